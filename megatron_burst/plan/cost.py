"""Bytes of hops and exchanges, by which calls are chosen."""

from dataclasses import replace

from megatron_burst.schedule.call import AttentionShape, Cargo, Circulate, Direction
from megatron_burst.schedule.topology import Topology


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
    """Whether K and V of all other nodes' pieces take no more memory than the queries, and their
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


def exchange_bytes(shape: AttentionShape, topology: Topology, again: bool = False) -> int:
    """Bytes that a rank sends to other nodes in both passes if all ranks exchange heads.

    Of all that is exchanged (`exchange_widths`) 1 - 1/N goes to other nodes.
    """
    widths = exchange_widths(shape, again).values()
    every = shape.batch * shape.tokens * sum(there + back for there, back in widths)
    return every - every // topology.inter_size


def nested_bytes(shape: AttentionShape, topology: Topology, circulate: Circulate) -> int:
    """Bytes that a rank sends to other nodes in both passes of a ring between nodes."""
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
