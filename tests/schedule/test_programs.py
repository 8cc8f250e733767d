"""Properties of programs: bytes per link, hops, buffers, what is hidden behind what."""

from collections import Counter
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.schedule.layout import ChunkSegments, Layout, positions
from megatron_burst.schedule.mask import Mask, Span, Tile
from megatron_burst.schedule.order import order, stream_of
from megatron_burst.schedule.program import (
    Arrange,
    Attend,
    AttendBackward,
    Buffer,
    FromRanks,
    Ref,
    Space,
    ToRanks,
    Transfer,
)
from megatron_burst.schedule.spec import Cargo, Circulate, Direction, Kernel
from megatron_burst.schedule.topology import Link, pretend_nodes
from tests.sampling import examples
from tests.schedule.cases import DOCUMENTS, EMITTERS, MASKS, Case, copies_of, grid

FORWARD, BACKWARD = Direction


def grids(side=5):
    return st.builds(grid, st.integers(1, side), st.integers(1, side))


GRIDS = grids()


@st.composite
def calls(draw, mode, mask=None, topologies=GRIDS):
    """A call of a mode; a ring without a mask also with keys of another sequence."""
    topology, circulate = draw(topologies), draw(st.sampled_from(list(Circulate)))
    topology = topology.flat() if mode == "a2a" else topology
    left = mode != "ring" and (mode == "a2a" or circulate is Circulate.KV) and draw(st.booleans())
    layout = draw(st.sampled_from([Layout.ZIGZAG, Layout.CONTIGUOUS]))
    pulled, wide = draw(st.booleans()) and mode != "ring", draw(st.booleans())
    pulled = pulled and not topology.spans_nodes
    rounds, group, chunk = (draw(st.integers(1, 3)) for _ in range(3))
    copies = draw(st.sampled_from([1, copies_of(topology.intra_size, rounds)]))
    mask = mask or draw(st.sampled_from(MASKS))
    other = mask == Mask.FULL and mode == "ring"
    keys = draw(st.sampled_from([None, 2, 4, 6])) if other else None
    return Case(
        mode, topology, layout, mask, circulate, Kernel(wide_grads=wide), rounds, pulled, left=left,
        group=group, copies=copies if mode == "a2a" else 1, tokens=2 * chunk, tokens_kv=keys,
    )  # fmt: skip


def transfers(program, *, link=None, cargo=None):
    return [
        op
        for op in program.ops
        if isinstance(op, Transfer) and link in (None, op.link) and cargo in (None, op.cargo)
    ]


# --- lengths: rows counted in units ---


def in_rows(x, unit):
    """A row or position count in units of `unit`."""
    match x:
        case Span():
            return x.scaled(unit)
        case range():
            return range(x.start * unit, x.stop * unit)
        case Ref():
            return replace(x, rows=in_rows(x.rows, unit))  # heads are none
        case Buffer():
            return replace(x, rows=x.rows * unit)
        case Mask() | ChunkSegments() | str():
            return x
        case tuple():
            return tuple(in_rows(one, unit) for one in x)
    names = {f.name for f in fields(x)} - {"src_blocks", "dst_chunks"} if is_dataclass(x) else ()
    return replace(x, **{name: in_rows(getattr(x, name), unit) for name in names}) if names else x


@examples(50, 150)
@given(st.data())
def test_one_program_serves_all_lengths(data):
    """In units, it is the program made for that very length, including slots."""
    mask = data.draw(st.sampled_from((*MASKS, *DOCUMENTS[:2])))
    case = data.draw(calls(data.draw(st.sampled_from(list(EMITTERS))), mask))
    layout = data.draw(st.sampled_from((case.layout, Layout.DOCUMENTS)[: 1 + mask.documents]))
    tokens = 2 * data.draw(st.integers(1, 1 << 22))
    case = replace(case, layout=layout, tokens=tokens, tokens_kv=None)
    rank = data.draw(st.integers(0, case.topology.cp_size - 1))
    for direction in Direction:
        spec = case.spec(direction, rank)
        in_units, unit = spec.in_units()
        assert in_units.shape.tokens == 2 and spec.shape.tokens == 2 * unit
        one, whole = (EMITTERS[case.mode](some) for some in (in_units, spec))
        assert in_rows(one.ops, unit) == whole.ops
        assert {
            name: in_rows(buffer, unit) for name, buffer in one.buffers.items()
        } == whole.buffers


# --- bytes: closed formulas, of a rank's whole shard ---


def keys(shape, width):
    return shape.batch * shape.keys * shape.heads_kv * (shape.dim_qk + shape.dim_v) * width


def queries(shape, width):
    return shape.batch * shape.tokens * shape.heads_q * shape.dim_qk * width


def outputs(shape, width):
    return shape.batch * shape.tokens * shape.heads_q * shape.dim_v * width


def statistics(shape):
    return shape.batch * shape.tokens * shape.heads_q * shape.stat_bytes


def circulating(case, direction):
    """Bytes of a circulating shard, including copies of its KV heads, and of its gradient."""
    shape = replace(case.shape, heads_kv=case.shape.heads_kv * case.copies)
    if direction is FORWARD:
        return keys(shape, shape.itemsize), 0
    if case.circulate is Circulate.KV:
        return keys(shape, shape.itemsize), keys(shape, shape.grad_bytes)
    side = queries(shape, shape.itemsize) + outputs(shape, shape.itemsize) + 2 * statistics(shape)
    return side, queries(shape, shape.grad_bytes)


def between_nodes(case, direction):
    """N-1 hops of every shard and its gradient; no keys that forward saved."""
    read, grad = circulating(case, direction)
    recalled = case.left and direction is BACKWARD
    return (case.topology.inter_size - 1) * (grad + (0 if recalled else read))


def share_width(case):
    """Width of gradients that leave inside a node."""
    return case.shape.grad_bytes if case.kernel.wide_grads else case.shape.itemsize


@examples(35, 100)
@given(calls("ring"), st.sampled_from(list(Direction)))
def test_a_ring_sends_n_times_l_less_one_shards_inside_and_n_less_one_between(case, direction):
    nodes, ranks, shape = case.topology.inter_size, case.topology.intra_size, case.shape
    read, grad = circulating(case, direction)
    # inside a node gradients are summed on the way
    summed = grad * shape.stat_bytes // shape.grad_bytes if nodes * ranks > 2 else grad
    expected = {
        Link.INTRA: nodes * (ranks - 1) * (read + summed), Link.INTER: (nodes - 1) * (read + grad)
    }  # fmt: skip
    for program in case.programs(direction):
        assert program.sent_bytes() == expected


@examples(35, 100)
@given(calls("gather", Mask.FULL), st.sampled_from(list(Direction)))
def test_gathering_sends_every_shard_to_all_others_of_the_node(case, direction):
    """Once per step; in backward with circulating queries, once per round, and their gradients once
    per step."""
    nodes, others, shape = case.topology.inter_size, case.topology.intra_size - 1, case.shape
    alone = direction is BACKWARD and case.circulate is Circulate.Q
    inside = others * (1 if alone else nodes) * keys(shape, shape.itemsize)
    if direction is BACKWARD:
        inside += others * nodes * keys(shape, share_width(case))
    for program in case.programs(direction):
        sent = program.sent_bytes()
        assert sent == {Link.INTRA: inside, Link.INTER: between_nodes(case, direction)}


@given(st.integers(1, 8), st.integers(1, 3))
def test_on_one_node_a_rank_gathers_only_what_a_causal_mask_shows(ranks, rounds):
    """Rank r sees the chunks before its late one, 2L-1-r; one of them is its own."""
    case = Case("gather", grid(1, ranks), Layout.ZIGZAG, Mask.CAUSAL, rounds=rounds, tokens=4)
    for rank, program in enumerate(case.programs(FORWARD)):
        taken = sum(program.num_bytes(take.rows) for op in transfers(program) for take in op.recvs)
        chunks = 2 * ranks - 2 - rank if ranks > 1 else 0
        assert taken == chunks * keys(case.shape, case.shape.itemsize) / 2


@examples(35, 100)
@given(calls("a2a"), st.sampled_from(list(Direction)))
def test_an_all_to_all_keeps_one_part_of_everything_and_sends_the_rest(case, direction):
    """Of everything that ranks compute with: a KV head that several ranks need counts for each."""
    shape, ranks = case.shape, case.topology.intra_size
    shape = replace(shape, heads_kv=shape.heads_kv * case.copies)
    qkv = queries(shape, shape.itemsize) + keys(shape, shape.itemsize)
    if direction is FORWARD:
        everything = qkv + outputs(shape, shape.itemsize) + statistics(shape)
    else:
        there = outputs(shape, shape.itemsize) + statistics(shape)
        there += 0 if case.left else qkv + statistics(shape)
        back = queries(shape, share_width(case)) + keys(shape, share_width(case))
        everything = there + back
    on_node = Counter(case.topology.node_of)[0]
    for program in case.programs(direction):
        sent = program.sent_bytes()
        assert sent[Link.INTRA] == everything * (on_node - 1) // ranks
        assert sent[Link.INTER] == everything * (ranks - on_node) // ranks


def test_a_flat_ring_crosses_between_nodes_in_every_step():
    """Only ranks at a border send between nodes, but they send everything there."""
    flat = Case("ring", pretend_nodes(8, 2).flat(), Layout.ZIGZAG, Mask.CAUSAL, rounds=1)
    sent = [program.sent_bytes() for program in flat.programs(FORWARD)]
    hop = keys(flat.shape, flat.shape.itemsize)
    assert [of_links[Link.INTER] // hop for of_links in sent] == [0, 0, 0, 7, 0, 0, 0, 7]


WINDOWS = st.builds(Mask, st.integers(0, 9), st.sampled_from([0, 1, 3]))


@examples(35, 100)
@given(calls("gather", topologies=grids(3)), WINDOWS, st.sampled_from(list(Direction)))
def test_between_nodes_only_the_halo_of_a_window_travels(case, mask, direction):
    """Rows of a shard that a query of another node sees, counted one by one, N-1 hops far."""
    case = replace(case, mask=mask, circulate=Circulate.KV, tokens=12, tokens_kv=None)
    nodes, size = case.topology.inter_size, case.topology.cp_size
    held = [
        [p for at in positions(case.layout, rank, size, 12) for p in at] for rank in range(size)
    ]

    def halo(owner):
        home = case.topology.coord(owner)[0]
        away = [r for r in range(size) if case.topology.coord(r)[0] != home]
        seen = {p + by for r in away for p in held[r] for by in range(-mask.left, mask.right + 1)}
        return len(seen & set(held[owner]))

    shape, recalled = case.shape, case.left and direction is BACKWARD
    for rank, program in enumerate(case.programs(direction)):
        row, column = case.topology.coord(rank)
        rows = [halo(case.topology.rank_at(row - away, column)) for away in range(nodes)]
        row_bytes = [keys(shape, width) // 12 for width in (shape.itemsize, shape.grad_bytes)]
        expected = 0 if recalled else sum(rows[:-1]) * row_bytes[0]
        expected += sum(rows[1:]) * row_bytes[1] if direction is BACKWARD else 0
        assert program.sent_bytes()[Link.INTER] == expected
        assert all(op.sends or op.recvs for op in transfers(program, link=Link.INTER))


def test_a_halo_of_4k_at_128k_is_a_sixteenth_of_a_shard_and_nobody_reads_the_last_one():
    zigzag = Case("gather", grid(2, 1), Layout.ZIGZAG, Mask(4096, 0), rounds=1, tokens=65536)
    whole = replace(zigzag, mask=Mask.CAUSAL)
    sent, every = ([p.sent_bytes()[Link.INTER] for p in case.programs(FORWARD)]
                   for case in (zigzag, whole))  # fmt: skip
    assert [16 * some for some in sent] == every  # 4K of 64K rows each way
    contiguous = replace(zigzag, layout=Layout.CONTIGUOUS)
    assert [len(transfers(p, link=Link.INTER)) for p in contiguous.programs(FORWARD)] == [1, 1]
    assert [p.sent_bytes()[Link.INTER] for p in contiguous.programs(FORWARD)] == [sent[0], 0]


# --- hops and buffers ---


@examples(35, 100)
@given(calls("ring"))
def test_the_return_transfer_of_a_rings_gradients_takes_p_less_one_hops(case):
    nodes, ranks = case.topology.inter_size, case.topology.intra_size
    hops = {Link.INTRA: nodes * (ranks - 1), Link.INTER: nodes - 1}
    for program in case.programs(BACKWARD):
        made = Counter(op.link for op in transfers(program, cargo=Cargo.GRAD))
        assert made == Counter(hops) and made.total() == case.topology.cp_size - 1


@examples(35, 100)
@given(calls("gather"))
def test_between_nodes_a_piece_and_its_gradient_make_n_less_one_hops_a_round(case):
    hops = case.rounds * (case.topology.inter_size - 1)
    for program in case.programs(BACKWARD):
        assert len(transfers(program, link=Link.INTER, cargo=Cargo.GRAD)) == hops
        reads = 0 if case.left else hops
        assert len(transfers(program, link=Link.INTER, cargo=Cargo.READ)) == reads


def most_buffers(case):
    """The most hop buffers that a backward may take, for data read and for gradients."""
    nodes, ranks = case.topology.inter_size, case.topology.intra_size
    if case.mode == "ring":
        inside = 0 if ranks == 1 else 1 if ranks == 2 else 2
        if nodes == 1:
            return (1 + inside, 2) if ranks > 1 else (0, 0)
        if ranks == 1:
            return min(nodes, 3), min(nodes, 3)
        return (2 + inside, 3) if nodes == 2 else (3 + inside, 5)
    if nodes == 1:
        return 0, 0
    if case.rounds == 1:
        return min(nodes, 3), min(2 * nodes - 2, 6)
    return 4, min(2 * nodes, 6)


def hops_in_memory(program, use):
    """How many distinct hop buffers of a use there are."""
    every = (b for b in program.buffers.values() if (b.space, b.use) == (Space.POOL, use))
    return len({buffer.storage for buffer in every})


@examples(35, 100)
@given(st.sampled_from(["ring", "gather", "a2a"]).flatmap(calls))
def test_hop_buffers_do_not_grow_with_the_group(case):
    """Sending a shard on takes the memory of a few, whatever the group's size."""
    read, grad = most_buffers(case)
    if case.mode == "ring" and case.layout is Layout.CONTIGUOUS and case.mask.causal:
        grad += 1  # a step without a tile adds nothing: what it sent stays until what came goes on
    for direction in Direction:
        program = EMITTERS[case.mode](case.spec(direction))
        assert hops_in_memory(program, Cargo.READ) <= read
        assert hops_in_memory(program, Cargo.GRAD) <= (grad if direction is BACKWARD else 0)
        # what arrives is added in the accumulation dtype, while the next round begins
        assert hops_in_memory(program, "sums") <= min(case.rounds, 2)


# --- what is hidden behind what ---


def hidden(program, cargo, link=None):
    """For each transfer, kernels between its issue and the first use of its data."""
    found = []
    for index, op in enumerate(program.ops):
        if op not in transfers(program, cargo=cargo, link=link):
            continue
        brought = {take.rows.buffer for take in op.recvs}
        later = enumerate(program.ops[index + 1 :], index + 1)
        uses = [n for n, other in later if brought & {ref.buffer for ref in other.reads}]
        until = program.ops[index : uses[0] if uses else len(program.ops)]
        found.append(sum(isinstance(other, Attend | AttendBackward) for other in until))
    return found


@examples(35, 100)
@given(calls("ring", Mask.FULL), st.sampled_from(list(Direction)))
def test_every_hop_of_a_ring_but_the_last_ones_home_is_behind_a_kernel(case, direction):
    """The last return the total, and on several nodes what it is summed from."""
    last = min(case.topology.inter_size - 1, 1) + (case.topology.intra_size > 1)
    for program in case.programs(direction):
        assert all(hidden(program, Cargo.READ))
        grads = hidden(program, Cargo.GRAD)
        assert all(grads[: len(grads) - last])


def test_a_hop_of_data_between_nodes_has_a_whole_round_to_arrive():
    """The ring is nested for this overlap."""
    case = Case("ring", grid(3, 4), Layout.ZIGZAG, Mask.CAUSAL, rounds=1)
    for direction in Direction:
        for program in case.programs(direction):
            assert hidden(program, Cargo.READ, Link.INTER) == [4, 4]


@examples(35, 100)
@given(GRIDS)
def test_a_rings_work_is_balanced_in_zigzag(topology):
    """Every rank computes the same pairs in every step; the first step half a row more."""
    case = Case("ring", topology, Layout.ZIGZAG, Mask.CAUSAL, rounds=1, tokens=8)
    for program in case.programs(FORWARD):
        kernels = [op for op in program.ops if isinstance(op, Attend)]
        work = [_pairs(op) for op in kernels]
        assert work == [36] + [32] * (topology.cp_size - 1)


def _pairs(kernel):
    rows = (Span(0, 8) if ref.rows is None else ref.rows for ref in (kernel.q, kernel.kv))
    return Tile(*rows, kernel.mask).pairs


ONE_NODE = st.builds(grid, st.just(1), st.integers(2, 5))


def beside_kernels(program):
    """For each operation, how many kernels may run at the same time: neither waits for the
    other."""
    behind, last = [], {}
    for index, (op, waits) in enumerate(zip(program.ops, order(program).waits, strict=True)):
        earlier = [*waits, *([last[stream]] if (stream := stream_of(index, op)) in last else ())]
        behind.append({index}.union(*(behind[other] for other in earlier)))
        last[stream] = index
    kernels = [n for n, op in enumerate(program.ops) if isinstance(op, Attend | AttendBackward)]
    return [
        sum(kernel not in behind[index] and index not in behind[kernel] for kernel in kernels)
        for index in range(len(program.ops))
    ]


@examples(35, 100)
@given(calls("gather", Mask.FULL, ONE_NODE))
def test_on_one_node_every_gathered_round_but_the_first_comes_behind_kernels(case):
    """On several, what waits for another node is issued behind the kernels that hide it."""
    for direction in Direction:
        for program in case.programs(direction):
            reads = transfers(program, cargo=Cargo.READ, link=Link.INTRA)
            first = [op for op in reads if _number(op).endswith(" 0")]
            assert all(hidden(program, Cargo.READ, Link.INTRA)[len(first) :])


@examples(35, 100)
@given(data=st.data())
def test_an_all_to_all_exposes_its_first_round_there_and_its_last_one_back(data):
    """With their copies. What the rest takes is issued behind the kernels that hide it."""
    case = data.draw(calls("a2a", Mask.FULL, ONE_NODE))
    whole = replace(case, layout=Layout.DOCUMENTS, mask=DOCUMENTS[0], tokens_kv=None)
    case = data.draw(st.sampled_from([case, replace(case, one_slot=True), whole]))
    last = f" {case.rounds - 1}"
    for direction in Direction:
        for program in case.programs(direction):
            counts, kernels = beside_kernels(program), 0
            for op, count in zip(program.ops, counts, strict=True):
                kernels += isinstance(op, Attend | AttendBackward)
                if isinstance(op, ToRanks) or getattr(op, "cargo", None) is Cargo.READ:
                    first = _number(op).endswith(" 0")
                    assert count or first
                    assert kernels or first or direction is BACKWARD
                if isinstance(op, FromRanks) or getattr(op, "cargo", None) is Cargo.GRAD:
                    assert count or _number(op).endswith(last)
                if type(op) is Arrange:
                    assert count or op.target.buffer.endswith(" 0")


@examples(35, 100)
@given(st.sampled_from(["ring", "gather", "a2a"]).flatmap(calls), st.sampled_from(list(Direction)))
def test_all_ranks_issue_their_transfers_in_one_order(case, direction):
    """The same links and cargoes in sequence, leaving out empty ones: so no transfer waits in front
    of one that a peer waits for."""
    longest: list = []
    for program in case.programs(direction):
        issued = [(op.link, op.cargo, _number(op)) for op in transfers(program)]
        longest = issued if len(issued) > len(longest) else longest
    for program in case.programs(direction):
        places = [longest.index((op.link, op.cargo, _number(op))) for op in transfers(program)]
        assert all(one < other for one, other in pairwise(places))


def _number(op):
    """What an operation is about, as buffers are named after steps and rounds."""
    if isinstance(op, ToRanks):
        return op.target.buffer
    if isinstance(op, FromRanks):
        return op.source.buffer
    return (op.slot or op.sends[0].rows).buffer
