"""The closed rules behind `auto`: bytes of transfers, and how many heads a round has."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from megatron_burst.logs import Decision
from megatron_burst.schedule.layout import Layout, positions
from megatron_burst.schedule.modes import max_heads
from megatron_burst.schedule.spec import LONG_SHARD, AttentionShape, Cargo, Circulate, Direction
from megatron_burst.schedule.topology import Topology

BLOCK = 128  # query rows (backward: key rows) of a thread block in current attention kernels
_ROUND_BYTES = 128 << 20  # gathered keys and values of one round: larger rounds are no faster
_ONLY_ROUND_BYTES = 256 << 20  # but of short shards: a single round needs no second slot
_ROUNDS = 4  # on one node, if nothing hides the first round's keys and the last gradients
_TWO_ROUNDS_BYTES = 64 << 20  # of all keys and values: up to so much, four would be too short
_PIECES = 8  # rounds on several nodes: at most an eighth of a transfer is exposed
_WAVES = 1.9  # of thread blocks, at least, per tile: shorter tiles are inefficient
_BUSY = 0.9  # share of the multiprocessors, over the waves of all rounds


def with_wire_dtype(shape: AttentionShape, grad_wire: str | None) -> AttentionShape:
    """The shape with gradients as wide as on the wire: the model's dtype, unless "accumulate" is
    asked for. A contribution is rounded once, like the kernels' results, and added in float32."""
    narrow = grad_wire != "accumulate"
    return replace(shape, grad_bytes=shape.itemsize if narrow else shape.stat_bytes)


def remote_kv_fits(shape: AttentionShape, num_remote: int, share: float = 1.0) -> bool:
    """Whether K and V of all other nodes' pieces (the share that circulates) take no more memory
    than the queries, and returning their gradients takes no longer than with circulating Q."""
    keys = share * shape.rows_kv * (shape.dim_qk + shape.dim_v)
    sides = sum(hop_bytes(shape, Direction.BACKWARD, Circulate.Q).values())
    return num_remote * keys <= shape.rows_q * shape.dim_qk and keys * shape.grad_bytes <= sides


def hop_bytes(
    shape: AttentionShape, direction: Direction, circulate: Circulate, share: float = 1.0
) -> dict[Cargo, int]:
    """Bytes of one hop of each cargo; `share`: of the keys that circulates.

    K,V: `read` is K and V, `grad` dK and dV. Q (backward only): `read` is Q, dO and the
    statistics lse and delta, `grad` dQ.
    """
    both_dims = shape.dim_qk + shape.dim_v
    if circulate is Circulate.KV:
        elements = round(share * shape.rows_kv * both_dims)
        read, grad = elements * shape.itemsize, elements * shape.grad_bytes
    else:
        read = shape.rows_q * (both_dims * shape.itemsize + 2 * shape.stat_bytes)
        grad = shape.rows_q * shape.dim_qk * shape.grad_bytes
    return {Cargo.READ: read, Cargo.GRAD: grad if direction is Direction.BACKWARD else 0}


def choose_circulate(
    shape: AttentionShape, requested: Circulate | None = None, share: float = 1.0
) -> Decision:
    """What circulates in backward; `share`: of the keys that would."""
    hops = {way: hop_bytes(shape, Direction.BACKWARD, way, share) for way in Circulate}
    cost = {way: sum(cargoes.values()) for way, cargoes in hops.items()}
    kv, q = format_bytes(cost[Circulate.KV]), format_bytes(cost[Circulate.Q])
    figures = f"a hop of backward is {kv} for kv and {q} for q"
    if requested is not None:
        return Decision(requested, f"asked for; {figures}")
    return Decision(min(cost, key=cost.__getitem__), figures)


def a2a_bytes(shape: AttentionShape, topology: Topology, resends: bool = False) -> int:
    """Bytes that a rank sends to other nodes in both passes of an all-to-all over all ranks.

    A share of 1 - 1/N of all that is sent (`a2a_pass_bytes`) goes to other nodes.
    """
    sent = sum(map(sum, a2a_pass_bytes(shape.replicated(topology.cp_size), resends).values()))
    return sent - sent // topology.inter_size


def inter_ring_bytes(
    shape: AttentionShape, topology: Topology, circulate: Circulate, share: float = 1.0
) -> int:
    """Bytes that a rank sends to other nodes in both passes of a ring between nodes; `share`: of
    the keys that circulates."""
    forward = hop_bytes(shape, Direction.FORWARD, Circulate.KV, share)
    backward = hop_bytes(shape, Direction.BACKWARD, circulate, share)
    return (topology.inter_size - 1) * sum((*forward.values(), *backward.values()))


def a2a_pass_bytes(
    shape: AttentionShape, resends: bool = False
) -> dict[Direction, tuple[int, int]]:
    """Bytes of a rank's rows in an all-to-all, there and back, by direction; for a shape that is
    `replicated` for its ranks.

    Forward: Q, K, V there; the output and lse back. Backward: dO and delta there; dQ, dK, dV back.
    With `resends` backward sends Q, K, V and lse too: kept results replace the forward that would
    have saved them.
    """
    q = shape.rows_q * shape.dim_qk * shape.itemsize
    out = shape.rows_q * shape.dim_v * shape.itemsize
    kv = shape.rows_kv * (shape.dim_qk + shape.dim_v) * shape.itemsize
    stats = shape.rows_q * shape.stat_bytes
    return {
        Direction.FORWARD: (q + kv, out + stats),
        Direction.BACKWARD: (out + stats + (q + kv + stats if resends else 0), q + kv),
    }


def window_imbalance(left: int, cp_size: int, tokens: int) -> float:
    """Share of the ranks' time that waits for the slowest one under a causal window, with `tokens`
    rows on each in zigzag order: the first rows of a sequence see fewer keys."""

    def seen_before(place: int) -> int:
        first = min(place, left + 1)
        return first * (first + 1) // 2 + (place - first) * (left + 1)

    shards = (positions(Layout.ZIGZAG, rank, cp_size, tokens) for rank in range(cp_size))
    work = [sum(seen_before(x.stop) - seen_before(x.start) for x in shard) for shard in shards]
    return 1 - sum(work) / (cp_size * max(work))


def thread_blocks(rows: int) -> int:
    """Thread blocks of a tile with `rows` rows, for each head of each sequence."""
    return ceil(rows / BLOCK)


def busy_share(kernels: Sequence[int], multiprocessors: int) -> float:
    """Share of the multiprocessors that are busy, over all waves of kernels with these blocks."""
    waves = sum(ceil(blocks / multiprocessors) for blocks in kernels)
    return sum(kernels) / (multiprocessors * waves)


def choose_heads_gather(
    shape: AttentionShape, topology: Topology, multiprocessors: int, requested: int | None = None,
    exposed: bool = False,
) -> int:  # fmt: skip
    """KV heads gathered at a time: as few as keep the kernels busy, for small buffers.

    A tile's thread blocks should be two waves of a GPU's multiprocessors or more, and the last
    wave nearly full: blocks of one head are 1.9 waves of an H200's 132, but 2.4 of an A800's 108,
    which therefore takes two heads.

    On one node, long shards with grouped heads take rounds of 64 MiB, which have half the memory:
    kernels grow with the square of the length, so the more rounds cost about a percent. Other
    shards take a single round, if it has up to 256 MiB.

    On several nodes there are eight rounds, if heads and kernels allow: only one step hides the
    first piece from another node and the last returned gradient, and more rounds make them smaller.

    Args:
        shape: sizes of the call on one rank.
        topology: of the group; ranks of a row gather.
        multiprocessors: of a GPU.
        requested: by the user, at most all of them; 0: all; None lets the rule decide.
        exposed: whether nothing hides the first round's keys and the last gradients: then one node
            has four rounds, or two of up to 32 MiB, up to 64 if it has four KV heads or fewer.
    """
    if requested is not None:
        return requested or shape.heads_kv
    row = shape.batch * shape.tokens * topology.intra_size
    head_bytes = row * (shape.dim_qk + shape.dim_v) * shape.itemsize
    in_bytes = _ROUND_BYTES // head_bytes
    if topology.inter_size > 1:
        in_bytes = min(in_bytes, -(-shape.heads_kv // _PIECES))
    elif exposed:
        most = _TWO_ROUNDS_BYTES * (2 if shape.heads_kv <= _ROUNDS else 1)  # a head alone is slow
        rounds = 2 if head_bytes * shape.heads_kv <= most else _ROUNDS
        in_bytes = min(in_bytes, -(-shape.heads_kv // rounds))
    elif shape.tokens >= LONG_SHARD and shape.heads_q > shape.heads_kv:
        in_bytes //= 2
    elif head_bytes * shape.heads_kv <= _ONLY_ROUND_BYTES:
        return shape.heads_kv
    chunk = -(-shape.tokens // 2)  # zigzag's: the queries of a tile
    a_head = thread_blocks(chunk) * shape.batch * shape.heads_q // shape.heads_kv
    for heads in range(min(shape.heads_kv, max(1, in_bytes)), shape.heads_kv):
        sizes = [heads] * (shape.heads_kv // heads) + [shape.heads_kv % heads]
        busy = busy_share([a_head * heads_of_round for heads_of_round in sizes], multiprocessors)
        if heads * a_head >= _WAVES * multiprocessors and busy >= _BUSY:
            return heads
    return shape.heads_kv


def choose_heads_a2a(
    shape: AttentionShape, topology: Topology, multiprocessors: int, requested: int | None = None
) -> int:
    """KV heads that a rank computes in a round: few, as each is a whole sequence's work.

    If heads and kernels allow, on several nodes there are eight rounds: nothing hides the first one
    there and the last one back. On one node four have half the memory of one; for less than 8K
    tokens their launches would take too long. Arguments are those of `choose_heads_gather`.
    """
    ranks, group = topology.intra_size, _q_heads_with_kv_head(shape, topology)
    most = max_heads(shape, topology, "a2a")
    if requested == 0:
        return most
    in_bytes = max(1, 2 * _ROUND_BYTES // head_bytes_over_all_rows(shape, topology))
    rounds = _ROUNDS if shape.tokens >= LONG_SHARD // 4 else 1
    in_bytes = min(in_bytes, -(-most // (_PIECES if topology.spans_nodes else rounds)))
    blocks = thread_blocks(shape.tokens * ranks) * shape.batch * group
    return min(most, requested or max(in_bytes, ceil(_WAVES * multiprocessors / blocks)))


def _q_heads_with_kv_head(shape: AttentionShape, topology: Topology) -> int:
    """Query heads that a rank computes with a KV head in an all-to-all."""
    # 0 if heads cannot be sharded evenly, which is refused when the program is made
    return max(1, shape.heads_q // shape.replicated(topology.intra_size).heads_kv)


def head_bytes_over_all_rows(shape: AttentionShape, topology: Topology) -> int:
    """Bytes of a KV head over all rows of a node: queries and outputs, keys and values."""
    heads = _q_heads_with_kv_head(shape, topology) + 1
    rows = shape.batch * topology.intra_size * shape.tokens * heads
    return rows * (shape.dim_qk + shape.dim_v) * shape.itemsize


def format_bytes(num_bytes: int) -> str:
    """Bytes in the largest unit of which there is one."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes} B"
