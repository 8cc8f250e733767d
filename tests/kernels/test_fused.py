"""The Triton kernels in Triton's interpreter on the CPU, against plain torch and float64.

The comparisons are functions of (kernels, device, shape, ...) that return numbers, so tests/gpu can
run them on a GPU. Where GPUs round to bf16, the interpreter truncates.
"""

from importlib.util import find_spec
from itertools import product

import pytest
import torch
from torch.nn.functional import pad

from megatron_burst.kernels import partial
from tests.sampling import crossed

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(2, 19, 3, 8), (1, 110, 2, 40), (1, 33, 2, 128), (2, 23, 1, 192)]
MIXES = {  # of parts; the third part's is also the output's
    "bf16": [BF16] * 3,
    "fp16": [FP16] * 4,
    "two to fp32": [FP32, BF16, FP32],
    "three to fp16": [BF16, FP32, FP16],
}
MANY = {"17 of fp16": [FP16] * 17, "40 of two": [FP32, BF16] * 20}
PLACES_AND_SINKS = list(product((False, True), (False, True)))
DELTAS = {"bf16": [BF16, BF16], "fp16": [FP16, FP16], "two": [FP32, BF16]}

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
]


def cut(x, how):
    """The same values laid out differently: dense, permuted, sliced, unaligned."""
    if how % 4 == 0:
        return x.clone()
    if how % 4 == 1:
        return x.transpose(0, -3).contiguous().transpose(0, -3)
    if how % 4 == 2:
        return pad(x, (0, 0, 2, 1, 3, 2), value=7)[..., 3:-2, 2:-1, :]
    return pad(x, (3, 1), value=7)[..., 3:-1]


def around(view):
    """The rest of the memory that a view was cut from."""
    memory = view._base.clone()
    memory.as_strided(view.shape, view.stride(), view.storage_offset()).zero_()
    return memory


def excess(got, truth, eps):
    """Largest error beyond one rounding (relative eps) of the truth, relative to its largest
    value."""
    return float((((got.double() - truth).abs() - eps * truth.abs()) / truth.abs().max()).max())


def random_tensors(shape, dtypes, device):
    torch.manual_seed(0)
    return [cut(torch.randn(shape, device=device).to(x), i) for i, x in enumerate(dtypes)]


def one_rounding(device, dtype):
    cuts_off = device == "cpu" and dtype is BF16
    return torch.finfo(dtype).eps / (1 if cuts_off else 2)


def parts_with_empty_rows(shape, dtypes, device):
    """Parts for merge_parts, 0 where they saw no key; every seventh row saw none in any part."""
    batch, tokens, heads, _ = shape
    outs = random_tensors(shape, dtypes, device)
    lses = random_tensors((batch, heads, tokens), [FP32] * len(dtypes), device)
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        lse.mul_(8)
        for empty in (slice(i, None, 5), slice(6, None, 7)):
            out[:, empty], lse[:, :, empty] = 0, -torch.inf
    return list(zip(outs, lses, strict=True))


def compare_merge(kernels, device, shape, dtypes, in_place, sinks=False):
    """Errors of merge_parts by name."""
    parts = parts_with_empty_rows(shape, dtypes, device)
    sink = torch.linspace(-9, 9, shape[2], device=device).to(dtypes[0]) if sinks else None
    lses = torch.stack([lse.double() for _, lse in parts])
    lse_truth = lses.logsumexp(0)
    if sinks:
        lse_truth = lse_truth.logaddexp(sink.double().view(1, -1, 1))
    weights = (lses - lse_truth.nan_to_num(neginf=0)).exp().transpose(2, 3).unsqueeze(-1)
    truth = sum(x.double() * w for (x, _), w in zip(parts, weights, strict=True))
    plain, plain_lse = torch.empty(shape, dtype=dtypes[2]), torch.empty(lse_truth.shape)
    partial.merge_parts(plain, plain_lse, [(x.cpu(), y.cpu()) for x, y in parts],
                        sink if sink is None else sink.cpu())  # fmt: skip
    out, lse = parts[2] if in_place else (cut(torch.ones_like(x), 2) for x in parts[2])
    surroundings = around(out), around(lse)
    kernels.merge_parts(out, lse, parts, sink)
    lost = torch.empty_like(out)
    parts[0][0][:, 0] = torch.nan  # whose lse is -inf
    kernels.merge_parts(lost, torch.empty_like(lse), parts, sink)
    return {
        "out": excess(out, truth, one_rounding(device, dtypes[2])),
        "out against torch": excess(out.cpu(), plain.double(), 2 * torch.finfo(dtypes[2]).eps),
        "lse": float((lse - lse_truth).exp().sub(1).nan_to_num().abs().max()),
        "lse against torch": float((lse.cpu() - plain_lse).nan_to_num().abs().max()),
        "empty rows": float(lse.isinf().ne(lse_truth.isinf()).sum() + out[:, 6::7].ne(0).sum()),
        "elsewhere": changes(surroundings, (around(out), around(lse))),
        "NaN": float(lost[:, 0].isnan().logical_not().sum() + lost[:, 1:].isnan().sum()),
    }


def changes(before, after):
    return float(sum(a.ne(b).sum() for a, b in zip(before, after, strict=True)))


def compare_sum(kernels, device, shape, dtypes, in_place):
    """Errors of sum_parts by name."""
    parts = random_tensors(shape, dtypes, device)
    truth = sum(part.double() for part in parts)
    target = parts[2] if in_place else cut(torch.ones_like(parts[0]), 2)
    plain = torch.empty(shape, dtype=target.dtype)
    partial.sum_parts(plain, [part.cpu() for part in parts])
    surroundings = around(target)
    kernels.sum_parts(target, parts)
    same_bits = device != "cpu" or target.dtype is not BF16
    return {
        "sum": excess(target, truth, one_rounding(device, target.dtype)),
        "bits": float(target.cpu().ne(plain).sum()) if same_bits else 0.0,
        "elsewhere": changes([surroundings], [around(target)]),
    }


def compare_delta(kernels, device, shape, dtypes, scale):
    """Errors of row_delta and surrogate_out by name, relative to |dO||O|."""
    dout, out = random_tensors(shape, dtypes, device)
    dout.mul_(scale)
    dout[:, 3] = 0
    truth = (dout.double() * out.double()).sum(-1).transpose(1, 2)
    size = (dout.double().norm(dim=-1) * out.double().norm(dim=-1)).transpose(1, 2).clamp_min(1e-30)
    delta = kernels.row_delta(dout, out)
    assert delta.dtype is FP32 and delta.is_contiguous()
    stand_in = kernels.surrogate_out(dout, cut(delta, 2))
    assert stand_in.dtype is dout.dtype and stand_in.is_contiguous()
    theirs = (dout.double() * stand_in.double()).sum(-1).transpose(1, 2)
    third = dout.abs().topk(3).values[..., 2:] * (1 - 1e-4)  # its order in float32 is less exact
    return {
        "delta": float(((delta - truth) / size).abs().max()),
        "stand-in": float(((theirs - delta) / size).abs().max()),
        "non-zeros": float(stand_in.ne(0).sum(-1).max()),
        "other places": float((stand_in.ne(0) & (dout.abs() < third)).sum()),
        "row without gradient": float(stand_in[:, 3].ne(0).sum()),
    }


def compare_corners(kernels, device):
    """Edge-case shapes and values, by name: True if right."""
    ones = torch.ones(1, device=device).expand(1, 5, 2, 40)
    small = torch.full((1, 1, 1, 8), -1e-4, dtype=FP16, device=device)
    sixteen = torch.full((1, 1, 1), 16.0, device=device)
    share = kernels.surrogate_out(small, sixteen)
    narrow = torch.ones(1, 2, 1, 2, device=device)
    no_rows = torch.empty(1, 0, 2, 8, device=device)
    kernels.sum_parts(no_rows, [no_rows, no_rows])
    target = torch.empty(2, 3, 1, 300, device=device)
    kernels.sum_parts(target, [ones[:, :1, :1, :1].expand(target.shape)])
    lost = kernels.surrogate_out(narrow, torch.full((1, 1, 2), torch.nan, device=device))
    return {
        "expanded": bool((kernels.row_delta(ones, ones) == 40).all()),
        "fp16": bool(share.isfinite().all())
        and abs(float(kernels.row_delta(small, share)) - 16) <= 1e-3 * 16,
        "narrow": torch.equal(
            kernels.surrogate_out(narrow, narrow[..., 0].transpose(1, 2)).sum(-1), narrow[..., 0]
        ),
        "wide": bool((target == 1).all()),
        "NaN": bool(lost.isnan().any(-1).all()),
    }


def interpret(compare, *args):
    """Run a comparison with the kernels."""
    from megatron_burst.kernels import fused

    return compare(fused, "cpu", *args)


@pytest.fixture(scope="module")
def interpreter(interpreted):
    return lambda *args: interpreted(interpret, *args)


def check_merge(errors):
    """2e-6 allows for float32 sums and for exponentials, whose argument has 20 units."""
    assert errors["out"] <= 2e-6 and errors["lse"] <= 5e-6, errors
    assert errors["out against torch"] <= 2e-6 and errors["lse against torch"] <= 5e-6, errors
    assert errors["empty rows"] == errors["elsewhere"] == 0, errors


def check_sum(errors):
    assert errors["sum"] <= 2e-6 and errors["bits"] == errors["elsewhere"] == 0, errors


def check_delta(errors):
    assert errors["delta"] <= 1e-6 and errors["stand-in"] <= 1e-6, errors
    assert errors["non-zeros"] <= 3, errors
    assert errors["other places"] == errors["row without gradient"] == 0, errors


@pytest.mark.parametrize("name, in_place, sinks", crossed(MIXES, PLACES_AND_SINKS, 2))
def test_merging(interpreter, name, in_place, sinks):
    """Guards against wrong strides or masks, a second rounding, NaN from parts that saw no key."""
    for shape in SHAPES:
        check_merge(interpreter(compare_merge, shape, MIXES[name], in_place, sinks))


@pytest.mark.parametrize("name, in_place", crossed(MIXES | MANY, [(False,), (True,)], 1))
def test_sums(interpreter, name, in_place):
    """Guards against wrong strides or masks, another summation order, a second rounding."""
    for shape in SHAPES:
        check_sum(interpreter(compare_sum, shape, (MIXES | MANY)[name], in_place))


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize("dtypes", DELTAS.values(), ids=DELTAS)
def test_delta_and_its_stand_in(interpreter, dtypes, scale):
    """Guards against an entry, sign or column misread from the packed keys."""
    for shape in SHAPES:
        check_delta(interpreter(compare_delta, shape, dtypes, scale))


def test_corners(interpreter):
    """Guards against what only expanded, empty, very narrow or wide tensors and extreme values
    show."""
    corners = interpreter(compare_corners)
    assert all(corners.values()), corners
