"""verl's fused forward (`use_fused_kernels`) with burst's log-probabilities, against its forward
with logits: its own fused kernel runs on GPUs only.

Guards against a processor that verl looks up elsewhere, labels in another order, and gradients of
one tensor-parallel rank.
"""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from tests.integrations.log_probs import (
    RESPONSES,
    TEMPERATURE,
    TOLERANCE,
    documents,
    errors_of,
    small_gpt,
)
from tests.ranks import preload, run_ranks

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed: make test-integrations", allow_module_level=True)
preload("verl.workers.engine.megatron.transformer_impl", "verl.models.mcore.mbridge")
preload("verl.models.mcore.model_forward_fused")


def nested():
    return torch.nested.nested_tensor(documents(), layout=torch.jagged)


def with_logits(model):
    """What verl's engine computes without fused kernels."""
    from verl.models.mcore.model_forward import gptmodel_forward_model_engine
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    process = MegatronEngineWithLMHead._lm_head_logits_processor
    engine = SimpleNamespace(engine_config=SimpleNamespace(entropy_from_logits_with_chunking=False))
    options = dict.fromkeys(("calculate_sum_pi_squared", "distillation_use_topk",
                             "distillation_only"), False)  # fmt: skip

    def of_logits(logits, label, temperature):
        return process(
            engine, logits, label=label, temperature=temperature, calculate_entropy=True,
            logits_processor_func=None, batch=None, data_format="thd", **options,
        )  # fmt: skip

    temperature = torch.nested.nested_tensor(
        [torch.full((len(x),), TEMPERATURE) for x in documents()], layout=torch.jagged
    )
    return gptmodel_forward_model_engine(
        model, nested(), {}, of_logits, {"label": nested(), "temperature": temperature},
        data_format="thd",
    )  # fmt: skip


def fused(model):
    """What it computes with them."""
    from verl.models.mcore.model_forward_fused import (
        fused_forward_model_engine,
        patch_fused_forward,
    )

    patch_fused_forward(model)
    return fused_forward_model_engine(False)(model, nested(), nested(), {}, TEMPERATURE, True, 0)


def trained(rank, tp, cp, sp):
    """Errors of a policy step's values and gradients."""
    runs = iter((with_logits, fused))

    def run(model):
        output = next(runs)(model)
        values = {name: [] for name in output}
        for name, rows in output.items():
            for row, response in zip(rows.unbind(), RESPONSES, strict=True):
                values[name].append(row[-1 - response : -1])  # the last has no next token
        values = {name: torch.cat(rows) for name, rows in values.items()}
        weights = torch.linspace(-1, 1, sum(RESPONSES))
        return values | {"loss": (values["log_probs"] * weights - 0.1 * values["entropy"]).sum()}

    return errors_of(lambda: small_gpt(tp, cp, sequence_parallel=sp), run)


@pytest.mark.parametrize("tp, cp, sp", [(1, 1, False), (2, 1, True), (2, 1, False), (1, 2, False)])
def test_verls_fused_forward_gives_what_its_logits_give(tp, cp, sp):
    for errors in run_ranks(trained, tp * cp, tp, cp, sp):
        assert max(errors.values()) < TOLERANCE, errors
