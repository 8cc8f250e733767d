"""ROLL's log-probabilities and entropies of packed samples, with burst's and its own.

Run with `ROLL=clone`, as test_roll. The strategy's methods are taken out of their file, which
imports Ray and vLLM. Guards against hooks on the output layer that take its output apart, rows of
prompts that are computed, and logits that are made nevertheless.
"""

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.integrations.log_probs import LENGTHS, RESPONSES, TOLERANCE, documents, errors_of
from tests.mcore.gpt import Parallel, start
from tests.ranks import run_ranks

roll = pytest.importorskip("tests.integrations.test_roll")  # skips without a clone

LONGEST = 48
METHODS = (*roll.PACKING, "_unpack_sequences", "op_compute_log_probs", "op_compute_entropy")


def strategy_of(gpt):
    """The strategy, in a module of its name."""
    from mcore_adapter.parallel_functions import context_parallel_gather, vocab_parallel_logprobs
    from roll.third_party.megatron.tensor_parallel import vocab_parallel_entropy

    strategy = roll.strategy_of(
        gpt, *METHODS, context_parallel_gather=context_parallel_gather,
        vocab_parallel_logprobs=vocab_parallel_logprobs,
        vocab_parallel_entropy=vocab_parallel_entropy,
    )  # fmt: skip
    strategy.megatron_train_args = SimpleNamespace(cross_entropy_loss_fusion=False)
    strategy.worker_config = SimpleNamespace(logits_in_fp32=True)
    return strategy


def padded(rows, length):
    return torch.stack([torch.nn.functional.pad(x, (0, length - len(x))) for x in rows])


def trained(rank, tp, cp):
    """Errors of a sum over log-probabilities and entropies, and of all gradients."""
    sys.path[:0] = [os.environ["ROLL"], str(Path(os.environ["ROLL"]) / "mcore_adapter/src")]
    module = ModuleType("roll.distributed.strategy.megatron_strategy")
    tokens = padded(documents(), LONGEST)
    attended = padded([torch.ones(length) for length in LENGTHS], LONGEST).long()
    answered = padded(
        [(torch.arange(n) >= n - m).long() for n, m in zip(LENGTHS, RESPONSES, strict=True)],
        LONGEST,
    )
    make = torch.tensor

    def build():
        start(Parallel(tp=tp, cp=cp))
        gpt = roll.model_of(cp, tp, cp_comm_type="burst")
        module.MegatronInferStrategy = type(strategy_of(gpt))
        sys.modules[module.__name__] = module
        return gpt

    def run(model):
        strategy = strategy_of(model)
        type(strategy).op_compute_log_probs = module.MegatronInferStrategy.op_compute_log_probs
        type(strategy).op_compute_entropy = module.MegatronInferStrategy.op_compute_entropy
        with mock.patch.object(torch, "tensor", lambda *a, pin_memory=False, **o: make(*a, **o)):
            rows, params, _, ends = strategy._pack_sequences(tokens, attended)
        output = model(rows, attention_mask=None, position_ids=None, packed_seq_params=params)
        values = {"log_probs": [], "entropy": []}
        for i, logits in enumerate(strategy._unpack_sequences(output, ends)):
            length = logits.size(1) * cp
            mask = answered[i : i + 1, :length]
            given = {"logits": logits.float(), "attention_mask": mask}
            values["entropy"].append(strategy.op_compute_entropy(**given)[0])
            given["logits"] = logits.float()  # ROLL's own function changes them in place
            values["log_probs"].append(
                strategy.op_compute_log_probs(input_ids=tokens[i : i + 1, :length], **given)[0]
            )
        values = {name: torch.cat(rows) for name, rows in values.items()}
        weights = torch.linspace(-1, 1, len(values["log_probs"]))
        return values | {"loss": (values["log_probs"] * weights - 0.1 * values["entropy"]).sum()}

    return errors_of(build, run)


@pytest.mark.parametrize("tp, cp", [(1, 1), (2, 1), (1, 2)])
def test_log_probabilities_of_roll_make_no_logits(tmp_path, tp, cp):
    logs = {"ROLL_LOG_DIR": str(tmp_path)}
    for errors in run_ranks(trained, tp * cp, tp, cp, environment=logs):
        assert max(errors.values()) < TOLERANCE, errors
