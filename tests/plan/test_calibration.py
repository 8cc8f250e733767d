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
    to_toml,
    write_calibration,
)
from megatron_burst.plan.hardware_file import read_hardware

numbers = st.floats(1e-6, 1e6)
sizes = st.integers(1, 2**40)
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
    (KernelSpeed("fa4", "forward", 128, 65536, 650.5),),
    (LinkSpeed("intra", 2**28, 380.0, 9.5), LinkSpeed("inter", 2**28, 40.0, 20.0)),
)  # fmt: skip


@given(calibrations)
def test_what_is_written_is_read(calibration):
    assert from_toml(to_toml(calibration), "x") == calibration


def test_files(tmp_path):
    path = tmp_path / "machine.toml"
    write_calibration(ONE, path)
    assert from_toml(path.read_text(), "x") == ONE
    machine = read_hardware(path)
    assert machine.name == "mine" and machine.gpu.matmul_tflops == 700
    with pytest.raises(BurstError, match="nowhere.toml must be a readable text file"):
        read_hardware(tmp_path / "nowhere.toml")
    with pytest.raises(BurstError, match="must be writable.*pass another --out"):
        write_calibration(ONE, Path(tmp_path / "no" / "folder.toml"))


@pytest.mark.parametrize(
    "old, new, match",
    [
        ("memory_gib = 139.8", "memory_gib = ", "must be TOML.*line 4"),
        ("memory_gib = 139.8", "", "the file must hold name, gpu.*got no 'memory_gib'; add it"),
        ("memory_gib", "memory_gb", "line 4,.*key 'memory_gb', did you mean 'memory_gib'"),
        ("139.8", '"139.8"', "x, line 4, memory_gib must be a positive number.*got '139.8'"),
        ("139.8", "nan", "must be a positive number.*got nan"),
        ("139.8", "true", "must be a positive number.*got True"),
        ('"inter"', '"nvlink"', r"line 21, links 2.kind must be one of intra, .*got 'nvlink'"),
        ("seq = 65536", "seq = 65536.5", r"kernels 1.seq must be a positive whole number"),
        ("[[kernels]]", "[kernels]", r"write \[\[kernels\]\]"),
        ("gb_per_s = 40.0", "gb_per_s = 0", "line 23, links 2.gb_per_s must be a positive number"),
        ("gb_per_s = 40.0", "gb_per_s = inf", "must be a positive number.*got inf"),
        ("latency_us = 20.0", "", "links 2 must hold kind, .*got no 'links 2.latency_us'"),
    ],
)
def test_what_is_wrong_is_named(old, new, match):
    text = to_toml(ONE)
    assert old in text
    with pytest.raises(BurstError, match=match):
        from_toml(text.replace(old, new), "x")
