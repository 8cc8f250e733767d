"""`keep` under torch.utils.checkpoint: gradients, what is recomputed, what is refused.

Guards against results that are matched wrongly.
"""

import gc
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megatron_burst import keep
from megatron_burst.errors import BurstError
from megatron_burst.recompute.recording import Recording, Saved
from tests.recompute.layers import (
    LAYERS,
    REENTRANT,
    Counted,
    flash,
    forward,
    gradients,
    inputs,
    layer,
    model,
    plain,
    truth_of,
)

pytestmark = pytest.mark.numeric


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
    """Otherwise their gradient would silently be lost."""
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
    """Several forwards before their backwards, which run in another order; one in evaluation."""
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
    """The inner one records what the outer one's recomputation uses; attention still runs once."""
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
    """retain_graph: what was kept is used up, and the result is still right."""
    counted = Counted(flash)
    weights, x = model(), inputs()
    loss = forward(weights, keep(counted), x, True).square().sum()
    loss.backward(retain_graph=True)
    gradients(weights, [x])
    loss.backward()
    assert counted.calls == 2 * LAYERS
    for got, true in zip(gradients(weights, [x]), truth_of(flash), strict=True):
        assert torch.equal(got, true)


@REENTRANT
def test_a_backward_inside_the_checkpoint_uses_up_what_it_kept(reentrant):
    """As a penalty on gradients: recomputation makes that call again. It was an AttributeError."""
    counted = Counted(flash)

    def penalised(x, attend):
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(attend(inner, 2 * inner, inner * 3).sum(), inner)
        return attend(x, 2 * x, x * 3) * grad

    grads = []
    for attend in (flash, keep(counted)):
        x = torch.randn(2, 2, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        x.requires_grad_()
        out = checkpoint(lambda x: penalised(x * 1, attend), x, use_reentrant=reentrant)  # noqa: B023
        out.square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
    assert counted.calls == (3 if reentrant else 4)  # torch recomputes within such a checkpoint too


def test_a_second_backward_is_refused_where_it_is_not():
    loss = forward(model(), keep(flash), inputs(), False).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@REENTRANT
def test_random_numbers_of_attention_and_of_what_follows_are_the_first_passes(reentrant):
    """Dropout in attention is kept with it; later dropout draws the same numbers again.

    Kernels may advance the generator without using it, as TransformerEngine's do.
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
    with pytest.raises(BurstError, match="only tensors and None.*got .'NoneType'.; wrap"):
        forward(model(), keep(lambda q, k, v, scale: None), inputs(), True)


def recompute_with_other(debug, change):
    """A checkpoint whose recomputation calls attention with other inputs."""
    attend, times = keep(flash, debug=debug), []

    def fickle(x):
        times.append(1)
        return layer(model()[0], attend, change(x) if len(times) > 1 else x)

    checkpoint(fickle, inputs(), use_reentrant=True).square().sum().backward()


def test_debug_mode_finds_recomputation_with_other_inputs():
    def last_bit(x):
        y = x.clone()
        y.view(torch.int64)[-1, -1, -1] ^= 1 << 40
        return y

    recompute_with_other(False, last_bit)

    def sign_of_a_row(x):
        y = x.clone()
        y[0, 3] *= -1  # only the highest bit
        return y

    recompute_with_other(True, lambda x: x * 1)
    for change in (last_bit, lambda x: x.flip(1), sign_of_a_row):
        with pytest.raises(
            BurstError, match=r"equal the first pass's inputs bit by bit.*inputs \[0, 1, 2"
        ):
            recompute_with_other(True, change)


def test_refuses_recomputation_of_another_shape_always():
    with pytest.raises(BurstError, match="recomputation must make the same calls"):
        recompute_with_other(False, lambda x: x[:, :3])


class Layer(torch.nn.Module):
    """Two linear layers; counts calls of the first."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.up = torch.nn.Linear(6, 24, dtype=torch.float64)
        self.down = torch.nn.Linear(24, 6, dtype=torch.float64)
        self.calls = 0
        self.up.register_forward_hook(self.count)

    def count(self, *_):
        self.calls += 1

    def run(self, x, up):
        return self.down(F.gelu(up(x)))


@REENTRANT
def test_a_module_is_called_once_and_its_parameters_are_no_part_of_what_is_kept(reentrant):
    found = []
    for kept in (False, True):
        layer, x = Layer(), torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 6)
        x.requires_grad_()
        up = keep(layer.up) if kept else layer.up
        out = checkpoint(layer.run, x, up, use_reentrant=reentrant)
        if kept:
            recordings = [each for each in gc.get_objects() if type(each) is Recording]
            assert [each.num_bytes for each in recordings] == [5 * 24 * 8]
            del recordings
        out.square().sum().backward()
        assert layer.calls == 2 - kept
        found.append([x.grad, *(weight.grad for weight in layer.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Adapted(torch.nn.Module):
    """A frozen linear layer with a trained one beside it, as of LoRA."""

    def __init__(self, frozen):
        super().__init__()
        torch.manual_seed(5)
        self.base, self.added = (torch.nn.Linear(6, 24, dtype=torch.float64) for _ in range(2))
        self.base.requires_grad_(False)
        self.added.requires_grad_(not frozen)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.base(x) + self.added(x)


CALLED = {
    "module": lambda layer, wrap: wrap(layer),
    "nested": lambda layer, wrap: (
        lambda x: wrap(lambda more, none: (layer(more["x"][0]), None))({"x": [x]}, None)[0]
    ),
    "no input": lambda layer, wrap: lambda x: wrap(lambda: layer(x))(),
}


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@REENTRANT
@pytest.mark.parametrize("called", CALLED)
def test_a_module_has_gradients_where_no_input_of_it_needs_one(called, reentrant, frozen):
    """Behind a frozen embedding. A reentrant checkpoint, which torch gives no backward then, has
    another input that needs one."""
    x, y = (torch.linspace(-1, n, 30, dtype=torch.float64).view(5, 6) for n in (1, 2))
    y, found = y.requires_grad_(reentrant or frozen), []
    keep(Adapted(frozen))  # sets up checkpoints, if none was kept in this process yet
    for wrap in (lambda function: function, keep):
        layer, y.grad = Adapted(frozen), None
        up = CALLED[called](layer, wrap)
        seen = []

        def run(x, y, up=up, seen=seen):
            rows = up(x)
            seen.append(rows.requires_grad)
            return F.gelu(rows).sum(-1, keepdim=True) * y

        checkpoint(run, x, y, use_reentrant=reentrant).square().sum().backward()
        assert layer.calls == (2 if wrap is not keep else 1)
        found.append([y.grad, *(weight.grad for weight in layer.parameters()), seen[-1]])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one is other
    assert (found[0][3] is None) == frozen


class Grouped(torch.nn.Module):
    """A linear layer for each part of the rows, some of which have none, as experts are called."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(2)
        self.weights = torch.nn.ParameterList(
            torch.randn(6, 6, dtype=torch.float64, generator=draw) for _ in range(4)
        )

    def forward(self, x):
        parts = zip(x.split([2, 0, 3, 0]), self.weights, strict=True)
        return torch.cat([torch.sigmoid(part @ weight) for part, weight in parts])


@REENTRANT
def test_no_placeholder_is_made_for_parameters_and_what_is_empty(reentrant, monkeypatch):
    """With hundreds of experts they took milliseconds a call."""
    made, make = [], Saved.__init__
    monkeypatch.setattr(Saved, "__init__", lambda self, x: (made.append(x), make(self, x))[1])
    found = []
    for wrap in (lambda module: module, keep):
        module, x = Grouped(), torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 6)
        x.requires_grad_()
        call = wrap(module)
        out = checkpoint(lambda x: call(x.sin()).cos(), x, use_reentrant=reentrant)  # noqa: B023
        out.sum().backward()
        found.append([x.grad, *(weight.grad for weight in module.weights)])
    assert len(made) == 2 * 2  # input and result of two experts that have rows
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
