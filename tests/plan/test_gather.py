"""Gather schedules: every pair once, whole pieces only, balanced, in the buffers that are there."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.errors import BurstError
from megatron_burst.plan.choose import (
    choose_heads_per_round,
    choose_intra,
    choose_transfer,
)
from megatron_burst.plan.cost import AttentionShape, gather_bytes
from megatron_burst.plan.gather import gather_schedule, pieces_of
from megatron_burst.plan.layout import Layout, positions
from megatron_burst.plan.mask import Mask
from megatron_burst.plan.schedule import Direction
from megatron_burst.plan.topology import pretend_hosts

GATHERED = (Layout.ZIGZAG, Layout.CONTIGUOUS)


def schedules(cp_size, **options):
    return [gather_schedule(rank, cp_size, **options) for rank in range(cp_size)]


@st.composite
def problems(draw):
    cp_size, heads_kv = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    options = {
        "layout": draw(st.sampled_from(GATHERED)),
        "mask": draw(st.sampled_from(list(Mask))),
        "tokens": 2 * draw(st.integers(1, 3)),
        "heads_kv": heads_kv,
        "heads_per_round": draw(st.integers(1, heads_kv)),
        "direction": draw(st.sampled_from(list(Direction))),
        "rectangular_causal": draw(st.booleans()),
    }
    return cp_size, options


def pairs_of(tile, query_positions, key_positions):
    """(query position, key position) pairs of a tile; the diagonal ends in its last corner."""
    ahead = len(tile.kv) - len(tile.q)
    for i, row in enumerate(range(tile.q.start, tile.q.stop)):
        seen = ahead + i + 1 if tile.mask is Mask.CAUSAL else len(tile.kv)
        for key in range(tile.kv.start, tile.kv.start + seen):
            yield query_positions[row], key_positions[key]


@given(problems())
def test_each_query_meets_each_visible_key_once_for_each_head(problem):
    cp_size, options = problem
    whole = range(cp_size * options["tokens"])
    for rank, schedule in enumerate(schedules(cp_size, **options)):
        spans = positions(options["layout"], rank, cp_size, options["tokens"])
        mine = [position for span in spans for position in span]
        met = Counter()
        for round_ in schedule.rounds:
            for head in range(round_.heads.start, round_.heads.stop):
                for tile in (*round_.before, *round_.after):
                    met.update((head, *pair) for pair in pairs_of(tile, mine, mine))
                for tile in round_.tiles:
                    met.update((head, *pair) for pair in pairs_of(tile, mine, whole))
        causal = options["mask"] is Mask.CAUSAL
        heads = range(options["heads_kv"])
        expected = {(h, q, k) for h in heads for q in mine for k in whole if k <= q or not causal}
        assert met.keys() == expected and set(met.values()) == {1}


@given(problems())
def test_tiles_hold_whole_pieces_and_what_the_kernel_can_do(problem):
    """A share is sent piece by piece; kernels without rectangular causal tiles get square ones."""
    cp_size, options = problem
    for schedule in schedules(cp_size, **options):
        edges = {0} | {piece.whole.stop for piece in schedule.pieces}
        for round_ in schedule.rounds:
            assert all({t.kv.start, t.kv.stop} <= edges for t in round_.tiles)
            for tile in (*round_.before, *round_.tiles, *round_.after):
                square = len(tile.q) == len(tile.kv)
                assert square or tile.mask is Mask.FULL or options["rectangular_causal"]
            assert all(tile.q == tile.kv for tile in (*round_.before, *round_.after))


@given(problems())
def test_what_ranks_read_and_give_back_is_what_their_tiles_hold(problem):
    """All ranks must know of all: what one takes is what the other gives, in the same order."""
    cp_size, options = problem
    every = schedules(cp_size, **options)
    for schedule in every:
        for index, (reads, leaves) in enumerate(zip(schedule.reads, schedule.leaves, strict=True)):
            for rank, other in enumerate(every):
                tiles = other.rounds[index].tiles
                foreign = [p for p in schedule.pieces if p.owner != rank]
                seen = {row for tile in tiles for row in range(tile.kv.start, tile.kv.stop)}
                assert reads[rank] == tuple(p for p in foreign if p.whole.start in seen)
                laid = [row for tile in tiles for row in range(tile.kv.start, tile.kv.stop)]
                for leaf in leaves[rank]:
                    assert laid[leaf.rows.slice] == list(
                        range(leaf.piece.whole.start, leaf.piece.whole.stop)
                    )
                left = sum(len(leaf.rows) for leaf in leaves[rank])
                own = [p.whole for p in schedule.pieces if p.owner == rank]
                kept = sum(len(span) for tile in tiles for span in own if tile.kv.holds(span))
                assert left + kept == len(laid) <= schedule.share_rows


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("heads_per_round", [1, 2, 4])
def test_own_tiles_hide_the_first_gather_and_the_last_gradients(direction, heads_per_round):
    schedule = gather_schedule(
        1, 4, layout=Layout.ZIGZAG, mask=Mask.CAUSAL, tokens=8, heads_kv=4,
        heads_per_round=heads_per_round, direction=direction, rectangular_causal=True,
    )  # fmt: skip
    assert schedule.rounds[0].before
    assert bool(schedule.rounds[-1].after) == (direction is Direction.BACKWARD)
    for round_ in schedule.rounds[1:-1]:
        assert not round_.before and not round_.after


@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_work_is_balanced_in_zigzag(cp_size):
    """Rounds too: nobody waits for a rank whose tiles see more keys."""
    every = schedules(
        cp_size, layout=Layout.ZIGZAG, mask=Mask.CAUSAL, tokens=64, heads_kv=2, heads_per_round=1,
        direction=Direction.FORWARD, rectangular_causal=True,
    )  # fmt: skip
    for index in range(2):
        work = {sum(tile.pairs for tile in s.rounds[index].tiles) for s in every}
        assert len(work) == 1
    total = 64 * cp_size
    assert sum(t.pairs for s in every for t in s.rounds[1].tiles) == total * (total + 1) // 2


@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_bytes_equal_the_formula(cp_size):
    """Under a causal mask in zigzag 3/4 of the other P-1 shards of keys are read; both chunks of a
    rank have gradients for the keys before them: P-1 shards in all."""
    shape = AttentionShape(2, 64, 8, 4, 16, 8, 2, 4, 4)
    shard = 2 * 64 * 4 * (16 + 8)
    for rectangular in (True, False):
        options = {
            "layout": Layout.ZIGZAG, "mask": Mask.CAUSAL, "tokens": 64, "heads_kv": 4,
            "heads_per_round": 1, "rectangular_causal": rectangular,
        }  # fmt: skip
        forward = schedules(cp_size, direction=Direction.FORWARD, **options)
        shards = cp_size * (cp_size - 1) * shard
        assert sum(gather_bytes(s, shape, 0) for s in forward) == 0.75 * shards * 2
        backward = schedules(cp_size, direction=Direction.BACKWARD, **options)
        assert sum(gather_bytes(s, shape, 4) for s in backward) == shards * (0.75 * 2 + 4)
        whole = schedules(cp_size, direction=Direction.FORWARD, **options | {"mask": Mask.FULL})
        assert {gather_bytes(s, shape, 0) for s in whole} == {(cp_size - 1) * shard * 2}


def test_pieces_are_the_sequence_in_order():
    pieces = pieces_of(Layout.ZIGZAG, 2, 4)
    assert [piece.owner for piece in pieces] == [0, 1, 1, 0]
    assert [piece.whole.start for piece in pieces] == [0, 2, 4, 6]
    assert [piece.rows.start for piece in pieces] == [0, 0, 2, 2]


def test_the_striped_layout_cannot_be_gathered():
    with pytest.raises(BurstError, match="in the order of the sequence.*got layout striped; pass"):
        pieces_of(Layout.STRIPED, 2, 4)


def test_auto_gathers_on_gpus_of_one_host_only():
    one, two, alone = pretend_hosts(4, 1), pretend_hosts(4, 2), pretend_hosts(1, 1)

    def auto(topology, layout=Layout.ZIGZAG, device="cuda"):
        return choose_intra(topology, layout, device, "auto").value

    assert auto(one) == auto(one, Layout.CONTIGUOUS) == "gather"
    assert (
        auto(two) == auto(alone) == auto(one, Layout.STRIPED) == auto(one, device="cpu") == "ring"
    )
    assert choose_intra(one, Layout.ZIGZAG, "cpu", "gather").value == "gather"
    assert choose_intra(one, Layout.ZIGZAG, "cuda", "ring").reason == "asked for"


@pytest.mark.parametrize(
    "topology, layout, words",
    [
        (pretend_hosts(4, 2), Layout.ZIGZAG, "must share a host.*got 2; pass --burst-intra ring"),
        (pretend_hosts(4, 1), Layout.STRIPED, "must not be striped.*got striped; pass"),
    ],
)
def test_gathering_is_refused_where_it_cannot_be(topology, layout, words):
    with pytest.raises(BurstError, match=words):
        choose_intra(topology, layout, "cuda", "gather")


def test_a_round_has_as_many_heads_as_the_buffer_holds():
    def heads(tokens, heads_q, heads_kv, asked=None):
        shape = AttentionShape(1, tokens, heads_q, heads_kv, 128, 128, 2, 4, 4)
        return choose_heads_per_round(shape, 4, asked)

    assert heads(16384, 32, 32) == 4  # 32 MiB each
    assert heads(16384, 32, 8) == 8  # 256 MiB in all: one round
    assert heads(32768, 32, 8) == 2  # 64 MiB each
    assert heads(131072, 32, 32) == heads(131072, 8, 1) == 1
    assert heads(1 << 20, 32, 32) == 1  # however large a single head is
    wide = AttentionShape(1, 4096, 32, 32, 1024, 1024, 2, 4, 4)
    assert choose_heads_per_round(wide, 16, None) == 16  # 256 MiB each, but shorter tiles
    assert heads(16384, 32, 8, asked=5) == 5
    with pytest.raises(BurstError, match="must not exceed the key heads.*got 3 of 2; leave it out"):
        heads(16384, 8, 2, asked=3)


@pytest.mark.parametrize(
    "hosts, device, asked, trouble, value",
    [
        (1, "cuda", "auto", None, "pull"),
        (1, "cuda", "pull", None, "pull"),
        (1, "cuda", "send", None, "send"),
        (1, "cuda", "auto", "no peer access", "send"),
        (2, "cuda", "auto", None, "send"),
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
        (2, "cuda", None, "all ranks must share a host"),
        (1, "cpu", None, "the ranks must use GPUs"),
        (1, "cuda", "no peer access", "symmetric memory must work between the GPUs; got: no peer"),
    ],
)
def test_pulling_that_cannot_be_done_is_refused(hosts, device, trouble, why):
    with pytest.raises(BurstError, match=why):
        choose_transfer(pretend_hosts(4, hosts), device, "pull", lambda: trouble)
