"""Bytes against figures of the papers computed by hand, and what follows from them."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_burst.resolve import choose_circulate
from megatron_burst.rules import hop_bytes, inter_ring_bytes, with_wire_dtype
from megatron_burst.schedule.spec import AttentionShape, Circulate, Direction
from megatron_burst.schedule.topology import pretend_nodes

MHA = AttentionShape(
    batch=1, tokens=8, heads_q=32, heads_kv=32, dim_qk=128, dim_v=128,
    itemsize=2, stat_bytes=4, grad_bytes=2,
)  # fmt: skip
GQA = replace(MHA, heads_kv=8)


@pytest.mark.parametrize("nodes", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_circulating_q_saves_24_percent_of_backward_at_every_number_of_nodes(nodes, ranks):
    """MHA, d 128, bf16: 512 B per hop, token and head in forward; 1024 in backward with KV, 776
    with Q. The original's extra inter hop of dQ cancels the savings at two nodes."""
    topology = pretend_nodes(nodes * ranks, nodes)
    for circulate, width in ((Circulate.KV, 512 + 1024), (Circulate.Q, 512 + 776)):
        assert inter_ring_bytes(MHA, topology, circulate) == (nodes - 1) * 8 * 32 * width
    assert pytest.approx(0.2422, abs=1e-4) == 1 - 776 / 1024


@pytest.mark.parametrize(
    "heads_q, heads_kv, dims, grad_bytes, chosen",
    [
        (32, 32, (128, 128), 2, "q"),
        (32, 16, (128, 128), 2, "kv"),
        (32, 8, (128, 128), 4, "kv"),
        (32, 32, (64, 64), 4, "q"),
        (8, 8, (192, 128), 2, "q"),  # MLA, expanded heads
        (3, 3, (1, 1), 2, "kv"),  # statistics outweigh a head of one element
    ],
)
def test_auto_takes_fewer_bytes(heads_q, heads_kv, dims, grad_bytes, chosen):
    """The published break-even: Q for MHA, K and V as soon as heads are grouped."""
    shape = AttentionShape(1, 8, heads_q, heads_kv, *dims, 2, 4, grad_bytes)
    choice = choose_circulate(shape)
    assert choice.value == chosen and "a hop of backward is" in choice.reason


def test_a_choice_can_be_asked_for():
    choice = choose_circulate(GQA, Circulate.Q)
    assert choice.value == "q" and choice.reason.startswith("asked for")


def test_the_table_of_bytes_between_nodes_is_what_is_sent():
    """docs/concepts/programs.md: bytes of a backward for each token and query head."""
    page = Path(__file__).parents[2] / "docs/concepts/programs.md"
    rows = [line.split("|")[1:-1] for line in page.read_text().splitlines() if line[:2] == "| "]
    rows = [[cell.strip() for cell in row] for row in rows if row[0][:5] in (" MHA ", " GQA,")]
    assert len(rows) == 6
    for name, nodes, *figures in rows:
        heads_kv = 4 if name == "MHA" else 1
        shape = with_wire_dtype(AttentionShape(1, 1, 4, heads_kv, 128, 128, 2, 4, 4), None)
        sent = [
            sum(hop_bytes(shape, Direction.BACKWARD, circulate).values()) * (int(nodes) - 1) / 4
            for circulate in Circulate
        ]
        assert [int(figure) for figure in figures[:3]] == [*sent, min(sent)]
