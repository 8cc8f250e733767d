"""The Megatron flags that say how a training job is dealt out over GPUs."""

from math import ceil

from megatron_burst.plan.strategy import Job, Strategy, stage_layers


def megatron_flags(job: Job, strategy: Strategy, host_bytes: float = 0.0) -> tuple[str, ...]:
    """`flag_values` as words of a command, one flag with its value an entry."""
    flags = flag_values(job, strategy, host_bytes)
    return tuple(flag if value is True else f"{flag} {value}" for flag, value in flags.items())


def flag_values(job: Job, strategy: Strategy, host_bytes: float = 0.0) -> dict[str, int | str]:
    """What to add to a Megatron-LM command: values by flag, true for one that takes none.

    Args:
        job: the job.
        strategy: how it is dealt out.
        host_bytes: pinned memory of a host, of `Memory.host`.
    """
    flags: dict[str, int | str] = {
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
    if strategy.ep > 1:
        flags |= {"--expert-model-parallel-size": strategy.ep, "--expert-tensor-parallel-size": 1}
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
        gib = host_bytes / job.on_host / (1 << 30)
        flags["--burst-keep-host-gib"] = ceil(1.1 * gib)
    return flags


def _recompute_flags(job: Job, strategy: Strategy) -> dict[str, int | str]:
    if strategy.recompute == "none":
        return {}
    if strategy.recompute == "selective":
        modules = "mlp moe" if job.model.experts else "mlp"  # "mlp" leaves layers of experts alone
        return {"--recompute-granularity": "selective", "--recompute-modules": modules}
    flags: dict[str, int | str] = {
        "--recompute-granularity": "full",
        "--recompute-method": "uniform",
    }
    flags["--recompute-num-layers"] = 1
    if strategy.keep != "none":
        flags["--burst-keep"] = strategy.keep
    if strategy.offload:
        flags["--burst-keep-offload"] = True
    if strategy.offload_inputs:
        flags["--burst-keep-offload-inputs"] = True
    return flags
