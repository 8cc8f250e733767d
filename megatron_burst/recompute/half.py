"""Keeps the later half of the sequence's rows; computes the early half again, evenly."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_burst.comm.groups import Communicator
from megatron_burst.comm.hop import Carrier
from megatron_burst.config import BurstConfig
from megatron_burst.engine.call import Call
from megatron_burst.engine.run import run_forward
from megatron_burst.engine.setup import Pattern, set_up
from megatron_burst.errors import BurstError
from megatron_burst.plan.half import EarlyHalf, Move, choose_half, early_half
from megatron_burst.plan.schedule import Cargo
from megatron_burst.recompute.host import host_memory
from megatron_burst.recompute.keep import torch_patches
from megatron_burst.recompute.keeping import WHO, WHOLE, Keeping, Parcel, Resident, Tensors


@dataclass(frozen=True, slots=True)
class LaterHalf:
    """The policy that keeps (out, lse) of the later rows. A replay is collective.

    Attributes:
        plan: which rows are computed again, and by whom.
        call: how: a call over the early half as a sequence of its own.
    """

    plan: EarlyHalf
    call: Call

    def trim(self, outs: Tensors) -> Tensors:
        """Rows of out [b, n, h, d] and lse [b, h, n] from the later half."""
        out, lse = outs
        late = slice(self.plan.early.stop, None)
        return out[:, late].clone(), lse[:, :, late].clone()

    def restore(self, kept: Tensors, inputs: Tensors) -> Tensors:
        """Out and lse of all rows; the early ones computed from q, k and v."""
        late_out, late_lse = kept
        rows, size = self.plan.early.slice, len(self.plan.early)
        early_out, early_lse = self._compute([x[:, rows] for x in inputs])
        whole = _longer(late_out, size)
        lse = late_lse.new_empty(*late_lse.shape[:2], whole.shape[1])
        whole[:, size:], lse[:, :, size:] = late_out, late_lse
        whole[:, :size], lse[:, :, :size] = early_out, early_lse
        return whole, lse

    def _compute(self, shard: Sequence[Tensor]) -> Tensors:
        """Out and lse of this rank's early rows, from its early q, k and v [b, n/2, h, d]."""
        moves, carrier = self.plan.moves, self.call.carrier
        with torch.no_grad(), torch.autocast(shard[0].device.type, enabled=False):
            if not moves:
                return run_forward(self.call, *shard)
            dealt = _passed(moves, carrier, shard)
            out, lse = run_forward(self.call, *dealt)
            home = [Move(move.dest, move.dest_rows, move.source, move.rows) for move in moves]
            rows_first = _passed(home, carrier, (out.to(shard[0].dtype), lse.transpose(1, 2)))
            return rows_first[0], rows_first[1].transpose(1, 2)


def keeping_of(
    q: Tensor, k: Tensor, v: Tensor, carrier: Communicator, pattern: Pattern, config: BurstConfig
) -> tuple[Keeping | None, str]:
    """How a call of burst attention is kept, None if it is not; what is to be said of it.

    Args:
        q: [b, n, h, d_qk].
        k: [b, n, h_kv, d_qk].
        v: [b, n, h_kv, d_v].
        carrier: of the context-parallel group.
        pattern: mask, layout, scale.
        config: what the user asked for.

    Raises:
        BurstError: if it was asked for what only Megatron's layers can have.
    """
    _check(config)
    if config.keep == "none":
        return None, ""
    for patch in torch_patches():
        patch.apply()
    policy, said = WHOLE, ""
    if config.keep == "half":
        topology, tokens = carrier.topology, q.shape[1]
        hosts = len(set(topology.host_of))
        choice = choose_half(pattern.layout, pattern.mask, topology.cp_size, tokens, hosts)
        said = f"; keep half: {choice}"
        if choice.value == "none":
            return None, said
        dealt = choice.value == "dealt"
        plan = early_half(pattern.layout, topology.cp_size, tokens, dealt)
        shard = (x[:, plan.early.slice] for x in (q, k, v))
        early = replace(pattern, layout=plan.layout)
        policy = LaterHalf(plan, set_up(*shard, carrier, early, config)[0])
    return Keeping(policy, packer(q.device, config), config.keep_debug), said


def packer(device: torch.device, config: BurstConfig) -> Callable[[Tensors], Parcel]:
    """Where kept tensors go."""
    if not config.keep_offload:
        return Resident
    return host_memory(device, config.keep_host_gib).pack


def _check(config: BurstConfig) -> None:
    of_layers = {
        "keep": config.keep == "auto",
        "keep_layers": config.keep_layers is not None,
        "keep_offload_inputs": config.keep_offload_inputs,
    }
    for name, is_given in of_layers.items():
        if is_given:
            raise BurstError(
                f"{WHO}: {name} must be settled by Megatron's layers, because a single call knows "
                f"of no others; got {name}={getattr(config, name)}; pass keep none, half or all to "
                "each call, and leave the rest out"
            )


def _passed(moves: Sequence[Move], carrier: Carrier, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What this rank has of tensors [b, n, ...] after all moves."""
    mine = carrier.cp_rank
    results = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
    sends, recvs, arrivals = [], [], []
    for move in moves:
        for source, target in zip(tensors, results, strict=True):
            if move.source == move.dest == mine:
                target[:, move.dest_rows.slice] = source[:, move.rows.slice]
            elif move.source == mine:
                sends.append((move.dest, source[:, move.rows.slice].contiguous()))
            elif move.dest == mine:
                view = target[:, move.dest_rows.slice]
                arrivals.append(
                    (view, torch.empty(view.shape, dtype=view.dtype, device=view.device))
                )
                recvs.append((move.source, arrivals[-1][1]))
    carrier.exchange(Cargo.READ, sends, recvs).wait()
    for view, arrived in arrivals:
        view.copy_(arrived)
    return results


def _longer(x: Tensor, more: int) -> Tensor:
    """Like x [b, n, h, d], with `more` rows more; rows stay outermost in memory if they are."""
    rows = x.shape[1] + more
    if x.shape[0] > 1 and x.stride(0) < x.stride(1):
        return x.new_empty(rows, x.shape[0], *x.shape[2:]).transpose(0, 1)
    return x.new_empty(x.shape[0], rows, *x.shape[2:])
