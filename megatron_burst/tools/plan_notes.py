"""What a user of `megatron-burst plan` should know beside the figures, as sentences."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from megatron_burst.errors import nearest_multiples
from megatron_burst.tools.hardware import GIB
from megatron_burst.tools.job.candidate import ROOMY, Candidate, candidate, loses
from megatron_burst.tools.job.script import Arguments
from megatron_burst.tools.job.search import Fixed, enough_gpus, length_step, options_of, search
from megatron_burst.tools.job.strategy import SIZES, Job

_NARROW = 2048  # width of an expert


def warnings_of(
    job: Job, found: Sequence[Candidate], fixed: Fixed, arguments: Arguments
) -> list[str]:
    """What speaks against taking the best of a search as it is, which was given `fixed` and a
    script's arguments."""
    of_job = (
        *_of_nodes(job),
        *_of_one_rank(found[0]),
        *_of_model(job),
        *_of_length(job, fixed),
        *_of_memory(job, found),
        *_of_packing(job),
    )
    return [*of_job, *_of_script(job, found[0], arguments)]


def _of_script(job: Job, best: Candidate, arguments: Arguments) -> Iterator[str]:
    """That a plan changes the dtype of a script, or names what never ends."""
    if arguments.get("fp16") and not arguments.get("bf16"):
        yield "the script trains in fp16, this plan in bf16: replace --fp16 by --bf16"
    elif arguments and not arguments.get("bf16"):
        yield "the script trains in fp32, this plan in bf16: its flag --bf16 changes the numbers"
    if best.strategy.recompute == "selective" and job.model.biases:
        yield (
            "Megatron's backward never ends where --recompute-modules has mlp and linear layers "
            "have biases: pass --disable-bias-linear, or plan with another --recompute"
        )
    if best.strategy.fsdp != "none":
        without = "" if best.strategy.fused_loss else "; burst's fused loss does not run under it"
        yield f"Megatron refuses FSDP where CUDA_DEVICE_MAX_CONNECTIONS is 1: unset it{without}"


def _of_model(job: Job) -> Iterator[str]:
    """That parts beside the language model are not counted, that nothing of linear attention is
    measured, and that narrow experts take longer (`frontier_1x*.csv` of the benchmarks)."""
    if towers := " and ".join(job.model.towers):
        yield (
            f"only the language model is planned: time and memory of {towers} (towers for images "
            "or sound, which every context-parallel rank runs whole) come on top"
        )
    if job.model.linear:
        yield (
            "time and memory of linear attention are computed from its FLOPs and bytes, and have "
            "not been compared with measurements"
        )
    if job.model.experts and job.model.experts.ffn < _NARROW:
        yield (
            f"experts are {job.model.experts.ffn} wide, and their products are counted at the "
            "speed of large ones: measured layers with 128 experts 768 wide took 1.1 to 1.8 "
            "times as long"
        )


def _of_length(job: Job, fixed: Fixed) -> Iterator[str]:
    """That a length leaves out strategies, with lengths near it that leave out none."""
    step = length_step(job, {name: value for name, value in fixed if name in SIZES})
    if job.seq % step:
        yield (
            f"{job.seq} tokens rule out every strategy whose 2 x CP x TP does not divide them; to "
            f"rule out none, choose a {nearest_multiples(job.seq, step)}"
        )


def _of_packing(job: Job) -> Iterator[str]:
    """That the documents of packed samples are not known."""
    if job.packing and not job.packing.sample:
        yield (
            "the lengths of your documents are not known, so usual ones are planned, which "
            f"have {job.share:.0%} of the query-key pairs of one causal sequence (MagiAttention's "
            "published distribution); --cu-seqlens FILE gives yours"
        )


def _of_one_rank(best: Candidate) -> Iterator[str]:
    """That no sequence is sharded, and what of burst runs all the same."""
    strategy = best.strategy
    if strategy.cp == 1:
        flags = ["--burst-keep"] if strategy.keep != "none" else []
        flags += ["--burst-fused-loss"] if strategy.fused_loss else []
        run = "run" if len(flags) > 1 else "runs"
        still = f"; {' and '.join(flags)} of this plan {run} without it" if flags else ""
        yield (
            "with CP 1 no two ranks share a sequence, so burst attention is not used: this job can "
            f"train without it, or be planned with --cp 2 or more{still}"
        )


def _of_nodes(job: Job) -> Iterator[str]:
    """What it costs that the GPUs are no multiple of a node's."""
    most = job.hardware.node.gpus
    if job.on_node == job.gpus or most <= job.on_node or job.gpus % most == 0:
        return
    nodes, last = job.gpus // job.on_node, job.gpus % most
    yield (
        f"{job.gpus} GPUs are not a multiple of a node's {most}: planned as {nodes} nodes with "
        f"{job.on_node} each, {most - job.on_node} idle on each; start {job.on_node} ranks on "
        f"each node. A group of ranks over nodes of {most} and {last} would be a flat ring, whose "
        f"busiest rank sends {most + last - 1} shards between nodes instead of 1"
    )


def _of_memory(job: Job, found: Sequence[Candidate]) -> Iterator[str]:
    """That the best nearly fills a GPU's memory, or exceeds the node's."""
    best, usable = found[0], job.hardware.gpu.usable_bytes
    if best.fits and best.is_tight:
        free = (usable - best.memory.peak) / GIB
        yield (
            f"the peak is {best.share:.1%} of the usable memory, {free:.1f} GiB below it: what the "
            "planner does not model (fragmentation, uneven experts) may not fit; nothing with "
            f"these options needs less than {ROOMY:.0%}"
        )
    if best.host_over_gib:
        node = job.hardware.node
        yield (
            f"pinned host memory of {best.memory.node / GIB:.0f} GiB a node exceeds what a plan "
            f"takes, 80 % of the {node.memory_gib * job.on_node / node.gpus:.0f} GiB that "
            f"{job.on_node} GPUs of an {job.hardware.name} node have; if yours has more, give it "
            "as memory_gib in a --hardware file"
        )


def with_keep(job: Job, best: Candidate) -> str:
    """What keeping all results comes to where a script keeps none; "" if that does not fit."""
    for offload in (False, True):
        more = candidate(job, replace(best.strategy, keep="all", offload=offload))
        if more.fits and more.time:
            where = " --burst-keep-offload results" if offload else ""
            return (
                f"with --burst-keep all{where}, a step takes {more.time.seconds:.4g} s, and the "
                f"peak is {more.memory.peak / GIB:.2f} GiB"
            )
    return ""


def no_room(job: Job, found: Sequence[Candidate], fixed: Fixed, batch: Callable[[int], int]) -> str:
    """By how much the best of what does not fit is too large, and what would do; `batch`: sequences
    of a step of a job with so many GPUs."""
    said = loses(found[0], found[0])
    if fixed and (best := search(job)[0]).fits:
        options = " ".join(options_of(fixed))
        found_so = f"{best.strategy.layout}, {best.strategy.policy}"
        return f"{said}; without {options} it fits: {found_so}"
    without_dp = tuple((name, value) for name, value in fixed if name != "dp")
    if gpus := enough_gpus(job, without_dp, batch):
        return f"{said}; {gpus} GPUs would be enough"
    if fixed and (gpus := enough_gpus(job, (), batch)):
        return f"{said}; {gpus} GPUs would be enough, with sizes and policy chosen by the planner"
    return f"{said}; more GPUs alone do not help: shorten the sequence, or lower the batch"
