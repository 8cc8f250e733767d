"""A strategy with its memory and time, and why it is not the best."""

from dataclasses import dataclass

from megatron_burst.errors import BurstError
from megatron_burst.tools.hardware import GIB
from megatron_burst.tools.job.auto import placed_by_auto
from megatron_burst.tools.job.memory import NAMES, Memory, memory_of
from megatron_burst.tools.job.step import StepTime, step_time
from megatron_burst.tools.job.strategy import Job, Strategy, misfit
from megatron_burst.tools.units import digits

# share of the usable memory that a plan needs at most, if anything fits in that; the rest is for
# what is not counted: fragmentation, uneven experts
ROOMY = 0.92


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy with its memory and, if it fits, its time."""

    strategy: Strategy  # how the job is sharded
    memory: Memory  # that it needs
    time: StepTime | None  # of a step; None if it does not fit
    share: float  # of a GPU's usable memory that it needs
    over_gib: float  # GPU memory that is missing; 0 if none is
    host_over_gib: float  # host memory that is missing

    @property
    def fits(self) -> bool:
        return self.over_gib <= 0 and self.host_over_gib <= 0

    @property
    def is_tight(self) -> bool:
        return self.share > ROOMY


def candidate(job: Job, strategy: Strategy) -> Candidate:
    """A strategy with its memory and time.

    Raises:
        BurstError: if it does not fit the job.
    """
    if reason := misfit(job, strategy):
        raise BurstError(
            "plan: the parallel sizes must fit the GPUs, the model and the batch, because Megatron "
            f"shards all of them evenly; got {reason}; change that size, or leave it to the search"
        )
    return look_at(job, placed_by_auto(job, strategy))


def look_at(job: Job, strategy: Strategy) -> Candidate:
    """The same of a strategy that fits the job."""
    memory = memory_of(job, strategy)
    over, node_over = missing_gib(job, memory)
    time = step_time(job, strategy, memory) if over <= 0 and node_over <= 0 else None
    share = memory.peak / job.hardware.gpu.usable_bytes
    return Candidate(strategy, memory, time, share, max(0.0, over), max(0.0, node_over))


def missing_gib(job: Job, memory: Memory, share: float = 1.0) -> tuple[float, float]:
    """Memory that a GPU, of which a share is usable, and a node lack; negative where it fits."""
    over = (memory.peak - share * job.hardware.gpu.usable_bytes) / GIB
    host_gib = job.hardware.node.memory_gib * job.on_node
    host_gib *= 0.8 / job.hardware.node.gpus  # the rest is for processes and the page cache
    return over, memory.node / GIB - host_gib


def rank(one: Candidate) -> tuple:
    """What candidates are sorted by, the best first."""
    if one.time:  # among equals, the one without host copies, which are free on paper only
        copies = one.strategy.offload + one.strategy.offload_inputs
        return one.is_tight, one.time.seconds * (1 + 0.001 * copies), one.memory.peak
    return 2, one.over_gib + one.host_over_gib, 0


def loses(one: Candidate, best: Candidate) -> str:
    """Why a candidate is not the best, as text."""
    if one.over_gib:
        parts = one.memory.in_gib()
        most = max(NAMES, key=parts.__getitem__)
        largest = f"{NAMES[most]}, {parts[most]:.1f} GiB"
        return f"a GPU lacks {one.over_gib:.1f} GiB; largest part: {largest}"
    if one.host_over_gib:
        return f"a node lacks {one.host_over_gib:.0f} GiB of host memory"
    if one is best or not one.time or not best.time:
        return "the best"
    part, extra = _most_of_it(one.time, best.time)
    slower = one.time.seconds / best.time.seconds - 1
    if one.is_tight > best.is_tight and slower < 0:
        return f"{-slower:.1%} faster, but needs {one.share:.0%} of the memory"
    if slower < 0.0005:
        same = one.strategy.layout == best.strategy.layout
        return "as fast, with other copies to host memory" if same else "as fast"
    more = one.time.seconds - best.time.seconds
    rest = extra - more
    less = f", {digits(rest, 3)} s less for the rest" if rest > 0.1 * more else ""
    says = f"{slower:.1%} slower ({digits(more, 3)} s a step)"
    return f"{says}: {digits(extra, 3)} s more for {part}{less}"


def slower_part(one: Candidate, best: Candidate) -> tuple[str, str]:
    """How much slower than the best, and which part takes most of it; or "" and what it lacks."""
    if not one.time or not best.time:
        return "", loses(one, best).partition(";")[0]
    slower = f"{one.time.seconds / best.time.seconds - 1:.1%}"
    if one.is_tight > best.is_tight:
        return slower, f"needs {one.share:.0%} of the memory"
    return slower, _most_of_it(one.time, best.time)[0]


def _most_of_it(one: StepTime, best: StepTime) -> tuple[str, float]:
    """The part that takes most longer, and by how many seconds."""
    seconds, best_seconds = dict(one.parts), dict(best.parts)
    extra = {part: seconds[part] - best_seconds.get(part, 0.0) for part in seconds}
    part = max(extra, key=extra.__getitem__)
    return part, extra[part]
