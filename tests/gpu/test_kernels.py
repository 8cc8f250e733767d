"""Every available kernel, with windows and packed documents, against float64.

Inputs are exact; weights, gradients of scores and results are rounded once each, and so are
gradients per head where a kernel sums those of a KV group afterwards: at most four times 2^-9.
"""

from dataclasses import replace
from itertools import pairwise, product
from random import Random

import pytest
import torch

from megatron_burst.kernels.backends import backends
from megatron_burst.kernels.interface import SOFTCAP, QuerySide
from megatron_burst.kernels.partial import row_delta
from megatron_burst.kernels.visible import CAUSAL, FULL, Segments
from megatron_burst.schedule.mask import SLICES, Mask
from megatron_burst.tools.speeds import problem_of
from tests.gpu import needs_gpus
from tests.kernels.bands import Band, Composed, errors_of
from tests.sampling import whole

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(),
]
BOUND, WHOLE = 4 * 2**-9, pytest.mark.whole
GROUPED = {"heads": 64, "heads_kv": 8, "dim_qk": 128, "dim_v": 128}
ONE = {"heads": 1, "heads_kv": 1, "dim_qk": 128, "dim_v": 128}
PLAIN = {"heads": 4, "heads_kv": 4, "dim_qk": 64, "dim_v": 64}
SEGMENTS = (0, 1, 1000, 63, 0, 200)
CASES = {
    "window": Band((700,), (700,), 200, 0, packed=False, batch=2),
    "two sides, more keys": Band((300,), (900,), 100, 60, packed=False),
    "to the right, more rows": Band((900,), (300,), None, 350, packed=False),
    "to the left, more rows": Band((900,), (300,), 50, None, packed=False),
    "documents": Band(SEGMENTS, SEGMENTS, None, 0),
    "documents, full": Band(SEGMENTS, SEGMENTS),
    "documents, more keys": Band((1, 100, 0, 300), (1, 612, 40, 700), None, 0),
    "documents, fewer keys": Band((5, 300, 129, 0, 77), (64, 0, 33, 31, 20), None, 0),
    "documents, other keys": Band((5, 300, 129, 0, 77), (64, 0, 500, 31, 20)),
    "branches of a tree": Band((700, 0, 120, 64, 0, 400), (0, 200, 350, 0, 30, 90)),
    "documents of one query": Band((1, 1, 0, 1), (3, 200, 7, 0), None, 0),
    "documents with a window": Band((1, 600, 200, 0), (1, 600, 350, 9), 128, 0),
    "documents with two sides": Band((0, 400, 65), (3, 130, 65), 10, 40),
    "no keys": Band((30, 0), (0, 0)),
    "no queries": Band((0, 0), (20, 3), None, 0),
    "capped": Band((700,), (700,), None, 0, packed=False, batch=2, softcap=1.5),
    "capped documents with a window": Band((1, 600, 200), (1, 600, 350), 128, 0, softcap=1.5),
}
CASES |= {
    name: Band((400,), (400,), packed=False, batch=2, slices=some)
    for name, some in {
        "slices": ((0, 130, 0, 130, 1), (130, 200, 60, 330, 3), (200, 400, 0, 100, 2),
                   (200, 400, 100, 400, 1)),
        "block-causal": tuple((n, n + 80, 0, n + 80, 0) for n in range(0, 400, 80)),
        "blocks": tuple((n, n + 40, m, m + 40, 0) for n in range(0, 400, 40)
                        for m in range(0, 400, 40) if (n + 3 * m) // 40 % 4 < 2),
    }.items()
}  # fmt: skip
CASES["capped slices"] = replace(CASES["slices"], softcap=1.5)
SHAPES = {f"{name}, 64/8": replace(band, **GROUPED) for name, band in CASES.items()} | {
    f"{name}, 4/4": replace(CASES[name], **PLAIN)
    for name in ("window", "documents", "documents, fewer keys", "documents with a window")
}

SOME = {
    "window", "two sides, more keys", "to the right, more rows", "documents",
    "documents, fewer keys", "branches of a tree", "documents with a window", "no keys", "slices",
    "blocks", "capped", "capped documents with a window", "capped slices",
}  # fmt: skip
WITH_SINKS = {"window", "to the right, more rows", "documents", "branches of a tree", "no keys"}


def every(some):
    """Each shape; with --all alone those that are not named."""
    return [
        pytest.param(band, id=name, marks=() if name.removesuffix(", 64/8") in some else WHOLE)
        for name, band in SHAPES.items()
    ]


def kernels():
    """GPU backends that work here."""
    if not torch.cuda.is_available():
        return ["none"]
    named = [(name, b) for name, b in backends().items() if "cuda" in b.capability.devices]
    return [name for name, b in named if not b.missing()]


def backend_for(name, band):
    backend = backends()[name]
    q, k, v, _ = replace(band, queries=(1,), keys=(1,), dtype=torch.bfloat16).inputs("cuda")
    visible = band.visible()
    mask = Mask(visible.left, visible.right, visible.segments is not None)
    problem = problem_of(q, k, v, mask=mask)
    if band.slices:
        problem = replace(problem, needs=frozenset({SLICES}))
    problem = replace(problem, needs=problem.needs | ({SOFTCAP} if band.softcap else set()))
    if why := backend.capability.refusal(problem):
        pytest.skip(why)
    return Composed(backend) if problem.needs & backend.capability.composed else backend


@pytest.mark.parametrize("delta", ["delta", *whole("out")])
@pytest.mark.parametrize("band", every(SOME))
@pytest.mark.parametrize("name", kernels())
def test_equals_float64(name, band, delta):
    """Guards against segments and bounds in another convention, empty rows, strides, output
    buffers. A kernel that takes no delta gets the output."""
    backend = backend_for(name, band)
    with_delta = delta == "delta" and backend.capability.takes_delta
    for strided in (False, True):
        given = replace(band, dtype=torch.bfloat16, strided=strided)
        errors = errors_of(backend, given, "cuda", into=strided, with_delta=with_delta)
        assert all(error <= BOUND for error in errors.values()), (strided, errors)


def random_slices(seed, rows, keys):
    """Those of a random grid, of every kind."""
    random = Random(seed)
    sides = [
        pairwise(sorted({0, end, *(random.randrange(end) for _ in range(4))}))
        for end in (rows, keys)
    ]
    found = ((*q, *k, random.randint(0, 3)) for q, k in product(*map(list, sides)))
    some = [one for one in found if random.random() < 0.7 and one[1] - one[0] <= one[3] - one[2]]
    return tuple(some) or ((0, rows, 0, keys, 0),)


BLOCKS = [
    ((1000, 1000), 0, GROUPED), ((640, 1536), 1, GROUPED), ((700, 700), 2, PLAIN),
    ((1, 300), 3, PLAIN), ((900, 1100), 4, PLAIN | {"dim_qk": 96, "dim_v": 96}),
    ((513, 513), 5, PLAIN | {"dim_qk": 32, "dim_v": 32}), ((128, 128), 6, GROUPED),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "seed", "shape"), BLOCKS, ids=str)
@pytest.mark.parametrize("name", kernels())
def test_parts_by_blocks_equal_float64(name, sizes, seed, shape):
    """Guards against bits of other pairs, blocks that are computed twice or never, and ends of
    sequences within a block. One compiled kernel serves all masks."""
    for turn in range(4):
        slices = random_slices(4 * seed + turn, *sizes)
        band = Band((sizes[0],), (sizes[1],), packed=False, batch=1 + turn % 2, slices=slices)
        band = replace(band, dtype=torch.bfloat16, strided=turn > 1, **shape)
        problem = problem_of(*band.inputs("cuda")[:3], mask=Mask())
        backend = backends()[name]
        if not backend.capability.takes_blocks(problem):
            pytest.skip("it has no blocks here")
        errors = errors_of(backend, band, "cuda", into=turn > 1)
        assert all(error <= BOUND for error in errors.values()), (turn, slices, errors)


@pytest.mark.parametrize("band", every(WITH_SINKS))
@pytest.mark.parametrize("name", kernels())
def test_sinks_equal_float64(name, band):
    """Guards against sinks in another convention or of another head, and rows without a key. Sinks
    in float32, then in bf16."""
    backend = backend_for(name, band)
    if isinstance(backend, Composed) or not backend.capability.sinks:
        pytest.skip("its sinks join in a pass of their own")
    for strided in (False, True):
        given = replace(band, dtype=torch.bfloat16, strided=strided, sinks=True)
        errors = errors_of(backend, given, "cuda", into=strided)
        assert all(error <= BOUND for error in errors.values()), (strided, errors)


WIDE = [(256, 256), (192, 128), (192, 192), (160, 96)]
HEADS = [((4, 4), False), ((8, 2), True), ((4, 4), True), ((8, 2), False)]
USUAL = [(dims, *heads) for dims in WIDE for heads in HEADS[: 2 if dims in WIDE[:2] else 1]]
REST = [(dims, *heads) for dims in WIDE for heads in HEADS if (dims, *heads) not in USUAL]


@pytest.mark.parametrize(("dims", "heads", "causal"), [*USUAL, *whole(*REST)], ids=str)
@pytest.mark.parametrize("name", kernels())
def test_wide_heads_equal_float64(name, dims, heads, causal):
    """Guards against head dimensions that a kernel claims to support but does not, in either
    pass."""
    sizes = dict(heads=heads[0], heads_kv=heads[1], dim_qk=dims[0], dim_v=dims[1])
    band = Band((700,), (700,), None, 0 if causal else None, packed=False, batch=2, **sizes)
    errors = errors_of(backend_for(name, band), replace(band, dtype=torch.bfloat16), "cuda")
    assert all(error <= BOUND for error in errors.values()), errors


@pytest.mark.parametrize("case", ["window", "documents", "documents with a window"])
@pytest.mark.parametrize("name", kernels())
def test_the_same_bits_twice(name, case):
    """Guards against sums in arbitrary order, and kernels that wait for a block that they never
    start."""
    band = replace(CASES[case], dtype=torch.bfloat16, **GROUPED)
    backend = backend_for(name, band)
    if not backend.capability.deterministic:
        pytest.skip("its gradients are not deterministic")
    q, k, v, dout = band.inputs("cuda")
    visible = band.visible("cuda")
    out, lse = backend.forward(q, k, v, band.scale, visible)
    side = QuerySide(q, dout, lse, None, out.to(q.dtype))
    one, other = (
        backend.backward(side, k, v, band.scale, visible, deterministic=True) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("packed", [False, True], ids=["full", "documents"])
@pytest.mark.parametrize("name", kernels())
def test_strides_beyond_2_31_elements(name, packed):
    """Guards against offsets of rows, and of documents, in 32 bits; outputs of kernels are dense
    here."""
    far, lengths = 2**20, (2049, 64)
    rows = sum(lengths)
    band = Band(lengths, lengths, packed=packed, dtype=torch.bfloat16, **ONE)
    backend = backend_for(name, band)
    if backend.capability.in_32_bits:
        pytest.skip("its offsets have 32 bits")
    memory = torch.empty(rows * far, dtype=torch.bfloat16, device="cuda")
    near, visible = band.inputs("cuda"), band.visible("cuda")

    def run(move):
        q, k, v, dout = (move(x, i) for i, x in enumerate(near))
        out, lse = backend.forward(q, k, v, band.scale, visible)
        side = QuerySide(q, dout, lse, None, move(out, 4))
        return out, *backend.backward(side, k, v, band.scale, visible)

    def apart(x, place):
        strides = rows * far, far, x.shape[3], 1
        return memory.as_strided(x.shape, strides, place * x.shape[3]).copy_(x)

    for found, expected in zip(run(apart), run(lambda x, _: x.clone()), strict=True):
        assert (found.float() - expected.float()).abs().max() <= BOUND * expected.abs().max()


@pytest.mark.parametrize("packed", [False, True], ids=["full", "documents"])
@pytest.mark.parametrize("name", kernels())
def test_an_output_of_more_than_2_31_elements(name, packed):
    """Guards against offsets of 32 bits into a kernel's own memory, such as its sums of dQ: the
    last document, or the last rows, are as if computed alone."""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free memory")
    backend, rows, few, heads = backends()[name], 135 * 4000, 4000, 32
    alone, keys = (CAUSAL, rows) if packed else (FULL, few)
    q, dout = (torch.randn(1, rows, heads, 128, device="cuda", dtype=torch.bfloat16) for _ in "qo")
    k, v = (torch.randn(1, keys, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    problem = problem_of(q, k, v, mask=Mask(None, alone.right, packed))
    assert problem.huge
    if why := backend.capability.refusal(problem):
        pytest.skip(why)
    starts = torch.arange(0, rows + 1, few, dtype=torch.int32, device="cuda")
    seen = replace(alone, segments=Segments(starts, starts, few, few) if packed else None)

    def run(q, k, v, dout, visible):
        out, lse = backend.forward(q, k, v, 0.1, visible)
        side = QuerySide(q, dout, lse, row_delta(dout, out), None)
        return out, *backend.backward(side, k, v, 0.1, visible)

    last = [x[:, -few:].contiguous() for x in (q, k, v, dout)]
    expected = run(*last, alone)
    compared = 4 if packed else 2  # without documents dk and dv are of all queries
    for found, right in [*zip(run(q, k, v, dout, seen), expected, strict=True)][:compared]:
        assert (found[:, -few:].float() - right.float()).abs().max() <= BOUND * right.abs().max()
