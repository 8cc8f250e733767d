"""Pictures of results: one colour a mode in all of them, and what they say of their rows."""

import csv
import os
import re
import subprocess
from functools import cache

import pytest

from benchmarks.compared import LIBRARIES
from benchmarks.show import ROOT
from benchmarks.style import _MODES, _OTHERS, SERIES, colour_of, colours_of, measured_on
from tests.benchmarks.rows import row


@cache
def drawn():
    """CSVs by command of benchmarks/redraw.sh that draws them, as it prints it."""
    script, there = ROOT / "benchmarks" / "redraw.sh", os.environ | {"PYTHON": "true"}
    done = subprocess.run([script], env=there, capture_output=True, text=True, check=True)
    found = {}
    for line in done.stdout.splitlines():
        csvs = re.findall(r"benchmarks/(?:results|predictions)/\w+\.csv", line)
        if csvs and ".md" not in line:
            found[line] = csvs
    return found


def modes_in(csvs):
    """What the rows that a picture shows are of."""
    found = set()
    for path in csvs:
        with (ROOT / path).open(newline="") as file:
            for one in csv.DictReader(file):
                is_old = one.get("superseded") or one.get("pass", "fwd_bwd") != "fwd_bwd"
                if not is_old and one.get("impl", "") not in ("", *LIBRARIES):
                    found.add(":".join(filter(None, (one["impl"], one.get("mode")))))
    return found


def test_modes_of_every_picture_that_is_drawn_have_colours_of_their_own():
    assert len(drawn()) > 10
    for command, csvs in drawn().items():
        colours = colours_of(modes_in(csvs))
        assert len(set(colours.values())) == len(colours), (command, colours)


def test_a_mode_has_one_colour_in_all_pictures():
    found = {}
    for csvs in drawn().values():
        for mode, colour in colours_of(modes_in(csvs)).items():
            assert found.setdefault(mode, colour) == colour, mode
    assert len(found) > 30


def test_no_colour_is_given_twice():
    colours = [*_MODES, *_OTHERS]
    assert len(set(colours)) == len(colours) and len(set(SERIES)) == len(SERIES)
    names = [f"some:{number}" for number in range(len(_OTHERS))]
    assert len(set(colours_of(names).values())) == len(names)
    assert colours_of(names) == colours_of(reversed(names)) and len(colours_of(names * 2)) == 14


@pytest.mark.parametrize("name", ["validate_plan.py", "plots.py", "accuracy.py"])
def test_pictures_take_their_colours_from_one_place(name):
    text = (ROOT / "benchmarks" / name).read_text()
    assert not re.search(r'"(tab:|C\d|#[0-9a-f]{6})', text)


def test_bursts_default_and_its_peers_are_told_apart_everywhere():
    assert colour_of("burst") == colour_of("burst:auto") == colour_of("burst:all")
    assert colour_of("te:p2p") == colour_of("megatron") == colour_of("megatron:full")
    assert colour_of("burst") != colour_of("te:p2p")
    assert colour_of("burst:intra=a2a") == colour_of("burst:a2a")
    assert colour_of("some:mode") == colour_of("some:mode")
    apart = "burst:inter=ring@zigzag", "burst:inter=a2a@zigzag", "burst:ring", "burst:recompute"
    assert len(set(map(colour_of, apart))) == 4


def test_words_for_gpus_and_days():
    rows = [
        row("burst:auto", (1, 1, 1)),
        row("te:p2p", (2, 2, 2), date="2026-01-05T00:00:00+00:00"),
    ]
    assert measured_on(rows) == "4 x H200, 2026-01-02 to 2026-01-05"
    assert measured_on(rows[:1]) == "4 x H200, 2026-01-02"
    mixed = [*rows, row("burst:auto", (1, 1, 1), ranks=2, gpu="NVIDIA H100 80GB HBM3; 1980 MHz")]
    assert measured_on(mixed).startswith("H100 and H200, ")
    emulated = {"nodes": 2, "link": "ring 5, all-to-all 6 GB/s between 2 nodes of one machine"}
    assert measured_on([row("te:p2p", (1, 1, 1), **emulated)]) == (
        "2 emulated nodes x 2 H200, 2026-01-02"
    )
    planned = row("burst:auto", (1, 1, 1), gpu="predicted for h200", ranks=1)
    assert measured_on([planned]) == "predicted for H200, 2026-01-02"
