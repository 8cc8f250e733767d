"""burst_attention on a group of one rank: just the kernel, nothing that only several ranks need."""

from contextlib import ExitStack
from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_burst.attention import burst_attention
from megatron_burst.config import BurstConfig
from megatron_burst.kernels.backends import backends
from tests.oracle import full_attention
from tests.ranks import run_ranks
from tests.schedule.cases import LAYOUTS

pytestmark = pytest.mark.numeric
TOKENS = 17  # odd, which zigzag refuses on several ranks
CONFIGS = {  # options that one rank has no use for are no error
    "default": BurstConfig(),
    "gather": BurstConfig(intra="gather", heads_per_round=1),
    "a2a": BurstConfig(inter="a2a"),
    "flat": BurstConfig(flat=True),
    "transfers": BurstConfig(circulate="q", transfer="pull", resend="never", nccl_ctas=4),
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
    return found, before, (store.num_keys(), len(dist.distributed_c10d._world.pg_names))


def test_it_is_the_kernel_alone_and_exact_for_any_length():
    ((found, before, after),) = run_ranks(run_cases, 1)
    assert len(found) == len(CONFIGS) * len(LAYOUTS) * 2 and before == after
    for (name, _, causal), (error, calls) in found.items():
        assert error <= 1e-12, (name, error)
        if CONFIGS[name].keep == "none":
            assert calls == [1, 1], (name, calls)
        else:  # one call outside the checkpoint; in recomputation half of the rows, none or all
            recomputed = name == "half kept"
            assert calls == [2 + recomputed, 1], (name, causal, calls)


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
