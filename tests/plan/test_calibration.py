"""The TOML of a calibration: nothing lost, and what is wrong named with its place."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.errors import BurstError
from megatron_burst.plan.calibration import (
    Calibration,
    KernelSpeed,
    LinkSpeed,
    from_toml,
    read_calibration,
    to_toml,
    write_calibration,
)

numbers = st.floats(0, 1e6)
sizes = st.integers(0, 2**40)
texts = st.text(st.characters(codec="utf-8"))
kernels = st.builds(
    KernelSpeed, texts, st.sampled_from(["forward", "backward"]), sizes, sizes, numbers
)
links = st.builds(LinkSpeed, st.sampled_from(["intra", "inter", "host"]), sizes, numbers, numbers)
calibrations = st.builds(
    Calibration, texts, texts, numbers, numbers,
    st.lists(kernels, max_size=3).map(tuple), st.lists(links, max_size=3).map(tuple),
)  # fmt: skip
ONE = Calibration(
    "mine", "NVIDIA H200", 139.8, 700.0,
    (KernelSpeed("fa4", "forward", 128, 65536, 650.5),), (LinkSpeed("intra", 2**28, 380.0, 9.5),),
)  # fmt: skip


@given(calibrations)
def test_what_is_written_is_read(calibration):
    assert from_toml(to_toml(calibration), "x") == calibration


def test_files(tmp_path):
    path = tmp_path / "machine.toml"
    write_calibration(ONE, path)
    assert read_calibration(path) == ONE
    with pytest.raises(BurstError, match="nowhere.toml must be a text file that can be read"):
        read_calibration(tmp_path / "nowhere.toml")
    with pytest.raises(BurstError, match="must be writable.*pass another --out"):
        write_calibration(ONE, Path(tmp_path / "no" / "folder.toml"))


@pytest.mark.parametrize(
    "old, new, match",
    [
        ("memory_gib = 139.8", "memory_gib = ", "must be TOML.*line 4"),
        ("memory_gib = 139.8", "", "must have memory_gib"),
        ("memory_gib", "memory_gb", "got memory_gb; write memory_gib"),
        ("139.8", '"139.8"', "x, memory_gib must be a number.*got '139.8'"),
        ("139.8", "nan", "must be a number, not negative.*got nan"),
        ("139.8", "true", "must be a number.*got True"),
        ('"intra"', '"nvlink"', r"number 1, kind must be one of intra, inter, .*got 'nvlink'"),
        ("seq = 65536", "seq = 65536.5", r"\[\[kernels\]\] number 1, seq must be a whole number"),
        ("[[links]]", "[links]", r"must have \[\[links\]\] tables"),
        ("gb_per_s = 380.0", "gb_per_s = -1", "gb_per_s must be a number, not negative.*got -1"),
    ],
)
def test_what_is_wrong_is_named(old, new, match):
    text = to_toml(ONE)
    assert old in text
    with pytest.raises(BurstError, match=match):
        from_toml(text.replace(old, new), "x")
