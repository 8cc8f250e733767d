"""Some rows of a call by the definition of attention, from the shards of all ranks.

The rows of one KV head that are drawn go to all ranks: queries, or keys. Every rank computes what
its own shard adds to their results, some of it at a time, in float64, and the ranks sum that. So
no shard travels, and memory is bounded at any length.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from random import Random, SystemRandom
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.engine.passes import Passes
from megatron_burst.masks.sample import indices_of
from megatron_burst.masks.seen import seen_at
from megatron_burst.schedule.inter_node import heads_in_rounds
from megatron_burst.schedule.layout import Layout, chunks_of, positions
from megatron_burst.schedule.spec import Direction, Spec

_ROWS = 128  # of all ranks together
_OF_SLOPE = 1 / 8  # of numbers near 1: GPUs' fast tanh is as exact as float16
_SCORES = 1 << 20  # computed at a time: 8 MiB, and about six times as much beside


class Compared(NamedTuple):
    """A field of the rows that are drawn, the same on all ranks; [r, heads, d], float64."""

    got: Tensor  # what the call computed
    true: Tensor  # what it is by definition
    squares: Tensor  # the sum of the squares of what adds up to it


type Drawn = tuple[Tensor, dict[str, Compared]]  # positions in the sample [r]; fields by name


class Definition:
    """Computes rows of one call; all ranks call each method together.

    Args:
        passes: of the call.
        sample: its documents or slices, or None.
        number: draws the rows; the same on all ranks.

    Attributes:
        head: the KV head, which `out` draws.
        group: query heads of a KV head.
        size: ranks.
    """

    def __init__(self, passes: Passes, sample: Any, number: int) -> None:
        self._passes, self._sample, self._number = passes, sample, number
        self._log, self._scale, shape = passes.announcer.log, passes.scale, passes.spec.shape
        self._rank, self.size = passes.transport.cp_rank, passes.spec.topology.cp_size
        self.head, self._of = 0, Random(number).randrange(shape.batch)
        self.group = shape.heads_q // shape.heads_kv

    # ---- rows ----

    def out(self, call: Mapping[str, Tensor], sink: Tensor | None) -> Drawn:
        """lse and out of queries.

        Args:
            call: q, k, v, out and lse of this rank.
            sink: of the call, or None.
        """
        self.head = self._next_head()
        (rows, places), of = self._drawn(call["q"]), self._of
        q, out = (self._gathered(call[name][of, rows, self._heads]) for name in ("q", "out"))
        got_lse = self._gathered(call["lse"][of, self._heads, rows].T)
        parts = [scores.logsumexp(-1) for scores, *_ in self._over_keys(call, q, places)]
        lse = self._gathered(torch.stack(parts).logsumexp(0).unsqueeze(0)).logsumexp(0)
        if sink is not None:
            lse = torch.logaddexp(lse, sink[self._heads].double())
        total, squares = torch.zeros_like(out), torch.zeros_like(out)
        for scores, _, v in self._over_keys(call, q, places):
            weights = _weights(scores, lse)
            total += torch.einsum("rgm,md->rgd", weights, v)
            squares += torch.einsum("rgm,md->rgd", weights**2, v**2)
        off = torch.where(got_lse == lse, 0.0, got_lse - lse).unsqueeze(-1)  # both may be -inf
        # weights are off by that
        of_lse = Compared(off, torch.zeros_like(off), torch.ones_like(off))
        of_out = Compared(out, self._summed(total), self._summed(squares))
        return places, {"lse": of_lse, "out": of_out}

    def grad_of_queries(self, call: Mapping[str, Tensor], dq: Tensor) -> Drawn:
        """dq of queries, by the call's own lse; `call`: also dout and delta."""
        (rows, places), of, heads = self._drawn(dq), self._of, self._heads
        q, dout, got = (self._gathered(x[of, rows, heads]) for x in (call["q"], call["dout"], dq))
        lse, delta = (self._gathered(call[name][of, heads, rows].T) for name in ("lse", "delta"))
        delta, total, squares = delta.unsqueeze(-1), torch.zeros_like(q), torch.zeros_like(q)
        for scores, k, v in self._over_keys(call, q, places):
            weights, above = _weights(scores, lse), torch.einsum("rgd,md->rgm", dout, v)
            slope, rough = self._slope(scores)
            total += torch.einsum("rgm,md->rgd", weights * slope * (above - delta), k)
            spread = (weights * rough) ** 2 * (above**2 + delta**2)
            squares += torch.einsum("rgm,md->rgd", spread, k**2)
        return places, {"dq": self._rows_of(got, total, squares, self._scale)}

    def grads_of_keys(self, call: Mapping[str, Tensor], dk: Tensor, dv: Tensor) -> Drawn:
        """dk and dv of keys; `call` as for queries."""
        (rows, places), of, heads = self._drawn(dk), self._of, self._heads
        tensors = call["k"], call["v"], dk, dv
        k, v, got_dk, got_dv = (self._gathered(x[of, rows, self.head]) for x in tensors)
        sums = [torch.zeros_like(x) for x in (k, k, v, v)]
        own = self._places(call["q"])
        for at in _steps(len(own), len(k) * self.group):
            q, dout = (call[name][of, at, heads].double() for name in ("q", "dout"))
            lse, delta = (call[name][of, heads, at].T.double() for name in ("lse", "delta"))
            scores = self._scores(torch.einsum("mgd,rd->mgr", q, k))
            seen = seen_at(self._passes.spec.mask, self._sample, own[at], places)
            weights = _weights(scores.masked_fill(~seen.unsqueeze(1), -torch.inf), lse)
            above, delta = torch.einsum("mgd,rd->mgr", dout, v), delta.unsqueeze(-1)
            slope, rough = self._slope(scores)
            spread = (weights * rough) ** 2 * (above**2 + delta**2)
            factors = weights * slope * (above - delta), spread, weights, weights**2
            for total, by, x in zip(sums, factors, (q, q**2, dout, dout**2), strict=True):
                total += torch.einsum("mgr,mgd->rd", by, x)
        got_dk, got_dv, *totals = (x.unsqueeze(1) for x in (got_dk, got_dv, *sums))
        return places, {"dk": self._rows_of(got_dk, *totals[:2], self._scale),
                        "dv": self._rows_of(got_dv, *totals[2:], 1.0)}  # fmt: skip

    def _rows_of(self, got: Tensor, total: Tensor, squares: Tensor, scale: float) -> Compared:
        return Compared(got, self._summed(total) * scale, self._summed(squares) * scale**2)

    def _scores(self, products: Tensor) -> Tensor:
        """Scores of products of queries and keys."""
        scores, cap = products * self._scale, self._passes.softcap
        return cap * (scores / cap).tanh() if cap else scores

    def _slope(self, scores: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """How fast scores grow with what they were before they were capped; and what its rounding
        is a part of, as a slope near 0 is a difference of numbers near 1."""
        if not (cap := self._passes.softcap):
            return 1.0, 1.0
        slope = 1 - (scores.clamp(min=-cap) / cap) ** 2  # -inf: no key is seen
        return slope, slope + _OF_SLOPE

    # ---- shards ----

    @property
    def _heads(self) -> slice:
        """The query heads of the KV head."""
        return slice(self.head * self.group, (self.head + 1) * self.group)

    def _next_head(self) -> int:
        """The KV head of the group's next check, by the first rank's number: ranks that failed in
        between may have counted others."""
        carrier: Any = self._passes.transport
        by_rank = heads_by_rank(self._passes.spec)
        if carrier.checks is None:
            carrier.checks = SystemRandom().getrandbits(32) * len(by_rank)
        own = torch.tensor([carrier.checks], dtype=torch.float64)
        carrier.checks += 1
        return head_in_turn(int(self._gathered(own)[0]), by_rank)

    def _drawn(self, x: Tensor) -> tuple[list[int], Tensor]:
        """Some of this rank's rows, equally many on all ranks, and the positions of all ranks'."""
        draw, tokens = Random(f"{self._number} {self._rank}"), x.shape[1]
        rows = sorted(draw.sample(range(tokens), min(tokens, -(-_ROWS // self.size))))
        return rows, self._gathered(self._places(x)[rows]).long()

    def _places(self, x: Tensor) -> Tensor:
        """The positions of this rank's rows in the sample."""
        layout = self._passes.spec.layout
        if layout is Layout.DOCUMENTS and self.size > 1:
            return indices_of(self._in_documents, x.device)
        return indices_of(positions(layout, self._rank, self.size, x.shape[1]), x.device)

    @cached_property
    def _in_documents(self) -> tuple[range, ...]:
        """The same, where documents tell."""
        documents = getattr(self._sample, "documents", None) or self._sample
        return documents.places_of(chunks_of(self._rank, self.size))

    def _over_keys(
        self, call: Mapping[str, Tensor], q: Tensor, places: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Masked scores [r, g, m] of queries [r, g, d] with this rank's keys, some keys at a time,
        and these keys and values [m, d]."""
        k, v = (call[name][self._of, :, self.head] for name in "kv")
        own = self._places(call["k"])
        for at in _steps(len(own), len(q) * self.group):
            seen = seen_at(self._passes.spec.mask, self._sample, places, own[at])
            scores = self._scores(torch.einsum("rgd,md->rgm", q, k[at].double()))
            yield scores.masked_fill(~seen.unsqueeze(1), -torch.inf), k[at].double(), v[at].double()

    # ---- ranks ----

    def _gathered(self, x: Tensor) -> Tensor:
        """Of all ranks, one after the other, in float64."""
        own = x.double()
        if self._log is None:
            return own
        own = own.cpu().contiguous()
        shards = [torch.empty_like(own) for _ in range(self.size)]
        self._share(dist.all_gather, shards, own)
        return torch.cat(shards).to(x.device)

    def _summed(self, x: Tensor) -> Tensor:
        if self._log is None:
            return x
        total = x.cpu()
        self._share(dist.all_reduce, total)
        return total.to(x.device)

    def _share(self, collective: Callable[..., object], *tensors: Any) -> None:
        """Through gloo, as all of this is small."""
        carrier: Any = self._passes.transport
        try:
            collective(*tensors, group=carrier.spot_check_group)
        except RuntimeError as error:
            raise self._log.lost_hop(error) from error  # type: ignore[union-attr]


def heads_by_rank(spec: Spec) -> list[list[int]]:
    """The KV heads that each rank of a node computes in an all-to-all, which a gather's backward
    may be; in other modes all ranks compute all, so that they count as one."""
    spec = spec.program_spec(0, Direction.BACKWARD)
    if spec.intra != "a2a":
        return [list(range(spec.shape.heads_kv))]
    size = spec.topology.intra_size
    heads_kv = spec.shape.replicated(size).heads_kv
    copies, by_rank = heads_kv // spec.shape.heads_kv, [set[int]() for _ in range(size)]
    for heads in heads_in_rounds(heads_kv, (spec.heads_per_round or heads_kv) * size):
        part = len(heads) // size
        for head in range(heads.start, heads.stop):
            by_rank[(head - heads.start) // part].add(head // copies)
    return [sorted(heads) for heads in by_rank]


def head_in_turn(number: int, by_rank: Sequence[Sequence[int]]) -> int:
    """A head of another rank in each of as many checks as there are ranks, in an order that changes
    from then on; of a rank's heads each in turn."""
    turn, place = divmod(number, len(by_rank))
    heads = _shuffled(by_rank, turn)[place]
    turn, place = divmod(turn, len(heads))
    return _shuffled(heads, turn)[place]


def _shuffled[T](values: Sequence[T], seed: int) -> list[T]:
    return Random(seed).sample(values, len(values))


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse); 0 where a query sees no key."""
    return torch.exp(scores - lse.masked_fill(lse == -torch.inf, torch.inf).unsqueeze(-1))


def _steps(count: int, width: int) -> Iterator[slice]:
    step = max(1, _SCORES // width)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))
