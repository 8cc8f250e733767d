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
_MEASURED = "h100", "h200"  # presets whose predictions were compared with measured steps
# Errors of predicted time: the largest of dense models' measured steps on one node, without copies
# to the host and with them (frontier_*.csv); that of nine in ten measured calls of attention on two
# emulated nodes (docs/planner_errors.csv). Measured over predicted time of narrow experts
# (frontier_1x*.csv), and at most of packed documents (packed_2x1xh200.csv).
STEP_ERROR, COPIES_ERROR, BETWEEN_ERROR = 0.10, 0.17, 0.21
NARROW_TIMES, PACKED_TIMES = (1.1, 1.9), 3.7


def warnings_of(
    job: Job, candidates: Sequence[Candidate], fixed: Fixed, arguments: Arguments
) -> list[str]:
    """What speaks against the best of a search for `fixed` options and a script's arguments."""
    best = candidates[0]
    of_job = *_of_nodes(job), *_of_one_rank(best), *_of_model(job), *_of_length(job, fixed)
    of_best = *_of_memory(job, best), *_of_packing(job), *_of_script(job, best, arguments)
    return [*of_job, *of_best]


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
    """That parts beside the language model are not counted."""
    if towers := " and ".join(job.model.towers):
        yield (
            f"only the language model is planned: time and memory of {towers} (towers for images "
            "or sound, which every context-parallel rank runs whole) come on top"
        )


def _of_speed(job: Job) -> Iterator[str]:
    """Why no error of a predicted speed is known, or why it is known to be too high."""
    if job.model.linear:
        yield (
            "'s error is not known: the time of linear attention is computed from FLOPs and bytes, "
            "and has not been compared with measurements"
        )
    if job.model.experts and job.model.experts.ffn < _NARROW:
        yield (
            f" is too high: experts {job.model.experts.ffn} wide are counted at the speed of large "
            "products, and measured layers with 128 experts 768 wide took "
            f"{NARROW_TIMES[0]} to {NARROW_TIMES[1]} times as long"
        )
    if job.hardware.name not in _MEASURED:
        yield f"'s error is not known: no step was measured on {job.hardware.name}"
    if job.packing and job.gpus > job.on_node:
        yield (
            "'s error is not known: attention of packed documents between nodes took up to "
            f"{PACKED_TIMES} times as long as predicted"
        )


def _of_length(job: Job, fixed: Fixed) -> Iterator[str]:
    """That a length leaves out strategies, with lengths near it that leave out none."""
    step = length_step(job, {name: value for name, value in fixed if name in SIZES})
    if job.seq % step:
        yield (
            f"a sequence of {job.seq} tokens rules out every strategy whose 2 x CP x TP does not "
            f"divide it; to rule out none, choose a {nearest_multiples(job.seq, step)}"
        )


def _of_packing(job: Job) -> Iterator[str]:
    """That the documents of packed samples are not known."""
    if job.packing and not job.packing.sample:
        yield (
            "the lengths of your documents are not known, so the plan assumes MagiAttention's "
            f"published distribution, with {job.share:.0%} of the query-key pairs of one causal "
            "sequence; pass yours as --cu-seqlens FILE"
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
        f"{job.gpus} GPUs do not fill nodes of {most}, so the plan uses {job.on_node} GPUs on each "
        f"of {nodes} nodes and leaves {most - job.on_node} idle on each; start {job.on_node} ranks "
        f"on each node. A group of ranks on nodes of {most} and {last} would be a flat ring, and "
        f"its busiest rank would send {most + last - 1} shards between nodes instead of 1"
    )


def _of_memory(job: Job, best: Candidate) -> Iterator[str]:
    """That the best nearly fills a GPU's memory, or exceeds the node's."""
    if best.fits and best.is_tight:
        free = (job.hardware.gpu.usable_bytes - best.memory.peak) / GIB
        yield (
            f"the peak is {best.share:.1%} of the usable memory, {free:.1f} GiB below it: what the "
            "planner does not model (fragmentation, uneven experts) may not fit; nothing with "
            f"these options needs less than {ROOMY:.0%}"
        )
    if best.host_over_gib:
        node = job.hardware.node
        yield (
            f"the plan needs {best.memory.node / GIB:.0f} GiB of pinned host memory on a node, "
            f"which exceeds 80 % of the {node.memory_gib * job.on_node / node.gpus:.0f} GiB that "
            f"{job.on_node} GPUs of an {job.hardware.name} node have; if yours has more, set "
            "memory_gib in a --hardware file"
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


def no_room(
    job: Job, candidates: Sequence[Candidate], fixed: Fixed, batch: Callable[[int], int]
) -> tuple[str, Job, Sequence[Candidate]]:
    """What would be enough for a job of which nothing fits, as a sentence; then the job with that,
    and its strategies. `batch`: sequences of a step of a job with so many GPUs."""
    lack = loses(candidates[0], candidates[0]).partition(";")[0]
    if fixed and (free := search(job))[0].fits:
        options = " ".join(options_of(fixed))
        return f"without {options} it does, as planned below; with them {lack}", job, free
    without_dp = tuple((name, value) for name, value in fixed if name != "dp")
    for some, chosen in ((without_dp, ""), ((), ", with sizes and policy chosen by the planner")):
        if more := enough_gpus(job, some, batch):
            enough = f"{more.gpus} GPUs would be enough{chosen}, as planned below"
            return f"{enough}; on {job.gpus} {lack}", more, search(more, some)
    why = f"more GPUs alone do not help: shorten the sequence, or lower the batch; {lack}"
    return why, job, candidates


def mfu_doubt(job: Job, best: Candidate) -> tuple[str, list[str]]:
    """The range of a predicted MFU, as text, and what is known of it: ends of sentences."""
    doubts = list(_of_speed(job))
    if not best.time or doubts:
        return "", doubts
    error, of = STEP_ERROR, ", the largest error of a measured step on one node"
    if best.memory.node:
        error, of = COPIES_ERROR, ", the largest error of a measured step that copies to the host"
    if job.gpus > job.on_node:
        error = BETWEEN_ERROR
        of = ". On two emulated nodes, 9 of 10 attention calls were within it; no step ran"
    low, high = ((1 + sign * error) * best.time.mfu for sign in (-1, 1))
    return f" ({low:.0%} to {high:.0%})", [f" may be off by {error:.0%}{of}"]


def links_in_words(job: Job) -> str:
    """The speeds of links that a plan assumes."""
    links, share = job.hardware.links, job.hardware.inter_share(job.on_node)
    words = f"{links.pull.gbs.points[-1][1]:.0f} GB/s over NVLink"
    if job.gpus > job.on_node:
        words += f", {share * links.inter.gbs.points[-1][1]:.0f} GB/s a GPU between nodes"
    return words
