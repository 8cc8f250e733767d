"""slime's policy loss and log-probabilities of the old policy, with burst's and its own.

Run with `SLIME=clone`, as test_slime. Guards against a function that slime looks up elsewhere,
rows of prompts that are computed, and logits that are made nevertheless.
"""

import os
import sys
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.integrations.log_probs import (
    LENGTHS,
    RESPONSES,
    TEMPERATURE,
    TOLERANCE,
    documents,
    errors_of,
    small_gpt,
)
from tests.ranks import run_ranks

if "SLIME" not in os.environ:
    pytest.skip("SLIME must be a clone of slime: it is in no registry", allow_module_level=True)

ARGS = dict(
    rollout_temperature=TEMPERATURE, log_probs_chunk_size=-1, allgather_cp=False, entropy_coef=0.01,
    use_rollout_logprobs=False, use_opsm=False, advantage_estimator="grpo", eps_clip=0.2,
    eps_clip_high=0.2, eps_clip_c=None, get_mismatch_metrics=False, use_tis=False,
    use_kl_loss=True, kl_loss_coef=0.04, kl_loss_type="low_var_kl", use_unbiased_kl=False,
    loss_type="policy_loss", calculate_per_token_loss=False, rollout_top_p=1.0,
)  # fmt: skip


def batch_of(data) -> dict:
    """A micro-batch, packed by slime's own function."""
    given = {
        "tokens": documents(), "loss_masks": [torch.ones(length) for length in RESPONSES],
        "total_lengths": list(LENGTHS), "response_lengths": list(RESPONSES),
        "rollout_mask_sums": torch.tensor(RESPONSES),
    }  # fmt: skip
    iterator = data.DataIterator(given, [list(range(len(LENGTHS)))])
    with mock.patch.object(data.accelerator, "device", return_value=torch.device("cpu")):
        return data.get_batch(iterator, list(given), pad_multiplier=16)


def of_responses(cp_rank: int, cp: int) -> list[torch.Tensor]:
    """Advantages, one for each row that a rank has of a response."""
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

    values = [torch.linspace(-1, 1, length) for length in RESPONSES]
    pairs = zip(values, LENGTHS, RESPONSES, strict=True)
    return [slice_log_prob_with_cp(value, *lengths) for value, *lengths in pairs]


def trained(rank, tp, cp, options):
    """Errors of a policy step and of old log-probabilities."""
    sys.path.insert(0, os.environ["SLIME"])
    from slime.backends.megatron_utils import data, loss

    args = SimpleNamespace(**ARGS | options)

    def run(model):
        batch = batch_of(data)
        call = partial(
            model, batch["tokens"], None, None, labels=None,
            packed_seq_params=batch["packed_seq_params"], loss_mask=batch["full_loss_masks"],
        )  # fmt: skip
        with torch.no_grad():
            _, old = loss.get_log_probs_and_entropy(
                call().float(), args=args, unconcat_tokens=batch["unconcat_tokens"],
                total_lengths=batch["total_lengths"], response_lengths=batch["response_lengths"],
                with_entropy=True,
            )  # fmt: skip
        noise = of_responses(rank, cp)
        batch["log_probs"] = [x + 0.1 * n for x, n in zip(old["log_probs"], noise, strict=True)]
        batch["ref_log_probs"] = [x - 0.1 * n for x, n in zip(old["log_probs"], noise, strict=True)]
        batch["advantages"] = noise
        total, _, log = loss.loss_function(args, batch, 1, 1, call().float())
        return {
            "loss": total, "log": log["values"], "old": torch.cat(old["log_probs"]),
            "entropy": torch.cat(old["entropy"]),
        }  # fmt: skip

    return errors_of(lambda: small_gpt(tp, cp), run)


@pytest.mark.parametrize("tp, cp, options", [
    (1, 1, {}), (2, 1, {"recompute_loss_function": True}), (1, 2, {}),
])  # fmt: skip
def test_a_policy_step_of_slime_makes_no_logits(tp, cp, options):
    options = {"recompute_loss_function": False} | options
    for errors in run_ranks(trained, tp * cp, tp, cp, options):
        assert max(errors.values()) < TOLERANCE, errors
