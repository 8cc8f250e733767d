"""How a training job is dealt out over GPUs."""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from megatron_burst.errors import BurstError
from megatron_burst.plan.attention import AttentionCall
from megatron_burst.plan.hardware import Hardware
from megatron_burst.plan.model import Model
from megatron_burst.schedule.call import AttentionShape
from megatron_burst.schedule.topology import Topology, pretend_nodes
from megatron_burst.units import nearest_multiples

Recompute = Literal["none", "selective", "full"]
Keep = Literal["none", "half", "all"]
Intra = Literal["auto", "ring", "gather", "a2a"]


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be trained on what."""

    model: Model  # the model
    seq: int  # tokens of a sequence
    gpus: int  # of the job
    gpus_per_node: int  # of an NVLink domain; a job on a single one may be smaller
    batch: int  # sequences of a step, all GPUs together; micro-batches hold one
    hardware: Hardware  # the cluster's

    def __post_init__(self) -> None:
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise BurstError(
                "plan: --gpus must be a multiple of --gpus-per-node, because nodes are used whole; "
                f"got {self.gpus} and {self.gpus_per_node}; choose "
                f"{self.gpus // self.gpus_per_node * self.gpus_per_node} or another multiple"
            )

    @property
    def on_node(self) -> int:
        """GPUs of the job on a node."""
        return min(self.gpus_per_node, self.gpus)


def even_share(gpus: int, gpus_per_node: int) -> int:
    """GPUs that a job uses of each node: equally many, as most of them as comes out even.

    Nodes with unequal numbers of ranks cannot have nested rings.

    Raises:
        BurstError: if half of each node or more would be idle.
    """
    if gpus <= gpus_per_node:
        return gpus
    least = ceil(gpus / gpus_per_node)
    for nodes in range(least, 2 * least):
        if gpus % nodes == 0:
            return gpus // nodes
    near = gpus // gpus_per_node * gpus_per_node
    raise BurstError(
        "plan: --gpus must come out even over the nodes, because rings between them join equally "
        f"many ranks of each; got {gpus} on nodes of {gpus_per_node}; choose {near} or "
        f"{near + gpus_per_node}"
    )


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a job is dealt out."""

    tp: int = 1  # tensor-parallel size, with sequence parallelism
    cp: int = 1  # context-parallel size
    pp: int = 1  # pipeline-parallel size
    dp: int = 1  # data-parallel size
    ep: int = 1  # expert-parallel size
    # activations that backward computes again: none, feed-forward ("selective"), or everything
    # but the layers' inputs
    recompute: Recompute = "full"
    keep: Keep = "none"  # which of attention's results full recomputation has at hand
    offload: bool = False  # whether they wait on the host
    offload_inputs: bool = False  # whether layers' inputs do too
    fused_loss: bool = True  # whether the loss is computed without all logits
    # whether weights and gradients are dealt out over data-parallel ranks too (ZeRO-3), as
    # BurstEngine has it; not offered by the search
    shard_weights: bool = False
    # how queries and keys come together inside a node; the search leaves it to burst
    intra: Intra = "auto"

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def layout(self) -> str:
        """The sizes in words."""
        experts = f" EP {self.ep}" if self.ep > 1 else ""
        return f"TP {self.tp} CP {self.cp} PP {self.pp} DP {self.dp}{experts}"

    @property
    def policy(self) -> str:
        """What is computed again, in words."""
        if self.recompute != "full":
            return f"recompute {self.recompute}"
        where = " on host" if self.offload else ""
        inputs = ", inputs on host" if self.offload_inputs else ""
        return f"recompute full, keep {self.keep}{where}{inputs}"


def misfit(job: Job, strategy: Strategy) -> str | None:
    """Why a strategy cannot be for a job, or None."""
    ranks = ranks_per_node(job, strategy)
    if strategy.gpus != job.gpus:
        return f"{strategy.layout} needs {strategy.gpus} GPUs, not {job.gpus}"
    for name, check in _OF_ONE_SIZE.items():
        if why := check(job, getattr(strategy, name)):
            return why
    if strategy.cp > ranks and strategy.cp % ranks:
        return f"CP {strategy.cp} does not fill nodes of {ranks} ranks"
    if job.seq % least_multiple(strategy):
        near = nearest_multiples(job.seq, least_multiple(strategy))
        return f"a sequence of {job.seq} tokens is no {near} (2 x CP x TP)"
    if strategy.keep == "half" and strategy.cp == 1:
        return "keeping half is burst attention's own, which needs CP above 1"
    if (job.gpus // strategy.pp) % strategy.ep:
        return f"EP {strategy.ep} does not divide the {job.gpus // strategy.pp} ranks of a stage"
    return None


def misfit_of(job: Job, name: str, size: int) -> str | None:
    """Why one size cannot be for a job, whatever the others are, or None.

    Args:
        job: the job.
        name: "tp", "cp", "pp", "dp" or "ep".
        size: of it.
    """
    check = _OF_ONE_SIZE.get(name)
    if check and (why := check(job, size)):
        return why
    if job.gpus % size:
        return f"{name.upper()} {size} does not divide the {job.gpus} GPUs of the job"
    return None


def _tp_misfit(job: Job, tp: int) -> str | None:
    heads_q, heads_kv = job.model.heads_q, job.model.heads_kv
    if job.on_node % tp:
        return f"TP {tp} does not divide the {job.on_node} GPUs of a node"
    if heads_q % tp or max(heads_kv, tp) % min(heads_kv, tp):
        return f"TP {tp} does not divide {heads_q}/{heads_kv} heads"
    return None


def _pp_misfit(job: Job, pp: int) -> str | None:
    if pp > 1 and _largest_stage(job.model, pp) * (pp - 1) >= job.model.layers:
        return f"PP {pp} leaves a stage without layers"
    return None


def _dp_misfit(job: Job, dp: int) -> str | None:
    return f"DP {dp} does not divide the batch of {job.batch}" if job.batch % dp else None


def _ep_misfit(job: Job, ep: int) -> str | None:
    experts = job.model.experts
    if ep > 1 and not experts:
        return f"EP {ep} needs experts, and {job.model.name} has none"
    if experts and experts.count % ep:
        return f"EP {ep} does not divide {experts.count} experts"
    return None


_OF_ONE_SIZE = {"tp": _tp_misfit, "pp": _pp_misfit, "dp": _dp_misfit, "ep": _ep_misfit}


def least_multiple(strategy: Strategy) -> int:
    """What the sequence must be a multiple of: a zigzag rank's two chunks are dealt out over TP."""
    return 2 * strategy.cp * strategy.tp


def stage_layers(model: Model, strategy: Strategy) -> int:
    """Layers of the largest pipeline stage; the last stage may have fewer."""
    return _largest_stage(model, strategy.pp)


def _largest_stage(model: Model, pp: int) -> int:
    return ceil(model.layers / pp)


def ranks_per_node(job: Job, strategy: Strategy) -> int:
    """Ranks of a context-parallel group that one node can hold."""
    return max(1, job.on_node // strategy.tp)


def topology_for(job: Job, strategy: Strategy) -> Topology:
    """The context-parallel group's topology: neighbours at stride TP, nodes filled in order."""
    return pretend_nodes(strategy.cp, max(1, strategy.cp // ranks_per_node(job, strategy)))


def attention_call(job: Job, strategy: Strategy, backend: str = "auto") -> AttentionCall:
    """A layer's attention on one rank, in bf16."""
    model = job.model
    shape = AttentionShape(
        batch=1,
        tokens=job.seq // strategy.cp,
        heads_q=model.heads_q // strategy.tp,
        heads_kv=max(1, model.heads_kv // strategy.tp),
        dim_qk=model.dim_qk,
        dim_v=model.dim_v,
        itemsize=2,
        stat_bytes=4,
        grad_bytes=4,
    )
    topology = topology_for(job, strategy)
    neighbours = job.on_node // topology.intra_size
    return AttentionCall(
        shape, topology, neighbours, strategy.intra, backend=backend,
        multiprocessors=job.hardware.gpu.multiprocessors,
        again=strategy.recompute == "full" and strategy.keep != "none",
    )  # fmt: skip
