"""Gather schedules: every pair once, whole pieces only, balanced, in the buffers that are there."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_burst.plan.cost import gather_bytes
from megatron_burst.plan.gather import gather_schedule
from megatron_burst.schedule.call import AttentionShape, Circulate, Direction
from megatron_burst.schedule.layout import Layout, positions
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.topology import Link, pretend_hosts
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
