"""How a training job is sharded over GPUs."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, Literal

from megatron_burst.errors import BurstError, nearest_multiples
from megatron_burst.recompute.auto.budget import Placed
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.spec import AttentionShape, Kernel
from megatron_burst.schedule.topology import pretend_nodes
from megatron_burst.tools.hardware import Hardware
from megatron_burst.tools.job.model import Model
from megatron_burst.tools.simulate.call import AttentionCall, by_auto, resolved
from megatron_burst.tools.simulate.sample import Packing

SIZES = ("tp", "cp", "pp", "dp", "ep")
Recompute = Literal["none", "selective", "full"]
Keep = Literal["none", "half", "all", "auto"]
Intra = Literal["auto", "ring", "gather", "a2a"]
Fsdp = Literal["none", "torch", "megatron"]
FSDP_ARGUMENTS = {"torch": "use_torch_fsdp2", "megatron": "use_megatron_fsdp"}  # Megatron's


@dataclass(frozen=True, slots=True)
class Job:
    """The model to train, and the cluster."""

    model: Model  # the model
    seq: int  # tokens of a sequence
    gpus: int  # of the job
    gpus_per_node: int  # per NVLink domain; a job on a single one may use fewer
    batch: int  # global batch in sequences; micro-batches have one
    hardware: Hardware  # the cluster's
    packing: Packing | None = None  # of the sequences; None: each is one causal document
    logits: bool = False  # whether a framework takes them from the model: no fused loss runs

    @property
    def share(self) -> float:
        """Share of causal sequences' (query, key) pairs that the job's have."""
        return self.packing.share(self.seq) if self.packing else 1.0

    def __post_init__(self) -> None:
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise BurstError(
                "plan: --gpus must be a multiple of --gpus-per-node, because only whole nodes are "
                f"used; got {self.gpus} and {self.gpus_per_node}; choose a "
                f"{nearest_multiples(self.gpus, self.gpus_per_node)}"
            )

    @property
    def on_node(self) -> int:
        """GPUs of the job on a node."""
        return min(self.gpus_per_node, self.gpus)


def even_share(gpus: int, gpus_per_node: int) -> int:
    """GPUs per node that a job uses: the most that divides its GPUs evenly.

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
    raise BurstError(
        "plan: --gpus must spread evenly over the nodes, because rings between nodes connect "
        f"equally many ranks of each node; got {gpus} on nodes of {gpus_per_node}; choose a "
        f"{nearest_multiples(gpus, gpus_per_node)}"
    )


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a job is sharded."""

    tp: int = 1  # tensor-parallel size, with sequence parallelism
    cp: int = 1  # context-parallel size
    pp: int = 1  # pipeline-parallel size
    dp: int = 1  # data-parallel size
    ep: int = 1  # expert-parallel size
    # activations that backward recomputes: none, feed-forward ("selective"), or everything but the
    # layers' inputs
    recompute: Recompute = "full"
    core_attn: bool = False  # whether "none" and "selective" recompute core attention too
    # which of attention's results full recomputation keeps; "auto": `placed`, within a budget
    keep: Keep = "none"
    offload: bool = False  # whether they are offloaded
    offload_inputs: bool = False  # whether layers' inputs are too
    keep_budget_gib: float | None = None  # GPU memory for "auto"; None: what is left without it
    again_layers: int | None = None  # first ones of a stage that "full" recomputes; None: all
    # in how many of these layers a module's output is kept, by its name in a layer; with "auto"
    # attention's results too (`kept.RESULTS` or `kept.HALF`)
    placed: tuple[tuple[str, Placed], ...] = ()
    # last ones of these layers of which "auto" keeps all, so that they are not recomputed; the
    # others have what is `placed`
    whole: int = 0
    fused_loss: bool = True  # whether the loss is computed without all logits
    # whose FSDP shards weights and gradients over data- and context-parallel ranks too (ZeRO-3);
    # given, never chosen by the search
    fsdp: Fsdp = "none"
    intra: Intra = "auto"  # mode inside a node; the search leaves it to burst

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def layout(self) -> str:
        """The sizes as text."""
        experts = f" EP {self.ep}" if self.ep > 1 else ""
        sharded = "" if self.fsdp == "none" else " FSDP"
        return f"TP {self.tp} CP {self.cp} PP {self.pp} DP {self.dp}{experts}{sharded}"

    @property
    def policy(self) -> str:
        """What is recomputed, as text."""
        kept = ("keep", "offload", "offload_inputs")
        names = ("recompute", *(kept if self.recompute == "full" else ("core_attn",)))
        fields = {name: getattr(self, name) for name in names}
        fields |= {"again_layers": self.again_layers, "keep_budget_gib": self.keep_budget_gib}
        return ", ".join(policy_words(fields))


def policy_words(policy: Mapping[str, Any]) -> list[str]:
    """What is recomputed and kept, as far as some fields of a strategy say it."""
    again = [policy["recompute"]] if "recompute" in policy else []
    if policy.get("core_attn"):
        again = [*(what for what in again if what != "none"), "core_attn"]
    words = [f"recompute {' and '.join(again)}"] if again else []
    if policy.get("again_layers") is not None:
        words = [f"{' '.join(words)} in {policy['again_layers']} layers of a stage".lstrip()]
    where = " on host" if policy.get("offload") else ""
    if "keep" in policy:
        within = policy.get("keep_budget_gib")
        budget = "" if within is None else f" within {within:g} GiB"
        words.append(f"keep {policy['keep']}{where}{budget}")
    elif where:
        words.append("results on host")
    if policy.get("offload_inputs"):
        words.append("inputs on host")
    return [*words, f"{policy['fsdp']}'s FSDP"] if "fsdp" in policy else words


def size_misfit(job: Job, sizes: Mapping[str, int]) -> str:
    """Why sizes do not fit a job, whatever the others are; "" if they do."""
    tp, pp, dp, ep = (sizes.get(name, 1) for name in ("tp", "pp", "dp", "ep"))
    model, heads_kv = job.model, job.model.heads_kv
    count = model.experts.count if model.experts else 1
    shared = {name: size for name, size in sizes.items() if name != "ep"}  # EP is inside the others
    product = " x ".join(f"{name.upper()} {size}" for name, size in shared.items())
    needs = (
        (job.on_node % tp == 0, f"TP {tp} does not divide the {job.on_node} GPUs of a node"),
        (model.heads_q % tp == 0 and max(heads_kv, tp) % min(heads_kv, tp) == 0,
         f"TP {tp} does not divide {model.heads_q}/{heads_kv} heads"),
        (pp == 1 or ceil(model.layers / pp) * (pp - 1) < model.layers,
         f"PP {pp} leaves a stage without layers"),
        (not model.pattern or model.layers % pp == 0,
         f"PP {pp} does not divide the {model.layers} layers of a hybrid"),
        (job.batch % dp == 0, f"DP {dp} does not divide the batch of {job.batch}"),
        (ep == 1 or model.experts, f"EP {ep} needs experts, and {model.name} has none"),
        (count % ep == 0, f"EP {ep} does not divide {count} experts"),
        (job.gpus % prod(shared.values()) == 0,
         f"{product} does not divide the {job.gpus} GPUs of the job"),
    )  # fmt: skip
    return next((why for holds, why in needs if not holds), "")


def misfit(job: Job, strategy: Strategy) -> str:
    """Why a strategy does not fit a job, or ""."""
    ranks, stage = ranks_per_node(job, strategy), job.gpus // strategy.pp
    if strategy.gpus != job.gpus:
        return f"{strategy.layout} needs {strategy.gpus} GPUs, not {job.gpus}"
    if why := size_misfit(job, {name: getattr(strategy, name) for name in SIZES}):
        return why
    if strategy.cp > ranks and strategy.cp % ranks:
        return f"CP {strategy.cp} does not fill nodes of {ranks} ranks"
    linear = job.model.linear
    if linear and (why := linear.misfit(strategy.tp, strategy.cp, job.seq)):
        return why
    if job.seq % least_multiple(strategy):
        near = nearest_multiples(job.seq, least_multiple(strategy))
        return f"a sequence of {job.seq} tokens is no {near} (2 x CP x TP)"
    if strategy.keep == "half" and strategy.cp == 1:
        return "only burst keeps half, and burst needs CP above 1"
    if strategy.fsdp == "torch" and (strategy.pp > 1 or strategy.ep > 1 or job.model.tied):
        return "--use-torch-fsdp2 has no pipeline or expert parallelism and no tied embeddings"
    if stage % strategy.ep:
        return f"EP {strategy.ep} does not divide the {stage} ranks of a stage"
    return ""


def least_multiple(strategy: Strategy) -> int:
    """What the sequence must be a multiple of: TP shards each of a zigzag rank's two chunks."""
    return 2 * strategy.cp * strategy.tp


def stage_layers(model: Model, strategy: Strategy) -> int:
    """Layers of the largest pipeline stage; the last stage may have fewer."""
    return ceil(model.layers / strategy.pp)


def first_stage_layers(model: Model, strategy: Strategy) -> int:
    """Layers of the first pipeline stage; if it is the last too, with those of prediction."""
    return stage_layers(model, strategy) + (model.predicted_layers if strategy.pp == 1 else 0)


def again_layers(model: Model, strategy: Strategy) -> int:
    """Layers of the first pipeline stage that full recomputation recomputes."""
    every = first_stage_layers(model, strategy)
    most = every if strategy.again_layers is None else min(every, strategy.again_layers)
    return most - strategy.whole


def busiest_layers(model: Model, strategy: Strategy) -> int:
    """Layers of the stage that computes most: those of multi-token prediction are on the last."""
    most = stage_layers(model, strategy)
    return max(most, model.layers - most * (strategy.pp - 1) + model.predicted_layers)


def ranks_per_node(job: Job, strategy: Strategy) -> int:
    """Ranks of a context-parallel group that one node can hold."""
    return max(1, job.on_node // strategy.tp)


def attention_call(job: Job, strategy: Strategy) -> AttentionCall:
    """A layer's attention on one rank, as burst runs it."""
    return resolved(open_call(job, strategy))


def open_call(job: Job, strategy: Strategy) -> AttentionCall:
    """A layer's attention on one rank, in bf16; neighbours at stride TP, nodes filled in order.

    Choices that the strategy does not make are open.
    """
    model, packing = job.model, job.packing
    sample = packing and packing.sharded(strategy.cp)  # with padding, where that is needed
    shape = AttentionShape(
        batch=1, tokens=(sample.tokens if sample else job.seq) // strategy.cp,
        heads_q=model.heads_q // strategy.tp, heads_kv=max(1, model.heads_kv // strategy.tp),
        dim_qk=model.dim_qk, dim_v=model.dim_v, itemsize=2, stat_bytes=4, grad_bytes=4,
    )  # fmt: skip
    nodes = max(1, strategy.cp // ranks_per_node(job, strategy))
    topology = pretend_nodes(strategy.cp, nodes)
    call = AttentionCall(
        topology, shape, packing.layout if packing else Layout.ZIGZAG,
        Mask(right=0, documents=packing is not None),
        Kernel(multiprocessors=job.hardware.gpu.multiprocessors),
        resends=strategy.recompute == "full" and strategy.keep != "none",
        intra=None if strategy.intra == "auto" else strategy.intra,
        neighbours=job.on_node // topology.intra_size,
    )  # fmt: skip
    return by_auto(call, job.hardware)
