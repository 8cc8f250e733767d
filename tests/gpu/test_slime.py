"""Three GRPO steps of slime's trainer on a GPU, on rollouts that are given: with its own
log-probabilities, of logits, and with burst's.

Run with `SLIME=clone`, its packages and TransformerEngine. Guards against losses that differ, and
logits that are made nevertheless.
"""

import os
import sys
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from tests.gpu import needs_gpus
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, needs_gpus()]
if "SLIME" not in os.environ or find_spec("httpx") is None:
    pytest.skip("SLIME must be a clone of slime: it is in no registry", allow_module_level=True)

VOCAB, LENGTHS, RESPONSES = 151_936, (8192,) * 4, (4096, 6144, 2048, 1024)
ARGS = SimpleNamespace(
    rollout_temperature=0.8, log_probs_chunk_size=-1, allgather_cp=False, entropy_coef=0.001,
    use_rollout_logprobs=False, use_opsm=False, advantage_estimator="grpo", eps_clip=0.2,
    eps_clip_high=0.2, eps_clip_c=None, get_mismatch_metrics=False, use_tis=False,
    use_kl_loss=True, kl_loss_coef=0.04, kl_loss_type="low_var_kl", use_unbiased_kl=False,
    loss_type="policy_loss", calculate_per_token_loss=False, rollout_top_p=1.0,
    recompute_loss_function=False,
)  # fmt: skip


def model_and_optimizer():
    """Four layers with the vocabulary of Qwen3, in bf16."""
    from megatron.core import distributed, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    bf16 = dict(bf16=True, params_dtype=torch.bfloat16)
    config = TransformerConfig(
        num_layers=4, hidden_size=2048, num_attention_heads=16, num_query_groups=4,
        ffn_hidden_size=6144, add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, normalization="RMSNorm", attention_dropout=0.0,
        hidden_dropout=0.0, recompute_granularity="full", recompute_method="uniform",
        recompute_num_layers=1, gradient_accumulation_fusion=False, **bf16,
    )  # fmt: skip
    gpt = GPTModel(
        config, get_gpt_layer_with_transformer_engine_spec(), VOCAB, max(LENGTHS),
        share_embeddings_and_output_weights=False, position_embedding_type="rope",
    )  # fmt: skip
    model = distributed.DistributedDataParallel(
        config, distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=True),
        Float16Module(config, gpt.cuda()),
    )  # fmt: skip
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-4, clip_grad=1.0, **bf16), [model])
    config.finalize_model_grads_func = distributed.finalize_model_grads
    return model, optimizer


def three_steps(rank: int) -> dict[str, list[float]]:
    """Losses, KL divergences from the reference, gradient norms and peaks of memory in GiB."""
    from megatron_burst.mcore.launch import switch_on_automatically

    switch_on_automatically()  # what `import megatron_burst.auto` does
    sys.path.insert(0, os.environ["SLIME"])
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from slime.backends.megatron_utils import data, loss

    model, optimizer = model_and_optimizer()
    generator = torch.Generator().manual_seed(7)
    given = {
        "tokens": [torch.randint(1, VOCAB, (n,), generator=generator).cuda() for n in LENGTHS],
        "loss_masks": [torch.ones(n, device="cuda") for n in RESPONSES],
        "total_lengths": list(LENGTHS), "response_lengths": list(RESPONSES),
        "rollout_mask_sums": torch.tensor(RESPONSES, device="cuda"),
    }  # fmt: skip

    def passes(function, more: dict, forward_only: bool):
        iterator = data.DataIterator(given, [list(range(len(LENGTHS)))])

        def forward_step(iterator, model):
            batch = data.get_batch(iterator, list(given), pad_multiplier=128) | more
            output = model(
                input_ids=batch["tokens"], position_ids=None, attention_mask=None, labels=None,
                packed_seq_params=batch["packed_seq_params"], loss_mask=batch["full_loss_masks"],
            )  # fmt: skip
            return output, partial(function, batch)

        return get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iterator, model=[model],
            num_microbatches=1, seq_length=sum(LENGTHS), micro_batch_size=1,
            forward_only=forward_only,
        )[0]  # fmt: skip

    def old(batch, logits):
        names = ("unconcat_tokens", "total_lengths", "response_lengths")
        options = {name: batch[name] for name in names}
        return loss.get_log_probs_and_entropy(logits, args=ARGS, with_entropy=True, **options)

    def policy(batch, logits):
        return loss.loss_function(ARGS, batch, 1, 1, logits)

    rows: dict[str, list[float]] = {"loss": [], "kl": [], "norm": [], "gib": []}
    reference = None
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            values = passes(old, {}, True)["log_probs"]
        reference = reference or values
        advantages = [torch.linspace(-1, 1, len(x), device="cuda") for x in values]
        more = {"log_probs": values, "ref_log_probs": reference, "advantages": advantages}
        model.zero_grad_buffer()
        optimizer.zero_grad()
        log = passes(policy, more, False)
        _, norm, _ = optimizer.step()
        numbers = dict(zip(log["keys"], log["values"].tolist()[1:], strict=True))
        for name, number in {
            "loss": numbers["loss"], "kl": numbers["kl_loss"], "norm": float(norm),
            "gib": torch.cuda.max_memory_allocated() / 2**30,
        }.items():  # fmt: skip
            rows[name].append(number)
    return rows


def test_three_steps_have_slimes_losses_without_logits():
    (own,), (ours,) = (
        run_ranks(
            three_steps, 1, backend="nccl", fresh=True, environment={"MEGATRON_BURST": option}
        )
        for option in ("log_probs=0", "log_probs=1")
    )
    for name in own:
        print(name, own[name], ours[name])
    for name in ("loss", "kl", "norm"):
        assert ours[name] == pytest.approx(own[name], rel=5e-3, abs=1e-5), name
    assert max(own["gib"]) - max(ours["gib"]) > 30  # logits alone take 19 in float32
