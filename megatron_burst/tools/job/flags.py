"""Megatron flags for a model and how its training is sharded; a whole plan as JSON."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import ceil
from types import SimpleNamespace
from typing import Any

from megatron_burst.balance.costs import IN_PLAN
from megatron_burst.mcore.refusals import refuses
from megatron_burst.tools.job.auto import rates_of, rows_of
from megatron_burst.tools.job.candidate import Candidate, loses
from megatron_burst.tools.job.model import Model
from megatron_burst.tools.job.model_flags import Values, hybrid_pattern, model_flags
from megatron_burst.tools.job.step import costs_of
from megatron_burst.tools.job.strategy import Job, Strategy, stage_layers

SIZES = {  # fields of a strategy: Megatron's flags
    "tp": "--tensor-model-parallel-size",
    "cp": "--context-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "ep": "--expert-model-parallel-size",
}
# by (`offload`, `offload_inputs`) of a strategy, values of --burst-keep-offload
OFFLOADED = {(True, False): "results", (False, True): "inputs", (True, True): "both"}
SHARDING: Mapping[str, Values] = {  # of weights and their states, by `fsdp` of a strategy
    "none": {
        "--use-distributed-optimizer": True, "--overlap-grad-reduce": True,
        "--overlap-param-gather": True,
    },
    "torch": {
        "--use-torch-fsdp2": True, "--use-distributed-optimizer": False,
        "--no-gradient-accumulation-fusion": True, "--ckpt-format": "torch_dist",
    },
    "megatron": {
        "--use-megatron-fsdp": True, "--data-parallel-sharding-strategy": "optim_grads_params",
        "--ckpt-format": "fsdp_dtensor",
    },
}  # fmt: skip
VERSION = 1  # of the JSON


def as_words(flags: Mapping[str, object]) -> tuple[str, ...]:
    """Flags as shell words, one entry per flag with its value; without flags that are off."""
    words = []
    for flag, value in flags.items():
        values = [] if value is True else value if isinstance(value, list | tuple) else [value]
        words += [] if value is False else [shlex.join([flag, *map(str, values)])]
    return tuple(words)


def as_json(
    job: Job,
    candidates: Sequence[Candidate],
    own: Mapping[str, Any] | None = None,
    documents: Mapping[str, Any] | None = None,
) -> str:
    """What a search found, for a run (`--burst-plan`) and for other programs: the best strategy's
    flags, the job, speeds of its GPUs, seconds of a micro-batch (`megatron_burst.balance`), that
    strategy, steps of drawn `documents`, and other strategies, 50 in all, with what speaks
    against them; what the best keeps; `own`: of `flag_values`."""
    best = candidates[0]
    costs = costs_of(job, best.strategy)
    described = {
        "version": VERSION,
        "flags": flag_values(job, best.strategy, best.memory.node, own),
        "model_flags": None if job.model.unknown else model_flags(job.model),
        "job": {
            "model": asdict(job.model) | {"layers": job.model.megatron_layers},
            "seq": job.seq, "gpus": job.gpus,
            "gpus_per_node": job.gpus_per_node, "batch": job.batch, "hardware": job.hardware.name,
            "packing": asdict(job.packing) if job.packing else None,
        },
        "rates": asdict(rates_of(job)),
        IN_PLAN: asdict(costs) if costs else None,
        "documents": documents,
        "best": _describe(best, best),
        "kept": [asdict(row) for row in rows_of(job, best.strategy)],
        "others": [_describe(one, best) for one in candidates[1:50]],
    }  # fmt: skip
    return json.dumps(described, indent=1) + "\n"


def _describe(one: Candidate, best: Candidate) -> dict[str, Any]:
    described = {
        "strategy": asdict(one.strategy),
        "fits": one.fits,
        "memory_gib": {name: round(gib, 3) for name, gib in one.memory.in_gib().items()},
        "why": loses(one, best),
    }
    if one.time:
        described["step_s"] = one.time.seconds
        described["tokens_per_s_per_gpu"] = one.time.tokens_per_gpu
        described["mfu"] = one.time.mfu
        described["parts_s"] = dict(one.time.parts)
    return described


def flag_values(
    job: Job,
    strategy: Strategy,
    host_bytes: float = 0.0,
    own: Mapping[str, Any] | None = None,
) -> Values:
    """What to add to a Megatron-LM command: values by flag, true for one that takes none.

    False stands for a flag that must not be there, because the figures would be others;
    `host_bytes`: pinned memory of a node, of `Memory.node`; `own`: of a script whose recomputation
    the strategy has, in its own words (`Script.flags`), because it would refuse others.
    """
    flags: Values = {
        "--seq-length": job.seq,
        "--max-position-embeddings": job.seq,
        "--micro-batch-size": 1,
        "--global-batch-size": job.batch,
    } | {SIZES[name]: getattr(strategy, name) for name in ("tp", "cp", "pp")}
    if strategy.tp > 1:
        flags["--sequence-parallel"] = True
    flags |= _stage_flags(job.model, strategy)
    if job.model.experts:
        flags |= {SIZES["ep"]: strategy.ep, "--expert-tensor-parallel-size": 1}
        flags |= {"--moe-token-dispatcher-type": "alltoall"} | fast_experts(job.model)
    flags |= {"--bf16": True, "--attention-dropout": 0, **SHARDING[strategy.fsdp]}
    if strategy.cp > 1:
        flags["--context-parallel-impl"] = "burst"
        if strategy.intra != "auto":
            flags["--burst-intra"] = strategy.intra
        flags |= _rope_flags(job, strategy)
    if strategy.fused_loss:
        flags["--burst-fused-loss"] = True
    flags |= _recompute_flags(job, strategy, own or {})
    if host_bytes and strategy.keep != "auto":  # whose choice follows from the limit
        gib = host_bytes / job.on_node / (1 << 30)
        flags["--burst-tune"] = f"keep_host_gib={ceil(1.1 * gib)}"
    return flags


def _stage_flags(model: Model, strategy: Strategy) -> Values:
    """How many layers each pipeline stage has, if not equally many; of a HybridModel always."""
    each = stage_layers(model, strategy)
    last = model.layers - each * (strategy.pp - 1)
    if model.hybrid:
        stages = [*[each] * (strategy.pp - 1), last]
        return {"--hybrid-layer-pattern": hybrid_pattern(model, stages)}
    return {"--decoder-last-pipeline-num-layers": last} if last != each else {}


def fast_experts(model: Model) -> Values:
    """What predicted times of experts presume and Megatron leaves off: products of all experts of a
    rank in one call, and TransformerEngine's kernels that sort tokens (from 2.1 on).

    Source: TEGroupedMLP of Megatron-Core 0.19, which refuses biases beside a fused dropout, and
    activations other than these.
    """
    if not model.gated and not dict(model.beside).get("--squared-relu"):
        return {}
    flags: Values = {"--moe-grouped-gemm": True, "--moe-permute-fusion": True}
    return flags | ({"--no-bias-dropout-fusion": True} if model.biases else {})


def _rope_flags(job: Job, strategy: Strategy) -> Values:
    """Without fused RoPE where burst refuses it."""
    model, beside, low = job.model, dict(job.model.beside), job.model.latent
    options = SimpleNamespace(
        seq_length=job.seq, micro_batch_size=1, context_parallel_size=strategy.cp,
        tensor_model_parallel_size=strategy.tp, num_attention_heads=model.heads_q,
        group_query_attention=True, num_query_groups=model.heads_kv, kv_channels=model.dim_qk,
        qk_layernorm=model.norms_heads, qk_l2_norm="--qk-l2-norm" in beside,
        attention_output_gate=model.gated_attention, multi_latent_attention=low is not None,
        qk_head_dim=model.dim_qk - (low.rope_dim if low else 0), v_head_dim=model.dim_v,
        qk_pos_emb_head_dim=low.rope_dim if low else 0,
        rope_type=beside.get("--rope-type", "yarn"),
        position_embedding_type=beside.get("--position-embedding-type", "rope"),
        apply_rope_fusion="--no-rope-fusion" not in beside,
    )  # fmt: skip
    refused = refuses("run", "apply_rope_fusion", options)
    return {"--no-rope-fusion": True} if refused else {}


def _recompute_flags(job: Job, strategy: Strategy, own: Mapping[str, Any]) -> Values:
    """Each of the two groups of flags as the script has it, else as the strategy needs it."""
    kept = {flag: value for flag, value in own.items() if flag.startswith("--burst-")}
    again = {flag: value for flag, value in own.items() if flag not in kept}
    return (again or _again_flags(job, strategy)) | (kept or _keep_flags(strategy))


def _again_flags(job: Job, strategy: Strategy) -> Values:
    if strategy.recompute == "full":
        layers = strategy.again_layers
        method, count = ("uniform", 1) if layers is None else ("block", layers)
        flags: Values = {"--recompute-granularity": "full", "--recompute-method": method}
        each = job.model.megatron_layers // job.model.layers
        return flags | {"--recompute-num-layers": count * each}
    modules = ["core_attn"] if strategy.core_attn else []
    if strategy.recompute == "selective":
        modules.append("mlp")
        modules += ["moe"] if job.model.experts else []  # "mlp" leaves experts alone
    if not modules:
        return {"--recompute-granularity": False}
    return {"--recompute-granularity": "selective", "--recompute-modules": modules}


def _keep_flags(strategy: Strategy) -> Values:
    flags: Values = {}
    if strategy.keep != "none":
        flags["--burst-keep"] = strategy.keep
    if strategy.keep == "auto" and strategy.keep_budget_gib is not None:
        flags["--burst-keep-budget-gib"] = strategy.keep_budget_gib
    offloaded = (strategy.offload, strategy.offload_inputs)
    if any(offloaded):
        flags["--burst-keep-offload"] = OFFLOADED[offloaded]
    return flags
