"""Gather schedules: every pair once, whole pieces only, balanced, in the buffers that are there."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_burst.errors import BurstError
from megatron_burst.plan.choose import choose_intra, choose_transfer
from megatron_burst.plan.choose_heads import choose_heads_per_round
from megatron_burst.plan.cost import AttentionShape, gather_bytes
from megatron_burst.plan.gather import gather_schedule
from megatron_burst.plan.layout import Layout, positions
from megatron_burst.plan.mask import Mask
from megatron_burst.plan.pieces import host_visits
from megatron_burst.plan.schedule import Circulate, Direction
from megatron_burst.plan.topology import Link, pretend_hosts, topology_of
from tests.plan.strategies import topologies

GATHERED = (Layout.ZIGZAG, Layout.CONTIGUOUS)


def schedules(topology, **options):
    return [gather_schedule(topology, rank, **options) for rank in range(topology.cp_size)]


@st.composite
def problems(draw):
    topology, heads_kv = draw(topologies(max_side=4)), draw(st.integers(1, 4))
    direction = draw(st.sampled_from(list(Direction)))
    options = {
        "layout": draw(st.sampled_from(GATHERED)),
        "mask": draw(st.sampled_from(list(Mask))),
        "tokens": 2 * draw(st.integers(1, 2)),
        "heads_kv": heads_kv,
        "heads_per_round": draw(st.integers(1, heads_kv)),
        "direction": direction,
        "rectangular_causal": draw(st.booleans()),
    }
    if direction is Direction.BACKWARD:
        options["circulate"] = draw(st.sampled_from(list(Circulate)))
    return topology, options


def pairs_of(tile, query_positions, key_positions):
    """(query position, key position) pairs of a tile; the diagonal ends in its last corner."""
    ahead = len(tile.kv) - len(tile.q)
    for i, row in enumerate(range(tile.q.start, tile.q.stop)):
        seen = ahead + i + 1 if tile.mask is Mask.CAUSAL else len(tile.kv)
        for key in range(tile.kv.start, tile.kv.start + seen):
            yield query_positions[row], key_positions[key]


def positions_in(layout, ranks, cp_size, tokens):
    """Positions of the rows of some ranks' shards."""
    return [p for rank in ranks for span in positions(layout, rank, cp_size, tokens) for p in span]


@settings(deadline=None, max_examples=60)
@given(problems())
def test_each_query_meets_each_visible_key_once_for_each_head(problem):
    topology, options = problem
    layout, size, tokens = options["layout"], topology.cp_size, options["tokens"]
    met = Counter()
    for rank, schedule in enumerate(schedules(topology, **options)):
        row, column = topology.coord(rank)
        mine = positions_in(layout, [rank], size, tokens)
        for step, leg in zip(schedule.steps, schedule.relay.legs, strict=True):
            there = (row - leg.distance) % topology.inter_size
            visitor = positions_in(layout, [topology.grid[there][column]], size, tokens)
            by_queries = schedule.circulate is Circulate.Q
            queries, host = (visitor, row) if by_queries else (mine, there)
            keys = sorted(positions_in(layout, topology.grid[host], size, tokens))
            for head in range(step.heads.start, step.heads.stop):
                for tile in (*step.before, *step.after):
                    met.update((head, *pair) for pair in pairs_of(tile, mine, mine))
                for tile in step.tiles:
                    met.update((head, *pair) for pair in pairs_of(tile, queries, keys))
    causal, whole = options["mask"] is Mask.CAUSAL, range(size * tokens)
    heads = range(options["heads_kv"])
    expected = {(h, q, k) for h in heads for q in whole for k in whole if k <= q or not causal}
    assert met.keys() == expected and set(met.values()) == {1}


@settings(deadline=None)
@given(problems())
def test_tiles_hold_whole_pieces_and_what_the_kernel_can_do(problem):
    """A share is sent piece by piece; kernels without rectangular causal tiles get square ones."""
    topology, options = problem
    for schedule in schedules(topology, **options):
        for step in schedule.steps:
            edges = {0} | {piece.whole.stop for piece in step.keys}
            assert all({t.kv.start, t.kv.stop} <= edges for t in step.tiles)
            for tile in step.every_tile:
                square = len(tile.q) == len(tile.kv)
                assert square or tile.mask is Mask.FULL or options["rectangular_causal"]
            assert all(tile.q == tile.kv for tile in (*step.before, *step.after))


@settings(deadline=None)
@given(problems())
def test_what_ranks_read_and_give_back_is_what_their_tiles_hold(problem):
    """What one takes is what the other gives, in the same order."""
    topology, options = problem
    every = schedules(topology, **options)
    for schedule in every:
        ranks = topology.grid[topology.coord(schedule.cp_rank)[0]]
        assert {*schedule.others, schedule.cp_rank} == set(ranks)
        seen = {(gather, rank): set() for gather in range(len(schedule.reads)) for rank in ranks}
        for index, step in enumerate(schedule.steps):
            for rank in ranks:
                tiles = every[rank].steps[index].tiles
                laid = [row for tile in tiles for row in range(tile.kv.start, tile.kv.stop)]
                seen[step.gather, rank].update(laid)
                for leaf in step.leaves[rank]:
                    assert laid[leaf.rows.slice] == list(
                        range(leaf.piece.whole.start, leaf.piece.whole.stop)
                    )
                if rank != schedule.cp_rank:
                    to_me = every[rank].steps[index].leaves[rank]
                    to_me = [leaf for leaf in to_me if leaf.piece.holder == schedule.cp_rank]
                    assert step.leaves[rank] == tuple(to_me)
                    continue
                left = sum(len(leaf.rows) for leaf in step.leaves[rank])
                own = [p.whole for p in step.keys if p.holder == rank]
                kept = sum(len(span) for tile in tiles for span in own if tile.kv.holds(span))
                assert left + kept == len(laid) <= schedule.share_rows
        for step in schedule.steps:
            for rank in ranks:
                rows = seen[step.gather, rank]
                foreign = [p for p in step.keys if p.holder != rank and p.whole.start in rows]
                if rank != schedule.cp_rank:
                    foreign = [piece for piece in foreign if piece.holder == schedule.cp_rank]
                assert schedule.reads[step.gather][rank] == tuple(foreign)


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("heads_per_round", [1, 2, 4])
def test_own_tiles_hide_the_first_gather_and_the_last_gradients(direction, heads_per_round):
    schedule = gather_schedule(
        pretend_hosts(4, 1), 1, layout=Layout.ZIGZAG, mask=Mask.CAUSAL, tokens=8, heads_kv=4,
        heads_per_round=heads_per_round, direction=direction, rectangular_causal=True,
    )  # fmt: skip
    assert schedule.steps[0].before
    assert bool(schedule.steps[-1].after) == (direction is Direction.BACKWARD)
    for step in schedule.steps[1:-1]:
        assert not step.before and not step.after


@pytest.mark.parametrize("hosts, ranks", [(1, 2), (1, 8), (2, 2), (4, 2), (2, 4), (8, 1)])
def test_work_is_balanced_in_zigzag(hosts, ranks):
    """Steps too: nobody waits for a rank whose tiles see more keys."""
    size = hosts * ranks
    every = schedules(
        pretend_hosts(size, hosts), layout=Layout.ZIGZAG, mask=Mask.CAUSAL, tokens=64, heads_kv=2,
        heads_per_round=1, direction=Direction.FORWARD, rectangular_causal=True,
    )  # fmt: skip
    for index in range(2 * hosts):
        work = {sum(tile.pairs for tile in s.steps[index].tiles) for s in every}
        assert len(work) == 1
    total = 64 * size
    pairs = sum(t.pairs for s in every for step in s.steps[hosts:] for t in step.tiles)
    assert pairs == total * (total + 1) // 2


@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_bytes_equal_the_formula(cp_size):
    """Under a causal mask in zigzag 3/4 of the other P-1 shards of keys are read; both chunks of a
    rank have gradients for the keys before them: P-1 shards in all."""
    shape = AttentionShape(2, 64, 8, 4, 16, 8, 2, 4, 4)
    shard = 2 * 64 * 4 * (16 + 8)
    one_host = pretend_hosts(cp_size, 1)

    def inside(schedule, share_bytes):
        sent = gather_bytes(schedule, shape, share_bytes)
        assert sent[Link.INTER] == 0
        return sent[Link.INTRA]

    for rectangular in (True, False):
        options = {
            "layout": Layout.ZIGZAG, "mask": Mask.CAUSAL, "tokens": 64, "heads_kv": 4,
            "heads_per_round": 1, "rectangular_causal": rectangular,
        }  # fmt: skip
        forward = schedules(one_host, direction=Direction.FORWARD, **options)
        shards = cp_size * (cp_size - 1) * shard
        assert sum(inside(s, 0) for s in forward) == 0.75 * shards * 2
        backward = schedules(one_host, direction=Direction.BACKWARD, **options)
        assert sum(inside(s, 4) for s in backward) == shards * (0.75 * 2 + 4)
        whole = schedules(one_host, direction=Direction.FORWARD, **options | {"mask": Mask.FULL})
        assert {inside(s, 0) for s in whole} == {(cp_size - 1) * shard * 2}


def test_pieces_are_the_sequence_in_order():
    (visit,) = host_visits(pretend_hosts(2, 1), 0, Layout.ZIGZAG, 4)
    pieces = visit.pieces
    assert [piece.holder for piece in pieces] == [0, 1, 1, 0]
    assert [piece.whole.start for piece in pieces] == [0, 2, 4, 6]
    assert [piece.rows.start for piece in pieces] == [0, 0, 2, 2]


def test_pieces_of_another_host_are_its_rows_in_the_hands_of_this_one():
    own, visit = host_visits(pretend_hosts(4, 2), 0, Layout.ZIGZAG, 4)
    assert [piece.holder for piece in visit.pieces] == [0, 1, 1, 0]
    assert [piece.whole.start for piece in visit.pieces] == [0, 2, 4, 6]
    assert (own.before, own.after) == ((0, 1, 2, 3), (0, 1, 2, 3))
    assert (visit.before, visit.after) == ((0, 0, 4, 4), (2, 2, 2, 2))


def test_hosts_on_one_side_visit_alike():
    """Of four hosts: the third itself, those before it, the one behind it."""
    visits = host_visits(pretend_hosts(8, 4), 2, Layout.ZIGZAG, 2)
    assert len(set(visits)) == 3
    assert visits[1] is visits[2]
    assert visits[1].before == (2, 2, 2, 2)
    assert visits[3].before == (0, 0, 4, 4)


def test_hosts_whose_ranks_interleave_visit_each_in_its_way():
    visits = host_visits(topology_of([0, 1, 0, 1]), 0, Layout.CONTIGUOUS, 1)
    assert visits[1].before == (0, 1)
    assert visits[1].after == (1, 2)


def test_the_striped_layout_cannot_be_gathered():
    with pytest.raises(BurstError, match="in the order of the sequence.*got layout striped; pass"):
        host_visits(pretend_hosts(2, 1), 0, Layout.STRIPED, 4)


def test_auto_gathers_on_gpus():
    one, two, alone = pretend_hosts(4, 1), pretend_hosts(4, 2), pretend_hosts(1, 1)

    def auto(topology, layout=Layout.ZIGZAG, device="cuda"):
        return choose_intra(topology, layout, device, "auto").value

    assert auto(one) == auto(two) == auto(one, Layout.CONTIGUOUS) == "gather"
    assert auto(two.flat()) == auto(alone) == "ring"
    assert auto(one, Layout.STRIPED) == auto(one, device="cpu") == "ring"
    assert choose_intra(one, Layout.ZIGZAG, "cpu", "gather").value == "gather"
    assert choose_intra(one, Layout.ZIGZAG, "cuda", "ring").reason == "asked for"


@pytest.mark.parametrize(
    "topology, layout, words",
    [
        (
            pretend_hosts(4, 2).flat(),
            Layout.ZIGZAG,
            "must share a host.*got flat ring of 4 ranks over 2 hosts; pass --burst-intra ring",
        ),
        (pretend_hosts(4, 1), Layout.STRIPED, "must not be striped.*got striped; pass"),
    ],
)
def test_gathering_is_refused_where_it_cannot_be(topology, layout, words):
    with pytest.raises(BurstError, match=words):
        choose_intra(topology, layout, "cuda", "gather")


def test_a_round_has_as_many_heads_as_the_buffer_holds():
    def heads(tokens, heads_q, heads_kv, asked=None):
        shape = AttentionShape(1, tokens, heads_q, heads_kv, 128, 128, 2, 4, 4)
        return choose_heads_per_round(shape, pretend_hosts(4, 1), 132, asked)

    assert heads(16384, 32, 32) == 4  # 32 MiB each
    assert heads(16384, 32, 8) == 8  # 256 MiB in all: one round
    assert heads(32768, 32, 8) == 2  # 64 MiB each
    assert heads(131072, 32, 32) == heads(131072, 8, 1) == 1
    assert heads(1 << 20, 32, 32) == 1  # however large a single head is
    wide = AttentionShape(1, 4096, 32, 32, 1024, 1024, 2, 4, 4)
    # 256 MiB each, but shorter tiles
    assert choose_heads_per_round(wide, pretend_hosts(16, 1), 132) == 16
    assert heads(16384, 32, 8, asked=5) == 5


@pytest.mark.parametrize(
    "multiprocessors, expected",
    [
        (132, {65536: 1, 32768: 2, 16384: 4}),  # 256, 128, 64 blocks a head: 1.94 waves
        (108, {65536: 2, 32768: 4, 16384: 5}),  # 256 would be 2.4 waves, 512 are 4.7
        (148, {65536: 4, 32768: 8, 16384: 9}),  # 256 are 1.7, 512 are 3.5, 1024 are 6.9
    ],
)
def test_a_round_fills_the_waves_of_any_gpu(multiprocessors, expected):
    for tokens, heads in expected.items():
        shape = AttentionShape(1, tokens, 32, 32, 128, 128, 2, 4, 4)
        assert choose_heads_per_round(shape, pretend_hosts(16, 4), multiprocessors) == heads


def test_several_hosts_have_several_rounds_or_one_if_asked():
    two = pretend_hosts(4, 2)

    def heads(heads_q, heads_kv, tokens=65536, **options):
        shape = AttentionShape(1, tokens, heads_q, heads_kv, 64, 64, 2, 4, 4)
        return choose_heads_per_round(shape, two, 132, **options)

    assert heads(32, 32) == 4 and heads(32, 8) == 1 and heads(8, 1) == 1
    assert heads(32, 32, tokens=2048) == 32  # whatever fills the kernels comes first
    assert heads(32, 32, pieces=False) == 32


@pytest.mark.parametrize(
    "hosts, device, asked, trouble, value",
    [
        (1, "cuda", "auto", None, "pull"),
        (1, "cuda", "pull", None, "pull"),
        (1, "cuda", "send", None, "send"),
        (1, "cuda", "auto", "no peer access", "send"),
        (2, "cuda", "auto", None, "pull"),
        (4, "cuda", "auto", None, "send"),
        (1, "cpu", "auto", None, "send"),
    ],
)
def test_ranks_pull_where_they_can(hosts, device, asked, trouble, value):
    choice = choose_transfer(pretend_hosts(4, hosts), device, asked, lambda: trouble)
    assert choice.value == value
    assert (trouble or "") in choice.reason


@pytest.mark.parametrize(
    "hosts, device, trouble, why",
    [
        (4, "cuda", None, "a rank must share its host with another"),
        (1, "cpu", None, "the ranks must use GPUs"),
        (1, "cuda", "no peer access", "symmetric memory must work between the GPUs; got: no peer"),
    ],
)
def test_pulling_that_cannot_be_done_is_refused(hosts, device, trouble, why):
    with pytest.raises(BurstError, match=why):
        choose_transfer(pretend_hosts(4, hosts), device, "pull", lambda: trouble)
