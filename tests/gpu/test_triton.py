"""Our Triton attention compiled, with the table's block sizes, against float64."""

from dataclasses import replace

import pytest
import torch

from megatron_burst.kernels.interface import QuerySide
from megatron_burst.kernels.triton import Triton
from megatron_burst.kernels.visible import CAUSAL
from tests.gpu import needs_gpus
from tests.kernels.attention import Tile, errors_of, inputs_of
from tests.kernels.test_triton import SHAPES
from tests.sampling import whole

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(),
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# inputs are exact; weights and gradients of scores are rounded once before each product
BOUNDS = {BF16: 4e-3, FP16: 6e-4, FP32: 1e-5}
DIMS = ((16, 16), (40, 40), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
LARGE = {
    f"{dims} {rows}x{keys}": Tile(rows, keys, 4, 2, *dims, causal=causal)
    for dims in DIMS
    for rows, keys, causal in ((512, 512, True), (333, 777, True), (640, 257, False))
}
USUAL = ((64, 64), (128, 128), (192, 128))  # with --all alone each length of the others
PADDED = {f"padded {dim}": Tile(40, 200, 4, 2, dim, dim) for dim in (24, 56, 72)}
TILES = {
    name: tile
    for name, tile in (SHAPES | LARGE | PADDED).items()
    if min(tile.dim_qk, tile.dim_v) >= Triton.capability.min_dim
}
OTHER = {FP16: ((64, 64), (192, 128)), FP32: ((64, 64), (128, 128), (256, 256))}


def sampled(tiles):
    """Tiles for `parametrize`."""
    for name, tile in tiles.items():
        few = name not in LARGE or tile.rows == 333 or (tile.dim_qk, tile.dim_v) in USUAL
        yield pytest.param(tile, id=name, marks=() if few else pytest.mark.whole)


def check(errors, dtype):
    wrong = {name: error for name, error in errors.items() if not error <= BOUNDS[dtype]}
    assert not wrong, wrong


@pytest.mark.parametrize("strided", [True, *whole(False)], ids=["strided", "dense"])
@pytest.mark.parametrize("tile", sampled(TILES))
def test_equals_float64(tile, strided):
    """Guards against what the interpreter cannot show: bf16, TMA, pipelining, thread layouts."""
    check(errors_of(Triton(), replace(tile, dtype=BF16, strided=strided), "cuda"), BF16)


@pytest.mark.parametrize("tile", sampled(LARGE))
@pytest.mark.parametrize("dtype", OTHER, ids=str)
def test_other_dtypes(dtype, tile):
    if (tile.dim_qk, tile.dim_v) not in OTHER[dtype]:
        pytest.skip("these dimensions are compiled for bf16 only")
    check(errors_of(Triton(), replace(tile, dtype=dtype), "cuda"), dtype)


@pytest.mark.parametrize("heads_kv", [1, 4, 8])
def test_many_heads_and_sequences(heads_kv):
    """Guards against a wrong order of programs: several sections of heads, several sequences."""
    for strided in (False, True):
        tile = Tile(4096, 4096, 8, heads_kv, 128, 128, batch=2, dtype=BF16, strided=strided)
        check(errors_of(Triton(), tile, "cuda"), BF16)


def test_rows_without_a_key_are_empty():
    for tile in (Tile(300, 70, dtype=BF16), Tile(30, 0, causal=False, dtype=BF16)):
        check(errors_of(Triton(), tile, "cuda"), BF16)


@pytest.mark.parametrize("dim", [64, *whole(40)])
def test_elements_past_two_to_the_31(dim):
    """Guards against int32 offsets: rows are so far apart that they span 4 Gi elements."""
    q, k, v, dout = inputs_of(Tile(2048, 2048, 2, 1, dim, dim, dtype=BF16), "cuda")
    memory = torch.empty(2048, 2**21, dtype=BF16, device="cuda")
    far = memory[:, : 4 * dim].unflatten(1, (4, dim)).unsqueeze(0)
    far_q, far_k, far_v = far[:, :, :2], far[:, :, 2:3], far[:, :, 3:]
    for target, source in ((far_q, q), (far_k, k), (far_v, v)):
        target.copy_(source)
    near, distant = (run(*x, dout) for x in ((q, k, v), (far_q, far_k, far_v)))
    assert all(torch.equal(a, b) for a, b in zip(near, distant, strict=True))


def run(q, k, v, dout):
    out, lse = Triton().forward(q, k, v, 0.125, CAUSAL)
    return out, lse, *Triton().backward(QuerySide(q, dout, lse, None, out), k, v, 0.125, CAUSAL)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)
def test_the_same_bits_twice(dims):
    tensors = inputs_of(Tile(3000, 3000, 8, 2, *dims, dtype=BF16), "cuda")
    first = run(*tensors)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(*tensors), strict=True))
