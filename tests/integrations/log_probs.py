"""A framework's log-probabilities with and without burst's, of the same model and batch.

Import it where a test module is imported, as tests.mcore.gpt.
"""

import os
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

from tests.mcore.gpt import VOCAB, Parallel, build, config_of, start
from tests.ranks import preload

preload("megatron_burst.mcore.log_probs.head", "megatron_burst.mcore.log_probs.replacements")

LENGTHS, RESPONSES = (13, 24, 7), (6, 11, 4)
TEMPERATURE = 0.7
# The frameworks' functions work in float32, also for models in float64: 6e-8 a rounding, in sums of
# 96 classes.
TOLERANCE = 6e-6


def documents() -> list[Tensor]:
    """Tokens of each document, int64 [length]: a prompt and a response."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(1, VOCAB, (length,), generator=generator) for length in LENGTHS]


def small_gpt(tp: int, cp: int = 1, **options):
    """Megatron's GPT in float64, which leaves its logits sharded over the vocabulary."""
    from megatron.core.models.gpt import GPTModel

    from tests.mcore.gpt import Model
    from tests.mcore.packed_sample import spec_of

    start(Parallel(tp=tp, cp=cp))
    config = config_of(Parallel(tp=tp, cp=cp), cp_comm_type="burst", **options)
    with mock.patch.object(GPTModel, "__init__", _sharded(GPTModel.__init__)):
        return build(config, spec_of(Model()))


def _sharded(init: Callable) -> Callable:
    def with_sharded_logits(self, *args, parallel_output, **options):
        init(self, *args, parallel_output=True, **options)

    return with_sharded_logits


def errors_of(build_model: Callable, run: Callable[..., dict[str, Tensor]]) -> dict[str, float]:
    """Relative errors of `run(model)`, values by name with a "loss", and of all gradients, with
    burst's log-probabilities; these may make no logits."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from megatron_burst.mcore.launch import switch_on_automatically

    switch_on_automatically()  # what `import megatron_burst.auto` does: attention alone
    truth = _outcome(build_model(), run)
    os.environ["MEGATRON_BURST"] = "log_probs=1"
    switch_on_automatically()

    forward = ColumnParallelLinear.forward

    def no_logits(self, *args, **options):
        assert self.output_size != VOCAB, "logits were made"
        return forward(self, *args, **options)

    model = build_model()
    with mock.patch.object(ColumnParallelLinear, "forward", no_logits):
        got = _outcome(model, run)
    assert got.keys() == truth.keys() and len(truth) > 10
    return {name: _error(got[name], truth[name]) for name in truth}


def _outcome(model, run: Callable) -> dict[str, Tensor]:
    values = run(model)
    values["loss"].backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {name: x.detach().clone() for name, x in (values | grads).items()}


def _error(got: Tensor, truth: Tensor) -> float:
    assert got.shape == truth.shape and bool(truth.isfinite().all())
    return float((got - truth).abs().max() / truth.abs().max())
