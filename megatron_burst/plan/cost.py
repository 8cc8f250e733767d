"""Bytes per link and FLOPs of a schedule, counted from its steps."""

from collections import Counter
from dataclasses import replace

from megatron_burst.plan.a2a import A2ASchedule
from megatron_burst.plan.gather import GatherSchedule
from megatron_burst.plan.schedule import Schedule
from megatron_burst.schedule.call import AttentionShape, Cargo, Circulate, Direction
from megatron_burst.schedule.topology import Link, Topology


def on_wire(shape: AttentionShape, grad_wire: str, hops: int) -> AttentionShape:
    """The shape with gradients as wide as they travel between ranks.

    Args:
        shape: sizes of the call.
        grad_wire: "accumulate", "input" or "auto": the model's dtype where a sum makes no more than
            one hop. It is rounded once then, as what the kernels return is, and joined in float32.
        hops: that a sum of gradients makes.
    """
    narrow = grad_wire == "input" or (grad_wire == "auto" and hops <= 1)
    return replace(shape, grad_bytes=shape.itemsize if narrow else shape.stat_bytes)


def few_come(shape: AttentionShape, others: int) -> bool:
    """Whether K and V of all other hosts' pieces take no more memory than the queries, and their
    gradients' way home is no longer than that of circulating Q."""
    keys = shape.rows_kv * (shape.dim_qk + shape.dim_v)
    sides = hop_bytes(shape, Direction.BACKWARD, Circulate.Q).values()
    return others * keys <= shape.rows_q * shape.dim_qk and keys * shape.grad_bytes <= sum(sides)


def hop_bytes(
    shape: AttentionShape, direction: Direction, circulate: Circulate
) -> dict[Cargo, int]:
    """Bytes of one hop of each cargo.

    K,V: `read` is K and V, `grad` dK and dV. Q (backward only): `read` is Q, dO and the
    statistics lse and delta, `grad` dQ.
    """
    both_dims = shape.dim_qk + shape.dim_v
    if circulate is Circulate.KV:
        read = shape.rows_kv * both_dims * shape.itemsize
        grad = shape.rows_kv * both_dims * shape.grad_bytes
    else:
        read = shape.rows_q * (both_dims * shape.itemsize + 2 * shape.stat_bytes)
        grad = shape.rows_q * shape.dim_qk * shape.grad_bytes
    return {Cargo.READ: read, Cargo.GRAD: grad if direction is Direction.BACKWARD else 0}


def link_bytes(schedule: Schedule, shape: AttentionShape) -> dict[Link, int]:
    """Bytes that the schedule's rank sends on each link, from its hops."""
    per_hop = hop_bytes(shape, schedule.direction, schedule.circulate)
    sent = Counter({Link.INTRA: 0, Link.INTER: 0})
    for hop in schedule.hops:
        sent[schedule.topology.link(schedule.cp_rank, hop.dest)] += per_hop[hop.cargo]
    return dict(sent)


def gather_bytes(
    schedule: GatherSchedule, shape: AttentionShape, share_bytes: int
) -> dict[Link, int]:
    """Bytes that a rank of a gather schedule sends on each link.

    Args:
        schedule: of the rank, for one pass.
        shape: sizes of the call.
        share_bytes: bytes of a gradient element as it leaves for another rank of the host; 0 in
            forward, where none does.
    """
    row, mine = shape.batch * (shape.dim_qk + shape.dim_v), schedule.cp_rank
    heads_of = {step.gather: len(step.heads) for step in schedule.steps}
    sent = sum(
        len(piece.rows) * heads_of[gather] * row * shape.itemsize
        for gather, reads in enumerate(schedule.reads)
        for pieces in reads.values()
        for piece in pieces
        if piece.holder == mine
    )
    for step in schedule.steps:
        leaving = sum(len(leaf.rows) for leaf in step.leaves[mine])
        sent += leaving * len(step.heads) * row * share_bytes
    return {Link.INTRA: sent, Link.INTER: relay_bytes(schedule, shape)}


def relay_bytes(schedule: GatherSchedule | A2ASchedule, shape: AttentionShape) -> int:
    """Bytes that a rank passes to another host, a group of heads at a time."""
    per_hop = hop_bytes(shape, Direction.BACKWARD, schedule.circulate)
    return sum(
        per_hop[hop.cargo] * len(schedule.rounds[hop.round]) // shape.heads_kv
        for hop in schedule.relay.hops
    )


def exchange_bytes(shape: AttentionShape, topology: Topology, again: bool = False) -> int:
    """Bytes that a rank sends to other hosts in both passes if all ranks exchange heads.

    Of all that is exchanged (`exchange_widths`) 1 - 1/N goes to other hosts.
    """
    widths = exchange_widths(shape, again).values()
    every = shape.batch * shape.tokens * sum(there + back for there, back in widths)
    return every - every // topology.inter_size


def nested_bytes(shape: AttentionShape, topology: Topology, circulate: Circulate) -> int:
    """Bytes that a rank sends to other hosts in both passes of a ring between hosts."""
    forward = hop_bytes(shape, Direction.FORWARD, Circulate.KV)
    backward = hop_bytes(shape, Direction.BACKWARD, circulate)
    return (topology.inter_size - 1) * sum((*forward.values(), *backward.values()))


def exchange_widths(shape: AttentionShape, again: bool = False) -> dict[Direction, tuple[int, int]]:
    """Bytes of a token's heads that are exchanged, there and back, by direction.

    Forward: Q, K, V there; the output and lse back. Backward: dO and delta there; dQ, dK, dV back.

    Args:
        shape: sizes of the call on one rank.
        again: whether backward exchanges Q, K, V and lse too: where kept results stand for the
            forward that would have left them.
    """
    q = shape.heads_q * shape.dim_qk * shape.itemsize
    out = shape.heads_q * shape.dim_v * shape.itemsize
    kv = shape.heads_kv * (shape.dim_qk + shape.dim_v) * shape.itemsize
    stats = shape.heads_q * shape.stat_bytes
    return {
        Direction.FORWARD: (q + kv, out + stats),
        Direction.BACKWARD: (out + stats + (q + kv + stats if again else 0), q + kv),
    }


def exchange_shares(schedule: A2ASchedule) -> dict[Link, float]:
    """Share of what a rank exchanges that goes over each link; network only where a row has it."""
    mine, topology = schedule.cp_rank, schedule.topology
    links = [topology.link(mine, rank) for rank in schedule.ranks if rank != mine]
    used = (Link.INTRA, Link.INTER) if topology.spans_hosts else (Link.INTRA,)
    return {link: links.count(link) / len(schedule.ranks) for link in used}


def a2a_bytes(
    schedule: A2ASchedule, shape: AttentionShape, again: bool = False
) -> dict[Link, float]:
    """Bytes that a rank of a schedule that exchanges heads sends on each link.

    Args:
        schedule: of the rank, for one pass.
        shape: sizes of the call.
        again: as in `exchange_widths`.
    """
    both = sum(exchange_widths(shape, again)[schedule.direction]) * shape.batch * shape.tokens
    sent = {link: both * share for link, share in exchange_shares(schedule).items()}
    sent[Link.INTER] = sent.get(Link.INTER, 0) + relay_bytes(schedule, shape)
    return sent


def flops(schedule: Schedule, shape: AttentionShape) -> int:
    """FLOPs of the schedule's tiles: two matmuls forward, five backward, masked pairs left out."""
    pairs = sum(tile.pairs for step in schedule.steps for tile in step.tiles)
    dims = shape.dim_qk + shape.dim_v
    if schedule.direction is Direction.BACKWARD:
        dims = 3 * shape.dim_qk + 2 * shape.dim_v
    return 2 * pairs * shape.batch * shape.heads_q * dims
