"""How a call runs between nodes: bytes decide, and exposed communication."""

from contextlib import suppress
from dataclasses import replace

import pytest

from benchmarks.documents import SEED, lengths_of
from megatron_burst.errors import BurstError
from megatron_burst.resolve import circulating_share, resolve, reuses_remote
from megatron_burst.rules import a2a_bytes, inter_ring_bytes
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.modes import MODES, mode_of
from megatron_burst.schedule.spec import AttentionShape, Circulate, Direction
from megatron_burst.schedule.topology import Link, pretend_nodes
from megatron_burst.tools.hardware import Curve, LinkSpeed
from megatron_burst.tools.packed import way_of as packed_way
from megatron_burst.tools.simulate.call import left_bytes, program, resolved
from megatron_burst.tools.simulate.sample import Sample
from tests.frozen import drawn_call
from tests.tools.simulate.calls import call_of, opened
from tests.tools.simulate.machines import H200


def shape_of(heads_q, heads_kv, grad_bytes=4):
    return AttentionShape(1, 16384, heads_q, heads_kv, 128, 128, 2, 4, grad_bytes)


def between(topology, shape=None, **asked):
    """What runs between nodes, and why."""
    return resolve(opened(shape, topology, **asked))[1]["inter"]


WIDE, NARROW = {"grad_wire": "accumulate"}, {"grad_wire": "input"}


@pytest.mark.parametrize(
    "heads, nodes, asked, value",
    [
        ((32, 8), 2, WIDE, "ring"),  # few KV heads: small K, V
        ((32, 32), 2, WIDE, "a2a"),
        ((32, 32), 2, NARROW | {"heads_per_round": 1}, "a2a"),
        ((32, 32), 2, NARROW | {"heads_per_round": 1, "resends": True}, "ring"),
        ((32, 32), 4, WIDE | {"resends": True}, "a2a"),
        ((32, 32), 2, NARROW | {"heads_per_round": 2}, "ring"),  # half of it is exposed
        ((32, 32), 4, WIDE | {"device": "cpu"}, "a2a"),
        ((36, 36), 4, WIDE, "ring"),  # 8 ranks do not divide the heads
        ((32, 4), 8, WIDE, "a2a"),  # on more than two nodes all bytes count once, also those of
        ((32, 4), 8, NARROW, "a2a"),  # its one round, which nothing hides
        ((32, 4), 4, NARROW, "ring"),
        ((32, 32), 1, WIDE, "ring"),
        ((32, 32), 1, WIDE | {"inter": "a2a"}, "a2a"),
        ((32, 8), 2, WIDE | {"inter": "flat"}, "flat"),
    ],
)
def test_between_nodes_bytes_decide(heads, nodes, asked, value):
    assert between(pretend_nodes(8, nodes), shape_of(*heads), **asked).value == value


def test_what_nothing_hides_counts_twice():
    """MHA on two nodes, gradients in bf16: 4 units of bytes in eight rounds against 5."""
    shape, topology = shape_of(32, 32, 2), pretend_nodes(4, 2)
    unit = 16384 * 32 * 128 * 2
    statistics = 16384 * 32 * 4  # one of lse, delta
    assert a2a_bytes(shape, topology) == 4 * unit + statistics
    ring = min(inter_ring_bytes(shape, topology, circulate) for circulate in Circulate)
    assert ring == 5 * unit + 2 * statistics
    spec, reasons = resolve(opened(shape, topology))
    assert spec.inter == spec.intra == "a2a" and spec.heads_per_round == 1
    assert reasons["inter"].reason == (
        "between nodes a ring sends 644 MiB a rank, an all-to-all 514 MiB, of which 64.2 MiB are "
        "exposed"
    )
    for other in ({"pieces": False}, {"heads_per_round": 4}, {"resends": True}):
        assert between(topology, shape, **other).value == "ring"


def test_what_was_asked_for_inside_a_node_stays():
    choice = between(pretend_nodes(8, 4), shape_of(32, 32), intra="gather")
    assert choice.value == "ring" and "intra=gather was asked for" in choice.reason


@pytest.mark.parametrize("again", [False, True])
def test_exchanged_bytes_are_the_formulas(again):
    """n(4h_q + 4h_kv)(1 - 1/N) elements and the statistics, in bf16; n(5h_q + 6h_kv) with kept
    results."""
    shape, topology = shape_of(32, 8), pretend_nodes(4, 2)
    width = 16384 * 128 * 2
    tensors = 5 * 32 + 6 * 8 if again else 4 * 32 + 4 * 8
    statistics = 16384 * 32 * 4 * (3 if again else 2)
    assert a2a_bytes(shape, topology, again) == (width * tensors + statistics) // 2


def test_kv_heads_count_for_each_rank_that_needs_them():
    """Each of 8 ranks gets one of 8 KV heads, or a copy of one of 2; 1 - 1/N of it leaves the
    node."""
    topology = pretend_nodes(8, 4)
    eight, two = (a2a_bytes(shape_of(32, heads), topology) for heads in (8, 2))
    assert eight == two
    assert call_of(shape_of(32, 2), topology, inter="a2a").heads_per_round == 1
    counted = call_of(shape_of(32, 2), topology, inter="a2a", layout=Layout.CONTIGUOUS)
    sent = [program(counted, 0, direction).sent_bytes()[Link.INTER] for direction in Direction]
    assert sum(sent) == two


DOCUMENTS = Mask(right=0, documents=True)


def documents_call(tokens, heads, grid=(2, 1), layout=Layout.ZIGZAG, mask=DOCUMENTS, **options):
    """A call with `tokens` tokens in the whole sample."""
    ranks = grid[0] * grid[1]
    shape = AttentionShape(1, tokens // ranks, *heads, 128, 128, 2, 4, 4)
    topology = pretend_nodes(ranks, grid[0])
    return opened(shape, topology, layout=layout, mask=mask, **options)


@pytest.mark.parametrize("layout", [Layout.ZIGZAG, Layout.CONTIGUOUS, Layout.DOCUMENTS])
@pytest.mark.parametrize(
    "tokens, heads, grid, way",
    [
        (32768, (64, 8), (2, 1), "ring"),  # measured: 42 TFLOP/s per GPU all-to-all, 108 ring
        (131072, (64, 8), (2, 1), "ring"),  # 118, 386
        (131072, (32, 8), (2, 1), "ring"),  # 115, 241
        (262144, (32, 8), (2, 1), "ring"),  # 171, 369
        (131072, (32, 32), (2, 1), "a2a"),  # fewer bytes
        (131072, (32, 8), (8, 1), "a2a"),  # K and V go round seven times
        (131072, (64, 8), (4, 4), "ring"),
        (131072, (64, 8), (16, 1), "a2a"),  # 16 ranks, 8 KV heads
    ],
)
def test_documents_go_between_nodes_as_they_take_less_time(tokens, heads, grid, way, layout):
    call = resolved(documents_call(tokens, heads, grid, layout))
    assert (call.inter, call.intra) == (way, "gather" if way == "ring" else "a2a")
    for direction in Direction:
        program(call, 0, direction)


def sample_seconds(call, sample, layout=Layout.ZIGZAG):
    """Simulated time of both passes with known documents, and a slow link between nodes."""
    slow = LinkSpeed(20.0, Curve(((1.0, 5.0),)))
    links = replace(H200.links, inter=slow)
    return sum(packed_way(call, sample, replace(H200, links=links), layout).seconds)


@pytest.mark.parametrize("tokens", [1 << 18, 1 << 20])
def test_documents_of_long_samples_stay_although_ranks_have_unequal_work(tokens):
    """Documents end: kernels take as long per token in a sample of any length, so a slow link
    decides for a million tokens as it does for fewer."""
    call = documents_call(tokens, (64, 8), (2, 2))
    assert resolved(call).inter == "ring"
    sample = Sample.of(lengths_of("drawn", tokens, SEED, 8))
    chosen = sample_seconds(call, sample)
    assert 1.4 * chosen < sample_seconds(replace(call, inter="a2a"), sample)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("layout", [Layout.ZIGZAG, Layout.DOCUMENTS])
def test_windows_in_documents_are_exchanged_over_all_ranks(layout, device):
    mask = Mask(4096, 0, documents=True)
    call = documents_call(131072, (64, 8), layout=layout, mask=mask, device=device)
    spec, reasons = resolve(call)
    assert spec.inter == spec.intra == "a2a" and "windows" in reasons["inter"].reason


@pytest.mark.parametrize("nodes", [1, 2])
def test_even_documents_are_gathered_inside_a_node(nodes):
    call = documents_call(131072, (64, 8), (nodes, 4), Layout.DOCUMENTS)
    found = resolved(call)
    assert found.intra == "gather" and found.inter == "ring"


@pytest.mark.parametrize("heads", [(64, 8), (32, 32)], ids=str)
@pytest.mark.parametrize("layout", [Layout.ZIGZAG, Layout.CONTIGUOUS])
@pytest.mark.parametrize("grid", [(2, 1), (2, 4)])
def test_of_windows_the_halo_goes_round_and_stays_whatever_the_heads(grid, layout, heads):
    """An all-to-all sends all heads; K and V of 4K rows are less than any rank's queries."""
    asked = documents_call(131072, heads, grid, layout, Mask(4096, 0))
    call = resolved(asked)
    assert (call.inter, call.intra, reuses_remote(call)) == ("ring", "gather", True)
    rows = 4096 * heads[1] * 256
    assert left_bytes(call) == 2 * rows
    sent = [
        sum(program(call, rank, direction).sent_bytes()[Link.INTER] for direction in Direction)
        for rank in range(grid[0] * grid[1])
    ]
    assert max(sent) == 2 * rows * (2 if layout is Layout.ZIGZAG and grid[1] == 1 else 1)
    assert circulating_share(replace(asked, intra="ring")) == 1.0


def test_auto_takes_every_mode_but_those_by_force():
    taken = set()
    for number in range(600):
        spec = replace(
            drawn_call(number), inter=None, intra=None, heads_per_round=None, circulate=None,
            pulled=None, saves_remote=None,
        )  # fmt: skip
        with suppress(BurstError):  # a mask that no mode has in that layout
            taken.add(mode_of(resolve(spec)[0]))
    assert taken == {name for name, mode in MODES.items() if not mode.by_force}
