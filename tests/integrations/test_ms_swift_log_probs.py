"""ms-swift's GRPO step and log-probabilities of the old policy, with burst's and its own.

Guards against a function that ms-swift looks up elsewhere, other signs or masks, and logits that
are made nevertheless.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from tests.integrations.log_probs import (
    LENGTHS,
    RESPONSES,
    TEMPERATURE,
    TOLERANCE,
    documents,
    errors_of,
)
from tests.mcore.gpt import Parallel, start
from tests.ranks import preload, run_ranks

swift = pytest.importorskip("tests.integrations.test_ms_swift")  # skips where it is missing
preload("swift.megatron.trainers.grpo_trainer")

LONGEST = max(LENGTHS)


def batch_of():
    """A packed micro-batch, as ms-swift's data collator makes it: labels of responses only."""
    rows = {"input_ids": documents(), "labels": [], "position_ids": []}
    for tokens, response in zip(documents(), RESPONSES, strict=True):
        prompt = len(tokens) - response
        labels = torch.cat([torch.full((prompt,), -100), tokens[prompt:]])
        rows["labels"].append(labels)
        rows["position_ids"].append(torch.arange(len(tokens)))
    return {name: torch.cat(parts)[None] for name, parts in rows.items()} | {
        "seq_lens": list(LENGTHS)
    }


def trainer_of(args):
    """The trainer, without a run: what its step and its loss read."""
    from swift.megatron.trainers.grpo_trainer import MegatronGRPOTrainer

    trainer = object.__new__(type("Trainer", (MegatronGRPOTrainer,), {}))
    trainer.__dict__.update(
        args=args, temperature=TEMPERATURE, compute_entropy=True, log_entropy=False,
        top_entropy_quantile=0.5, micro_batch_size=len(LENGTHS), enable_routing_replay=False,
        disable_rollout_importance_sampling=True, rollout_importance_sampling_mode=None,
        log_rollout_offpolicy_metrics=False, beta=0.04, kl_in_reward=False, loss_type="grpo",
        importance_sampling_level="token", epsilon_low=0.2, epsilon_high=0.2,
        off_policy_sequence_mask_delta=None, _has_teacher=False,
        unwrapped_models=[SimpleNamespace(training=True)],
        _metrics={"train": defaultdict(list)}, _step=2, steps_per_generation=2,
    )  # fmt: skip
    return trainer


def grpo_batch():
    from swift.rl_core.data import GRPOBatch

    mask = torch.zeros(len(LENGTHS), LONGEST)
    for row, response in zip(mask, RESPONSES, strict=True):
        row[-1 - response : -1] = 1  # left-padded, and shifted as labels are
    generator = torch.Generator().manual_seed(3)
    old, reference = -4.5 + 0.3 * torch.randn(2, *mask.shape, generator=generator)
    return GRPOBatch(
        completion_mask=mask.bool(), truncated_mask=torch.zeros(len(LENGTHS)).bool(),
        seq_lengths=torch.tensor(LENGTHS), old_per_token_logps=old, ref_per_token_logps=reference,
        advantages=torch.tensor([[1.0], [-0.5], [0.7]]).expand_as(mask),
    )  # fmt: skip


def trained(rank, tp):
    """Errors of a GRPO step and of the old policy's log-probabilities."""
    from swift.megatron.trainers.utils import compute_per_token_logps_fn

    args = swift.arguments(f"--tensor_model_parallel_size {tp}")
    vars(args).update(
        task_type="causal_lm", is_multimodal=False, overlong_filter=False, delta=None,
        num_microbatches=1,
    )  # fmt: skip

    def run(model):
        old, _ = compute_per_token_logps_fn(model, args, iter([batch_of()]), TEMPERATURE)
        trainer = trainer_of(args)
        data = batch_of() | {"grpo_batch": grpo_batch()}
        log_probs, loss_of = trainer.forward_step(iter([data]), model)
        entropy = loss_of.keywords["data"]["per_token_entropy"]
        counted = grpo_batch().completion_mask
        loss = loss_of(log_probs)[0]
        return {"old": old, "log_probs": log_probs[counted], "entropy": entropy[counted],
                "loss": loss}  # fmt: skip

    def build():
        start(Parallel(tp=tp))
        return swift.model_of(
            1, cp_comm_type="burst", tensor_model_parallel_size=tp, sequence_parallel=tp > 1
        )

    return errors_of(build, run)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_grpo_step_of_ms_swift_makes_no_logits(tp):
    for errors in run_ranks(trained, tp, tp):
        assert max(errors.values()) < TOLERANCE, errors
