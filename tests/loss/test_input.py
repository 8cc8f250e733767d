"""What happens with bad and unusual input: defined, documented, and the same on every rank."""

from dataclasses import replace

import pytest
import torch

from megatron_burst import count_supervised, linear_cross_entropy
from megatron_burst.errors import BurstError
from megatron_burst.loss import checks, passes
from tests.loss.oracle import chunks_of, oracle, random_problem, relative_error

pytestmark = pytest.mark.numeric
BOTH = pytest.mark.parametrize("grads", ["recompute", "forward"])


def run(problem, grads="recompute", chunk=None, **settings):
    with chunks_of(chunk):
        return linear_cross_entropy(
            problem.hidden, problem.weight, problem.labels, loss_mask=problem.loss_mask,
            grads=grads, **settings,
        )  # fmt: skip


@BOTH
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("how", ["mask", "labels"])
def test_all_tokens_left_out_give_zero_and_no_nan(how, reduction, grads):
    ours = random_problem().leaves()
    if how == "mask":
        ours.loss_mask.zero_()
    else:
        ours.labels.fill_(-100)
    loss = run(ours, grads, reduction=reduction)
    loss.sum().backward()
    assert loss.eq(0).all() and loss.shape == (ours.labels.shape if reduction == "none" else ())
    assert ours.hidden.grad.eq(0).all() and ours.weight.grad.eq(0).all()


@BOTH
@pytest.mark.parametrize("shape", [(0, 2, 16), (5, 0, 16), (0, 16)])
def test_an_empty_sequence_gives_zero(shape, grads):
    hidden = torch.randn(shape, requires_grad=True)
    weight = torch.randn(40, 16, requires_grad=True)
    labels = torch.zeros(shape[:-1], dtype=torch.long)
    loss = linear_cross_entropy(hidden, weight, labels, grads=grads)
    loss.backward()
    assert loss == 0 and hidden.grad.shape == shape and weight.grad.eq(0).all()
    losses = linear_cross_entropy(hidden, weight, labels, reduction="none", grads=grads)
    assert losses.shape == labels.shape


@BOTH
@pytest.mark.parametrize("compact", [True, False])
def test_nan_in_tokens_that_are_left_out_goes_nowhere(grads, compact, monkeypatch):
    if not compact:  # as on a GPU, where nothing is counted
        monkeypatch.setattr(checks, "_stays_on_gpu", lambda x: True)
    truth, ours = random_problem().leaves(), random_problem().leaves()
    oracle(truth)[0].backward()
    out = (ours.labels == -100) | (ours.loss_mask == 0)
    assert out.any() and not out.all()
    with torch.no_grad():
        ours.hidden[out] = torch.nan
    loss = run(ours, grads, chunk=5)
    loss.backward()
    assert relative_error(loss, oracle(truth)[0]) < 1e-14
    assert relative_error(ours.hidden.grad, truth.hidden.grad) < 1e-14
    assert relative_error(ours.weight.grad, truth.weight.grad) < 1e-14


@BOTH
@pytest.mark.parametrize("how", ["transposed", "sliced", "expanded"])
def test_strided_hidden_is_read_as_it_lies(how, grads):
    dense = random_problem().leaves()
    if how == "transposed":
        view = dense.hidden.detach().transpose(0, 1).contiguous().transpose(0, 1)
    elif how == "sliced":
        view = torch.cat([dense.hidden.detach()] * 2, dim=2)[:, :, :16]
    else:
        view = dense.hidden.detach()[:1].expand(12, 2, 16)
        dense.hidden.data = view.contiguous()
    view = view.requires_grad_()
    assert not view.is_contiguous()
    run(dense, grads, chunk=5).backward()
    ours = run(replace(dense, hidden=view), grads, chunk=5)
    weight_grad = dense.weight.grad.clone()
    dense.weight.grad = None
    ours.backward()
    assert relative_error(view.grad, dense.hidden.grad) < 1e-14
    assert relative_error(dense.weight.grad, weight_grad) < 1e-14


def test_masked_tokens_are_not_computed(monkeypatch):
    seen, mm = [], torch.mm

    def counted(a, b, **options):
        seen.append(len(a))
        return mm(a, b, **options)

    monkeypatch.setattr(passes.torch, "mm", counted)
    problem = random_problem(s=50)
    problem.loss_mask.zero_()
    problem.loss_mask[7:12] = 1
    problem.labels[7:12] = 3
    loss = run(problem)
    assert sum(seen) == 10  # of 100
    assert relative_error(loss, oracle(problem)[0]) < 1e-14
    count = count_supervised(problem.labels, problem.loss_mask)
    assert count.wait() == (10,)
    with pytest.raises(BurstError, match="counted with the sharding.*got 3 parts instead of 1"):
        run(problem, supervised=type(count)(count.counts.repeat(3)))


@BOTH
def test_a_count_of_another_batch_drops_no_token(grads, monkeypatch):
    ours = random_problem().leaves()
    fewer = ours.loss_mask.clone()
    fewer[6:] = 0
    count = count_supervised(ours.labels, fewer)
    with pytest.raises(BurstError, match="supervised must count at least the tokens.*got fewer"):
        run(ours, grads, supervised=count)
    exact = run(ours, grads, supervised=count_supervised(ours.labels, ours.loss_mask))
    more = run(ours, grads, supervised=count_supervised(ours.labels))
    assert relative_error(exact, oracle(ours)[0]) < 1e-14 and relative_error(more, exact) < 1e-14
    monkeypatch.setattr(checks, "_stays_on_gpu", lambda x: True)
    for reduction in ("none", "mean"):
        ours = random_problem().leaves()
        losses = run(ours, grads, supervised=count, reduction=reduction)
        losses.sum().backward()
        assert losses.isnan().all() and ours.weight.grad.isnan().all()
        assert ours.hidden.grad.isnan().any()


@BOTH
def test_a_mean_over_weights_that_sum_to_zero_is_zero(grads):
    ours = random_problem(mask=False).leaves()
    weights = torch.zeros(12, 2)
    weights[:2] = torch.tensor([[1.0, -1.0], [0.5, -0.5]])
    ours.labels[:2] = 3
    loss = run(replace(ours, loss_mask=weights), grads)
    loss.backward()
    assert loss == 0 and ours.hidden.grad.eq(0).all() and ours.weight.grad.eq(0).all()


def test_a_mask_of_weights_weighs():
    truth, ours = random_problem().leaves(), random_problem().leaves()
    for problem in (truth, ours):
        problem.loss_mask.mul_(torch.linspace(0.5, 2, 24).view(12, 2))
    oracle(truth)[0].backward()
    run(ours, "forward").backward()
    assert relative_error(ours.weight.grad, truth.weight.grad) < 1e-14


LONG = torch.long
H, W = torch.zeros(4, 2, 8), torch.zeros(10, 8)
L = torch.zeros(4, 2, dtype=LONG)
REFUSED = {
    "label too large": ((H, W, L + 10), {}, r"labels must be in \[0, 10\) or -100.*got \[10, 10"),
    "label negative": ((H, W, L - 1), {}, r"labels must be in.*got \[-1, -1, -1\]; check the tok"),
    "another dtype": ((H, W.bfloat16(), L), {}, r"one dtype.*float32 and torch.bfloat16; cast one"),
    "integers": ((H.int(), W.int(), L), {}, r"must have one dtype among.*got torch.int32"),
    "weight transposed": ((H, W.t(), L), {}, r"same width.*weight \(8, 10\); pass the weight"),
    "no vocabulary": ((H, W[:0], L), {}, r"the vocabulary must not be empty.*got"),
    "whole labels": ((H[:2], W, L), {}, "instead of .2, 2.; .*pass whole_sample=True to next_tok"),
    "labels transposed": ((H, W, L.t()), {}, r"labels \(2, 4\) instead of \(4, 2\); transpose"),
    "labels are no integers": ((H, W, L.float()), {}, r"must be integers.*got torch.float32"),
    "mask": ((H, W, L), {"loss_mask": L[0]}, r"loss_mask must have the shape.*got \[\(2,\)\]"),
    "reduction": ((H, W, L), {"reduction": "avg"}, r"reduction must be.*got 'avg'; choose"),
    "grads": ((H, W, L), {"grads": "both"}, r"grads must be auto.*got 'both'; choose"),
    "lse": ((H, W, L), {"return_lse": True, "grads": "forward"}, r"needs grads='recompute'"),
    "smoothing": ((H, W, L), {"label_smoothing": 1.0}, r"label_smoothing must be in.*got 1.0"),
    "z-loss": ((H, W, L), {"z_loss": -0.1}, r"z_loss must not be negative.*got -0.1; change it"),
    "z-loss without end": ((H, W, L), {"z_loss": float("inf")}, r"not be.*infinite.*got inf"),
    "smoothing in words": ((H, W, L), {"label_smoothing": "0.1"}, r"in \[0, 1\).*got '0.1'"),
    "ignored": ((H, W, L), {"ignore_index": 1.5}, r"ignore_index must be an integer.*got 1.5"),
    "a list": ((H, W, L.tolist()), {}, r"labels must be a dense tensor.*got .*; pass a den"),
    "no weight": ((H, None, L), {}, r"weight must be a dense tensor.*got None"),
    "no hidden": ((None, W, L), {}, r"hidden must be a dense tensor.*got None"),
    "mask as a list": ((H, W, L), {"loss_mask": [1.0]}, r"loss_mask must be a dense.*got .1.0"),
    "a number": ((H, W, L), {"supervised": 8}, r"supervised must be what.*got 8; call"),
    "a mesh": ((H, W, L), {"tp_group": "tp"}, r"group must be a process group.*got a str"),
    "softcap": ((H, W, L), {"softcap": -3.0}, r"softcap must be 0 or positive.*got -3.0"),
    "scale": ((H, W, L), {"logit_scale": 0.0}, r"logit_scale must be positive and finite.*got 0"),
}


@pytest.mark.parametrize(("inputs", "settings", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses_in_one_sentence(inputs, settings, message):
    with pytest.raises(BurstError, match=f"^linear cross-entropy: .*{message}"):
        linear_cross_entropy(*inputs, **settings)


def test_on_a_gpu_a_label_out_of_range_makes_its_loss_and_all_gradients_nan(monkeypatch):
    """On a GPU the CPU cannot look; the check is disabled here to see what then happens."""
    monkeypatch.setattr(checks, "_stays_on_gpu", lambda x: True)
    for grads in ("recompute", "forward"):
        ours = random_problem(mask=False).leaves()
        ours.labels[3, 1] = 40
        losses = run(ours, grads, reduction="none")
        assert losses[3, 1].isnan() and losses.isnan().sum() == 1
        losses.sum().backward()
        assert ours.hidden.grad[3, 1].isnan().all() and ours.weight.grad.isnan().all()
