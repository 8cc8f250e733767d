"""Every way to deal a job out: what fits in memory, how fast it is, why the others lose."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

from megatron_burst.errors import BurstError
from megatron_burst.plan.hardware import GIB
from megatron_burst.plan.memory import Memory, memory_of
from megatron_burst.plan.step import StepTime, step_time
from megatron_burst.plan.strategy import Job, Keep, Strategy, least_multiple, misfit, misfit_of
from megatron_burst.plan.units import nearest_multiples

SIZES = ("tp", "cp", "pp", "dp", "ep")
_KEEPS: tuple[Keep, ...] = ("none", "half", "all")
_POLICIES = (
    Strategy(recompute="none"),
    Strategy(recompute="selective"),
    *(
        Strategy(recompute="full", keep=keep, offload=offload, offload_inputs=inputs)
        for keep, offload, inputs in product(_KEEPS, (False, True), (False, True))
        if offload <= (keep != "none")
    ),
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy with its memory and, if it fits, its time.

    Attributes:
        strategy: how the job is dealt out.
        memory: that it needs.
        time: of a step; None if it does not fit.
        over_gib: GPU memory that is missing; 0 if none is.
        host_over_gib: host memory that is missing.
    """

    strategy: Strategy
    memory: Memory
    time: StepTime | None
    over_gib: float
    host_over_gib: float

    @property
    def fits(self) -> bool:
        return self.over_gib <= 0 and self.host_over_gib <= 0


def candidate(job: Job, strategy: Strategy) -> Candidate:
    """A strategy, looked at.

    Raises:
        BurstError: if it cannot be for the job.
    """
    reason = misfit(job, strategy)
    if reason:
        raise BurstError(
            "plan: the parallel sizes must fit the GPUs, the model and the batch, because Megatron "
            f"deals all of them out evenly; got: {reason}; change it, or leave it to --search"
        )
    return _look_at(job, strategy)


def _look_at(job: Job, strategy: Strategy) -> Candidate:
    memory = memory_of(job, strategy)
    over = (memory.peak - job.hardware.gpu.usable_bytes) / GIB
    host_gib = job.hardware.host.memory_gib * job.on_host
    host_gib *= 0.8 / job.hardware.host.gpus  # the rest is for programs and the page cache
    host_over = memory.host / GIB - host_gib
    fits = over <= 0 and host_over <= 0
    time = step_time(job, strategy, memory) if fits else None
    return Candidate(strategy, memory, time, max(0.0, over), max(0.0, host_over))


@lru_cache(maxsize=8)
def search(job: Job, fixed: tuple[tuple[str, Any], ...] = ()) -> tuple[Candidate, ...]:
    """All candidates, the fastest first, then what does not fit, the nearest to fitting first.

    Args:
        job: the job.
        fixed: fields of `Strategy` that are given, e.g. (("tp", 2), ("keep", "all")).

    Raises:
        BurstError: if nothing divides evenly.
    """
    found = []
    asked = {name: value for name, value in fixed if name not in SIZES}
    wanted = [p for p in _POLICIES if all(getattr(p, n) == value for n, value in asked.items())]
    for layout in layouts(job, {name: value for name, value in fixed if name in SIZES}):
        sizes: dict[str, Any] = _sizes(layout)
        policies = [replace(policy, **sizes) for policy in wanted]
        found += [_look_at(job, strategy) for strategy in policies if not misfit(job, strategy)]
    if not found:
        raise BurstError(_nothing(job, dict(fixed)))
    return tuple(sorted(found, key=_rank))


def _nothing(job: Job, fixed: dict[str, Any]) -> str:
    """Why nothing makes up a job; a length alone that is in the way is named."""
    sizes = {name: value for name, value in fixed.items() if name in SIZES}
    if why := _uneven(job, sizes):
        return why
    options = " or ".join(f"--{name}".replace("_", "-") for name in fixed)
    change = f"leave out {options}, or change" if fixed else "change"
    change += " --gpus, --seq-length or --global-batch-size"
    given = ", ".join(f"{name} {value}" for name, value in fixed.items()) or "nothing fixed"
    if {"tp", "cp", "pp", "dp"} <= set(sizes) and (why := misfit(job, Strategy(**sizes))):
        given += f" ({why})"
    elif next(layouts(job, sizes), None) is None:
        divided = layouts(replace(job, seq=2 * job.gpus), sizes)
        if least := min(map(least_multiple, divided), default=0):
            change = f"choose a --seq-length that is a {nearest_multiples(job.seq, least)}"
    return (
        "plan: some TP x CP x PP x DP and policy must make up the job, because Megatron deals "
        f"everything out evenly; got {job.gpus} GPUs, {job.model.heads_q}/{job.model.heads_kv} "
        f"heads, {job.seq} tokens, a batch of {job.batch} and {given}; {change}"
    )


def _uneven(job: Job, sizes: dict[str, int]) -> str | None:
    """A given size that fits no job of these GPUs, model and batch, or several that do not."""
    must = "must fit the GPUs, the model and the batch, because Megatron deals all of them out"
    for name, size in sizes.items():
        if why := misfit_of(job, name, size):
            return f"plan: --{name} {must} evenly; got: {why}; change or leave out --{name}"
    dealt = {name: size for name, size in sizes.items() if name != "ep"}  # EP is of the others
    if job.gpus % prod(dealt.values()):
        options = " and ".join(f"--{name}" for name in dealt)
        layout = " x ".join(f"{name.upper()} {size}" for name, size in dealt.items())
        return (
            f"plan: {options} {must} evenly; got: {layout} = {prod(dealt.values())} does not "
            f"divide the {job.gpus} GPUs of the job; change or leave out one of them"
        )
    return None


def _rank(one: Candidate) -> tuple:
    if one.time:  # of equal ones the one without host copies, which are free on paper only
        copies = one.strategy.offload + one.strategy.offload_inputs
        return 0, one.time.seconds * (1 + 0.001 * copies), one.memory.peak
    return 1, one.over_gib + one.host_over_gib, 0


def _sizes(strategy: Strategy) -> dict[str, int]:
    return {name: getattr(strategy, name) for name in SIZES}


def layouts(job: Job, fixed: dict[str, int]) -> Iterator[Strategy]:
    """Every (TP, CP, PP, DP, EP) that divides evenly."""
    for tp in _divisors(job.on_host, fixed.get("tp")):
        for pp in _divisors(job.gpus, fixed.get("pp")):
            if pp > job.model.layers or job.gpus % (tp * pp):
                continue
            for dp in _divisors(job.batch, fixed.get("dp")):
                cp, rest = divmod(job.gpus, tp * pp * dp)
                if rest or fixed.get("cp", cp) != cp:
                    continue
                for ep in _expert_sizes(job, pp, fixed.get("ep")):
                    strategy = Strategy(tp, cp, pp, dp, ep)
                    if misfit(job, strategy) is None:
                        yield strategy


def _expert_sizes(job: Job, pp: int, given: int | None) -> list[int]:
    if not job.model.experts:
        return [given or 1]
    most = min(job.model.experts.count, job.gpus // pp)
    return [ep for ep in _divisors(job.model.experts.count, given) if ep <= most]


def _divisors(number: int, given: int | None) -> list[int]:
    if given:
        return [given]
    return [n for n in range(1, number + 1) if number % n == 0]


def loses(one: Candidate, best: Candidate) -> str:
    """Why a candidate is not the best, in words."""
    if one.over_gib:
        parts = one.memory.in_gib()
        names = [n for n in parts if n not in ("attention", "host", "peak")]
        most = max(names, key=parts.__getitem__)
        return f"out of memory by {one.over_gib:.1f} GiB; most is {most}: {parts[most]:.1f} GiB"
    if one.host_over_gib:
        return f"out of host memory by {one.host_over_gib:.0f} GiB a host"
    if one is best or not one.time or not best.time:
        return "the best"
    theirs, ours = dict(one.time.parts), dict(best.time.parts)
    extra = {part: theirs[part] - ours.get(part, 0.0) for part in theirs}
    part = max(extra, key=extra.__getitem__)
    slower = one.time.seconds / best.time.seconds - 1
    if slower < 0.0005:
        same = one.strategy.layout == best.strategy.layout
        return "as fast, by other copies to the host" if same else "as fast"
    return f"{slower:.1%} slower, most by {part} (+{extra[part]:.2f} s a step)"
