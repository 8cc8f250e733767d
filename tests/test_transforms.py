"""torch.compile, torch.func, vmap and forward-mode AD around the public functions.

Guards against graph breaks inside a call, and internal torch errors after something was sent.
"""

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from megatron_burst import BurstError, burst_attention, keep, linear_cross_entropy, token_log_probs
from megatron_burst.mcore import patches
from tests.recompute.layers import flash

Q, K, V = torch.randn(3, 1, 8, 2, 8, generator=torch.Generator().manual_seed(1)).unbind()
HIDDEN, WEIGHT, LABELS = torch.randn(8, 16), torch.randn(32, 16), torch.arange(8)


@pytest.fixture(scope="module", autouse=True)
def group():
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo", init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1
        )
        patches.apply("checkpoints")
        yield
        dist.destroy_process_group()


def attention(q):
    return burst_attention(q, K, V).sum()


def kept(q):
    return checkpoint(keep(flash), q, K, V, use_reentrant=False).sum()


def loss(hidden, grads="recompute"):
    return linear_cross_entropy(hidden, WEIGHT, LABELS, grads=grads)


def log_probs(hidden):
    return token_log_probs(hidden, WEIGHT, LABELS).log_probs.sum()


CALLS = {
    "burst attention": (attention, Q),
    "linear cross-entropy": (loss, HIDDEN),
    "linear cross-entropy, in forward": (partial(loss, grads="forward"), HIDDEN),
    "linear cross-entropy, of tokens": (log_probs, HIDDEN),
}
TRANSFORMS = {
    "grad": lambda call, x: torch.func.grad(call)(x),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,)),
    "vmap": lambda call, x: torch.vmap(call)(torch.stack([x, x])),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", CALLS)
def test_transforms_of_functions_are_refused_by_name(name, transform):
    call, x = CALLS[name]
    expected = (
        f"{name.partition(',')[0]}: gradients must come .*; got a call inside .* {transform};"
    )
    with pytest.raises(BurstError, match=expected):
        TRANSFORMS[transform](call, x)


@pytest.mark.parametrize("name", CALLS)
def test_tangents_are_refused_but_a_level_without_them_is_none(name):
    call, x = CALLS[name]
    with forward_ad.dual_level():
        expected = call(x)
        with pytest.raises(BurstError, match="got an input with a tangent; leave out"):
            call(forward_ad.make_dual(x, x))
    assert torch.equal(call(x), expected)


@pytest.mark.parametrize("name", [*CALLS, "burst keep"])
def test_batches_of_gradients_are_refused(name):
    """torch refuses other transforms of checkpoints."""
    call, x = CALLS.get(name, (kept, Q))
    x = x.clone().requires_grad_()
    y = call(x) * torch.ones(3)
    with pytest.raises(BurstError, match="got a batch of tensors for one; leave out is_grads_ba"):
        torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)


KEPT = keep(flash)
COMPILED = {  # each with something to compile before and after
    "keep": (lambda q: KEPT(q * 2, K, V).sin().sum(), Q),
    "log-probabilities": (lambda x: token_log_probs(x * 2, WEIGHT, LABELS)[0].sin().sum(), HIDDEN),
}


@pytest.mark.parametrize("name", COMPILED)
def test_a_call_is_one_graph_break_and_changes_nothing(name):
    layer, x = COMPILED[name]
    torch._dynamo.reset()
    explained = torch._dynamo.explain(layer)(x)
    assert explained.graph_break_count == 1 and explained.graph_count == 2
    assert "megatron_burst runs kernels" in explained.break_reasons[0].reason
    grads = []
    for each in (layer, torch.compile(layer, backend="eager")):
        leaf = x.clone().requires_grad_()
        each(leaf).backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


SILENT = """
import sys
import torch
from megatron_burst import burst_attention, keep, linear_cross_entropy
from megatron_burst.patching import undo_all
x = torch.randn(8, 16, requires_grad=True)
linear_cross_entropy(x, torch.randn(32, 16), torch.arange(8)).backward()
assert "torch._dynamo" not in sys.modules
undo_all()
explained = torch._dynamo.explain(lambda x: linear_cross_entropy(
    x * 2, torch.randn(32, 16), torch.arange(8), grads="recompute").sin())(x)
assert "megatron_burst runs kernels" in explained.break_reasons[0].reason, explained
"""


def test_torch_dynamo_is_not_imported_before_something_is_compiled():
    """It takes as long to import as torch."""
    subprocess.run([sys.executable, "-c", SILENT], check=True, timeout=300)
