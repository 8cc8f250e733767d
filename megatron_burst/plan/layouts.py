"""Every way to shard a job over its GPUs by size; where there is none, why."""

from collections.abc import Iterator
from dataclasses import replace
from math import lcm, prod
from typing import Any

from megatron_burst.plan.strategy import Job, Strategy, least_multiple, misfit, misfit_of
from megatron_burst.units import nearest_multiples

SIZES = ("tp", "cp", "pp", "dp", "ep")


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


def why_nothing(job: Job, fixed: dict[str, Any]) -> str:
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
        even = replace(job, seq=2 * job.gpus)  # every CP x TP divides it
        if next(layouts(even, sizes), None):
            near = nearest_multiples(job.seq, length_step(job, sizes))
            change = f"choose a --seq-length that is a {near} (2 x CP x TP)"
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


def length_step(job: Job, sizes: dict[str, int]) -> int:
    """What a length should be a multiple of, so that TP and CP may be what they like.

    That is 2 x CP x TP; of what is left open, powers of two that divide the GPUs.

    Args:
        job: the job.
        sizes: that are given.
    """
    least = least_multiple(Strategy(tp=sizes.get("tp", 1), cp=sizes.get("cp", 1)))
    if {"tp", "cp"} <= set(sizes):
        return least
    step = lcm(least, 2 * (job.gpus & -job.gpus))
    while step > job.seq and step % 2 == 0 and step // 2 % least == 0:
        step //= 2
    return step
