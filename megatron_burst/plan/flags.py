"""The Megatron flags of a model, and those that say how its training is sharded over GPUs."""

import shlex
from collections.abc import Mapping
from math import ceil

from megatron_burst.plan.model import Experts, Latent, Model, Windows
from megatron_burst.plan.strategy import Job, Strategy, stage_layers

_OFFLOADED = {(True, False): "results", (False, True): "inputs", (True, True): "both"}

Values = dict[str, int | float | str | bool | list[str]]


def as_words(flags: Mapping[str, object]) -> tuple[str, ...]:
    """Flags as words of a shell's command, one flag with its value an entry; none that are off."""
    return tuple(_in_words(flag, value) for flag, value in flags.items() if value is not False)


def _in_words(flag: str, value: object) -> str:
    if value is True:
        return flag
    return shlex.join([flag, *map(str, value if isinstance(value, list) else [value])])


def megatron_flags(job: Job, strategy: Strategy, host_bytes: float = 0.0) -> tuple[str, ...]:
    """`flag_values` as words of a command."""
    return as_words(flag_values(job, strategy, host_bytes))


def flag_values(job: Job, strategy: Strategy, host_bytes: float = 0.0) -> Values:
    """What to add to a Megatron-LM command: values by flag, true for one that takes none.

    False stands for a flag that must not be there, because the figures would be others.

    Args:
        job: the job.
        strategy: how it is dealt out.
        host_bytes: pinned memory of a node, of `Memory.node`.
    """
    flags: Values = {
        "--seq-length": job.seq,
        "--max-position-embeddings": job.seq,
        "--micro-batch-size": 1,
        "--global-batch-size": job.batch,
        "--tensor-model-parallel-size": strategy.tp,
        "--context-parallel-size": strategy.cp,
        "--pipeline-model-parallel-size": strategy.pp,
    }
    if strategy.tp > 1:
        flags["--sequence-parallel"] = True
    last = job.model.layers - stage_layers(job.model, strategy) * (strategy.pp - 1)
    if strategy.pp > 1 and last != stage_layers(job.model, strategy):
        flags["--decoder-last-pipeline-num-layers"] = last
    if job.model.experts:
        flags |= {"--expert-model-parallel-size": strategy.ep, "--expert-tensor-parallel-size": 1}
        flags["--moe-token-dispatcher-type"] = "alltoall"
    flags |= {"--bf16": True, "--attention-dropout": 0, "--use-distributed-optimizer": True}
    flags |= {"--overlap-grad-reduce": True, "--overlap-param-gather": True}
    if strategy.cp > 1:
        flags["--context-parallel-impl"] = "burst"
        if strategy.intra != "auto":
            flags["--burst-intra"] = strategy.intra
    if strategy.fused_loss:
        flags["--burst-fused-loss"] = True
    flags |= _recompute_flags(job, strategy)
    if host_bytes:
        gib = host_bytes / job.on_node / (1 << 30)
        flags["--burst-tune"] = f"keep_host_gib={ceil(1.1 * gib)}"
    return flags


def _recompute_flags(job: Job, strategy: Strategy) -> Values:
    if strategy.recompute == "none":
        return {"--recompute-granularity": False}
    if strategy.recompute == "selective":
        modules = ["mlp", *(["moe"] if job.model.experts else [])]  # "mlp" leaves experts alone
        return {"--recompute-granularity": "selective", "--recompute-modules": modules}
    flags: Values = {"--recompute-granularity": "full", "--recompute-method": "uniform"}
    flags["--recompute-num-layers"] = 1
    if strategy.keep != "none":
        flags["--burst-keep"] = strategy.keep
    offloaded = (strategy.offload, strategy.offload_inputs)
    if any(offloaded):
        flags["--burst-keep-offload"] = _OFFLOADED[offloaded]
    return flags


def model_flags(model: Model) -> Values:
    """A model's sizes, and what the planner takes for granted, as Megatron's flags.

    Norms, biases and position embedding are those of a Llama, unless its config says otherwise.
    """
    flags: Values = {
        "--num-layers": model.layers,
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": model.ffn,
        "--num-attention-heads": model.heads_q,
    }
    if model.latent:
        flags |= _latent_flags(model, model.latent)
    else:
        if model.heads_kv != model.heads_q:
            flags |= {"--group-query-attention": True, "--num-query-groups": model.heads_kv}
        flags["--kv-channels"] = model.dim_qk
    if model.experts:
        flags |= _expert_flags(model.experts, model.layers)
    if model.windows:
        flags |= _window_flags(model.windows)
    if model.sinks:
        flags["--softmax-type"] = "learnable"
    if model.gated:
        flags["--swiglu"] = True
    flags |= {"--vocab-size": model.vocab}
    if not model.tied:
        flags["--untie-embeddings-and-output-weights"] = True
    flags |= {"--normalization": "RMSNorm", "--disable-bias-linear": True}
    flags |= {"--position-embedding-type": "rope", "--hidden-dropout": 0}
    return flags | dict(model.beside)


def _latent_flags(model: Model, latent: Latent) -> Values:
    flags: Values = {"--multi-latent-attention": True}
    if latent.q_rank:
        flags["--q-lora-rank"] = latent.q_rank
    return flags | {
        "--kv-lora-rank": latent.kv_rank,
        "--qk-head-dim": model.dim_qk - latent.rope_dim,
        "--qk-pos-emb-head-dim": latent.rope_dim,
        "--v-head-dim": model.dim_v,
    }


def _expert_flags(experts: Experts, layers: int) -> Values:
    flags: Values = {
        "--num-experts": experts.count,
        "--moe-router-topk": experts.active,
        "--moe-ffn-hidden-size": experts.ffn,
    }
    if experts.shared_ffn:
        flags["--moe-shared-expert-intermediate-size"] = experts.shared_ffn
    if dense := experts.dense_layers:
        flags["--moe-layer-freq"] = f"[0]*{dense}+[1]*{layers - dense}"
    return flags


def _window_flags(windows: Windows) -> Values:
    """Megatron counts the keys before the query's own."""
    flags: Values = {"--window-size": f"{windows.size - 1},0"}
    numbers = range(1, len(windows.layers) + 1)
    fit = (n for n in numbers if windows.layers == tuple(number % n > 0 for number in numbers))
    if not all(windows.layers):
        pattern = ",".join(str(int(window)) for window in windows.layers)
        flags["--window-attn-skip-freq"] = next(fit, f"[{pattern}]")
    return flags
