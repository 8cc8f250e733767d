"""`keep` under torch.utils.checkpoint: what stays in memory.

Guards against kept inputs, and anything that outlives its graph.
"""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megatron_burst import keep
from megatron_burst.recompute.keep import run_kept
from megatron_burst.recompute.keeping import Frame, Keeping, running
from tests.recompute.layers import (
    DIM,
    HEADS,
    LAYERS,
    REENTRANT,
    flash,
    forward,
    gradients,
    inputs,
    model,
    truth_of,
)


def kept_bytes():
    """Bytes of all live recordings."""
    gc.collect()
    from megatron_burst.recompute.recording import Recording

    return [each.num_bytes for each in gc.get_objects() if type(each) is Recording]


@REENTRANT
def test_kept_are_the_output_and_the_statistics_only(reentrant):
    """Not q, k and v, though flash attention's graph saves them."""
    x = inputs()
    alive = []

    def watched(q, k, v, scale):
        alive.append(weakref.ref(q.untyped_storage()))
        return flash(q, k, v, scale)

    loss = forward(model(), keep(watched), x, reentrant).square().sum()
    rows = 2 * 6 * HEADS
    assert kept_bytes() == [rows * DIM * 8 + rows * 8] * LAYERS
    assert all(storage() is None for storage in alive)
    loss.backward()
    del loss
    assert kept_bytes() == []


@REENTRANT
def test_until_backward_recomputation_holds_values_but_not_what_they_are_a_slice_of(
    reentrant,
):
    """Queries and keys are new tensors, as RoPE makes them."""
    weight, x = torch.randn(HEADS * DIM, 8 * HEADS * DIM).double() / 8, inputs()
    attend, projections, alive = keep(F.scaled_dot_product_attention), [], []

    def one(x):
        qkv = (x @ weight).unflatten(-1, (HEADS, 8 * DIM)).transpose(1, 2)
        projections.append(weakref.ref(qkv.untyped_storage()))
        out = attend(qkv[..., :DIM] * 2, qkv[..., DIM : 2 * DIM] * 2, qkv[..., 2 * DIM : 3 * DIM])
        if out.requires_grad:  # not in a reentrant one's first pass
            out.register_hook(lambda _: alive.append([qkv() is not None for qkv in projections]))
        return out.square()

    checkpoint(one, x, use_reentrant=reentrant).sum().backward()
    assert alive == [[False, False]]
    recomputed, x.grad = x.grad, None
    one(x).sum().backward()
    assert torch.equal(recomputed, x.grad)


class Halved:
    """A policy that keeps half of the columns, and rebuilds outputs from them."""

    rounds = False

    def trim(self, outs):
        self.kept = [x[..., : x.shape[-1] // 2].clone() for x in outs]
        return tuple(self.kept)

    def restore(self, kept, inputs):
        return tuple(torch.cat([x, x], -1) for x in kept)


@REENTRANT
def test_what_outputs_were_restored_from_is_let_go_before_backward(reentrant):
    policy, alive = Halved(), []
    keeping = Keeping(policy)

    def one(x):
        heads = x.unflatten(-1, (HEADS, DIM))
        out = run_kept(flash, (heads, heads, heads), keeping)
        if out.requires_grad:
            out.register_hook(lambda _: alive.append(watched() is not None))
        return out.square()

    x = inputs()
    loss = checkpoint(one, x, use_reentrant=reentrant).sum()
    watched = weakref.ref(policy.kept.pop())
    loss.backward()
    assert alive == [False]


@REENTRANT
def test_nothing_outlives_steps_that_fail_anywhere(reentrant):
    """200 steps; two of three fail, in the first pass, in recomputation or in between."""
    weights, fail_at, calls = model(), None, 0

    def fails(q, k, v, scale):
        nonlocal calls
        calls += 1
        if fail_at == ("first pass", calls):
            raise RuntimeError("injected")
        return flash(q, k, v, scale)

    attend, backward_calls = keep(fails), 0

    def step(number):
        nonlocal fail_at, calls, backward_calls
        calls = backward_calls = 0
        where = ("first pass", "recomputation", "between", None, None, None)[number % 6]
        fail_at = (where, 1 + number % LAYERS)

        def attend_or_fail(q, k, v, scale):
            nonlocal backward_calls
            if running() and running()[-1].recomputes:
                backward_calls += 1
                if fail_at == ("recomputation", backward_calls):
                    raise RuntimeError("injected")
            return attend(q, k, v, scale)

        x = inputs(number)
        loss = forward(weights, attend_or_fail, x, reentrant).square().sum()
        if where == "between":
            raise RuntimeError("injected")
        loss.backward()
        return gradients(weights, [x])

    failures = 0
    for number in range(200):
        try:
            found = step(number)
        except RuntimeError as error:
            assert "injected" in str(error)
            failures += 1
            for each in weights:
                for weight in each:
                    weight.grad = None
        else:
            if number % 20 == 3:
                for got, true in zip(found, truth_of(flash, (number,)), strict=True):
                    assert torch.equal(got, true)
        assert running() == ()
    assert failures == 101
    assert kept_bytes() == []
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is Frame]


def test_recomputation_that_fails_lets_go_of_what_it_has_not_taken():
    """Even if the caller holds on to the loss; the graph of a non-reentrant checkpoint itself holds
    recordings."""

    def fails(q, k, v, scale):
        if running()[-1].recomputes:
            raise RuntimeError("injected")
        return attend(q, k, v, scale)

    attend = keep(flash)
    loss = forward(model(), fails, inputs(), True, per_frame=LAYERS).square().sum()
    assert len(kept_bytes()) == LAYERS
    with pytest.raises(RuntimeError, match="injected"):
        loss.backward()
    assert kept_bytes() == []
