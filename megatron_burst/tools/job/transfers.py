"""Seconds of transfers that are not attention's: between stages, of weights and of gradients."""

from megatron_burst.tools.hardware import Hardware
from megatron_burst.tools.job.strategy import Job, Strategy
from megatron_burst.tools.job.weights import layer_params, params_of_rank


def _network_share(hardware: Hardware) -> float:
    return hardware.inter_share(hardware.node.gpus)


def all_to_all_seconds(job: Job, moved: float, nodes: float) -> float:
    """So many bytes of a GPU to ranks of so many nodes alike."""
    nodes = max(1.0, nodes)
    seconds = job.hardware.links.intra.seconds(moved / nodes)
    if nodes > 1:
        among = job.hardware.links.inter.seconds(
            moved * (1 - 1 / nodes), _network_share(job.hardware)
        )
        seconds = max(seconds, among)
    return seconds


def boundary_seconds(job: Job, strategy: Strategy) -> float:
    """One activation to the next pipeline stage."""
    moved = 2 * job.model.hidden * (job.seq // strategy.cp) / strategy.tp
    if job.gpus <= job.gpus_per_node:
        return job.hardware.links.intra.seconds(moved)
    return job.hardware.links.inter.seconds(moved, _network_share(job.hardware))


def update_seconds(job: Job, strategy: Strategy, num_bytes: float, backward: float) -> float:
    """Gradients scattered and weights gathered, half hidden behind backward."""
    moving = _among_shards(job, strategy, num_bytes)
    return moving - min(moving, backward / 2)


def sharded_seconds(job: Job, strategy: Strategy, stage: float) -> float:
    """FSDP, in a micro-batch: bf16 weights gathered for forward and again for backward, gradients
    scattered; hidden behind the stage's other work, but for the first layer's weights."""
    weights = 2 * sum(params_of_rank(job, strategy))
    first = _among_shards(job, strategy, 2 * layer_params(job, strategy))
    return first + max(0.0, _among_shards(job, strategy, 3 * weights) - first - stage)


def _among_shards(job: Job, strategy: Strategy, num_bytes: float) -> float:
    """Seconds to gather or scatter so many bytes over the data- and context-parallel ranks."""
    ranks = strategy.dp * strategy.cp
    local = max(1, job.on_node // strategy.tp)
    links = job.hardware.links
    moving = links.intra.seconds(num_bytes * (1 - 1 / min(ranks, local)))
    if ranks > local:
        share = _network_share(job.hardware)
        moving = max(moving, links.inter.seconds(num_bytes / local, share))
    return moving
