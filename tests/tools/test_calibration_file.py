"""The TOML of a calibration: nothing is lost, and errors are named with their location."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.errors import BurstError
from megatron_burst.files import Reader
from megatron_burst.tools.hardware import Calibration, KernelRow, LinkRow
from megatron_burst.tools.hardware_file import hardware, parse_hardware, to_toml

numbers = st.floats(1e-6, 1e6)
sizes = st.integers(1, 2**40)
texts = st.text(st.characters(codec="utf-8"), max_size=100)
kernels = st.builds(
    KernelRow, texts, st.sampled_from(["forward", "backward"]), sizes, sizes, numbers
)
links = st.builds(LinkRow, st.sampled_from(["intra", "inter", "host"]), sizes, numbers, numbers)
calibrations = st.builds(
    Calibration, texts, texts, numbers, numbers,
    st.lists(kernels, max_size=3).map(tuple), st.lists(links, max_size=3).map(tuple),
)  # fmt: skip
ONE = Calibration(
    "mine", "NVIDIA H200", 139.8, 700.0,
    (KernelRow("fa4", "forward", 128, 65536, 650.5),),
    (LinkRow("intra", 2**28, 380.0, 9.5), LinkRow("inter", 2**28, 40.0, 20.0)),
)  # fmt: skip


@given(calibrations)
def test_what_is_written_is_read(calibration):
    reader = Reader("test", "x", "it is read", "correct it")
    assert reader.typed(Calibration, reader.toml(to_toml(calibration))) == calibration


def test_a_file_is_a_machine(tmp_path):
    path = tmp_path / "machine.toml"
    path.write_text(to_toml(ONE))
    machine = hardware(str(path))
    assert machine.name == "mine" and machine.gpu.matmul_tflops == 700


@pytest.mark.parametrize(
    "old, new, match",
    [
        ("memory_gib = 139.8", "memory_gib = ", "must be TOML.*line 4"),
        ("memory_gib = 139.8", "", "x must hold name, gpu.*got no 'memory_gib'; correct the"),
        ("memory_gib", "memory_gb", "x must hold only .*'memory_gb', did you mean 'memory_gib'"),
        ("139.8", '"139.8"', "x: memory_gib must be a positive number.*got '139.8'"),
        ("139.8", "nan", "must be a positive number.*got nan"),
        ("139.8", "true", "must be a positive number.*got True"),
        ('"inter"', '"nvlink"', r"x: links 2.kind must be one of intra, .*got 'nvlink'"),
        ("seq = 65536", "seq = 65536.5", r"kernels 1.seq must be a positive whole number"),
        ("[[kernels]]", "[kernels]", r"kernels must be a list of tables, \[\[kernels\]\] in TOML"),
        ("gb_per_s = 40.0", "gb_per_s = 0", "x: links 2.gb_per_s must be a positive number"),
        ("gb_per_s = 40.0", "gb_per_s = inf", "must be a positive number.*got inf"),
        ("latency_us = 20.0", "", "x: links 2 must hold kind, .*got no 'latency_us'"),
    ],
)
def test_what_is_wrong_is_named(old, new, match):
    text = to_toml(ONE)
    assert old in text
    with pytest.raises(BurstError, match=match):
        parse_hardware(text.replace(old, new), "x")
