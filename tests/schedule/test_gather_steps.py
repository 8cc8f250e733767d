"""Steps of gathers: every pair once, whole pieces only, balanced, sends match receives."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_burst.schedule.gather_steps import gather_steps
from megatron_burst.schedule.inter_node import heads_in_rounds, steps
from megatron_burst.schedule.layout import Layout, positions
from megatron_burst.schedule.spec import Circulate, Direction, Kernel, Spec
from megatron_burst.schedule.topology import pretend_nodes
from tests.schedule.cases import MASKS, shape_of
from tests.schedule.strategies import topologies

GATHERED = (Layout.ZIGZAG, Layout.CONTIGUOUS)


def order_of(spec):
    """Round and distance of each step."""
    rounds = heads_in_rounds(spec.shape.heads_kv, spec.heads_per_round)
    return steps(spec.topology.inter_size, len(rounds), spec.backward, spec.saves_remote)


def steps_of(spec):
    """Steps of all ranks."""
    ranks, order = range(spec.topology.cp_size), order_of(spec)
    return [gather_steps(replace(spec, cp_rank=rank), order) for rank in ranks]


@st.composite
def specs(draw):
    topology, heads_kv = draw(topologies(max_side=4)), draw(st.integers(1, 4))
    direction = draw(st.sampled_from(list(Direction)))
    backward = direction is Direction.BACKWARD
    circulate = draw(st.sampled_from(list(Circulate))) if backward else Circulate.KV
    return Spec(
        topology, shape_of(2 * draw(st.integers(1, 2)), (heads_kv, heads_kv)),
        draw(st.sampled_from(GATHERED)), draw(st.sampled_from(MASKS)),
        Kernel(rectangular_causal=draw(st.booleans())), intra="gather",
        heads_per_round=draw(st.integers(1, heads_kv)), circulate=circulate,
        saves_remote=circulate is Circulate.KV and draw(st.booleans()), direction=direction,
    )  # fmt: skip


def pairs_of(tile, query_positions, key_positions):
    """(query position, key position) pairs of a tile; the diagonal ends in its last corner."""
    ahead = len(tile.kv) - len(tile.q)
    for i, row in enumerate(range(tile.q.start, tile.q.stop)):
        seen = ahead + i + 1 if tile.mask.causal else len(tile.kv)
        for key in range(tile.kv.start, tile.kv.start + seen):
            yield query_positions[row], key_positions[key]


def positions_in(layout, ranks, cp_size, tokens):
    """Positions of the rows of some ranks' shards."""
    return [p for rank in ranks for span in positions(layout, rank, cp_size, tokens) for p in span]


@settings(deadline=None, max_examples=60)
@given(specs())
def test_each_query_meets_each_visible_key_once_for_each_head(spec):
    topology, layout, tokens = spec.topology, spec.layout, spec.shape.tokens
    size = topology.cp_size
    met, rounds = Counter(), heads_in_rounds(spec.shape.heads_kv, spec.heads_per_round)
    for rank, gathers in enumerate(steps_of(spec)):
        row, column = topology.coord(rank)
        mine = positions_in(layout, [rank], size, tokens)
        for step, leg in zip(gathers.steps, order_of(spec), strict=True):
            there = (row - leg.node_offset) % topology.inter_size
            circulating = positions_in(layout, [topology.grid[there][column]], size, tokens)
            by_queries = spec.circulate is Circulate.Q
            queries, node = (circulating, row) if by_queries else (mine, there)
            keys = sorted(positions_in(layout, topology.grid[node], size, tokens))
            for head in range(rounds[leg.round].start, rounds[leg.round].stop):
                for tile in (*step.tiles.before, *step.tiles.after):
                    met.update((head, *pair) for pair in pairs_of(tile, mine, mine))
                for tile in step.tiles.gathered:
                    met.update((head, *pair) for pair in pairs_of(tile, queries, keys))
    causal, whole = spec.mask.causal, range(size * tokens)
    heads = range(spec.shape.heads_kv)
    expected = {(h, q, k) for h in heads for q in whole for k in whole if k <= q or not causal}
    assert met.keys() == expected and set(met.values()) == {1}


@settings(deadline=None)
@given(specs())
def test_tiles_hold_whole_pieces_and_what_the_kernel_can_do(spec):
    """Parts are sent piece by piece; kernels without rectangular causal tiles get square ones."""
    for gathers in steps_of(spec):
        for step in gathers.steps:
            edges = {0} | {piece.node_rows.stop for piece in step.keys}
            assert all({t.kv.start, t.kv.stop} <= edges for t in step.tiles.gathered)
            for tile in step.tiles.all_tiles:
                square = len(tile.q) == len(tile.kv)
                assert square or tile.mask.full or spec.kernel.rectangular_causal
            assert all(tile.q == tile.kv for tile in (*step.tiles.before, *step.tiles.after))


@settings(deadline=None)
@given(specs())
def test_what_ranks_read_and_give_back_is_what_their_tiles_hold(spec):
    """What one rank takes is what the other gives, in the same order."""
    topology = spec.topology
    every = steps_of(spec)
    for mine, gathers in enumerate(every):
        ranks = topology.grid[topology.coord(mine)[0]]
        assert {*topology.row_peers(mine), mine} == set(ranks)
        seen = {(gather, rank): set() for gather in range(len(gathers.reads)) for rank in ranks}
        for index, (gather, step) in enumerate(zip(gathers.gathers, gathers.steps, strict=True)):
            for rank in ranks:
                tiles = every[rank].steps[index].tiles.gathered
                laid = [row for tile in tiles for row in range(tile.kv.start, tile.kv.stop)]
                seen[gather, rank].update(laid)
                for leaf in step.grad_sends[rank]:
                    assert laid[leaf.rows.slice] == list(
                        range(leaf.chunk.node_rows.start, leaf.chunk.node_rows.stop)
                    )
                if rank != mine:
                    to_me = every[rank].steps[index].grad_sends[rank]
                    to_me = [leaf for leaf in to_me if leaf.chunk.cp_rank == mine]
                    assert step.grad_sends[rank] == tuple(to_me)
                    continue
                left = sum(len(leaf.rows) for leaf in step.grad_sends[rank])
                own = [p.node_rows for p in step.keys if p.cp_rank == rank]
                kept = sum(len(span) for tile in tiles for span in own if tile.kv.contains(span))
                assert left + kept == len(laid) <= gathers.grad_rows
        for gather, step in zip(gathers.gathers, gathers.steps, strict=True):
            for rank in ranks:
                rows = seen[gather, rank]
                foreign = [p for p in step.keys if p.cp_rank != rank and p.node_rows.start in rows]
                if rank != mine:
                    foreign = [piece for piece in foreign if piece.cp_rank == mine]
                assert gathers.reads[gather][rank] == tuple(foreign)


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("heads_per_round", [1, 2, 4])
def test_own_tiles_hide_the_first_gather_and_the_last_gradients(direction, heads_per_round):
    spec = Spec(
        pretend_nodes(4, 1), shape_of(8, (4, 4)), intra="gather", heads_per_round=heads_per_round,
        circulate=Circulate.KV, cp_rank=1, direction=direction,
    )  # fmt: skip
    found = [step.tiles for step in gather_steps(spec, order_of(spec)).steps]
    assert found[0].before
    assert bool(found[-1].after) == (direction is Direction.BACKWARD)
    for step in found[1:-1]:
        assert not step.before and not step.after


@pytest.mark.parametrize("nodes, ranks", [(1, 2), (1, 8), (2, 2), (4, 2), (2, 4), (8, 1)])
def test_work_is_balanced_in_zigzag(nodes, ranks):
    """In each step too: no rank waits for one whose tiles see more keys."""
    size = nodes * ranks
    every = steps_of(
        Spec(
            pretend_nodes(size, nodes), shape_of(64, (2, 2)), intra="gather", heads_per_round=1,
            circulate=Circulate.KV,
        )
    )  # fmt: skip
    for index in range(2 * nodes):
        work = {sum(tile.pairs for tile in s.steps[index].tiles.gathered) for s in every}
        assert len(work) == 1
    total = 64 * size
    pairs = sum(t.pairs for s in every for step in s.steps[nodes:] for t in step.tiles.gathered)
    assert pairs == total * (total + 1) // 2
