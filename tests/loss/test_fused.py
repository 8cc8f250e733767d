"""The Triton kernels in Triton's interpreter on the CPU, against plain torch and float64.

The comparison is a function of (kernels, device, ...) that returns numbers, so it also runs on a
GPU. Guards against a wrong mask at the end of a row, merging of tiles, a wrong factor.
"""

from importlib.util import find_spec

import pytest
import torch

from megatron_burst.loss import statistics
from megatron_burst.loss.statistics import Factor, LossOptions, Stat

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
]
SHAPES = [(3, 5), (4, 64), (2, 5000)]  # rows, classes: less than, one and more than a block
CAPPED = LossOptions(softcap=4.0, logit_scale=1.5)
TRANSFORMS = [LossOptions(), LossOptions(logit_scale=0.5), CAPPED]


def tile(shape, dtype, device):
    """Raw logits with gaps between rows, targets inside and outside the tile, factors."""
    rows, classes = shape
    torch.manual_seed(0)
    raw = (4 * torch.randn(rows, classes + 3, device=device)).to(dtype)[:, :classes]
    targets = torch.tensor([0, classes - 1, -1, classes][:rows], device=device)
    factors = torch.randn(len(Factor), rows, device=device)
    factors[Factor.LSE] = 14.0
    # of pieces of one row, values lie apart
    targets, factors = (
        x.unsqueeze(-1).repeat_interleave(3, -1)[..., 0] for x in (targets, factors)
    )
    return raw, targets, factors


def compare(kernels, device, shape, dtype, transform, extras):
    """Largest errors by name: of the statistics of two tiles, and of the gradient."""
    raw, targets, factors = tile(shape, dtype, device)
    exact, mine = (statistics.empty_statistics(len(raw), like) for like in (raw.double(), raw))
    nothing, swapped = torch.full_like(raw, -torch.inf), (raw.flip(1) * 0.5).contiguous()
    columns = torch.tensor([shape[1], shape[1] // 2, -1], device=device) + targets.unsqueeze(1)
    copy, news = swapped.clone(), torch.full_like(columns, -torch.inf, dtype=dtype)
    before = statistics.swap_(copy, columns, news), kernels.swap_(swapped, columns, news)
    outside = torch.full_like(targets, -1)
    for part, target in ((nothing, outside), (raw, targets), (swapped, targets + 1)):
        statistics.merge_statistics(exact, part.double(), target, transform, extras)
        kernels.merge_statistics(mine, part, target, transform, extras)
    truth = raw.double()
    statistics.gradient_(truth, targets, factors.double(), transform)
    surroundings = raw._base.clone()
    view = surroundings[:, : shape[1]]
    kernels.gradient_(view, targets, factors, transform)
    beyond = surroundings[:, shape[1] :].ne(raw._base[:, shape[1] :]).sum()
    # where GPUs round to bf16, the interpreter truncates
    eps = torch.finfo(dtype).eps
    excess = (view.double() - truth).abs() - eps * truth.abs()
    return {
        "statistics": float(((mine - exact).abs() / exact.abs().clamp_min(1)).max()),
        "gradient": float((excess / truth.abs().max()).max()),
        "elsewhere": float(beyond + before[0].ne(before[1]).sum() + copy.ne(swapped).sum()),
    }


def comparisons(device):
    from megatron_burst.loss import fused

    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    found = {}
    for i, shape in enumerate(SHAPES):
        for j, transform in enumerate(TRANSFORMS):
            case = shape, dtypes[(i + j) % 3], transform, bool((i + j) % 2)
            found[str(case)] = compare(fused, device, *case)
    return found


def test_kernels_compute_what_plain_torch_does(interpreted):
    found = interpreted(comparisons, "cpu")
    assert len(found) == 9
    for case, errors in found.items():
        assert errors["statistics"] < 3e-6, (case, errors)
        assert errors["gradient"] < 3e-6, (case, errors)
        assert errors["elsewhere"] == 0, case


def test_statistics_of_no_class_are_neutral():
    stats = statistics.empty_statistics(2, torch.zeros(1))
    assert stats[Stat.LSE].isneginf().all() and stats[1:].eq(0).all()
