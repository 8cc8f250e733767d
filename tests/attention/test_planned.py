"""`hardware`: every `auto` takes what simulation finds fastest, same on all ranks, equally exact.

Guards against a plan that the engine does not follow, a plan that overrides explicit options, and
ranks whose files lead to different schedules.
"""

from pathlib import Path

import pytest
import torch

from megatron_burst.config import BurstConfig
from megatron_burst.engine.planned import planned
from megatron_burst.engine.setup import Pattern, way_of
from megatron_burst.errors import BurstError
from megatron_burst.plan.hardware_file import preset_text
from megatron_burst.schedule.call import AttentionShape
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.topology import pretend_nodes
from tests.attention.test_processes import inputs, run, truth_of
from tests.oracle import rows_of
from tests.ranks import run_ranks
from tests.said import hearing

LONG = AttentionShape(1, 1 << 16, 32, 8, 128, 128, 2, 4, 4)
PATTERN = Pattern(Layout.ZIGZAG, Mask.CAUSAL, 1.0)


def way(config):
    return way_of(LONG, torch.device("cpu"), pretend_nodes(8, 2), PATTERN, config)


def test_without_hardware_nothing_changes():
    config = BurstConfig(intra="gather")
    assert planned(way(config), config) == (config, [])


@pytest.mark.parametrize(
    "asked",
    [
        {"intra": "ring", "circulate": "q"}, {"intra": "gather", "heads_per_round": 2},
        {"inter": "a2a"}, {"flat": True}, {"intra": "gather", "pieces": False},
    ],
)  # fmt: skip
def test_what_was_asked_for_stays(asked):
    config = BurstConfig.of(hardware="h200", **asked)
    config, _ = planned(way(config), config)
    for name, value in asked.items():
        assert getattr(config if hasattr(config, name) else config.tuning, name) == value
    assert config.intra != "auto" and (config.inter == "auto") == config.tuning.flat


def test_several_kernels_are_timed_as_the_fastest_that_is_known():
    reasons = {}
    for backend in ("auto", "fa4", "fa3,fa4,flash", "te,cudnn", "cudnn"):
        config = BurstConfig(hardware="h200", backend=backend)
        reasons[backend] = planned(way(config), config)[1]
    assert reasons["auto"] == reasons["fa4"] == reasons["fa3,fa4,flash"]
    assert reasons["te,cudnn"] == reasons["cudnn"] != reasons["auto"]


@pytest.mark.parametrize("backend", ["reference", "te,reference"])
def test_a_kernel_without_a_known_speed_is_refused(backend):
    config = BurstConfig(hardware="h200", backend=backend)
    with pytest.raises(
        BurstError, match=f"got {backend}, and speeds of fa4, .*; leave out --burst"
    ):
        planned(way(config), config)


def attend(rank, tomls):
    """Largest error and what rank 0 logged; or the message of a refusal."""
    tensors = inputs(4, 8, (8, 4), (8, 8), torch.float64)
    rows = rows_of(Layout.ZIGZAG, rank, 4, 8)
    config = BurstConfig.of(nodes=2, hardware=tomls[rank])
    try:
        with hearing() as said:
            got = run(tensors, rows, config=config)
    except BurstError as error:
        return str(error), ""
    pairs = zip(got, truth_of(tensors, True, 8**-0.5), strict=True)
    return max((a - b[:, rows]).abs().max().item() for a, b in pairs), said


def test_a_planned_call_is_exact_and_says_why():
    found = run_ranks(attend, 4, ["h200"] * 4)
    assert max(error for error, _ in found) <= 1e-12
    (line,) = found[0][1]
    assert "planned for h200 (" in line and " ms, " in line
    assert [said for _, said in found[1:]] == [[]] * 3


def test_ranks_whose_files_differ_are_told(tmp_path: Path):
    """Refused on all ranks, before anything is sent."""
    text = preset_text("h200")
    files = [tmp_path / name for name in ("one.toml", "other.toml")]
    for file in files:
        file.write_text(text)
    tomls = [str(files[0])] * 3 + [str(files[1])]
    for sentence, _ in run_ranks(attend, 4, tomls):
        assert "other.toml" in sentence
