"""`linear_cross_entropy` in one process against its definition in float64.

Guards against a wrong term of the loss or its gradient, rows or classes lost between tiles, wrongly
scaled gradients computed in forward, and sums kept in 16 bits.
"""

from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_burst import linear_cross_entropy, token_log_probs
from megatron_burst.errors import BurstError
from megatron_burst.loss import tiles
from megatron_burst.loss.statistics import LossOptions
from tests.loss.oracle import chunks_of, oracle, random_problem, relative_error

pytestmark = pytest.mark.numeric
PLAIN = LossOptions()
ALL = LossOptions(label_smoothing=0.1, z_loss=1e-2, softcap=5.0, logit_scale=0.7)
OPTIONS = {
    "plain": LossOptions(),
    "smoothing": LossOptions(label_smoothing=0.1),
    "z-loss": LossOptions(z_loss=1e-2),
    "softcap": LossOptions(softcap=3.0),
    "scale": LossOptions(logit_scale=0.25),
    "all": ALL,
}


def call(problem, options=PLAIN, chunk=None, **settings):
    with chunks_of(chunk):
        return linear_cross_entropy(
            problem.hidden, problem.weight, problem.labels, loss_mask=problem.loss_mask,
            **asdict(options), **settings,
        )  # fmt: skip


def errors(problem, options, reduction, **settings):
    """Errors of loss and both gradients, after an incoming gradient other than 1."""
    truth, ours = problem.leaves(torch.float64), problem.leaves()
    expected = oracle(truth, options, reduction)[0]
    got = call(ours, options, reduction=reduction, **settings)
    scale = torch.tensor(1.7)
    if reduction == "none":
        mask = torch.ones_like(expected) if problem.loss_mask is None else problem.loss_mask
        scale = 1.7 * mask
    (expected * scale).sum().backward()
    (got * scale).sum().backward()
    return (
        relative_error(got, expected),
        relative_error(ours.hidden.grad, truth.hidden.grad),
        relative_error(ours.weight.grad, truth.weight.grad),
    )


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("grads", ["recompute", "forward"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_loss_and_gradients_are_those_of_the_definition(options, grads, reduction):
    for chunk in (1, 7, None):
        found = errors(random_problem(), options, reduction, grads=grads, chunk=chunk)
        assert max(found) < 1e-14, (chunk, found)


@settings(max_examples=60, deadline=None)
@given(
    s=st.integers(0, 9), b=st.integers(1, 3), width=st.integers(1, 9), vocab=st.integers(1, 700),
    chunk=st.one_of(st.none(), st.integers(1, 40)), scratch=st.integers(1, 1 << 16),
    reduction=st.sampled_from(["none", "sum", "mean"]), mask=st.booleans(),
    grads=st.sampled_from(["auto", "recompute", "forward"]), seed=st.integers(0, 9),
    options=st.sampled_from(list(OPTIONS.values())),
)  # fmt: skip
def test_any_shape_and_any_tiles(
    s, b, width, vocab, chunk, scratch, reduction, mask, grads, seed, options
):
    problem = random_problem(s, b, width, vocab, mask=mask, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "SCRATCH_BYTES", scratch)
        if reduction == "none" and grads == "forward":
            grads = "auto"
        found = errors(problem, options, reduction, grads=grads, chunk=chunk)
    # for a single class p - [y] is 0: z_loss leaves a small difference of numbers near 1
    assert max(found) < (1e-11 if vocab > 1 else 1e-8), found


def test_tiles_cover_several_parts_of_the_vocabulary(monkeypatch):
    """Otherwise the test above would say nothing about tiles of classes."""
    monkeypatch.setattr(tiles, "SCRATCH_BYTES", 1 << 14)
    chosen = tiles.choose_tiles(tiles.Sizes(600, 1000, 8, 8), whole=False)
    assert chosen.rows < 600 and chosen.classes < 1000


def test_smoothing_of_torch_is_ours_by_the_formula():
    problem, alpha = random_problem(mask=False), 0.2
    vocab = problem.weight.shape[0]
    logits = (problem.hidden @ problem.weight.t()).flatten(0, 1)
    theirs = F.cross_entropy(
        logits, problem.labels.flatten(), label_smoothing=alpha, ignore_index=-100
    )
    ours = call(problem, LossOptions(label_smoothing=alpha * (vocab - 1) / vocab))
    assert relative_error(ours, theirs) < 1e-14


@pytest.mark.parametrize("options", [LossOptions(), ALL], ids=["plain", "all"])
def test_gradients_of_losses_and_lse_at_once(options):
    truth, ours = random_problem().leaves(), random_problem().leaves()
    weights = torch.randn(2, 12, 2, dtype=torch.float64)
    expected = oracle(truth, options, "none")[:2]
    got = call(ours, options, reduction="none", return_lse=True)
    for run in (expected, got):
        sum((x * w).sum() for x, w in zip(run, weights, strict=True)).backward()
    assert relative_error(ours.hidden.grad, truth.hidden.grad) < 1e-14
    assert relative_error(ours.weight.grad, truth.weight.grad) < 1e-14


def test_gradcheck():
    problem = random_problem(s=3, b=1, width=4, vocab=7)

    def run(hidden, weight):
        moved = replace(problem, hidden=hidden, weight=weight)
        log_probs, entropy, _ = token_log_probs(
            hidden, weight, problem.labels, options=LossOptions(softcap=4.0)
        )
        loss, lse = call(moved, ALL, reduction="none", return_lse=True, chunk=2)
        return log_probs, entropy, loss, lse, call(moved, ALL, grads="recompute")

    leaves = problem.leaves()
    assert torch.autograd.gradcheck(run, (leaves.hidden, leaves.weight))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_and_entropy_with_gradients(temperature):
    options = LossOptions(logit_scale=1 / temperature)
    truth, ours = random_problem().leaves(), random_problem().leaves()
    loss, _, entropy = oracle(truth, options, "none")
    got = token_log_probs(
        ours.hidden, ours.weight, ours.labels, loss_mask=ours.loss_mask, options=options
    )
    assert relative_error(got.log_probs, -loss) < 1e-14
    assert relative_error(got.entropy, entropy) < 1e-14
    weights = torch.randn(2, 12, 2, dtype=torch.float64)
    (-loss * weights[0] + entropy * weights[1]).sum().backward()
    (got.log_probs * weights[0] + got.entropy * weights[1]).sum().backward()
    assert relative_error(ours.hidden.grad, truth.hidden.grad) < 1e-13
    assert relative_error(ours.weight.grad, truth.weight.grad) < 1e-13
    without = token_log_probs(ours.hidden, ours.weight, ours.labels, entropy=False)
    assert without.entropy is None
    with pytest.raises(BurstError, match="asked for without label smoothing and z-loss.*; leave"):
        token_log_probs(ours.hidden, ours.weight, ours.labels, options=ALL)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("grads", ["recompute", "forward"])
def test_errors_are_at_most_those_of_the_plain_computation(dtype, grads):
    """Plain: logits in the model's dtype, loss in float32, as in Megatron."""
    exact = random_problem(s=64, b=2, width=48, vocab=300, mask=False)
    rounded = replace(exact, hidden=exact.hidden.to(dtype), weight=exact.weight.to(dtype))
    truth, plain, ours = rounded.leaves(torch.float64), rounded.leaves(), rounded.leaves()
    oracle(truth)[0].backward()
    logits = (plain.hidden @ plain.weight.t()).flatten(0, 1).float()
    F.cross_entropy(logits, plain.labels.flatten()).backward()
    loss = call(ours, grads=grads, chunk=9)
    assert loss.dtype == torch.float32 and ours.hidden.dtype == dtype
    loss.backward()
    for name in ("hidden", "weight"):
        true = getattr(truth, name).grad
        theirs, mine = (
            float((getattr(x, name).grad.double() - true).norm() / true.norm())
            for x in (plain, ours)
        )
        assert mine <= 1.1 * theirs + torch.finfo(torch.float32).eps, (name, mine, theirs)


def test_error_of_the_weights_gradient_is_flat_in_the_number_of_chunks():
    """The error of a bf16 sum would grow with each chunk."""
    exact = random_problem(s=512, b=1, width=16, vocab=24, mask=False)
    rounded = replace(exact, hidden=exact.hidden.bfloat16(), weight=exact.weight.bfloat16())
    truth = rounded.leaves(torch.float64)
    oracle(truth)[0].backward()
    found = []
    for grads in ("recompute", "forward"):
        for chunk in (512, 64, 8, 1):
            ours = rounded.leaves()
            call(ours, grads=grads, chunk=chunk).backward()
            difference = (ours.weight.grad.double() - truth.weight.grad).norm()
            found.append(float(difference / truth.weight.grad.norm()))
    assert max(found) <= 1.05 * min(found), found


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
@pytest.mark.parametrize("grads", ["recompute", "forward"])
def test_what_needs_no_gradient_gets_none(frozen, grads):
    ours, truth = random_problem().leaves(), random_problem().leaves()
    for name in ("hidden", "weight"):
        getattr(ours, name).requires_grad_(frozen not in (name, "both"))
    loss = call(ours, grads=grads)
    assert loss.requires_grad == (frozen != "both")
    if frozen == "both":
        return
    loss.backward()
    oracle(truth)[0].backward()
    other = {"hidden": "weight", "weight": "hidden"}[frozen]
    assert getattr(ours, frozen).grad is None
    assert relative_error(getattr(ours, other).grad, getattr(truth, other).grad) < 1e-14


def test_evaluation_computes_no_gradient():
    ours = random_problem().leaves()
    with torch.no_grad():
        loss = call(ours)
    assert not loss.requires_grad
    assert relative_error(loss, oracle(ours)[0]) < 1e-14


def test_gradients_of_forward_that_fit_no_common_factor_are_not_returned_wrong():
    ours = random_problem(mask=False).leaves()
    losses = call(ours, reduction="none", grads="forward")
    (losses * torch.arange(24).view(12, 2)).sum().backward()
    assert ours.hidden.grad[ours.labels >= 0].isnan().all() and ours.weight.grad.isnan().all()


def test_a_second_backward_is_refused_where_gradients_were_scaled_in_place():
    ours = random_problem().leaves()
    loss = call(ours, grads="forward")
    loss.backward(retain_graph=True)
    with pytest.raises(BurstError, match="backward must run only once.*pass grads='recompute', or"):
        loss.backward()
    again = call(ours, grads="recompute")
    again.backward(retain_graph=True)
    before = ours.weight.grad.clone()
    again.backward()
    assert not torch.equal(before, ours.weight.grad)


@pytest.mark.parametrize("grads", ["recompute", "forward"])
def test_main_grad_is_added_to_in_backward_only(grads):
    """Megatron's contract; autograd gets a placeholder gradient without memory."""
    exact = random_problem(s=32)
    rounded = replace(exact, hidden=exact.hidden.bfloat16(), weight=exact.weight.bfloat16())
    truth, ours = rounded.leaves(torch.float64), rounded.leaves()
    oracle(truth)[0].backward()
    for shared in (False, True):
        ours.weight.main_grad = torch.full(ours.weight.shape, 2.0)
        ours.weight.grad, ours.weight.grad_added_to_main_grad = None, False
        ours.weight.zero_out_wgrad = shared
        loss = call(ours, grads=grads, chunk=5)
        assert ours.weight.main_grad.eq(2).all() and not ours.weight.grad_added_to_main_grad
        loss.backward()
        assert ours.weight.grad_added_to_main_grad
        assert relative_error(ours.weight.main_grad - 2, truth.weight.grad) < 1e-2
        assert ours.weight.grad.eq(0).all() and ours.weight.grad.shape == ours.weight.shape
        assert shared or ours.weight.grad.untyped_storage().nbytes() == 2


@pytest.mark.parametrize("grads", ["recompute", "forward"])
def test_a_main_grad_that_changes_between_forward_and_backward_loses_nothing(grads):
    truth, ours = random_problem().leaves(), random_problem().leaves()
    oracle(truth)[0].backward()
    for change in (
        lambda x: x.main_grad.zero_(), lambda x: x.main_grad.mul_(3),
        lambda x: setattr(x, "main_grad", torch.full_like(x, 5.0)),
    ):  # fmt: skip
        ours.weight.main_grad = torch.full_like(ours.weight, 2.0, requires_grad=False)
        ours.weight.grad_added_to_main_grad = False
        loss = call(ours, grads=grads)
        change(ours.weight)
        before = ours.weight.main_grad.clone()
        loss.backward()
        assert relative_error(ours.weight.main_grad - before, truth.weight.grad) < 1e-12
    before = ours.weight.main_grad.clone()
    (only,) = torch.autograd.grad(
        call(replace(ours, weight=ours.weight.detach()), grads=grads), ours.hidden
    )
    assert torch.equal(ours.weight.main_grad, before)
    assert relative_error(only, truth.hidden.grad) < 1e-12


def test_a_main_grad_in_16_bit_is_left_to_megatrons_hook():
    ours = random_problem().leaves(torch.bfloat16)
    ours.weight.main_grad = torch.zeros_like(ours.weight)
    ours.weight.grad_added_to_main_grad = False
    call(ours).backward()
    assert not ours.weight.grad_added_to_main_grad and ours.weight.main_grad.eq(0).all()
    assert ours.weight.grad.ne(0).any()
