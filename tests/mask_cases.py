"""Every mask, in every layout, mode and kernel: what the package declares of it, and the call that
must run or be refused so.

The table of docs/masks.md is made of this; tests/masks/test_mask_table.py makes the calls on CPUs,
tests/gpu/test_masks.py on GPUs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_burst import slices as makers
from megatron_burst.arguments import CallArgs, sample_args_of
from megatron_burst.attention import burst_attention
from megatron_burst.call import Call, call_of
from megatron_burst.call_checks import check
from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from megatron_burst.kernels.backends import backends
from megatron_burst.kernels.interface import Capability, Problem
from megatron_burst.resolve import resolve
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.modes import EMITTERS
from megatron_burst.schedule.spec import Direction, Kernel
from megatron_burst.schedule.topology import pretend_nodes
from tests.oracle import full_attention, rows_of, seen_by, seen_by_slices

TOKENS = 32  # of a sample, in units
ANYWHERE = (0, 3, 3, 11, 27)  # an empty document, and rows behind the last one
EACH = (0, 8, 8, 32)  # each of whole chunks
LAYOUTS = tuple(map(str, (Layout.ZIGZAG, Layout.CONTIGUOUS, Layout.STRIPED, Layout.DOCUMENTS)))


@dataclass(frozen=True)
class Example:
    """Arguments of a call with the mask, counted in units."""

    causal: bool = False
    window: tuple[int, int] | None = None
    edges: tuple[int, ...] = ()  # where documents, or segments of a tree, begin
    parents: tuple[int, ...] = ()
    prefix: int = 0  # of a mask of slices

    def arguments(self, layout: str, unit: int) -> dict:
        """Of `burst_attention`."""
        edges, found = self.edges, {"causal": self.causal, "layout": layout}
        if layout == Layout.DOCUMENTS and (edges or self.prefix) and not self.parents:
            edges = EACH
        if edges:
            found["cu_seqlens"] = torch.tensor(edges, dtype=torch.int32) * unit
        if self.window:
            found["window"] = tuple(n * unit if n else n for n in self.window)
        if self.parents:
            found["prefix_tree"] = self.parents
        if self.prefix:
            found["slices"] = makers.prefix_lm(self.prefix * unit, TOKENS * unit)
        return found

    def seen(self, layout: str, unit: int) -> torch.Tensor:
        """Which keys each query sees, pair by pair."""
        given, tokens = self.arguments(layout, unit), TOKENS * unit
        if self.prefix:
            return seen_by_slices(given["slices"].tolist(), tokens)
        edges = given.get("cu_seqlens", torch.empty(0)).tolist()
        mask = called(self, layout).mask
        if self.window:
            mask = type(mask)(*given["window"], mask.documents)
        return seen_by(mask, edges, tokens, self.parents)


MASKS = {
    "causal": Example(causal=True),
    "full": Example(),
    "window, left": Example(causal=True, window=(5, 0)),
    "window, both sides": Example(window=(3, 2)),
    "documents, causal": Example(causal=True, edges=ANYWHERE),
    "documents, full": Example(edges=ANYWHERE),
    "windows in documents, left": Example(causal=True, window=(5, 0), edges=ANYWHERE),
    "windows in documents, both sides": Example(window=(3, 2), edges=ANYWHERE),
    "prefix trees": Example(causal=True, edges=(0, 8, 14, 20, 26), parents=(-1, 0, 1, 0)),
    "slices": Example(prefix=9),
}


class Cell(NamedTuple):
    """One way to compute a mask. On several nodes a ring joins them."""

    mask: str
    layout: str
    mode: str
    nodes: int
    kernel: str
    sinks: bool

    @property
    def config(self) -> BurstConfig:
        inter = "ring" if self.nodes > 1 and self.mode != "a2a" else "auto"
        return BurstConfig(nodes=self.nodes, intra=self.mode, inter=inter, backend=self.kernel)


def cells(kernels: Sequence[str], nodes: Sequence[int]) -> list[Cell]:
    """All of some kernels and numbers of nodes."""
    every = product(MASKS, LAYOUTS, EMITTERS, nodes, kernels, (False, True))
    return [Cell(*cell) for cell in every]


def called(
    example: Example, layout: str, config: BurstConfig = BurstConfig(), unit: int = 1
) -> Call:
    """The call as its ranks compare it."""
    given = example.arguments(layout, unit)
    names = "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "prefix_tree", "slices"
    named, window = sample_args_of(*map(given.get, names)), given.get("window")
    asked = CallArgs(example.causal, window, layout=layout, config=config, sample_args=named)
    return call_of([torch.ones(1, 8, heads, 8) for heads in (4, 2, 2)], asked)


@lru_cache(maxsize=4096)
def refusal(
    mask: str, layout: str, mode: str, nodes: int, ranks: int = 4, unit: int = 1
) -> str | None:
    """Why a mode refuses a mask in a layout, whatever the kernel; None if it does not."""
    cell = Cell(mask, layout, mode, nodes, "auto", False)
    call = called(MASKS[mask], layout, cell.config, unit)
    try:
        check(call, ranks)
        spec, _ = resolve(call.spec(pretend_nodes(ranks, nodes), Kernel()))
        for direction in Direction:
            EMITTERS[mode](spec.program_spec(0, direction))
    except BurstError as error:
        return str(error)
    return None


def lacks(can: Capability, mask: str) -> str | None:
    """Why a kernel refuses a mask, on a device that it runs on; None if it does not."""
    device, arch = next(iter(can.devices), "cpu"), max(can.archs & {9}, default=0)
    dtype = torch.float32 if torch.float32 in can.dtypes else torch.bfloat16
    return can.refusal(
        Problem(device, dtype, 64, 64, arch=arch, needs=called(MASKS[mask], "zigzag").problem.needs)
    )


def table() -> str:
    """All of it, in Markdown."""
    heads = ["mask", *(f"`{layout}`" for layout in LAYOUTS), "kernels"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for mask in MASKS:
        modes = (_modes(mask, layout) for layout in LAYOUTS)
        lines.append(f"| {mask} | {' | '.join(modes)} | {_kernels(mask)} |")
    able = [name for name, backend in backends().items() if backend.capability.sinks]
    own = f"{_listed(able)}; the others in a pass of their own"
    lines.append("| any of these with sinks " + "| the same " * len(LAYOUTS) + f"| {own} |")
    return "\n".join(lines)


def _modes(mask: str, layout: str) -> str:
    found = []
    for mode in EMITTERS:
        if refusal(mask, layout, mode, 2) is None:
            found.append(mode)
        elif refusal(mask, layout, mode, 1) is None:
            found.append(f"{mode} on one node")
    return ", ".join(found) or "-"


def _kernels(mask: str) -> str:
    every = [backend.capability for backend in backends().values()]
    able = [can for can in every if lacks(can, mask) is None]
    needs = called(MASKS[mask], "zigzag").problem.needs
    several = [can.name for can in able if not needs <= can.masks]
    if several:
        whole = [can.name for can in able if can.name not in several]
        return f"{_listed(whole)}; in several calls {_listed(several)}"
    rest = [can.name for can in every if can not in able]
    return f"all but {_listed(rest)}" if rest else "all"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# ---- the calls themselves, in processes of their own ---------------------------------------------


@lru_cache(maxsize=256)
def _seen(mask: str, layout: str, unit: int) -> torch.Tensor:
    return MASKS[mask].seen(layout, unit)


def outcome(cell: Cell, unit: int, dim: int, like: torch.Tensor) -> str | float:
    """A call of this rank in the default group: what it was refused with, or the largest relative
    error of (out, dq, dk, dv) over the whole sample, against float64.

    Args:
        cell: of the call.
        unit: rows.
        dim: of heads.
        like: has the dtype and the device.
    """
    example, tokens, size = MASKS[cell.mask], TOKENS * unit, dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    whole = [
        torch.randn(1, tokens, heads, dim, generator=generator).to(like) for heads in (4, 2, 2, 4)
    ]
    sink = torch.linspace(-1, 3, 4).to(like) if cell.sinks else None
    given = example.arguments(cell.layout, unit)
    layout, edges = Layout(cell.layout), given.get("cu_seqlens", torch.empty(0)).tolist()
    if layout is Layout.DOCUMENTS and not edges:  # refused, whatever the rows
        layout = Layout.ZIGZAG
    rows = rows_of(layout, dist.get_rank(), size, tokens // size, edges)
    q, k, v, dout = (x[:, rows].clone().requires_grad_() for x in whole)
    try:
        out = burst_attention(q, k, v, sink=sink, config=cell.config, **given)
    except BurstError as error:
        return str(error)
    got = [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.detach())]
    leaves = [x.double().cpu().requires_grad_() for x in whole[:3]]
    of_sink = None if sink is None else sink.double().cpu()
    seen = _seen(cell.mask, cell.layout, unit)
    out = full_attention(*leaves, False, dim**-0.5, seen, of_sink)
    truth = [out.detach(), *torch.autograd.grad(out, leaves, whole[3].double().cpu())]
    wrong = [
        ((one.double().cpu() - all_[:, rows]) ** 2).sum()
        for one, all_ in zip(got, truth, strict=True)
    ]
    squares = torch.stack(wrong).to(like.device)
    dist.all_reduce(squares)
    norms = torch.stack([(x**2).sum() for x in truth])
    return float((squares.cpu() / norms).sqrt().max())


def outcomes(rank: int, some: Sequence[Cell], unit: int, dim: int, like: torch.Tensor) -> list:
    """Of several cells."""
    return [outcome(cell, unit, dim, like) for cell in some]


def assert_as_declared(cell: Cell, found: str | float, ranks: int, most: float, unit: int) -> None:
    """The call, in these units, was refused in the words that the package declares, or exact."""
    why = refusal(cell.mask, cell.layout, cell.mode, cell.nodes, ranks, unit)
    lack = lacks(backends()[cell.kernel].capability, cell.mask)
    if why or lack:
        assert isinstance(found, str) and (found == why or (lack and lack in found)), (cell, found)
    else:
        assert isinstance(found, float) and found <= most, (cell, found)
