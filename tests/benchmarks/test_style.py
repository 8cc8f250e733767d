"""Pictures of results: one colour a mode in all of them, and what they say of their rows."""

import csv

import pytest

from benchmarks.show import ROOT
from benchmarks.style import colour_of, measured_on
from tests.benchmarks.rows import row

SEPARATE = (  # implementations that are drawn together have different colours
    "attention_4xh200_one_node", "attention_2x2xh200", "packed_2xh200_one_node",
    "recompute_4xh200", "loss_h200",
)  # fmt: skip


@pytest.mark.parametrize("name", SEPARATE)
def test_modes_of_one_picture_have_colours_of_their_own(name):
    with (ROOT / "benchmarks" / "results" / f"{name}.csv").open() as file:
        rows = [each for each in csv.DictReader(file) if not each.get("superseded")]
    rows = [each for each in rows if each["ms"] and each.get("pass", "fwd_bwd") == "fwd_bwd"]
    names = {":".join(filter(None, (each["impl"], each.get("mode")))) for each in rows}
    drawn = {name for name in names if "burst:backend" not in name}
    colours = [colour_of(name) for name in drawn]
    assert len(drawn) > 5 and len(set(colours)) == len(colours), (colours, drawn)


def test_bursts_default_and_its_peers_are_told_apart_everywhere():
    assert colour_of("burst") == colour_of("burst:auto") == colour_of("burst:all")
    assert colour_of("te:p2p") == colour_of("megatron") == colour_of("megatron:full")
    assert colour_of("burst") != colour_of("te:p2p")
    assert colour_of("some:mode") == colour_of("some:mode")


def test_words_for_gpus_and_days():
    rows = [
        row("burst:auto", (1, 1, 1)),
        row("te:p2p", (2, 2, 2), date="2026-01-05T00:00:00+00:00"),
    ]
    assert measured_on(rows) == "4 x H200, 2026-01-02 to 2026-01-05"
    assert measured_on(rows[:1]) == "4 x H200, 2026-01-02"
    mixed = [*rows, row("burst:auto", (1, 1, 1), ranks=2, gpu="NVIDIA H100 80GB HBM3; 1980 MHz")]
    assert measured_on(mixed).startswith("H100 and H200, ")
