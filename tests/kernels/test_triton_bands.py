"""Windows and packed documents of our Triton attention, in Triton's interpreter against float64."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given

from tests.kernels.bands import Band
from tests.kernels.test_triton import EACH_HOW, HOW, check
from tests.kernels.test_visible import bands
from tests.sampling import crossed, examples

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

BANDS = {
    "a window to the left": Band((50,), (50,), 20, 0, packed=False),
    "two sides, more keys": Band((33,), (101,), 7, 40, packed=False),
    "to the right, more rows": Band((90,), (40,), None, 5, packed=False),
    "to the left, no end": Band((40,), (90,), 3, None, packed=False),
    "narrower than a block": Band((50,), (50,), 1, 1, packed=False, batch=2),
    "documents": Band((1, 0, 33, 20, 5), (1, 7, 33, 40, 0), None, 0),
    "documents, full": Band((16, 17, 0, 31), (32, 15, 9, 5)),
    "documents with a window": Band((3, 40, 0, 17), (30, 40, 4, 12), 18, 6, heads_kv=2),
    "two parts": Band((20, 19), (20, 25), 9, 0, dim_qk=48, dim_v=32),
    "capped": Band((50,), (50,), None, 0, packed=False, softcap=0.5),
    "capped documents, two parts": Band((20, 19), (20, 25), 9, 0, dim_qk=48, softcap=0.5),
}


SLICES = {
    "all kinds": (
        (0, 30, 0, 30, 1), (0, 30, 31, 50, 2), (30, 44, 3, 40, 3), (30, 44, 40, 60, 0),
        (44, 70, 50, 60, 2), (44, 70, 0, 33, 1), (70, 75, 74, 75, 0),
    ),
    "block-causal": tuple((n, n + 16, 0, n + 16, 0) for n in range(0, 48, 16)),
    "blocks": tuple(
        (n, n + 16, m, m + 16, 0)
        for n in range(0, 64, 16) for m in range(0, 64, 16) if (n + 3 * m) // 16 % 4 < 2
    ),
    "keys that nobody sees": ((3, 40, 20, 21, 0), (40, 80, 0, 10, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name, how", crossed(SLICES, EACH_HOW, 1))
def test_slices_equal_float64(interpreter, name, how):
    """Guards against intervals of other rows, blocks that begin or end inside one, pairs computed
    twice, and rows without any."""
    dtype, strided, sizes, tma = HOW[how]
    band = Band((80,), (75,), packed=False, dtype=dtype, strided=strided, slices=SLICES[name])
    if name == "blocks":
        band = replace(band, queries=(64,), keys=(64,))
    if name == "block-causal":
        band = replace(band, queries=(48,), keys=(48,), batch=2)
    check(interpreter(band, sizes, tma), dtype)
    if not strided:
        check(interpreter(replace(band, sinks=True), sizes, tma), dtype)
        check(interpreter(replace(band, softcap=0.5), sizes, tma), dtype)


@pytest.mark.parametrize("name, how", crossed(BANDS, EACH_HOW, 1))
def test_bands_and_segments_equal_float64(interpreter, name, how):
    """Guards against wrong band edges, blocks that straddle documents, rows of the next
    document."""
    dtype, strided, sizes, tma = HOW[how]
    check(interpreter(replace(BANDS[name], dtype=dtype, strided=strided), sizes, tma), dtype)


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
def test_sinks_equal_float64(interpreter, band):
    """Guards against sinks of another head, and rows without a key."""
    band = replace(band, dtype=torch.float32, strided=True, sinks=True, heads_kv=1)
    check(interpreter(band, (16, 32), False), torch.float32)


@examples(4, 40)
@given(bands(windows=True, longest=40, most=3))
def test_any_band_equals_float64(interpreter, band):
    band = replace(band, heads=2, heads_kv=1, batch=1, dtype=torch.float32)
    check(interpreter(band, (16, 16), False), torch.float32)
