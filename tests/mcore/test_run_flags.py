"""The flags of a run that `plan` prints beside those that the benchmarks ran: what they do not have
in common is listed here, with the reason."""

import dataclasses
import shlex
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import frontier_step
from benchmarks.frontier_cases import MODELS, settings_of
from benchmarks.slice_cases import RUNS, flags_of
from megatron_burst.tools.hardware_file import preset
from megatron_burst.tools.job.flags import as_words, flag_values
from megatron_burst.tools.job.hugging_face import PRESETS
from megatron_burst.tools.job.model_flags import model_flags
from megatron_burst.tools.job.strategy import Job, Strategy
from tests.mcore.test_model_flags import built
from tests.test_examples import megatrons_parser

H200 = preset("h200")
OF_TRAINING = {  # data, learning rate, logs: the user's
    "calculate_per_token_loss", "eval_interval", "eval_iters", "log_interval", "lr",
    "lr_decay_style", "mock_data", "num_workers", "split", "tokenizer_type", "train_iters",
    "vocab_size",  # the benchmark's tokenizer adds a token
}  # fmt: skip
ELSEWHERE = {  # torchrun and `benchmarks.slices` give them
    "bf16", "context_parallel_size", "kv_channels", "group_query_attention", "num_query_groups",
}  # fmt: skip
# a slice has one data-parallel rank and no other work to hide these transfers behind
OVERLAP = {"overlap_grad_reduce", "overlap_param_gather"}


@pytest.mark.parametrize("impl", ["burst", "burst-recompute"])
def test_slices_ran_with_the_flags_of_a_plan(impl):
    keep = "all" if impl == "burst" else "none"
    some = [what for what, one in RUNS if one == impl]
    for what in some:
        job = Job(what.model, what.seq, 4, 4, 1, H200)
        flags = model_flags(job.model) | flag_values(job, Strategy(cp=4, keep=keep))
        planned = megatrons_parser().parse_args(shlex.split(" ".join(as_words(flags))))
        words = [*what.flags, *flags_of(impl, 4), *what.rope(4)]
        ran = vars(megatrons_parser().parse_args(words))
        other = {name for name, value in vars(planned).items() if ran[name] != value}
        assert other <= OF_TRAINING | ELSEWHERE | OVERLAP, what.name
    assert len(some) > 1


OF_CPUS = {  # that the benchmark turns off without a GPU, as here
    "use_cpu_initialization", "bias_activation_fusion", "masked_softmax_fusion",
    "bias_dropout_fusion", "attention_softmax_in_fp32",
}  # fmt: skip
OF_THE_BENCHMARK = {  # it trains nothing, on random tokens, and gives no model its own numbers
    "calculate_per_token_loss", "finalize_model_grads_func", "inference_sampling_seed",
    "layernorm_epsilon", "moe_aux_loss_coeff", "moe_router_dtype", "context_parallel_size",
    "cp_comm_type", "tensor_parallel_num_weight_shards", "deallocate_pipeline_outputs",
    "expert_tensor_parallel_num_weight_shards",
}  # fmt: skip
# kernels of Apex and of TransformerEngine that Megatron uses unless told otherwise
SLOWER = {"gradient_accumulation_fusion", "persist_layer_norm"}


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-1.7b", "qwen3-30b-a3b"])
def test_steps_ran_with_the_config_of_a_plans_flags(name, monkeypatch):
    """Experts among them: grouped products and fused permutation, which Megatron leaves off."""
    from megatron.core.transformer.moe import moe_utils

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for kernel in ("permute", "permute_with_probs", "unpermute", "sort_chunks_by_index",
                   "sort_chunks_by_index_with_probs"):  # fmt: skip
        monkeypatch.setattr(moe_utils, f"fused_{kernel}", print)
    monkeypatch.setattr(frontier_step, "HAVE_TE", True)
    model = MODELS[name]
    trainer = SimpleNamespace(_sizes=model, _sample=SimpleNamespace(ranks=4), _dtype=torch.bfloat16)
    ran = frontier_step.Trainer._config(trainer, settings_of(model)["burst:keep"])
    job = Job(replace(PRESETS[name], layers=model.layers), 1 << 17, 4, 4, 1, H200)
    flags = model_flags(job.model) | flag_values(job, Strategy(cp=1, dp=4))
    of_job = {"--micro-batch-size", "--global-batch-size", "--seq-length", "--bf16",
              "--max-position-embeddings", "--overlap-grad-reduce", "--overlap-param-gather",
              "--burst-fused-loss"}  # fmt: skip
    words = as_words({flag: value for flag, value in flags.items() if flag not in of_job})
    planned = built(" ".join(words))
    values = {field.name: getattr(ran, field.name) for field in dataclasses.fields(ran)}
    values = {name: getattr(value, "__name__", value) for name, value in values.items()}
    other = {name for name in values if name in planned and planned[name] != values[name]}
    assert other <= OF_CPUS | OF_THE_BENCHMARK | SLOWER
    if model.experts:
        for fast in ("moe_grouped_gemm", "moe_permute_fusion"):
            assert planned[fast] and values[fast]
