"""Gradients added to `main_grad` in forward, with a predicted scale, against float64.

Guards against weight gradients that are lost, added twice or added with a scale other than
backward's, whatever happens between the passes; and gradients added when they must not be.
"""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_burst import linear_cross_entropy
from megatron_burst.errors import BurstError
from megatron_burst.loss.main_grad import Forecast
from tests.loss.oracle import oracle, random_problem, relative_error
from tests.loss.test_linear import OPTIONS, call
from tests.loss.test_memory import Live, Products


class Step:
    """Micro-batches of one head over a training step, and the same by definition.

    `run` takes what a script does with a micro-batch's losses.
    """

    def __init__(self, per_token=False, dtype=torch.float64, options=OPTIONS["plain"]):
        self.weight = random_problem(dtype=dtype).weight.requires_grad_()
        total = torch.float64 if dtype == torch.float64 else torch.float32
        self.weight.main_grad = torch.zeros_like(self.weight, dtype=total)
        self.weight.grad_added_to_main_grad = False
        self.true_weight = self.weight.detach().double().requires_grad_()
        self.forecast, self.options, self.seed = Forecast(per_token), options, 0
        self.open()

    def open(self):
        """Start a new step."""
        self.weight.main_grad.zero_()
        self.true_weight.grad = None
        self.forecast.open()

    def problem(self, mask=True):
        """Return the next micro-batch."""
        self.seed += 1
        drawn = random_problem(seed=self.seed, mask=mask, dtype=self.weight.dtype)
        return replace(drawn.leaves(), weight=self.weight)

    def losses(self, problem):
        return call(problem, self.options, reduction="none", forecast=self.forecast, chunk_tokens=5)

    def added(self) -> bool:
        """Whether `main_grad` has anything."""
        return bool(self.weight.main_grad.any())

    def run(self, script, problem=None):
        """Run one micro-batch; return the error of the hidden states' gradient."""
        problem = problem or self.problem()
        script(self.losses(problem), problem.loss_mask).backward()
        return self.check(script, problem)

    def check(self, script, problem) -> float:
        """Do the same by definition."""
        truth = replace(problem.leaves(torch.float64), weight=self.true_weight)
        script(oracle(truth, self.options, "none")[0], problem.loss_mask).backward()
        return relative_error(problem.hidden.grad, truth.hidden.grad)

    def error(self) -> float:
        """Error of `main_grad`."""
        return relative_error(self.weight.main_grad, self.true_weight.grad)

    @property
    def counts(self):
        return self.forecast.hits, self.forecast.misses, self.forecast.pending


def over_tokens(losses, mask):
    """As in pretrain_gpt.py, over its tokens and 3 micro-batches."""
    return (losses * mask).sum() / mask.sum() / 3


def summed(losses, mask):
    return (losses * mask).sum() * 0.7


def weighted(losses, mask):
    """Weighted tokens: no common factor."""
    return (losses * mask * torch.arange(losses.numel()).view(losses.shape)).sum()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("script, per_token", [(over_tokens, False), (summed, True)])
def test_the_scale_of_the_last_backward_is_used(script, per_token, options):
    """With a different number of tokens in each micro-batch, over several steps."""
    step = Step(per_token, options=options)
    assert step.run(script) < 1e-13 and step.counts == (0, 0, 0)
    for _ in range(2):
        for _ in range(3):
            problem, before = step.problem(), step.weight.main_grad.clone()
            losses = step.losses(problem)
            assert not torch.equal(step.weight.main_grad, before)
            assert step.forecast.pending == 1
            script(losses, problem.loss_mask).backward()
            assert step.check(script, problem) < 1e-13
        assert step.error() < 1e-13
        step.forecast.close()
        step.open()
    assert step.counts == (6, 0, 0)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.bfloat16, 1e-2)])
def test_another_scale_is_made_good(dtype, tolerance):
    """Another number of micro-batches; none; one per token; then the scale is known again."""
    step = Step(dtype=dtype)
    step.run(over_tokens)
    step.run(over_tokens)

    def other(losses, mask):
        return over_tokens(losses, mask) * 1e-3

    def skipped(losses, mask):
        return over_tokens(losses, mask) * 0

    for script in (other, weighted):
        assert step.run(script) < tolerance and step.error() < tolerance
    assert step.counts == (1, 2, 0)
    step.open()
    problem, step.forecast.misses = step.problem(), 0
    losses = step.losses(problem)
    assert step.added()
    skipped(losses, problem.loss_mask).backward()
    eps = torch.finfo(step.weight.main_grad.dtype).eps
    assert problem.hidden.grad.eq(0).all()
    assert step.weight.main_grad.abs().max() < 10 * eps  # what was added had entries below 1
    assert step.run(over_tokens) < tolerance


def test_what_is_added_is_taken_out_with_the_bits_that_it_had():
    """In bf16: otherwise 1 part in 300 would remain of a term a thousand times as large."""
    step = Step(dtype=torch.bfloat16)
    step.run(lambda losses, mask: over_tokens(losses, mask) * 1e3)
    step.open()
    step.run(lambda losses, mask: over_tokens(losses, mask))
    assert step.counts == (0, 1, 0) and step.error() < 1e-2


def test_many_micro_batches_may_be_under_way():
    step = Step()
    step.run(over_tokens)
    step.open()
    problems = [step.problem() for _ in range(4)]
    losses = [step.losses(problem) for problem in problems]
    assert step.forecast.pending == 4
    for i in (2, 0, 3, 1):
        over_tokens(losses[i], problems[i].loss_mask).backward()
        assert step.check(over_tokens, problems[i]) < 1e-13
    assert step.error() < 1e-13 and step.counts == (4, 0, 0)


def test_backward_twice():
    step = Step()
    step.run(over_tokens)
    step.open()
    problem = step.problem()
    loss = over_tokens(step.losses(problem), problem.loss_mask)
    loss.backward(retain_graph=True)
    loss.backward()
    step.check(lambda *given: 2 * over_tokens(*given), problem)
    assert step.error() < 1e-13 and step.counts == (1, 0, 0)


def test_evaluation_adds_nothing():
    step = Step()
    step.run(over_tokens)
    step.open()
    with torch.no_grad():
        step.losses(step.problem())
    frozen = step.problem()
    step.weight.requires_grad_(False)
    step.losses(frozen).sum().backward()
    assert not step.added() and step.forecast.pending == 0
    assert frozen.hidden.grad.any()


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "dropped"])
def test_a_loss_without_backward_is_told(kept):
    step = Step()
    step.run(over_tokens)
    step.open()
    losses = step.losses(step.problem())
    if not kept:
        del losses
    step.run(over_tokens)
    with pytest.raises(BurstError, match="one backward pass.*got 1 without.*no_grad"):
        step.forecast.close()
    step.open()  # such a step is skipped, and the next one starts from zeros
    assert step.run(over_tokens) < 1e-13 and step.error() < 1e-13
    step.forecast.close()


def test_an_exception_in_between_is_gone_with_the_next_step():
    step = Step()
    step.run(over_tokens)
    step.open()
    problem = step.problem()
    with pytest.raises(RuntimeError, match="interrupted"):
        step.losses(problem).register_hook(_interrupt)
        step.run(lambda losses, mask: _raise(), problem)
    step.open()
    step.run(over_tokens)
    step.forecast.close()
    assert step.error() < 1e-13


def _interrupt(grad):
    raise RuntimeError("interrupted")


def _raise():
    raise RuntimeError("interrupted")


def test_main_grad_set_to_zero_between_forward_and_backward():
    """What forward added is gone: backward adds it again."""
    step = Step()
    step.run(over_tokens)
    problem = step.problem()
    losses = step.losses(problem)
    step.open()
    over_tokens(losses, problem.loss_mask).backward()
    assert step.check(over_tokens, problem) < 1e-13 and step.error() < 1e-13
    step.forecast.close()


def test_nothing_is_added_outside_of_a_step():
    step = Step()
    step.run(over_tokens)
    step.forecast.close()
    step.weight.main_grad.zero_()
    losses = step.losses(step.problem())
    assert not step.added() and losses.requires_grad and step.forecast.pending == 0


def test_forward_run_again_by_reentrant_checkpointing():
    """Megatron's: the first run has no gradients."""
    step = Step()
    step.run(over_tokens)
    step.open()
    problem = step.problem()

    def forward(hidden):
        return step.losses(replace(problem, hidden=hidden))

    losses = checkpoint(forward, problem.hidden, use_reentrant=True)
    assert not step.added()
    over_tokens(losses, problem.loss_mask).backward()
    step.check(over_tokens, problem)
    assert step.error() < 1e-13 and step.counts == (1, 0, 0)
    step.forecast.close()


def test_forward_run_again_by_other_checkpointing_is_told():
    """Its second run never gets a backward pass."""
    step = Step()
    step.run(over_tokens)
    step.open()
    problem = step.problem()

    def forward(hidden):
        return (step.losses(replace(problem, hidden=hidden)) ** 2).sum()

    checkpoint(forward, problem.hidden, use_reentrant=False).backward()
    with pytest.raises(BurstError, match="got 1 without"):
        step.forecast.close()


def test_gives_up_where_the_scale_cannot_be_foreseen(caplog):
    step = Step()
    for turn in range(6):
        step.run(lambda losses, mask, turn=turn: summed(losses, mask) * (1 + turn))
        assert step.error() < 1e-13
    assert step.counts == (0, 3, 0) and step.forecast.given_up
    assert len(caplog.records) == 1
    step.forecast.hits, before = 100, step.weight.main_grad.clone()
    step.losses(step.problem())
    assert not torch.equal(step.weight.main_grad, before)  # an occasional miss is worth it


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_spoils_one_step_only(number):
    step = Step()
    step.run(over_tokens)
    step.run(lambda losses, mask: over_tokens(losses, mask) * number)
    assert not step.weight.main_grad.isfinite().all()
    step.open()
    assert step.run(over_tokens) < 1e-13 and step.error() < 1e-13
    assert step.counts == (1, 1, 0)


def test_a_micro_batch_without_tokens_changes_nothing():
    step = Step()
    step.run(over_tokens)
    for masked in (step.problem(), step.problem()):
        masked.loss_mask.zero_()
        (step.losses(masked) * masked.loss_mask).sum().backward()
        assert not masked.hidden.grad.any()
    assert step.run(over_tokens) < 1e-13 and step.error() < 1e-13
    assert step.counts == (3, 0, 0)
    empty = replace(random_problem(s=0).leaves(), weight=step.weight)
    (step.losses(empty).sum() * 3).backward()
    assert step.run(over_tokens) < 1e-13 and step.forecast.misses == 0


def test_three_products_and_no_second_gradient_of_the_weight():
    """Guards against a fourth GEMM, and a second buffer as large as the weight besides
    `main_grad`."""
    step, width, vocab = Step(dtype=torch.float32), 512, 1024
    problem = random_problem(64, 1, width, vocab, torch.float32, mask=False).leaves()
    problem.labels.clamp_(min=0)
    problem.weight.main_grad = torch.zeros_like(problem.weight)
    problem.weight.grad_added_to_main_grad = False
    for turn in range(3):
        with Products() as products, Live() as live:
            linear_cross_entropy(
                problem.hidden, problem.weight, problem.labels, reduction="none",
                forecast=step.forecast, chunk_tokens=16,
            ).sum().backward()  # fmt: skip
        one = 64 * width * vocab
        if turn:
            assert products.count == 3 * one, products.count / one
            # weight and main_grad show up too, as results of views and in-place sums
            assert live.most < 2.5 * problem.weight.nbytes, live.most / problem.weight.nbytes
    assert step.counts == (2, 0, 0)


def test_fp16_waits_for_backward():
    """Until the scale is known, small gradients underflow."""
    step = Step(dtype=torch.float16)
    step.run(over_tokens)
    losses = step.losses(step.problem())
    assert step.forecast.factor is not None and step.forecast.pending == 0
    assert losses.requires_grad
