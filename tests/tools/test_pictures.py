"""The picture shows what the programs do."""

from pathlib import Path

import pytest

from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.spec import Circulate, Direction
from megatron_burst.schedule.topology import pretend_nodes
from megatron_burst.tools.pictures import _drawn, _shown
from tests.schedule.cases import Case, grid


def spec(direction, circulate=Circulate.KV):
    return Case("ring", grid(2, 2), Layout.ZIGZAG, Mask.CAUSAL, circulate).spec(direction)


@pytest.mark.parametrize("suffix, magic", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_picture_is_written_in_the_format_of_its_suffix(tmp_path, suffix, magic, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "docs")
    from draw_ring import save_picture

    path = tmp_path / f"schedule.{suffix}"
    save_picture([spec(Direction.FORWARD), spec(Direction.BACKWARD, Circulate.Q)], path)
    content = path.read_bytes()
    assert content.startswith(magic)
    if suffix == "svg":  # matplotlib writes a label as a comment next to its glyphs
        text = content.decode()
        for label in ("rank 3", "shard 0", "return", "step 5", "gradient, between nodes"):
            assert f"<!-- {label} -->" in text, label


@pytest.mark.parametrize(
    "nodes, ranks, of_node, expected",
    [
        (1, 8, 8, list(range(8))),
        (2, 16, 8, list(range(16))),
        (1, 64, 64, [0, 63]),
        (3, 24, 8, [0, 7, 8, 15, 16, 23]),
        (4, 32, 8, [0, 7, 8, 15, 24, 31]),
        (8, 64, 8, [0, 7, 8, 15, 56, 63]),
        (20, 20, 1, [0, 1, 19]),
    ],
)
def test_of_many_ranks_the_ends_of_a_few_nodes_have_a_row(nodes, ranks, of_node, expected):
    """64 rows would be too low to read."""
    topology = pretend_nodes(ranks, nodes)
    assert ranks == nodes * of_node and _drawn(range(ranks), topology) == expected
    said = _shown(range(ranks), expected, topology)
    assert ("first and the last rank" in said) is (of_node > 1 and len(expected) < ranks)
    assert (f"the other {nodes - 3} nodes" in said) is (nodes > 3 and ranks > 16)


def test_of_more_ranks_than_are_simulated_the_first_are_drawn():
    topology = pretend_nodes(128, 16)
    said = _shown(range(64), _drawn(range(64), topology), topology)
    assert "the first 64 ranks" in said and "the other 5 nodes" in said
