"""Layers that "auto" does not recompute, on one GPU with TransformerEngine's modules.

Guards against a count of bytes that is less than what a layer holds: a run that fills its memory
by it would end without any. `tests/mcore/test_whole_layers.py` has more models, on CPUs.
"""

import gc
from dataclasses import replace
from unittest import mock

import pytest
import torch
from numpy import ndarray
from numpy.linalg import norm

from benchmarks.frontier_cases import Sample, Setting, settings_of
from megatron_burst.config import BurstConfig
from megatron_burst.tools.job.layers import Experts
from megatron_burst.tools.job.model import Model
from tests.gpu import needs_gpus, needs_transformer_engine
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, needs_gpus(), needs_transformer_engine()]
LAYERS, TOKENS = 4, 16 << 10  # a layer's input has 32 MiB; the allocator rounds up to 1 MiB more
DENSE = Model("dense", LAYERS, 1024, 16, 4, 64, 64, 4096, 512, beside=(("--qk-layernorm", True),))
MODELS = {"dense": DENSE, "experts": replace(DENSE, experts=Experts(8, 2, 1024))}
AUTO = BurstConfig(keep="auto", keep_host_gib=1e-6, deterministic=True)
SHARE = 0.6  # of what all layers hold: a budget for some of them


class Steps:
    """Steps of one model's trainer with some setting, and what they were like.

    Attributes:
        chosen: what "auto" chose from, and its choice, the latest one.
        grads: of the latest step.
        held, peak: bytes that are allocated after its forward, and at most.
    """

    def __init__(self, model: Model) -> None:
        from benchmarks.frontier_step import Trainer
        from megatron_burst.mcore.keep import recompute

        self.trainer, self.chosen = Trainer(model, Sample(TOKENS), torch.bfloat16), None
        self._full = settings_of(model)["burst:full"]
        self._loss, self.trainer._loss = self.trainer._loss, self._after_forward
        choose = recompute.choose_modules

        def choosing(problem, *args):
            self.chosen = problem, choose(problem, *args)
            return self.chosen[1]

        mock.patch.object(recompute, "choose_modules", choosing).start()

    def _after_forward(self, losses):
        self.held = torch.cuda.memory_allocated()
        return self._loss(losses)

    def run(self, burst: BurstConfig, steps: int = 2) -> "Steps":
        """Some steps; the last one counts."""
        self.use(burst)
        for _ in range(steps):
            torch.cuda.reset_peak_memory_stats()
            self.trainer.step()
        self.peak = torch.cuda.max_memory_allocated()
        self.grads = [x.cpu().numpy().copy() for x in self.trainer.gradients()]
        self.trainer.release()
        gc.collect()  # its model, whose experts hold tensors of the last step
        return self

    def use(self, burst: BurstConfig) -> None:
        """Build the model that the next steps have."""
        self.trainer.use(Setting("burst", "test", self._full.config, burst))


def furthest(some: list[ndarray], others: list[ndarray]) -> float:
    """Largest relative difference of two steps' gradients, in norm."""
    return max(norm(x - y) / norm(y) for x, y in zip(some, others, strict=True))


def left_by_failing(steps: Steps, where: str) -> int:
    """Bytes that are allocated more after a step that fails, after its forward or in backward, and
    another one: torch's engine drops what waited in the failed one when the next one runs."""

    def fail(*_):
        raise ZeroDivisionError

    before = allocated_after(steps)
    steps.use(AUTO)
    if where == "forward":
        steps.trainer._loss = fail
    else:
        first = next(steps.trainer._ddp.module.decoder.layers[0].parameters())
        hook = first.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        steps.trainer.step()
    if where == "forward":
        steps.trainer._loss = steps._after_forward
    else:
        hook.remove()
    return allocated_after(steps) - before


def allocated_after(steps: Steps) -> int:
    """Bytes that are allocated after a step."""
    steps.run(AUTO, 1)
    gc.collect()
    return torch.cuda.memory_allocated()


def measured(rank: int, name: str) -> dict[str, object]:
    """What steps of a model were like, beside those of full recomputation."""
    from benchmarks.stack import start

    start(False, 1)
    steps, found = Steps(MODELS[name]), {}
    full = replace(AUTO, keep="none", keep_host_gib=None)
    truth = steps.run(full).grads
    held, peak = steps.held, steps.peak
    found["again"] = furthest(steps.run(full).grads, truth)
    every = steps.run(AUTO)
    found["all"] = every.chosen[1]["layer"].device, furthest(every.grads, truth)
    found["promised"] = (every.held - held) / (LAYERS * every.chosen[0].whole_bytes)
    budget = SHARE * LAYERS * every.chosen[0].whole_bytes
    some = steps.run(replace(AUTO, keep_budget_gib=budget / 2**30))
    found["some"] = some.chosen[1]["layer"].device, furthest(some.grads, truth)
    found["peak"] = (some.peak - peak) / budget
    found["left"] = [left_by_failing(steps, where) for where in ("forward", "backward")]
    return found


@pytest.fixture(scope="module", params=MODELS)
def found(request):
    settings = dict(backend="nccl", timeout_s=300, fresh=True)
    (result,) = run_ranks(measured, 1, request.param, **settings)
    print(request.param, result)
    return result


def test_gradients_are_those_of_full_recomputation(found):
    """Bit by bit, where two runs of it have the same bits."""
    (every, error), (some, other) = found["all"], found["some"]
    assert every == LAYERS and 0 < some < LAYERS
    assert max(error, other) <= 2 * found["again"]


def test_layers_hold_what_was_counted_and_steps_stay_within_their_budget(found):
    assert 0.95 <= found["promised"] <= 1.01
    assert 0 < found["peak"] <= 1


def test_a_step_that_fails_leaves_nothing(found):
    assert max(found["left"]) < 1 << 20
