"""Keeps the later rows of a sequence; recomputes the early ones, evenly over ranks."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_burst.call import Call
from megatron_burst.comm.carrier import Carrier
from megatron_burst.comm.communicator import Communicator
from megatron_burst.comm.pass_log import Kind, Marks, Pass
from megatron_burst.config import BurstConfig
from megatron_burst.engine.passes import Passes
from megatron_burst.engine.watch import range_of
from megatron_burst.recompute.checkpoints import patch_checkpoints
from megatron_burst.recompute.keep import run_kept
from megatron_burst.recompute.keeping import Keeping, Parcel, Resident, Tensors
from megatron_burst.recompute.later_plan import (
    EarlyRows,
    Move,
    choose_later,
    early_rows,
    early_tokens,
    kept_share,
)
from megatron_burst.recompute.offload import host_memory
from megatron_burst.say import Choice
from megatron_burst.schedule.spec import Cargo, Spec
from megatron_burst.schedule.topology import Link


@dataclass(frozen=True, slots=True)
class LaterRows:
    """The policy that keeps (out, lse) of the later rows. Recomputation is collective, and so is
    the first pass if other ranks keep a rank's rows."""

    plan: EarlyRows  # which ranks recompute which rows; who keeps the others
    passes: Passes  # over the early rows as a separate sequence
    carrier: Carrier  # sends rows between any two ranks of the group, which share a node
    marks: Marks = field(default_factory=Marks)  # of the whole call
    rounds: ClassVar[bool] = True  # whether results are other bits in recomputation

    @property
    def _early(self) -> slice:
        return self.plan.early[self.carrier.cp_rank].slice

    def trim(self, outs: Tensors) -> Tensors:
        """The later rows of out [b, n, h, d] and lse [b, h, n]."""
        out, lse = outs
        if not self.plan.kept:
            late = slice(self._early.stop, None)
            return out[:, late].clone(), lse[:, :, late].clone()
        with torch.no_grad(), Pass(self.marks, Kind.LATER_ROWS) as this:
            rows = out.shape[1] - self.plan.tokens
            kept = _with_rows(out, rows), _with_rows(lse, rows, axis=2)
            there = Moving(self.plan.kept, self.carrier, _rows_first(*kept))
            this.begin()
            there.run(_rows_first(out, lse))
        return kept

    def restore(self, kept: Tensors, inputs: Tensors) -> Tensors:
        """Out and lse of all rows; the early ones recomputed from q, k and v."""
        tokens, late = inputs[0].shape[1], slice(self._early.stop, None)
        here = range_of("burst recomputation of early rows")
        this = Pass(self.marks, Kind.EARLY_ROWS)
        with here, torch.no_grad(), torch.autocast(kept[0].device.type, enabled=False), this:
            out, lse = _with_rows(kept[0], tokens), _with_rows(kept[1], tokens, axis=2)
            whole = _rows_first(out, lse)
            home = Moving([move.home for move in self.plan.kept], self.carrier, whole)
            if not self.plan.kept:
                out[:, late], lse[:, :, late] = kept

            def begin() -> None:
                this.begin()
                home.run(_rows_first(*kept))

            self._compute(inputs[:3], whole, begin, *inputs[3:])
        return out, lse

    def _compute(
        self, shard: Sequence[Tensor], whole: Sequence[Tensor], begin: Callable[[], None],
        sink: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Out and lse, rows first, of this rank's early rows, from its q, k and v.

        As a program does, a rank that fails after `begin` makes its transfers nevertheless.
        """
        if not self.plan.moves:
            early = self._forward((x[:, self._early] for x in shard), begin, sink)
            for target, rows in zip(whole, early, strict=True):
                target[:, self._early] = rows
            return
        evenly = [_dense_rows(x, self.plan.tokens) for x in shard]
        there = Moving(self.plan.moves, self.carrier, evenly)
        home = Moving([move.home for move in self.plan.moves], self.carrier, whole)

        def begin_and_send() -> None:
            begin()
            there.run(shard)

        try:
            early = self._forward(evenly, begin_and_send, sink)
        except Exception:
            if there.has_run:
                home.run(None)
            raise
        home.run(early)

    def _forward(
        self, shard: Iterable[Tensor], begin: Callable[[], None], sink: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return _rows_first(*self.passes.forward(*shard, begin=begin, sink=sink)[:2])


class Moving:
    """Rows that move between ranks: their memory first, so that nothing else can fail in `run`,
    which is collective. Rows of the targets [b, n, ...] that are sent to this rank are filled.
    """

    def __init__(self, moves: Sequence[Move], carrier: Carrier, targets: Sequence[Tensor]) -> None:
        self._carrier, self._targets, self.has_run = carrier, targets, False
        mine = carrier.cp_rank
        each = [(move, place) for move in moves for place in range(len(targets))]
        self._own = [one for one in each if one[0].source == one[0].dest == mine]
        sent = [
            (move, place, _dense_rows(targets[place], len(move.rows)))
            for move, place in each
            if move.source != move.dest and mine in (move.source, move.dest)
        ]
        self._sends = [one for one in sent if one[0].source == mine]
        self._arrivals = [one for one in sent if one[0].dest == mine]

    def run(self, sources: Sequence[Tensor] | None) -> None:
        """Send rows of the sources, in the order of targets; None: NaN, as there are none."""
        self.has_run = True
        for move, place in self._own if sources else ():
            self._targets[place][:, move.dest_rows.slice] = sources[place][:, move.rows.slice]
        for move, place, rows in self._sends:
            rows.copy_(sources[place][:, move.rows.slice]) if sources else rows.fill_(torch.nan)
        sends = [(move.dest, rows) for move, _, rows in self._sends]
        recvs = [(move.source, rows) for move, _, rows in self._arrivals]
        self._carrier.send(Link.INTRA, Cargo.READ, sends, recvs).wait(None)
        for move, place, rows in self._arrivals:
            self._targets[place][:, move.dest_rows.slice] = rows


def keep_of(
    call: Call, opened: Spec, spec: Spec, carrier: Communicator,
    passes_of: Callable[[Spec], Passes], marks: Marks,
) -> tuple[Callable[..., Any] | None, list[Choice]]:  # fmt: skip
    """The function that runs a call and keeps its results (`run_kept`), or None if none are kept;
    the choices made.

    Args:
        opened, spec: how the call runs, without the choices made and with them.
        passes_of: makes the passes of another spec.
    """
    config, device, policy, said = call.config, call.devices[0], None, []
    patch_checkpoints()
    share = kept_share(config.keep)
    if 0 < share < 1:
        choice = choose_later(spec, share)
        said = [replace(choice, value=f"keep {config.keep}: {choice.value}")]
        if choice.value == "none":
            return None, said
        cp_size, tokens = spec.topology.cp_size, opened.shape.tokens
        early = early_tokens(spec, share)
        plan = early_rows(spec.layout, cp_size, tokens, early, choice.value == "resharded")
        if plan.kept and not carrier.has_met:
            # others may be in a call without
            Marks(marks.log, marks.terms, digest=2).begin(Kind.AGREEMENT)
            _meet(carrier, cp_size, device)
            carrier.has_met = True
        shape = replace(opened.shape, tokens=early)
        smaller = replace(opened, shape=shape, layout=plan.layout)
        policy = LaterRows(plan, passes_of(smaller), carrier, marks)
    keeping = Keeping(policy, packer(device, config), config.keep_debug, marks)
    return partial(run_kept, keeping=keeping), said


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
    return host_memory(device, config.keep_host_gib).pack


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
