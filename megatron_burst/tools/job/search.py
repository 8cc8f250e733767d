"""Every way to shard a job: whether it fits in memory, how fast it is, why it loses."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import lcm
from types import SimpleNamespace
from typing import Any

from megatron_burst.errors import BurstError, nearest_multiples
from megatron_burst.mcore.refusals import refuses
from megatron_burst.tools.job.auto import placed_by_auto
from megatron_burst.tools.job.candidate import Candidate, look_at, missing_gib, rank
from megatron_burst.tools.job.memory import memory_of
from megatron_burst.tools.job.strategy import (
    FSDP_ARGUMENTS,
    SIZES,
    Fsdp,
    Job,
    Keep,
    Strategy,
    even_share,
    least_multiple,
    misfit,
    size_misfit,
)

Fixed = tuple[tuple[str, Any], ...]
Named = tuple[tuple[str, str], ...]
_OF_SCRIPTS = "core_attn", "again_layers"  # given by scripts alone
_MOST_GPUS = 1 << 16  # most that are tried if fewer do not fit
_KEEPS: tuple[Keep, ...] = ("none", "half", "all")
_POLICIES = (
    Strategy(recompute="none"),
    Strategy(recompute="selective"),
    *(
        Strategy(recompute="full", keep=keep, offload=offload, offload_inputs=inputs)
        for keep, offload, inputs in product(_KEEPS, (False, True), (False, True))
        if offload <= (keep != "none")
    ),
    *(Strategy(keep="auto", offload_inputs=inputs) for inputs in (False, True)),  # if asked for
)


@lru_cache(maxsize=8)
def search(job: Job, fixed: Fixed = (), of_script: Named = ()) -> tuple[Candidate, ...]:
    """All candidates, the fastest first, then what does not fit, the nearest to fitting first.

    `fixed` has fields of `Strategy` that are given, e.g. (("tp", 2), ("keep", "all")); `of_script`
    has fields among them that a script gives, with the flags to change there ("" for none).

    Raises:
        BurstError: if nothing divides evenly.
    """
    candidates = []
    for layout in layouts(job, _given_sizes(fixed)):
        candidates += [look_at(job, strategy) for strategy in _policies(job, layout, fixed)]
    if not candidates:
        raise BurstError(_why_nothing(job, fixed, of_script))
    return tuple(sorted(candidates, key=rank))


def enough_gpus(job: Job, fixed: Fixed, batch: Callable[[int], int]) -> Job | None:
    """The job on 2, 4, ... times as many GPUs, until something fits; `batch`: of so many GPUs."""
    node = job.gpus_per_node if job.gpus > job.gpus_per_node else job.hardware.node.gpus
    gpus = 2 * job.gpus
    while gpus <= _MOST_GPUS:
        more = replace(job, gpus=gpus, gpus_per_node=even_share(gpus, node), batch=batch(gpus))
        for layout in layouts(more, _given_sizes(fixed)):
            for strategy in _policies(more, layout, fixed):
                if max(missing_gib(more, memory_of(more, strategy))) <= 0:
                    return more
        gpus *= 2
    return None


def _given_sizes(fixed: Fixed) -> dict[str, int]:
    return {name: value for name, value in fixed if name in SIZES}


def options_of(fixed: Fixed) -> list[str]:
    """The command-line options of the given fields."""
    return [f"--{name}".replace("_", "-") for name, _ in fixed if name not in _OF_SCRIPTS]


def layouts(job: Job, fixed: dict[str, int]) -> Iterator[Strategy]:
    """Every (TP, CP, PP, DP, EP) that divides evenly."""
    for tp in _divisors(job.on_node, fixed.get("tp")):
        for pp in _divisors(job.gpus, fixed.get("pp")):
            if pp > job.model.layers or job.gpus % (tp * pp):
                continue
            for dp in _divisors(job.batch, fixed.get("dp")):
                cp, rest = divmod(job.gpus, tp * pp * dp)
                if rest or fixed.get("cp", cp) != cp:
                    continue
                for ep in _expert_sizes(job, pp, fixed.get("ep")):
                    strategy = Strategy(tp, cp, pp, dp, ep)
                    if not misfit(job, strategy):
                        yield strategy


def _expert_sizes(job: Job, pp: int, size: int | None) -> list[int]:
    if not job.model.experts:
        return [size or 1]
    most = min(job.model.experts.count, job.gpus // pp)
    return [ep for ep in _divisors(job.model.experts.count, size) if ep <= most]


def _divisors(number: int, size: int | None) -> list[int]:
    return [size] if size else [n for n in range(1, number + 1) if number % n == 0]


def _why_nothing(job: Job, fixed: Fixed, of_script: Named) -> str:
    """Why nothing fits a job; if only the length is in the way, it says so."""
    sizes: dict[str, Any] = _given_sizes(fixed)
    named = [name for name, _ in of_script]
    options = " or ".join(options_of(tuple(pair for pair in fixed if pair[0] not in named)))
    change = f"leave out {options}, or change" if options else "change"
    change += "".join(f" {flag} in the script," for _, flag in of_script if flag)
    change += " --gpus, --seq-length or --global-batch-size"
    values = ", ".join(f"{name} {value}" for name, value in fixed) or "nothing fixed"
    why = size_misfit(job, sizes)
    if not why and {"tp", "cp", "pp", "dp"} <= sizes.keys():
        why = misfit(job, Strategy(**sizes))
    if not why and next(layouts(job, sizes), None) is None:
        even = replace(job, seq=2 * job.gpus)  # every CP x TP divides it
        if not _is_countable(job, sizes):
            why = "no such TP x CP is large enough for Mamba's kernels, which count in 32 bits"
        elif any(layouts(even, sizes)):
            near = nearest_multiples(job.seq, length_step(job, sizes))
            change = f"choose a --seq-length that is a {near} (2 x CP x TP)"
    return (
        "plan: some TP x CP x PP x DP and policy must fit the job, because Megatron shards "
        f"everything evenly; got {job.gpus} GPUs, {job.model.heads_q}/{job.model.heads_kv} heads, "
        f"{job.seq} tokens, a batch of {job.batch} and {values}{why and f' ({why})'}; {change}"
    )


def _is_countable(job: Job, sizes: dict[str, int]) -> bool:
    """Whether kernels can count a sample's elements on the most ranks that may share it."""
    most = job.gpus // (sizes.get("pp", 1) * sizes.get("dp", 1))
    ranks = min(most, sizes.get("cp", most) * sizes.get("tp", most))
    linear = job.model.linear
    return linear is None or linear.is_countable(1, ranks, job.seq)


def length_step(job: Job, sizes: dict[str, int]) -> int:
    """What a length should be a multiple of, so that TP and CP are free.

    That is 2 x CP x TP; sizes that are not given count as powers of two that divide the GPUs.
    """
    least = least_multiple(Strategy(tp=sizes.get("tp", 1), cp=sizes.get("cp", 1)))
    if {"tp", "cp"} <= sizes.keys():
        return least
    step = lcm(least, 2 * (job.gpus & -job.gpus))
    while step > job.seq and step % 2 == 0 and step // 2 % least == 0:
        step //= 2
    return step


def _policies(job: Job, layout: Strategy, fixed: Fixed) -> Iterator[Strategy]:
    """The strategies of a layout with the policies that are given."""
    sizes = {name: getattr(layout, name) for name in SIZES}
    fields = {name: value for name, value in fixed if name not in SIZES}
    again = fields.pop("core_attn", False)  # set by a job, never chosen by the search
    fsdp = fields.pop("fsdp", "none")  # likewise
    budget, layers = fields.pop("keep_budget_gib", None), fields.pop("again_layers", None)
    asks_auto = fields.get("keep") == "auto"
    if asks_auto:  # its copies take the bandwidth
        fields.setdefault("offload_inputs", False)
    # Megatron's checkpoints of MLPs with biases never end their backward
    never = {"selective"} if job.model.biases and "recompute" not in fields else set()
    for policy in _POLICIES:
        strategy = replace(
            policy, **sizes, core_attn=again, fsdp=fsdp,
            fused_loss=has_fused_loss(fsdp) and not job.logits,
        )  # fmt: skip
        if policy.recompute == "full":
            strategy = replace(strategy, again_layers=layers, keep_budget_gib=budget)
        wanted = all(getattr(policy, name) == value for name, value in fields.items())
        wanted = wanted and (policy.keep == "auto") == asks_auto
        if wanted and policy.recompute not in never and not misfit(job, strategy):
            yield placed_by_auto(job, strategy)


def has_fused_loss(fsdp: Fsdp) -> bool:
    """Whether burst's fused loss runs under an FSDP."""
    name = FSDP_ARGUMENTS.get(fsdp)
    return name is None or not refuses("loss", name, SimpleNamespace(**{name: True}))
