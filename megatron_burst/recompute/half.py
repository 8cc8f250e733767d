"""Keeps the later half of the sequence's rows; recomputes the early half, evenly over ranks."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_burst.comm.carrier import Carrier
from megatron_burst.comm.groups import Communicator
from megatron_burst.comm.pass_log import Kind, Marks, Pass
from megatron_burst.config import BurstConfig
from megatron_burst.engine.call import Call
from megatron_burst.engine.planned import half_call
from megatron_burst.engine.ranges import range_of
from megatron_burst.engine.setup import Pattern, attention_shape, set_up
from megatron_burst.errors import BurstError
from megatron_burst.mcore import patches
from megatron_burst.plan.choose import Choice
from megatron_burst.plan.half import EarlyHalf, Move, choose_half
from megatron_burst.recompute.keeping import WHO, Keeping, Parcel, Resident, Tensors
from megatron_burst.recompute.offload import host_memory
from megatron_burst.schedule.call import Cargo
from megatron_burst.schedule.topology import Link


@dataclass(frozen=True, slots=True)
class LaterHalf:
    """The policy that keeps (out, lse) of the later rows. Recomputation is collective, and so is
    the first pass if other ranks keep a rank's rows."""

    plan: EarlyHalf  # which ranks recompute which rows; who keeps the others
    call: Call  # the call over the early half as a separate sequence
    over_all: Carrier  # sends rows between any two ranks of the group
    marks: Marks = field(default_factory=Marks)  # of the whole call

    @property
    def _early(self) -> slice:
        return self.plan.early[self.over_all.cp_rank].slice

    def trim(self, outs: Tensors) -> Tensors:
        """Rows of out [b, n, h, d] and lse [b, h, n] from the later half, n/2 of them."""
        out, lse = outs
        if not self.plan.kept:
            late = slice(self._early.stop, None)
            return out[:, late].clone(), lse[:, :, late].clone()
        with torch.no_grad(), Pass(self.marks, Kind.LATER_ROWS) as this:
            half = out.shape[1] // 2
            kept = _with_rows(out, half), _with_rows(lse, half, axis=2)
            this.begin()
            _pass(self.plan.kept, self.over_all, _rows_first(out, lse), _rows_first(*kept))
        return kept

    def restore(self, kept: Tensors, inputs: Tensors) -> Tensors:
        """Out and lse of all rows; the early ones recomputed from q, k and v."""
        tokens, late = inputs[0].shape[1], slice(self._early.stop, None)
        here = range_of("burst recomputation of an early half")
        this = Pass(self.marks, Kind.EARLY_HALF)
        with here, torch.no_grad(), torch.autocast(kept[0].device.type, enabled=False), this:
            out, lse = _with_rows(kept[0], tokens), _with_rows(kept[1], tokens, axis=2)
            whole = _rows_first(out, lse)
            this.begin()
            if self.plan.kept:
                home = [move.home for move in self.plan.kept]
                _pass(home, self.over_all, _rows_first(*kept), whole)
            else:
                out[:, late], lse[:, :, late] = kept
            self._compute(inputs, whole)
        return out, lse

    def _compute(self, shard: Sequence[Tensor], whole: Sequence[Tensor]) -> None:
        """Out and lse, rows first, of this rank's early rows, from its q, k and v."""
        if not self.plan.moves:
            early = _rows_first(*self._forward(x[:, self._early] for x in shard))
            for target, rows in zip(whole, early, strict=True):
                target[:, self._early] = rows
            return
        evenly = [_dense_rows(x, x.shape[1] // 2) for x in shard]
        _pass(self.plan.moves, self.over_all, shard, evenly)
        out, lse = self._forward(evenly)
        home = [move.home for move in self.plan.moves]
        _pass(home, self.over_all, _rows_first(out.to(whole[0].dtype), lse), whole)

    def _forward(self, shard: Iterable[Tensor]) -> Tensors:
        return self.call.recomputed.forward(*shard)[:2]


def keeping_of(
    q: Tensor, k: Tensor, v: Tensor, carrier: Communicator, pattern: Pattern, config: BurstConfig,
    over_all: Callable[[], Communicator], marks: Marks,
) -> tuple[Keeping | None, list[Choice]]:  # fmt: skip
    """How a call of burst attention is kept, or None; the choices made.

    q, k and v are [b, n, heads, dim]; `over_all` makes a communicator between any two ranks,
    collectively.

    Raises:
        BurstError: if an option works in Megatron's layers only.
    """
    _check(config)
    if config.keep == "none":
        return None, []
    patches.apply("checkpoints")
    policy, said = None, []
    if config.keep == "half":
        topology, shape = carrier.topology, attention_shape(q, k, v)
        problem = half_call(pattern.layout, pattern.mask, topology, shape, config)
        choice = choose_half(problem)
        said = [replace(choice, value=f"keep half: {choice.value}")]
        if choice.value == "none":
            return None, said
        plan = problem.half(choice.value == "resharded")
        mover = over_all() if plan.moves and topology.inter_size > 1 else carrier
        if plan.kept:
            _meet(mover, topology.cp_size, q.device)
        shard = (x[:, : shape.tokens // 2] for x in (q, k, v))
        early = replace(pattern, layout=plan.layout)
        policy = LaterHalf(plan, set_up(*shard, carrier, early, config)[0], mover, marks)
    return Keeping(policy, packer(q.device, config), config.tuning.keep_debug), said


def _meet(carrier: Carrier, cp_size: int, device: torch.device) -> None:
    """Pass a byte around all ranks. NCCL creates a communicator at its first transfer,
    collectively; with an odd number of ranks, one has nothing to send when later rows are kept."""
    mine = carrier.cp_rank
    sent, received = torch.zeros(2, 1, dtype=torch.uint8, device=device)
    sends, recvs = [((mine + 1) % cp_size, sent)], [((mine - 1) % cp_size, received)]
    carrier.send(Link.INTRA, Cargo.READ, sends, recvs).wait(None)


def packer(device: torch.device, config: BurstConfig) -> Callable[[Tensors], Parcel]:
    """The function that stores kept tensors."""
    if not config.offloads_results:
        return Resident
    return host_memory(device, config.tuning.keep_host_gib).pack


def _check(config: BurstConfig) -> None:
    given = config.keep == "auto", config.keep_layers is not None, config.offloads_inputs
    for name, is_given in zip(("keep", "keep_layers", "keep_offload"), given, strict=True):
        if is_given:
            raise BurstError(
                f"{WHO}: {name} must be resolved by Megatron's layers, because a single call "
                f"does not know the other layers; got {name}={getattr(config, name)}; pass keep "
                "none, half or all to each call, and leave the rest out"
            )


def _pass(
    moves: Sequence[Move], carrier: Carrier, sources: Sequence[Tensor], targets: Sequence[Tensor]
) -> None:
    """Fill the rows of targets [b, n, ...] that are sent to this rank; collective."""
    mine = carrier.cp_rank
    sends, recvs, arrivals = [], [], []
    for move in moves:
        for source, target in zip(sources, targets, strict=True):
            if move.source == move.dest == mine:
                target[:, move.dest_rows.slice] = source[:, move.rows.slice]
            elif move.source == mine:
                sends.append((move.dest, source[:, move.rows.slice].contiguous()))
            elif move.dest == mine:
                rows = target[:, move.dest_rows.slice]
                arrivals.append((rows, _dense_rows(rows, rows.shape[1])))
                recvs.append((move.source, arrivals[-1][1]))
    carrier.send(Link.INTRA, Cargo.READ, sends, recvs).wait(None)
    for rows, arrived in arrivals:
        rows.copy_(arrived)


def _rows_first(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Out [b, n, h, d] and lse [b, n, h], as views of out and of lse [b, h, n]."""
    return out, lse.transpose(1, 2)


def _dense_rows(x: Tensor, rows: int) -> Tensor:
    return x.new_empty(x.shape[0], rows, *x.shape[2:])


def _with_rows(x: Tensor, rows: int, axis: int = 1) -> Tensor:
    """An empty tensor like x [b, n, ...] of `rows` rows; keeps rows outermost in memory."""
    sizes = list(x.shape)
    sizes[axis] = rows
    if axis == 1 and x.shape[0] > 1 and x.stride(0) < x.stride(1):
        sizes[:2] = reversed(sizes[:2])
        return x.new_empty(sizes).transpose(0, 1)
    return x.new_empty(sizes)
