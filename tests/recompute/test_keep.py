"""`keep` under torch.utils.checkpoint: gradients, what is run again, what stays in memory.

Catches results that are paired wrongly, kept inputs, and anything that outlives its graph.
"""

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megatron_burst import keep
from megatron_burst.errors import BurstError
from megatron_burst.recompute.frames import Frame, running
from megatron_burst.recompute.keep import run_kept
from megatron_burst.recompute.keeping import Keeping
from tests.oracle import full_attention

HEADS, DIM, LAYERS = 4, 8, 3
REENTRANT = pytest.mark.parametrize("reentrant", [True, False])


class Counted:
    """An attention function that counts its calls."""

    def __init__(self, attention):
        self.attention, self.calls = attention, 0

    def __call__(self, *args, **options):
        self.calls += 1
        return self.attention(*args, **options)


def flash(q, k, v, scale=None):
    """torch's flash attention of [b, s, h, d]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)


def plain(q, k, v, scale=DIM**-0.5):
    return full_attention(q, k, v, True, scale)


def model(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(HEADS * DIM, 3 * HEADS * DIM), (HEADS * DIM, HEADS * DIM)]
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    return [[(draw(shape) / 8).requires_grad_() for shape in shapes] for _ in range(LAYERS)]


def layer(weights, attend, x):
    qkv = (x @ weights[0]).unflatten(-1, (HEADS, 3 * DIM))  # q, k, v share their memory
    q, k, v = qkv.split(DIM, dim=-1)
    return x + torch.tanh(attend(q, k, v, scale=0.3).flatten(2) @ weights[1])


def forward(weights, attend, x, reentrant, per_frame=1):
    """Layers in checkpoints, `per_frame` at a time; `reentrant=None` has none."""
    for start in range(0, LAYERS, per_frame):

        def some(x, members=weights[start : start + per_frame]):
            for each in members:
                x = layer(each, attend, x)
            return x

        x = some(x) if reentrant is None else checkpoint(some, x, use_reentrant=reentrant)
    return x


def inputs(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 6, HEADS * DIM, generator=generator, dtype=torch.float64).requires_grad_()


def gradients(weights, xs):
    leaves = [*xs, *(w for each in weights for w in each)]
    found = [leaf.grad.clone() for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


def truth_of(attention, seeds=(1,)):
    weights, xs = model(), [inputs(seed) for seed in seeds]
    for x in xs:
        forward(weights, attention, x, None).square().sum().backward()
    return gradients(weights, xs)


@REENTRANT
@pytest.mark.parametrize("attention", [flash, plain])
@pytest.mark.parametrize("per_frame", [1, 2, LAYERS])
def test_gradients_are_bitwise_those_without_checkpoints_and_attention_runs_once(
    reentrant, attention, per_frame
):
    counted = Counted(attention)
    weights, x = model(), inputs()
    forward(weights, keep(counted), x, reentrant, per_frame).square().sum().backward()
    assert counted.calls == LAYERS
    for got, true in zip(gradients(weights, [x]), truth_of(attention), strict=True):
        assert torch.equal(got, true)


@REENTRANT
def test_tensors_in_lists_and_dictionaries_are_arguments_too(reentrant):
    """Else their gradient would silently be lost."""
    weights, x = model(), inputs()
    kept = keep(lambda qkv, *, more: flash(*qkv, more["v"], **more["options"]))

    def attend(q, k, v, scale):
        return kept([q, k], more={"v": v, "options": {"scale": scale}})

    forward(weights, attend, x, reentrant).square().sum().backward()
    for got, true in zip(gradients(weights, [x]), truth_of(flash), strict=True):
        assert torch.equal(got, true)


@REENTRANT
def test_without_keep_attention_runs_twice(reentrant):
    """What the counter of the test above would show if nothing were kept."""
    counted = Counted(flash)
    forward(model(), counted, inputs(), reentrant).square().sum().backward()
    assert counted.calls == 2 * LAYERS


@REENTRANT
def test_micro_batches_in_flight_in_any_order(reentrant):
    """Several forwards before their backwards, which come in another order; one in evaluation."""
    counted = Counted(flash)
    weights, xs, attend = model(), [inputs(seed) for seed in (1, 2, 3)], keep(counted)
    losses = [forward(weights, attend, x, reentrant).square().sum() for x in xs]
    with torch.no_grad():
        forward(weights, attend, inputs(4), reentrant)
    for index in (1, 2, 0):
        losses[index].backward()
    assert counted.calls == 4 * LAYERS
    for got, true in zip(gradients(weights, xs), truth_of(flash, (1, 2, 3)), strict=True):
        torch.testing.assert_close(got, true, rtol=1e-13, atol=1e-13)  # summed in another order


def test_checkpoints_inside_checkpoints():
    """The inner one records what the outer one's replay takes; attention still runs once."""
    for outer in (True, False):
        for inner in (True, False):
            counted = Counted(flash)
            weights, x, attend = model(), inputs(), keep(counted)
            whole = partial(forward, weights, attend, reentrant=inner)
            checkpoint(lambda y, f=whole: f(y), x, use_reentrant=outer).square().sum().backward()
            assert counted.calls == LAYERS, (outer, inner)
            for got, true in zip(gradients(weights, [x]), truth_of(flash), strict=True):
                assert torch.equal(got, true)


def test_a_second_backward_computes_anew_where_the_checkpoint_is_reentrant():
    """retain_graph: what was taken is gone, and the result is right all the same."""
    counted = Counted(flash)
    weights, x = model(), inputs()
    loss = forward(weights, keep(counted), x, True).square().sum()
    loss.backward(retain_graph=True)
    gradients(weights, [x])
    loss.backward()
    assert counted.calls == 2 * LAYERS
    for got, true in zip(gradients(weights, [x]), truth_of(flash), strict=True):
        assert torch.equal(got, true)


def test_a_second_backward_is_refused_where_it_is_not():
    loss = forward(model(), keep(flash), inputs(), False).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def kept_bytes():
    """Bytes of all recordings that are alive."""
    gc.collect()
    from megatron_burst.recompute.recording import Recording

    return [each.num_bytes for each in gc.get_objects() if type(each) is Recording]


@REENTRANT
def test_kept_are_the_output_and_the_statistics_only(reentrant):
    """Not q, k and v, though the graph of flash attention saves them."""
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
def test_until_its_backward_a_replay_holds_values_but_not_the_projection_they_are_a_slice_of(
    reentrant,
):
    """Queries and keys are new tensors, as position embeddings make them."""
    weight, x = torch.randn(HEADS * DIM, 8 * HEADS * DIM).double() / 8, inputs()
    attend, projections, alive = keep(F.scaled_dot_product_attention), [], []

    def one(x):
        qkv = (x @ weight).unflatten(-1, (HEADS, 8 * DIM)).transpose(1, 2)
        projections.append(weakref.ref(qkv.untyped_storage()))
        out = attend(qkv[..., :DIM] * 2, qkv[..., DIM : 2 * DIM] * 2, qkv[..., 2 * DIM : 3 * DIM])
        if out.requires_grad:  # not in the first pass of a reentrant one
            out.register_hook(lambda _: alive.append([qkv() is not None for qkv in projections]))
        return out.square()

    checkpoint(one, x, use_reentrant=reentrant).sum().backward()
    assert alive == [[False, False]]
    replayed, x.grad = x.grad, None
    one(x).sum().backward()
    assert torch.equal(replayed, x.grad)


class Halved:
    """A policy that keeps half of the columns, and makes outputs anew of them."""

    def trim(self, outs):
        self.kept = [x[..., : x.shape[-1] // 2].clone() for x in outs]
        return tuple(self.kept)

    def restore(self, kept, inputs):
        return tuple(torch.cat([x, x], -1) for x in kept)


@REENTRANT
def test_what_a_replay_has_made_its_outputs_of_is_let_go_before_backward(reentrant):
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
    """200 steps; two of three fail, in the first pass, in the replay or between."""
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
        where = ("first pass", "replay", "between", None, None, None)[number % 6]
        fail_at = (where, 1 + number % LAYERS)

        def attend_or_fail(q, k, v, scale):
            nonlocal backward_calls
            if running() and running()[-1].replays:
                backward_calls += 1
                if fail_at == ("replay", backward_calls):
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


def test_a_replay_that_fails_lets_go_of_what_it_has_not_taken():
    """Even if the caller holds on to the loss; the graph of a checkpoint that is not reentrant
    holds recordings itself."""

    def fails(q, k, v, scale):
        if running()[-1].replays:
            raise RuntimeError("injected")
        return attend(q, k, v, scale)

    attend = keep(flash)
    loss = forward(model(), fails, inputs(), True, per_frame=LAYERS).square().sum()
    assert len(kept_bytes()) == LAYERS
    with pytest.raises(RuntimeError, match="injected"):
        loss.backward()
    assert kept_bytes() == []


@REENTRANT
def test_random_numbers_of_attention_and_of_what_follows_are_the_first_passes(reentrant):
    """Dropout in attention is kept with it; dropout behind it draws what it drew before.

    Kernels may move the generator without using it, as TransformerEngine's do.
    """

    def drops(q, k, v, scale):
        return F.dropout(flash(q, k, v, scale), 0.5)

    def step(attend):
        torch.manual_seed(3)
        weights, x = model(), inputs()

        def dropping(y):
            for each in weights:
                y = F.dropout(layer(each, attend, y), 0.2)
            return y

        checkpoint(dropping, x, use_reentrant=reentrant).square().sum().backward()
        return gradients(weights, [x])

    for got, true in zip(step(keep(drops)), step(drops), strict=True):
        assert torch.equal(got, true)


def test_refuses_what_is_no_tensor():
    with pytest.raises(BurstError, match="must return a tensor or a tuple.*got .'NoneType'.; wrap"):
        forward(model(), keep(lambda q, k, v, scale: None), inputs(), True)


def replay_of_other(debug, change):
    """A checkpoint whose replay calls attention with other inputs."""
    attend, times = keep(flash, debug=debug), []

    def fickle(x):
        times.append(1)
        return layer(model()[0], attend, change(x) if len(times) > 1 else x)

    checkpoint(fickle, inputs(), use_reentrant=True).square().sum().backward()


def test_debug_mode_finds_a_replay_with_other_inputs():
    def last_bit(x):
        y = x.clone()
        y.view(torch.int64)[-1, -1, -1] ^= 1 << 40
        return y

    replay_of_other(False, last_bit)

    def sign_of_a_row(x):
        y = x.clone()
        y[0, 3] *= -1  # the highest bit alone
        return y

    replay_of_other(True, lambda x: x * 1)
    for change in (last_bit, lambda x: x.flip(1), sign_of_a_row):
        with pytest.raises(
            BurstError, match=r"equal the first pass's bit by bit.*inputs \[0, 1, 2"
        ):
            replay_of_other(True, change)


def test_refuses_a_replay_of_another_shape_always():
    with pytest.raises(BurstError, match="a replay must call attention as the first pass did"):
        replay_of_other(False, lambda x: x[:, :3])
