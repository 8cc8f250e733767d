"""Each backend against float64; what each supports, as data; how one is chosen.

The rule for low precision is relative: at most twice the error of torch's own attention.
"""

import re
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from megatron_burst.arguments import CallArgs
from megatron_burst.call import call_of
from megatron_burst.errors import BurstError
from megatron_burst.kernels.backends import backends, choose_backend
from megatron_burst.kernels.interface import Problem, QuerySide
from megatron_burst.kernels.partial import row_delta, surrogate_out
from megatron_burst.kernels.torch_cpu import TorchCpu
from megatron_burst.kernels.visible import CAUSAL, FULL
from megatron_burst.schedule.mask import DOCUMENTS
from megatron_burst.tools.simulate.call import _RECTANGULAR
from megatron_burst.tools.speeds import problem_of
from tests.oracle import full_attention

pytestmark = pytest.mark.numeric
ON_CPU = ["reference", "torch-cpu"]
SHAPES = [  # batch, query rows, key rows, heads, KV heads, d_qk, d_v, causal
    (2, 7, 7, 4, 2, 8, 8, True),
    (1, 1, 1, 1, 1, 1, 1, True),
    (1, 5, 9, 4, 4, 6, 3, False),
    (2, 9, 5, 6, 2, 3, 10, False),
    (1, 33, 1, 2, 1, 16, 16, False),
    (1, 1100, 1100, 2, 1, 4, 4, True),  # more than one block of rows
]


def tensors_of(shape, dtype=torch.float64):
    b, n, m, h, h_kv, d_qk, d_v, _ = shape
    torch.manual_seed(n * m + h)
    sizes = [(b, n, h, d_qk), (b, m, h_kv, d_qk), (b, m, h_kv, d_v), (b, n, h, d_v)]
    return [torch.randn(*size, dtype=torch.float64).to(dtype) for size in sizes]


def truth_of(tensors, causal, scale):
    q, k, v, dout = (x.double() for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = full_attention(*leaves, causal, scale)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def run_backend(name, tensors, causal, scale, stand_in):
    """(out, dq, dk, dv); with `stand_in`, backward never sees the output."""
    q, k, v, dout = tensors
    backend, visible = backends()[name], CAUSAL if causal else FULL
    out, lse = backend.forward(q, k, v, scale, visible)
    delta = row_delta(dout, out)
    given = surrogate_out(dout, delta) if stand_in else out.to(q.dtype)
    side = QuerySide(q, dout, lse, delta, None if backend.capability.takes_delta else given)
    return [out, *backend.backward(side, k, v, scale, visible)], lse


@pytest.mark.parametrize("stand_in", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ON_CPU)
def test_float64_equals_the_definition(name, shape, stand_in):
    tensors, causal, scale = tensors_of(shape), shape[-1], 0.37
    got, lse = run_backend(name, tensors, causal, scale, stand_in)
    for result, expected in zip(got, truth_of(tensors, causal, scale), strict=True):
        assert (result - expected).abs().max() <= 1e-11
    assert lse.shape == (shape[0], shape[3], shape[1]) and lse.dtype == torch.float64


@pytest.mark.parametrize("stand_in", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ON_CPU)
def test_low_precision_is_no_worse_than_twice_torchs(name, dtype, stand_in):
    tensors, scale = tensors_of((2, 64, 64, 4, 2, 16, 16, True), dtype), 0.25
    truth = truth_of(tensors, True, scale)
    got, lse = run_backend(name, tensors, True, scale, stand_in)
    assert lse.dtype == torch.float32
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    # torch's fused kernel for bf16 fails in backward under ATEN_CPU_CAPABILITY=default
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in leaves), is_causal=True, scale=scale, enable_gqa=True
        ).transpose(1, 2)
    theirs = [out, *torch.autograd.grad(out, leaves, tensors[3])]
    for ours, other, true in zip(got, theirs, truth, strict=True):
        error, baseline = ((x.double() - true).norm() / true.norm() for x in (ours, other))
        assert error <= 2 * baseline + 1e-7


def test_strided_views_are_read_as_they_are():
    """Rows of a hop buffer and sbhd slices are views with gaps."""
    tensors = tensors_of((2, 8, 8, 4, 2, 8, 8, True))
    gaps = [torch.stack([x, x + 1], dim=2)[:, :, 0].transpose(0, 1).contiguous() for x in tensors]
    views = [x.transpose(0, 1) for x in gaps]
    for name in ON_CPU:
        ours, _ = run_backend(name, views, True, 0.5, False)
        plain, _ = run_backend(name, tensors, True, 0.5, False)
        for a, b in zip(ours, plain, strict=True):
            assert (a - b).abs().max() <= 1e-13


def problem(device="cpu", dtype=torch.float32, dim_qk=64, dim_v=64):
    return Problem(device, dtype, dim_qk, dim_v, arch=9 if device == "cuda" else 0)


@pytest.mark.parametrize(
    "given, chosen",
    [
        (problem(), "torch-cpu"),
        (problem("cuda", torch.bfloat16, 256, 256), "cudnn"),
        (replace(problem("cuda", torch.bfloat16, 256, 256), arch=10), "flash"),  # cuDNN to 128
        (problem("cuda", torch.float32), "triton"),
        (problem("cuda", torch.bfloat16, 192, 128), "cudnn"),
        (replace(problem("cuda", torch.bfloat16, 192, 128), arch=8), "triton"),
        (problem(dim_qk=512, dim_v=512), "torch-cpu"),
        (problem("cuda", torch.bfloat16, 36, 36), "triton"),
    ],
    ids=str,
)
def test_auto_takes_the_fastest_that_can_and_says_why_not_the_others(given, chosen):
    backend, choice = choose_backend(given, "auto")
    assert backend.capability.name == choice.value == chosen
    for name in list(backends())[: list(backends()).index(chosen)]:
        assert re.search(rf"not ([\w-]+, )*{name}(, [\w-]+)*: it", choice.reason), name


@pytest.mark.parametrize("dims", [(512, 512), (128, 264)])
def test_head_dimensions_past_those_of_kernels_are_refused_and_can_be_asked_for(dims):
    given = problem("cuda", torch.bfloat16, *dims)
    with pytest.raises(
        BurstError, match="largest head dimension is 256.*choose among reference [^,]"
    ):
        choose_backend(given, "auto")
    for name in ("fa4", "cudnn", "flash", "triton"):
        with pytest.raises(BurstError, match=f"backend {name} must"):
            choose_backend(given, name)
    assert choose_backend(given, "reference")[0].capability.name == "reference"


def test_flash_attention_4_has_other_dimensions_on_blackwell():
    """There its kernel for 256 takes no gradient of lse, through which delta is passed."""
    capability = backends()["fa4"].capability
    for dims, has in (((128, 128), True), ((192, 128), True), ((256, 256), False),
                      ((160, 128), False)):  # fmt: skip
        given = replace(problem("cuda", torch.bfloat16, *dims), arch=10)
        assert (capability.refusal(given) is None) == has
        assert capability.refusal(replace(given, arch=9)) is None


@pytest.mark.parametrize("dim", [8, 16, 48, 80, 112])
def test_flash_attention_4_is_not_given_dimensions_whose_gradients_it_gets_wrong(dim):
    capability = backends()["fa4"].capability
    refusal = capability.refusal(problem("cuda", torch.bfloat16, dim, dim))
    assert refusal == "it needs head dimensions that are multiples of 32"
    assert capability.refusal(problem("cuda", torch.bfloat16, 96, 96)) is None


def test_kernels_that_are_not_deterministic_are_passed_over_where_that_is_asked_for():
    given = replace(problem("cuda", torch.bfloat16, 80, 80), deterministic=True)
    assert choose_backend(given, "auto")[0].capability.name == "flash"
    with pytest.raises(BurstError, match="cudnn must.*its gradients are not deterministic; choose"):
        choose_backend(given, "cudnn")


def test_a_backend_that_cannot_do_the_call_is_refused_with_those_that_can():
    with pytest.raises(BurstError, match=r"backend flash must.*on cpu.*choose among torch-cpu, re"):
        choose_backend(problem(), "flash")
    with pytest.raises(BurstError, match="no such backend exists.*choose among torch-cpu"):
        choose_backend(problem(), "flsh")
    with pytest.raises(BurstError, match="int64 on cpu.*choose another dtype"):
        choose_backend(problem(dtype=torch.int64), "auto")


def test_the_planner_knows_which_kernels_do_rectangular_causal_tiles():
    """It does not use torch, so it cannot look."""
    able = {name for name, b in backends().items() if b.capability.rectangular_causal}
    assert {*_RECTANGULAR} == able | {"auto"}


def test_flash_attention_4_is_not_given_pairs_whose_gradients_it_gets_wrong():
    """On Hopper, its preprocessing of 80 rows writes past the end unless done 16 rows at a time."""
    capability = backends()["fa4"].capability
    for dims, right in (((128, 64), False), ((128, 96), False), ((128, 160), False),
                        ((128, 128), True), ((64, 128), True), ((96, 64), True),
                        ((192, 128), True)):  # fmt: skip
        given = problem("cuda", torch.bfloat16, *dims)
        assert (capability.refusal(given) is None) == right, dims
        assert choose_backend(given, "auto")[1].value != "fa4" or right
    assert capability.refusal(replace(problem("cuda", torch.bfloat16, 128, 64), arch=10)) is None


@pytest.mark.parametrize("name", ["fa4", "triton", "cudnn", "flash"])
def test_kernels_that_count_in_32_bits_are_not_given_more_elements(name):
    """Backward of the last two is wrong, or reads out of bounds."""
    given, can = problem("cuda", torch.bfloat16, 128, 128), backends()[name].capability
    for needs in (frozenset(), frozenset({DOCUMENTS}) & can.masks):
        assert can.refusal(replace(given, needs=needs)) is None
        refusal = can.refusal(replace(given, needs=needs, huge=True))
        assert ("2^31" in (refusal or "")) == (name not in ("fa4", "triton"))


@pytest.mark.parametrize(
    ("sizes", "huge"),
    [
        ((1, 2**19, 32, 256, 128), False), ((1, 2**19 + 1, 32, 256, 128), True),
        ((2, 2**18, 32, 128, 128), False), ((2, 2**18 + 1, 32, 128, 128), True),
        ((1, 5461 * 128, 32, 80, 80), False), ((1, 5461 * 128 + 1, 32, 80, 80), True),  # 96
        ((1, 2730 * 128, 32, 160, 160), False), ((1, 2730 * 128 + 1, 32, 160, 160), True),  # 192
        ((8000, 1, 16, 128, 128), False), ((8300, 1, 16, 128, 128), True),  # rows: 128
    ],
)  # fmt: skip
def test_a_call_says_if_a_rank_has_more_elements_than_32_bits_count(sizes, huge):
    """Of the output; Q may have more."""
    batch, rows, heads, dim_qk, dim_v = sizes
    one = torch.empty(1, 1, 1, 1, dtype=torch.bfloat16)
    q, k, v = (one.expand(batch, rows, *x) for x in ((heads, dim_qk), (8, dim_qk), (8, dim_v)))
    assert call_of((q, k, v), CallArgs()).problem.huge == problem_of(q, k, v).huge == huge


def test_ranks_compare_the_kernels_of_larger_calls_too(monkeypatch):
    """They agree once, whatever the length of later calls."""
    limited = replace(TorchCpu.capability, in_32_bits=True)
    monkeypatch.setattr(TorchCpu, "capability", limited)
    q = torch.ones(1, 4, 2, 8)
    facts = call_of((q, q, q), CallArgs()).facts()
    assert facts["backend"] == "torch-cpu"
    assert facts["backend of huge outputs"] == "reference"
