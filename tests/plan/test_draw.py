"""Drawings show what the schedule says."""

import pytest

from megatron_burst.plan.draw import as_text, save_picture
from megatron_burst.schedule.call import Circulate, Direction
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.topology import pretend_hosts
from tests.plan.strategies import schedules


def ring(direction, circulate=Circulate.KV):
    return schedules(
        pretend_hosts(4, 2), layout=Layout.ZIGZAG, mask=Mask.CAUSAL, tokens=2,
        direction=direction, circulate=circulate,
    )  # fmt: skip


def test_text_names_visitors_work_and_hops():
    lines = as_text(ring(Direction.FORWARD)).splitlines()
    assert lines[0] == "forward on 2 hosts x 2 ranks, zigzag, causal: KV circulates"
    assert lines[3].split() == ("rank 0 [0] causal ⇒2 →1 [1] ½ q [2] ½ q →1 [3] ½ q".split())
    backward = as_text(ring(Direction.BACKWARD, Circulate.Q)).splitlines()
    assert backward[4].split()[-4:] == ["home", "⇛3", "home", "⇢0"]


@pytest.mark.parametrize("suffix, magic", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_picture_is_written_in_the_format_of_its_suffix(tmp_path, suffix, magic):
    path = tmp_path / f"schedule.{suffix}"
    save_picture([ring(Direction.FORWARD), ring(Direction.BACKWARD, Circulate.Q)], path)
    content = path.read_bytes()
    assert content.startswith(magic)
    if suffix == "svg":  # matplotlib writes a label as a comment beside its glyphs
        text = content.decode()
        for label in ("rank 3", "shard 0", "go home", "step 5", "gradient, between hosts"):
            assert f"<!-- {label} -->" in text, label
