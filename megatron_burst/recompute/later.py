"""Keeps the later half of a sequence; recomputes the early half, evenly over ranks."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_burst.call import Call
from megatron_burst.comm.communicator import Communicator
from megatron_burst.comm.detector import Pass, PassAnnouncer, PassKind
from megatron_burst.comm.transport import Transport
from megatron_burst.config import BurstConfig
from megatron_burst.engine.passes import Passes
from megatron_burst.engine.ranges import range_of
from megatron_burst.logs import Decision
from megatron_burst.recompute.checkpoints import patch_checkpoints
from megatron_burst.recompute.keep import run_kept
from megatron_burst.recompute.keeping import Keeping, Parcel, Resident, Tensors
from megatron_burst.recompute.later_plan import EarlyRows, RowMove, choose_later, early_rows
from megatron_burst.recompute.offload import host_memory
from megatron_burst.schedule.spec import Cargo, Spec
from megatron_burst.schedule.topology import Link


@dataclass(frozen=True, slots=True)
class KeepTail:
    """The policy that keeps (out, lse) of a shard's tail, the later half of its rows. Early rows
    of all ranks are a smaller causal sequence, which they recompute together."""

    plan: EarlyRows  # which ranks recompute which rows
    passes: Passes  # over the early rows as a separate sequence
    transport: Transport  # sends the rows that the plan moves between ranks, which share a node
    announcer: PassAnnouncer = field(default_factory=PassAnnouncer)  # of the whole call
    rounds: ClassVar[bool] = True  # whether results are other bits in recomputation

    def trim(self, outs: Tensors) -> Tensors:
        """The tail of out [b, n, h, d] and of lse [b, h, n]."""
        out, lse = outs  # a view would hold the memory of all rows
        return out[:, self.plan.tokens :].clone(), lse[:, :, self.plan.tokens :].clone()

    def restore(self, kept: Tensors, inputs: Tensors) -> Tensors:
        """Out [b, n, h, d] and lse [b, h, n] of all rows, from what `trim` returned and the inputs:
        q, k and v [b, n, heads, d] of all rows, and the call's sink if it has one."""
        tokens, device = inputs[0].shape[1], kept[0].device.type
        span = range_of("burst recomputation of early rows")
        collective = Pass(self.announcer, PassKind.EARLY_ROWS)
        with span, torch.no_grad(), torch.autocast(device, enabled=False), collective:
            out, lse = _with_rows(kept[0], tokens), kept[1].new_empty(*kept[1].shape[:2], tokens)
            out[:, self.plan.tokens :], lse[:, :, self.plan.tokens :] = kept
            self._recompute(inputs[:3], _rows_first(out, lse), collective.begin, *inputs[3:])
        return out, lse

    def _recompute(self, shard: Sequence[Tensor], results: Sequence[Tensor],
                   begin: Callable[[], None], sink: Tensor | None = None) -> None:  # fmt: skip
        """Fill the early rows of the results, out [b, n, h, d] and lse [b, n, h], from q, k and v
        of all rows of this rank.

        A rank that fails after `begin`, which announces the pass, makes its transfers nevertheless,
        as in a program: the other ranks wait for them.
        """
        tokens = self.plan.tokens
        if not self.plan.moves:
            early = self._attend((x[:, :tokens] for x in shard), begin, sink)
            for target, rows in zip(results, early, strict=True):
                target[:, :tokens] = rows
            return
        resharded = [_dense_rows(x, tokens) for x in shard]
        outward = RowReshard(self.plan.moves, self.transport, resharded)
        back = RowReshard([move.reverse() for move in self.plan.moves], self.transport, results)

        def begin_and_send() -> None:
            begin()
            outward.run(shard)

        try:
            early = self._attend(resharded, begin_and_send, sink)
        except Exception:
            if outward.has_run:
                back.run(None)
            raise
        back.run(early)

    def _attend(
        self, shard: Iterable[Tensor], begin: Callable[[], None], sink: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Out [b, n, h, d] and lse [b, n, h] of the rows that this rank computes."""
        return _rows_first(*self.passes.forward(*shard, begin=begin, sink=sink)[:2])


class RowReshard:
    """Sends rows from rank to rank, by the moves of all ranks. `targets` are this rank's tensors
    [b, n, ...] that get the rows sent to it, also its own.

    It allocates the memory of all transfers when it is made, so that nothing can run out of memory
    in `run`, which is collective: the other ranks would wait.
    """

    def __init__(
        self, moves: Sequence[RowMove], transport: Transport, targets: Sequence[Tensor]
    ) -> None:
        self._transport, self._targets, self.has_run = transport, targets, False
        rank = transport.cp_rank
        self._stays = [move for move in moves if move.source == move.dest == rank]
        self._sends = self._with_memory(m for m in moves if m.source == rank != m.dest)
        self._arrivals = self._with_memory(m for m in moves if m.dest == rank != m.source)

    def _with_memory(self, moves: Iterable[RowMove]) -> list[tuple[RowMove, int, Tensor]]:
        """For each move and target: the move, the target's index, and memory for the rows."""
        return [
            (move, index, _dense_rows(target, len(move.rows)))
            for move in moves
            for index, target in enumerate(self._targets)
        ]

    def run(self, sources: Sequence[Tensor] | None) -> None:
        """Send rows of the sources, tensors [b, n, ...] in the order of the targets. Without
        sources, because this rank failed to compute them, send NaN."""
        self.has_run = True
        for move in self._stays if sources else ():
            for target, source in zip(self._targets, sources, strict=True):
                target[:, move.dest_rows.slice] = source[:, move.rows.slice]
        for move, index, rows in self._sends:
            if sources:
                rows.copy_(sources[index][:, move.rows.slice])
            else:
                rows.fill_(torch.nan)
        sends = [(move.dest, rows) for move, _, rows in self._sends]
        recvs = [(move.source, rows) for move, _, rows in self._arrivals]
        self._transport.send(Link.INTRA, Cargo.READ, sends, recvs).wait(None)
        for move, index, rows in self._arrivals:
            self._targets[index][:, move.dest_rows.slice] = rows


def keep_of(
    call: Call, opened: Spec, spec: Spec, transport: Communicator,
    passes_of: Callable[[Spec], Passes], announcer: PassAnnouncer,
) -> tuple[Callable[..., Any] | None, list[Decision]]:  # fmt: skip
    """The function that runs a call and keeps its results (`run_kept`), or None if none are kept;
    the choices made. `opened`: as `spec`, before choices; `passes_of`: makes the passes of a spec.
    """
    config, policy, choices = call.config, None, []
    patch_checkpoints()
    if config.keep == "half":
        choice = choose_later(spec)
        choices = [replace(choice, value=f"keep half: {choice.value}")]
        if choice.value == "none":
            return None, choices
        shape = spec.topology.cp_size, spec.shape.tokens
        plan = early_rows(spec.layout, *shape, choice.value == "resharded")
        smaller = replace(opened.shape, tokens=plan.tokens)
        passes = passes_of(replace(opened, shape=smaller, layout=plan.layout))
        policy = KeepTail(plan, passes, transport, announcer)
    keeping = Keeping(policy, packer(call.devices[0], config), config.keep_debug, announcer)
    return partial(run_kept, keeping=keeping), choices


def packer(device: torch.device, config: BurstConfig) -> Callable[[Tensors], Parcel]:
    """The function that stores kept tensors."""
    if not config.offloads_results:
        return Resident
    return host_memory(device, config.keep_host_gib).pack


def _rows_first(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Out [b, n, h, d] and lse [b, n, h], as views of out and of lse [b, h, n]."""
    return out, lse.transpose(1, 2)


def _dense_rows(x: Tensor, rows: int) -> Tensor:
    """An empty contiguous tensor like x [b, n, ...] of `rows` rows."""
    return x.new_empty(x.shape[0], rows, *x.shape[2:])


def _with_rows(x: Tensor, rows: int) -> Tensor:
    """An empty tensor like x [b, n, ...] of `rows` rows; keeps rows outermost in memory."""
    if x.shape[0] > 1 and x.stride(0) < x.stride(1):
        return x.new_empty(rows, x.shape[0], *x.shape[2:]).transpose(0, 1)
    return _dense_rows(x, rows)
