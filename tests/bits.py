"""Results of several ranks beside those of one rank, bit by bit, on any device."""

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_burst import slices
from megatron_burst.attention import burst_attention
from megatron_burst.config import BurstConfig
from megatron_burst.kernels.backends import backends
from megatron_burst.kernels.interface import QuerySide, copy_results
from megatron_burst.schedule.layout import Layout
from tests.oracle import rows_of

NAMES = ("out", "lse", "dq", "dk", "dv")
HEADS = {"MHA": (8, 8), "GQA": (8, 4), "copied": (8, 2)}  # query and KV heads; copies on four ranks


class Case(NamedTuple):
    """A mask of `n` tokens."""

    options: dict = {}  # of `burst_attention`
    edges: tuple[float, ...] = ()  # where documents begin and the last one ends, as shares of n
    sinks: bool = False
    windowed: bool = False  # torch's CPU kernel has none
    prefix: bool = False

    def arguments(self, n: int, heads: int, device: str) -> dict:
        """The arguments of a call."""
        given = dict(self.options)
        if self.edges:
            places = [round(share * n) for share in self.edges]
            given["cu_seqlens"] = torch.tensor(places, dtype=torch.int32, device=device)
        if self.sinks:
            given["sink"] = torch.linspace(-3, 9, heads, dtype=torch.float32, device=device)
        if self.prefix:
            given |= dict(causal=False, slices=slices.prefix_lm(n // 3, n))
        return given


ANYWHERE, EACH = (0, 0.11, 0.47, 1), (0, 0.125, 0.5, 1)
CASES = {
    "causal": Case(),
    "full": Case(dict(causal=False)),
    "sinks": Case(sinks=True),
    "documents": Case(edges=ANYWHERE),
    "documents each for itself": Case(dict(layout="zigzag-documents"), EACH),
    "sinks in documents": Case(edges=ANYWHERE, sinks=True),
    "slices": Case(prefix=True),
    "window": Case(dict(window=(9, 0)), windowed=True),
    "window and sinks": Case(dict(window=(9, 0)), sinks=True, windowed=True),
    "window in documents": Case(dict(window=(5, 0)), ANYWHERE, windowed=True),
    "prefix tree": Case(dict(prefix_tree=[-1, 0, 0]), ANYWHERE),
}


class Problem(NamedTuple):
    """One sample, its mask, and the options of the calls."""

    case: str
    heads: tuple[int, int]
    config: BurstConfig
    dtype: torch.dtype = torch.float32
    tokens: int = 64
    dim: int = 16
    device: str = "cpu"

    def tensors(self) -> list[torch.Tensor]:
        """q, k, v and dout of the whole sample."""
        generator = torch.Generator(self.device).manual_seed(3)
        how, (heads, heads_kv) = dict(generator=generator, device=self.device), self.heads
        shapes = [(1, self.tokens, h, self.dim) for h in (heads, heads_kv, heads_kv, heads)]
        return [torch.randn(shape, **how).to(self.dtype) for shape in shapes]

    def rows(self, rank: int, ranks: int) -> torch.Tensor:
        """Positions that a rank holds."""
        case = CASES[self.case]
        layout = Layout(case.options.get("layout", "zigzag"))
        edges = [round(share * self.tokens) for share in case.edges]
        rows = rows_of(layout, rank, ranks, self.tokens // ranks, edges)
        return rows.to(self.device)

    def run(self, group, rows: torch.Tensor, expand: int = 1) -> list[torch.Tensor]:
        """(out, lse, dq, dk, dv) of some rows; `expand`: repeat KV heads before the call."""
        q, k, v, dout = (x[:, rows].clone() for x in self.tensors())
        leaves = [x.requires_grad_() for x in (q, k, v)]
        keys = (x.repeat_interleave(expand, 2) if expand > 1 else x for x in leaves[1:])
        given = CASES[self.case].arguments(self.tokens, self.heads[0], self.device)
        out, lse = burst_attention(
            q, *keys, group=group, config=self.config, return_lse=True, **given
        )
        grads = torch.autograd.grad(out, leaves, dout)
        return [out.detach(), lse.detach(), *grads]


def groups_of(world: int) -> dict[int, object]:
    """This rank's group by size: 1, 2, ... up to all ranks; all ranks make all."""
    found, rank = {}, dist.get_rank()
    for size in (1, 2, 4):
        for first in range(0, world, size) if size <= world else ():
            ranks = list(range(first, first + size))
            group = dist.new_group(ranks)
            if rank in ranks:
                found[size] = group
    return found


def parts_of(problem: Problem, groups: dict, expand: int = 1) -> dict[int, list[tuple]]:
    """By number of ranks: each tensor of this rank's rows, and that of one rank."""
    one = problem.run(groups[1], problem.rows(0, 1), expand)
    found = {}
    for size, group in groups.items():
        if size > 1:
            rows = problem.rows(dist.get_rank(group), size)
            mine = [x.index_select(2 if x.dim() == 3 else 1, rows) for x in one]
            found[size] = list(zip(problem.run(group, rows, expand), mine, strict=True))
    return found


def equal_in(problem: Problem, groups: dict, expand: int = 1) -> dict[int, dict[str, bool]]:
    """By number of ranks: whether each tensor has the bits of one rank."""
    return {
        size: {n: torch.equal(a, b) for n, (a, b) in zip(NAMES, pairs, strict=True)}
        for size, pairs in parts_of(problem, groups, expand).items()
    }


class ByHeads:
    """A CPU kernel that computes each query head by itself, so that its bits depend on nothing
    else, and rounds results to the inputs' dtype, as kernels of GPUs do. MKL's bits depend on how
    many heads there are, and on where they lie."""

    def __init__(self, name: str) -> None:
        self._kernel = backends()[name]
        can = self._kernel.capability
        self.capability = replace(can, name=f"by-heads-{name}", wide_grads=False)

    def missing(self) -> None:
        return None

    def forward(self, q, k, v, scale, visible, into=None):
        group, found = q.shape[2] // k.shape[2], []
        for head in range(q.shape[2]):
            tensors = _alone(head, q), *(_alone(head // group, x) for x in (k, v))
            found.append(self._kernel.forward(*tensors, scale, visible))
        outs, lses = zip(*found, strict=True)
        return copy_results((torch.cat(outs, 2).to(q.dtype), torch.cat(lses, 1)), into)

    def backward(self, side, k, v, scale, visible, into=None, deterministic=False):
        group, grads = side.q.shape[2] // k.shape[2], []
        for head in range(side.q.shape[2]):
            own = QuerySide(*(None if x is None else _alone(head, x) for x in side))
            keys = (_alone(head // group, x) for x in (k, v))
            grads.append(self._kernel.backward(own, *keys, scale, visible))
        dq, *of_keys = (torch.cat(x, 2) for x in zip(*grads, strict=True))
        parts = (x.unflatten(2, (-1, group)).unbind(3) for x in of_keys)
        sums = dq, *(sum(some[1:], some[0]) for some in parts)
        return copy_results(tuple(x.to(k.dtype) for x in sums), into)


def _alone(head: int, x: torch.Tensor) -> torch.Tensor:
    """One head of [b, n, h, d], or of statistics [b, h, n], in memory of its own."""
    own = x.narrow(1 if x.dim() == 3 else 2, head, 1)
    return own.clone(memory_format=torch.contiguous_format)


def by_heads(name: str) -> str:
    """Let calls of this process ask for such a kernel; returns its name."""
    kernel = ByHeads(name)
    return backends().setdefault(f"by-heads-{name}", kernel).capability.name
