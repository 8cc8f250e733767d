"""Attention of one tile against float64: shapes, strided inputs, errors by name.

The same comparisons run in Triton's interpreter on the CPU and, in tests/gpu, on a GPU.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_burst.kernels.interface import Backend, QuerySide
from megatron_burst.kernels.partial import row_delta
from megatron_burst.kernels.reference import Reference
from megatron_burst.kernels.visible import CAUSAL, FULL, Visible


@dataclass(frozen=True)
class Tile:
    """What is computed; fewer KV heads than query heads means GQA."""

    rows: int
    keys: int
    heads: int = 2
    heads_kv: int = 1
    dim_qk: int = 16
    dim_v: int = 16
    causal: bool = True
    batch: int = 1
    dtype: torch.dtype = torch.float16
    strided: bool = False  # inputs and outputs lie as "sbhd" with gaps between rows

    @property
    def scale(self) -> float:
        return self.dim_qk**-0.5

    @property
    def visible(self) -> Visible:
        return CAUSAL if self.causal else FULL


def lay(x: Tensor, strided: bool) -> Tensor:
    """The same values; if strided, as every second row of an "sbhd" tensor with 7 in the others."""
    if not strided:
        return x.clone()
    memory = torch.full((x.shape[1], 2, *x.shape[::2], x.shape[3]), 7.0, dtype=x.dtype)
    view = memory.to(x.device)[:, 0].transpose(0, 1)
    return view.copy_(x)


def inputs_of(tile: Tile, device: str) -> list[Tensor]:
    """q, k, v, dout."""
    torch.manual_seed(tile.rows + 31 * tile.keys)
    b, h, h_kv = tile.batch, tile.heads, tile.heads_kv
    sizes = (
        (b, tile.rows, h, tile.dim_qk), (b, tile.keys, h_kv, tile.dim_qk),
        (b, tile.keys, h_kv, tile.dim_v), (b, tile.rows, h, tile.dim_v),
    )  # fmt: skip
    return [
        lay(torch.randn(size).to(device=device, dtype=tile.dtype), tile.strided) for size in sizes
    ]


def truth_of(tile: Tile, inputs: list[Tensor], extra_lse: float) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv in float64; gradients as if other tiles weighed `extra_lse` more."""
    q, k, v, dout = (x.double() for x in inputs)
    out, lse = Reference().forward(q, k, v, tile.scale, tile.visible)
    total = lse.masked_fill(lse == -torch.inf, 0.0) + extra_lse  # of -inf it would make NaN
    side = QuerySide(q, dout, total, row_delta(dout, out), None)
    grads = Reference().backward(side, k, v, tile.scale, tile.visible)
    return {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), grads, strict=True))


def results_of(
    backend: Backend, tile: Tile, inputs: list[Tensor], truth: dict[str, Tensor], extra_lse: float
) -> dict[str, Tensor]:
    """The same from a backend, written into float32 gradients if strided, else returned."""
    q, k, v, dout = inputs
    into = into_grads = None
    if tile.strided:
        into = lay(torch.full_like(truth["out"], torch.nan, dtype=q.dtype), True), truth["lse"] + 9
        into = into[0], into[1].float()
        into_grads = tuple(lay(truth[x].float() + 9, True) for x in ("dq", "dk", "dv"))
    out, lse = backend.forward(q, k, v, tile.scale, tile.visible, into=into)
    delta = row_delta(dout.double(), truth["out"]).float()
    side = QuerySide(q, dout, (truth["lse"] + extra_lse).float(), delta, None)
    grads = backend.backward(side, k, v, tile.scale, tile.visible, into=into_grads)
    if tile.strided:
        assert out is into[0] and all(a is b for a, b in zip(grads, into_grads, strict=True))
        for x in (out, *grads):  # rows between those that are asked for
            assert x._base[:, 1].eq(7).all()
    assert all(grad.dtype is torch.float32 for grad in grads)
    return {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), grads, strict=True))


def errors_of(backend: Backend, tile: Tile, device: str, extra_lse: float = 0.5) -> dict:
    """Relative errors in norm by name; for lse the largest difference."""
    inputs = inputs_of(tile, device)
    truth = truth_of(tile, inputs, extra_lse)
    got = results_of(backend, tile, inputs, truth, extra_lse)
    errors = {name: relative(got[name], truth[name]) for name in ("out", "dq", "dk", "dv")}
    difference = (got["lse"].double() - truth["lse"]).nan_to_num(neginf=0).abs().max()
    return errors | {"lse": float(difference)}


def relative(got: Tensor, truth: Tensor) -> float:
    """|got - truth| / |truth|, or |got| where the truth is nearly 0."""
    size = float(truth.norm())
    return float((got.double() - truth).norm()) / (size if size > 1e-9 else 1.0)
