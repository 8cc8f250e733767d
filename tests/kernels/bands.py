"""Attention of one call under bands and segments against float64: a dense mask and autograd.

Other calls' share of the softmax is one extra key per row, with its own score and value: what
autograd then finds, a backend must find from lse and delta over all keys. The same comparisons run
on the CPU, in Triton's interpreter and, in tests/gpu, on a GPU.
"""

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from megatron_burst.kernels.backends import attend_and_raise
from megatron_burst.kernels.interface import Backend, QuerySide
from megatron_burst.kernels.masks.parts import Parts
from megatron_burst.kernels.partial import accumulate_dtype, surrogate_out
from megatron_burst.kernels.visible import Segments, Visible
from megatron_burst.masks.slice_calls import Calls
from megatron_burst.masks.slice_parts import Bands
from tests.kernels.attention import relative
from tests.oracle import seen_by_slices

NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Band:
    """What is computed: queries and keys of each segment; just one unless `packed`."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    left: int | None = None
    right: int | None = None
    packed: bool = True
    heads: int = 2
    heads_kv: int = 1
    dim_qk: int = 16
    dim_v: int = 16
    batch: int = 1
    dtype: torch.dtype = torch.float64
    strided: bool = False  # inputs and gradients lie side by side in wider rows
    sinks: bool = False  # whether forward has attention sinks; backward does not know of them
    slices: tuple[tuple[int, ...], ...] = ()  # instead of a band and segments
    softcap: float = 0.0  # of the scores; none for a backend without

    @property
    def sink(self) -> Tensor:
        """[heads]: some sinks larger than all scores."""
        return torch.arange(self.heads) % 9 - 2.0

    @property
    def scale(self) -> float:
        return self.dim_qk**-0.5

    @property
    def score_options(self) -> dict[str, float]:
        """What both passes of a backend get."""
        return {"softcap": self.softcap} if self.softcap else {}

    def visible(self, device: str = "cpu") -> Visible:
        if self.slices:
            every = ((range(sum(x)),) for x in (self.queries, self.keys))
            return Visible(parts=Parts(Bands(np.array(self.slices)).parts(*every)))
        if not self.packed:
            return Visible(self.left, self.right)
        cu_q, cu_k = (
            torch.tensor([0, *accumulate(each)], dtype=torch.int32, device=device)
            for each in (self.queries, self.keys)
        )
        longest = max(self.queries), max(self.keys)
        return Visible(self.left, self.right, Segments(cu_q, cu_k, *longest))

    def seen(self) -> Tensor:
        """[queries, keys]: which keys each query sees, by definition."""
        if self.slices:
            most = max(sum(self.queries), sum(self.keys))
            return seen_by_slices(self.slices, most)[: sum(self.queries), : sum(self.keys)]
        seen = torch.zeros(sum(self.queries), sum(self.keys), dtype=torch.bool)
        starts = (pairwise([0, *accumulate(each)]) for each in (self.queries, self.keys))
        for (row, end), (key, stop) in zip(*starts, strict=True):
            query = torch.arange(end - row).unsqueeze(1)
            ahead = torch.arange(stop - key) - (query + (stop - key) - (end - row))
            inside = torch.ones_like(ahead, dtype=torch.bool)
            inside &= True if self.left is None else ahead >= -self.left
            inside &= True if self.right is None else ahead <= self.right
            seen[row:end, key:stop] = inside
        return seen

    def inputs(self, device: str = "cpu") -> list[Tensor]:
        """q, k, v, dout."""
        torch.manual_seed(sum(self.queries) + 31 * sum(self.keys))
        rows, keys, b = sum(self.queries), sum(self.keys), self.batch
        sizes = (
            (b, rows, self.heads, self.dim_qk), (b, keys, self.heads_kv, self.dim_qk),
            (b, keys, self.heads_kv, self.dim_v), (b, rows, self.heads, self.dim_v),
        )  # fmt: skip
        return [beside(torch.randn(x).to(device, self.dtype), self.strided) for x in sizes]


class Composed:
    """A backend that takes no slices, given them as the engine does: in several calls."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.capability = backend, backend.capability

    def finds_largest(self, device: torch.device) -> bool:
        """As `Backend.finds_largest`: `Calls` asks another kernel itself."""
        return True

    def forward(self, q, k, v, scale, visible, into=None, **options):
        """As `Backend.forward`."""
        return self._calls(q, visible).forward(self.backend, q, k, v, scale, into, **options)

    def backward(self, side, k, v, scale, visible, into=None, deterministic=False, **options):
        """As `Backend.backward`."""
        how = {"into": into, "deterministic": deterministic, **options}
        return self._calls(side.q, visible).backward(self.backend, side, k, v, scale, **how)

    def _calls(self, q: Tensor, visible: Visible) -> Calls:
        assert visible.parts is not None
        return Calls(visible.parts, q.device, together=q.shape[0] == 1)


def beside(x: Tensor, strided: bool) -> Tensor:
    """The same values; if strided, between sevens in each row, like fields of an interleaved
    buffer."""
    if not strided:
        return x.clone()
    b, n, h, d = x.shape
    memory = x.new_full((b, n, 8 + h * d + 8), 7.0)
    return memory[:, :, 8:-8].unflatten(2, (h, d)).copy_(x)


def apart(stat: Tensor, strided: bool) -> Tensor:
    """The same values [b, h, n]; if strided, with a gap after each head's rows."""
    if not strided:
        return stat
    memory = stat.new_full((*stat.shape[:2], stat.shape[2] + 8), 7.0)
    return memory[:, :, :-8].copy_(stat)


def truth_of(band: Band, inputs: list[Tensor]) -> dict[str, Tensor]:
    """out and lse over these keys; lse and delta over all; gradients; in float64.

    Every third row has no other keys.
    """
    q, k, v, dout = (x.detach().double() for x in inputs)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    group, (rows, heads) = band.heads // band.heads_kv, q.shape[1:3]
    other = torch.randn(band.batch, heads, rows, 1, dtype=torch.float64).to(q.device)
    other[:, :, ::3] = -torch.inf
    q, k, v = (x.transpose(1, 2) for x in leaves)
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.mT * band.scale
    if band.softcap:
        scores = band.softcap * (scores / band.softcap).tanh()
    scores = scores.masked_fill(~band.seen().to(q.device), -torch.inf)
    alone, _ = softmax(scores)
    weights, total = softmax(torch.cat((scores, other), dim=-1))
    values = torch.randn(band.batch, heads, rows, band.dim_v, dtype=torch.float64).to(q.device)
    out = (weights[..., :-1] @ v + weights[..., -1:] * values).transpose(1, 2)
    grads = torch.autograd.grad(out, leaves, dout)
    found = {
        "out": (alone @ v).transpose(1, 2), "lse": scores.logsumexp(-1), "total": total,
        "delta": (dout * out).sum(-1).transpose(1, 2), "largest": largest_of_heads(scores),
    } | dict(zip(NAMES[1:], grads, strict=True))  # fmt: skip
    return {name: x.detach() for name, x in found.items()}


def largest_of_heads(scores: Tensor) -> Tensor:
    """[h] of scores [b, h, n, m], which may have no rows or no keys."""
    least = scores.new_full((*scores.shape[:2], 1), -torch.inf)
    return torch.cat((scores.flatten(2), least), -1).amax((0, 2))


def softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """(weights, lse); all weights are 0 where all scores are -inf."""
    least = scores.new_full((*scores.shape[:-1], 1), -1e30)
    largest = torch.cat((scores.detach(), least), dim=-1).amax(-1, keepdim=True)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    lse = (total.log() + largest).squeeze(-1)
    return weights / total.masked_fill(total == 0, 1.0), lse


def results_of(
    backend: Backend, band: Band, inputs: list[Tensor], truth: dict[str, Tensor], into: bool,
    with_delta: bool,
) -> dict[str, Tensor]:  # fmt: skip
    """The same from a backend; `into`: written to given buffers, in the dtypes that it would
    return.

    `with_delta`: backward gets delta and no output; else an output with that delta.
    """
    q, k, v, dout = inputs
    visible = band.visible(q.device)
    options = band.score_options
    largest = torch.full((band.heads,), -torch.inf, dtype=accumulate_dtype(q.dtype)).to(q.device)
    forward = attend_and_raise(backend, largest)
    # which a kernel may be another one for
    plain = backend.forward if into else forward
    out, lse = plain(q, k, v, band.scale, visible, **options)
    delta, total = (apart(truth[name].to(lse.dtype), band.strided) for name in ("delta", "total"))
    like = None if with_delta else surrogate_out(dout, delta)
    side = QuerySide(q, dout, total, delta if with_delta else None, like)
    grads = backend.backward(side, k, v, band.scale, visible, **options)
    if into:
        told = beside(out + 9, True), apart(torch.ones_like(lse), True)
        tolds = [beside(x + 9, True) for x in grads]
        again = forward(q, k, v, band.scale, visible, into=told, **options)
        anew = backend.backward(side, k, v, band.scale, visible, into=tuple(tolds), **options)
        assert all(a is b for a, b in zip((*again, *anew), (*told, *tolds), strict=True))
        for x in (told[0], *tolds):  # neighbouring memory
            assert x._base[..., :8].eq(7).all() and x._base[..., -8:].eq(7).all()
        (out, lse), grads = again, anew
    names = "out", "lse", *NAMES[1:], "largest"
    return dict(zip(names, (out, lse, *grads, largest), strict=True))


def errors_with_sinks(backend: Backend, band: Band, device: str, into: bool) -> dict[str, float]:
    """`errors_of` forward with sinks: of out, and of lse."""
    inputs, options = band.inputs(device), band.score_options
    plain = truth_of(band, inputs)
    sink = band.sink.to(device).view(1, -1, 1)
    lse = torch.logaddexp(plain["lse"], sink.double())
    out = plain["out"] * (plain["lse"] - lse).exp().transpose(1, 2).unsqueeze(-1)
    told = None
    if into:
        kinds = backend.forward(*inputs[:3], band.scale, band.visible(device), **options)
        told = beside(kinds[0] + 9, True), apart(torch.ones_like(kinds[1]), True)
    for dtype in (torch.float32, band.dtype):
        got = backend.forward(
            *inputs[:3], band.scale, band.visible(device), into=told,
            sink=sink.flatten().to(dtype), **options,
        )  # fmt: skip
    difference = (got[1].double() - lse).abs()
    largest = float(difference.max()) if difference.numel() else 0.0
    return {"out": relative(got[0], out), "lse": largest}


def errors_of(
    backend: Backend, band: Band, device: str = "cpu", into: bool = False,
    with_delta: bool | None = None,
) -> dict[str, float]:  # fmt: skip
    """Relative errors in norm by name; for lse the largest difference, infinite if one is NaN."""
    if not backend.capability.softcap:
        band = replace(band, softcap=0.0)
    if band.sinks:
        return errors_with_sinks(backend, band, device, into)
    inputs = band.inputs(device)
    truth = truth_of(band, inputs)
    with_delta = backend.capability.takes_delta if with_delta is None else with_delta
    got = results_of(backend, band, inputs, truth, into, with_delta)
    errors = {name: relative(got[name], truth[name]) for name in NAMES}
    empty = truth["lse"] == -torch.inf
    assert torch.equal(got["lse"] == -torch.inf, empty)
    blank = empty.transpose(1, 2)
    assert not got["out"][blank].any() and not got["dq"][blank].any()
    difference = (got["lse"].double() - truth["lse"])[~empty].abs()
    assert torch.equal(got["largest"] == -torch.inf, truth["largest"] == -torch.inf)
    of_largest = (got["largest"].double() - truth["largest"]).nan_to_num()  # of -inf and -inf
    errors["largest"] = float(of_largest.abs().max())
    return errors | {"lse": float(difference.max()) if difference.numel() else 0.0}
