"""burst_attention on a group of one rank: just the kernel, nothing that only several ranks need."""

from contextlib import ExitStack
from itertools import cycle, pairwise, product
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_burst.attention import burst_attention
from megatron_burst.config import BurstConfig, Force
from megatron_burst.kernels.backends import backends
from megatron_burst.loss.next_tokens import next_tokens
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.shards import position_ids, shard, unshard
from megatron_burst.slices import prefix_lm
from tests.oracle import full_attention, seen_by, seen_by_slices
from tests.ranks import run_ranks
from tests.schedule.cases import LAYOUTS

pytestmark = pytest.mark.numeric
TOKENS = 17  # odd, which zigzag refuses on several ranks
CONFIGS = {  # options that one rank has no use for are no error
    "default": BurstConfig(),
    "gather": BurstConfig(intra="gather", force=Force(heads_per_round=1)),
    "a2a": BurstConfig(inter="a2a"),
    "flat": BurstConfig(force=Force(flat=True)),
    "transfers": BurstConfig(
        force=Force(circulate="q", transfer="pull", resend="never"), nccl_ctas=4
    ),
    "half kept": BurstConfig(keep="half"),
    "all kept": BurstConfig(keep="all"),
}


def whole_sequence():
    generator = torch.Generator().manual_seed(5)
    shapes = [(4, 8), (2, 8), (2, 6), (4, 6)]  # heads and dimension of q, k, v, dout
    return [
        torch.randn(2, TOKENS, *shape, generator=generator, dtype=torch.float64) for shape in shapes
    ]


def passes(attend, tensors):
    """out, dq, dk, dv."""
    *leaves, dout = (x.clone().requires_grad_() for x in tensors)
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.detach())]


def run_cases(rank):
    """By case, the largest error and the kernel calls; store keys and groups added."""
    store, tensors, found = dist.distributed_c10d._get_default_store(), whole_sequence(), {}
    before = store.num_keys(), len(dist.distributed_c10d._world.pg_names)
    kernel = backends()["torch-cpu"]
    for name, layout, causal in product(CONFIGS, LAYOUTS, (True, False)):
        config = CONFIGS[name]

        def attend(q, k, v, layout=layout, causal=causal, config=config):
            options = dict(causal=causal, layout=layout.value, config=config)
            if config.keep == "none":
                return burst_attention(q, k, v, **options)
            checkpoint(lambda x: x + 1, q, use_reentrant=False)  # the first one is not kept
            burst_attention(q, k, v, **options)
            return checkpoint(burst_attention, q, k, v, use_reentrant=False, **options)

        truth = passes(lambda *x, causal=causal: full_attention(*x, causal, 8**-0.5), tensors)
        with ExitStack() as stack:
            calls = [
                stack.enter_context(mock.patch.object(kernel, side, wraps=getattr(kernel, side)))
                for side in ("forward", "backward")
            ]
            got = passes(attend, tensors)
        errors = [float((a - b).abs().max()) for a, b in zip(got, truth, strict=True)]
        found[name, layout, causal] = max(errors), [call.call_count for call in calls]
    errors = mask_errors(WAYS[:1])
    after = store.num_keys(), len(dist.distributed_c10d._world.pg_names)
    return found, errors, before, after


def test_it_is_the_kernel_alone_and_exact_for_any_length():
    ((found, errors, before, after),) = run_ranks(run_cases, 1)
    assert len(found) == len(CONFIGS) * len(LAYOUTS) * 2 and before == after
    for (name, _, causal), (error, calls) in found.items():
        assert error <= 1e-12, (name, error)
        if CONFIGS[name].keep == "none":
            assert calls == [1, 1], (name, calls)
        else:  # one call outside the checkpoint; in recomputation half of the rows, none or all
            recomputed = name == "half kept"
            assert calls == [2 + recomputed, 1], (name, causal, calls)
    assert_exact_masks(errors, WAYS[:1])


def test_a_whole_sequence_needs_no_group():
    """Nothing is initialised by it, and a default group of the user's changes nothing."""
    *qkv, _ = whole_sequence()
    found = [burst_attention(*qkv, window=(np.int64(4), 0))]
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found.append(burst_attention(*qkv, window=(4, 0)))
    dist.destroy_process_group()
    found.append(burst_attention(*qkv, window=(4, 0)))
    assert all(torch.equal(x, found[0]) for x in found)


# Documents that begin at odd tokens; rows behind the last one; an empty one; padding.
SAMPLES = {
    "documents": [(0, 3, 8, TOKENS)],
    "rows behind": [(0, 3, 3, 9)],
    "padding": [(0, 2, 7, 10), (0, 3, 8, TOKENS)],
    "padding and rows behind": [(0, 2, 2, 4), (0, 3, 6, 9)],
}
BANDS = {"causal": (True, None), "full": (False, None), "window": (True, (4, 0)),
         "both sides": (False, (3, 2))}  # fmt: skip
TREE = {"cu_seqlens": torch.tensor([0, 3, 8, 11]), "prefix_tree": [-1, 0, 0]}
WAYS = "auto", "ring", "gather", "a2a"


def boundaries_of(sample):
    names = "cu_seqlens", "cu_seqlens_padded"
    return {name: torch.tensor(x) for name, x in zip(names, SAMPLES[sample], strict=False)}


def in_sample(sample, causal, window):
    """Which keys each query sees, pair by pair."""
    ends, *_, starts = *SAMPLES[sample], SAMPLES[sample][-1]
    left, right = window or (None, None)
    seen = seen_by(Mask(left, 0 if causal else right, True), starts, TOKENS)
    real = torch.zeros(TOKENS, dtype=torch.bool)
    for start, (begin, end) in zip(starts, pairwise(ends), strict=False):
        real[start : start + end - begin] = True
    return seen & real & real.unsqueeze(1)


def mask_cases():
    """By name, arguments of a call and what its queries see."""
    for (band, (causal, window)), sample in product(BANDS.items(), SAMPLES):
        given = dict(causal=causal, window=window, **boundaries_of(sample))
        yield (band, sample), tuple(Layout), given, in_sample(sample, causal, window)
    whole = [layout for layout in Layout if layout is not Layout.DOCUMENTS]
    for band, (causal, window) in BANDS.items():
        left, right = window or (None, None)
        seen = seen_by(Mask(left, 0 if causal else right), (), TOKENS)
        yield (band, ""), whole, dict(causal=causal, window=window), seen
    seen = seen_by(Mask(right=0, documents=True), TREE["cu_seqlens"].tolist(), TOKENS, (-1, 0, 0))
    yield ("tree", ""), whole[:2], TREE, seen
    slices = prefix_lm(5, TOKENS)
    seen, given = seen_by_slices(slices.tolist(), TOKENS), dict(causal=False, slices=slices)
    yield ("slices", ""), whole[:2], given, seen
    yield ("slices", "documents"), [Layout.DOCUMENTS], given | boundaries_of("documents"), seen


def mask_errors(ways):
    """By case, the largest error of (out, dq, dk, dv)."""
    tensors, found, turns = [x[:1] for x in whole_sequence()], {}, cycle(ways[1:])
    for name, layouts, given, seen in mask_cases():
        truth = passes(lambda *x, seen=seen: full_attention(*x, False, 8**-0.5, seen), tensors)
        # each layout also in one of the other ways, in turn
        others = zip(layouts, turns, strict=False) if len(ways) > 1 else ()
        for layout, way in [*product(layouts, ways[:1]), *others]:
            options = given | dict(layout=str(layout), config=BurstConfig(intra=way))
            got = passes(lambda *x, options=options: burst_attention(*x, **options), tensors)
            errors = [float((a - b).abs().max()) for a, b in zip(got, truth, strict=True)]
            found[*name, str(layout), way] = max(errors)
    return found


def assert_exact_masks(errors, ways):
    assert len(errors) == (1 + (len(ways) > 1)) * (16 * 4 + 4 * 3 + 2 + 2 + 1)
    assert not {name: error for name, error in errors.items() if not error <= 1e-12}


def test_it_is_exact_with_every_mask_layout_and_mode():
    assert_exact_masks(mask_errors(WAYS), WAYS)


def test_shards_of_one_rank_are_the_sample_in_every_layout():
    """Also their positions, and the tokens that follow; a document ends at an odd row."""
    x, ids = torch.randn(1, TOKENS, 3), torch.arange(TOKENS).view(1, -1)
    for layout, sample in product(Layout, SAMPLES):
        given = dict(layout=str(layout), **boundaries_of(sample))
        assert torch.equal(shard(x, **given), x) and torch.equal(unshard(x, **given), x)
        ends, *_, starts = *SAMPLES[sample], SAMPLES[sample][-1]
        places, labels = torch.empty(TOKENS).long(), torch.full((1, TOKENS), -100)
        for start, stop in pairwise((*starts, TOKENS)):
            places[start:stop] = torch.arange(stop - start)
        for start, length in zip(starts, np.diff(ends), strict=False):
            labels[0, start : start + length - 1] = ids[0, start + 1 : start + length]
        assert torch.equal(position_ids(TOKENS, **given), places)
        assert torch.equal(next_tokens(ids, dim=1, **given), labels)
