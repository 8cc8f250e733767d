"""Hardware as data: presets with sources, TOML round trip, precise error messages."""

from dataclasses import fields, replace
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.errors import BurstError
from megatron_burst.kernels.backends import backends
from megatron_burst.kernels.interface import Problem
from megatron_burst.schedule.mask import Mask, Span, Tile
from megatron_burst.schedule.spec import AttentionShape, Direction
from megatron_burst.schedule.topology import pretend_nodes
from megatron_burst.tools.hardware import Curve, LinkSpeed
from megatron_burst.tools.hardware_file import (
    hardware,
    parse_hardware,
    preset,
    preset_names,
    preset_text,
)
from megatron_burst.tools.simulate.call import AttentionCall, by_auto, resolved
from megatron_burst.tools.simulate.kernels import Timer

H200 = preset_text("h200")


def test_presets_are_those_that_are_promised():
    assert set(preset_names()) == {"a100", "a800", "h100", "h200", "b200", "gb200-nvl72"}


@pytest.mark.parametrize("name", preset_names())
def test_every_figure_of_a_preset_has_a_source_and_no_source_is_of_nothing(name):
    machine = preset(name)
    assert machine.name == name
    figures = {
        f"{part}.{f.name}" for part in ("gpu", "node") for f in fields(getattr(machine, part))
    }
    figures |= {f"links.{f.name}" for f in fields(machine.links)}
    figures |= {f"kernels.{index}" for index in range(len(machine.kernels))}
    assert set(machine.sources) == figures
    assert all(machine.sources.values())


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_found_by_its_name_and_read_from_a_file(name, tmp_path):
    (tmp_path / "machine.toml").write_text(preset_text(name))
    assert hardware(str(tmp_path / "machine.toml")) == hardware(name.upper()) == preset(name)


@given(st.floats(0.01, 1e6))
def test_a_curve_stays_between_its_neighbours_and_is_flat_beyond_its_ends(x):
    curve = Curve(((1.0, 10.0), (100.0, 30.0), (1000.0, 20.0)))
    assert 10 <= curve.at(x) <= 30
    if x <= 1:
        assert curve.at(x) == 10
    if x >= 1000:
        assert curve.at(x) == 20


def test_a_curve_is_linear_in_the_logarithm():
    curve = Curve(((1.0, 10.0), (100.0, 30.0)))
    assert curve.at(10) == pytest.approx(20)
    assert curve.at(1) == 10 and curve.at(100) == 30 and curve.at(inf) == 30


def test_time_of_a_message():
    link = LinkSpeed(10, Curve(((1.0, 50.0),)))
    assert link.seconds(50e9) == pytest.approx(1 + 10e-6)
    assert link.seconds(50e9, share=0.5) == pytest.approx(2 + 10e-6)
    assert link.seconds(0) == 0


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("memory_gib = 139.8", "memory_gb = 139.8", r": gpu must .*'memory_gb', did you mean 'mem"),
        ("nics = 8\n", "", r": node must hold gpus, nics, memory_gib.*no 'nics'"),
        ("nics = 8", "nics = 8.5", r": node.nics must be a positive whole.*got 8.5"),
        ("nics = 8", "nics = true", "node.nics must be a positive whole number"),
        ("nccl_share = 0.2", "nccl_share = 1.0", "nccl_share must be a number from 0 to below 1,"),
        ("launch_us = 20", "launch_us = 'soon'", ": gpu.launch_us must be a number.*got 'soon'"),
        ("peak_tflops = 989.5", "peak_tflops = -1", ": gpu.peak_tflops must.*number.*got -1"),
        ("peak_tflops = 989.5", "peak_tflops = 'many'", "positive number"),
        ("head_dim = 64", "head_dim = 64\nspeed = 3", ": kernels 4 must .*unknown key 'speed'"),
        ("[[1, 20.0], [16, 40.0]", "[[16, 20.0], [1, 40.0]", "with ascending x"),
        ("[[1, 20.0], [16, 40.0]", "[[0, 20.0], [16, 40.0]", "list of positive"),
        ('name = "h200"', "name = 200", ": name must be a string"),
        ("[links.inter]", "[links.outer]", ": links must .*'outer', did you mean 'inter'"),
        ("[node]", "[node", r"must be TOML.*line \d+"),
        ("\n[sources]", "\n[source]", "unknown key 'source', did you mean 'sources'"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_named(old, new, match):
    assert old in H200
    with pytest.raises(BurstError, match=f"(?s)hardware: mine.toml.*{match}"):
        parse_hardware(H200.replace(old, new, 1), "mine.toml")


def test_an_unknown_machine_is_answered_with_the_nearest(tmp_path):
    with pytest.raises(BurstError, match=r"got 'h20', did you mean 'h200'\?"):
        hardware("h20")
    with pytest.raises(BurstError, match="must be a preset or a readable TOML file.*No such file"):
        hardware(str(tmp_path / "nothing.toml"))


def test_the_kernel_of_the_nearest_head_dimension_is_taken():
    machine = preset("h200")
    assert machine.kernel(128).head_dim == machine.kernel(120).head_dim == 128
    assert machine.kernel(64).head_dim == 64
    assert machine.kernel(128, "flash").backend == "flash"
    with pytest.raises(KeyError):
        machine.kernel(128, "nobody")


def test_a_kernel_that_is_known_at_one_head_dimension_loses_at_others_as_the_first_does():
    """Megatron's ring had cuDNN's speed of 128 at 64, and looked faster than burst there."""
    machine = preset("h200")
    best, other = machine.kernel(64), machine.kernel(64, "cudnn")
    assert (other.backend, other.head_dim) == ("cudnn", 64)
    ratio = best.forward.at(1e9) / machine.kernel(128).forward.at(1e9)
    assert other.forward.at(1e9) == pytest.approx(ratio * 561) and ratio < 0.9
    assert other.backward.at(1e9) < machine.kernel(128, "cudnn").backward.at(1e9)
    assert machine.kernel(120, "cudnn").forward.at(1e9) == 561


@pytest.mark.parametrize("heads_kv", [8, 32])
@pytest.mark.parametrize("dim_qk", [128, 192])
def test_the_planner_computes_with_the_kernel_that_auto_takes(heads_kv, dim_qk):
    """FlashAttention-4 on Hopper, but cuDNN for grouped heads of two dimensions, which has neither
    documents nor other GPUs."""
    shape = AttentionShape(1, 1 << 15, 32, heads_kv, dim_qk, 128, 2, 4, 4)
    row = pretend_nodes(2, 1)
    for name, arch, known in (("h200", 9, True), ("h100", 9, False), ("b200", 10, False)):
        problem = Problem("cuda", torch.bfloat16, dim_qk, 128, grouped=heads_kv < 32, arch=arch)
        first = next(
            each.capability for each in backends().values()
            if each.capability.refusal(problem) is None
        )  # fmt: skip
        call = by_auto(AttentionCall(row, shape), preset(name))
        is_cudnn = first.name == "cudnn"
        assert call.backend == ("cudnn" if is_cudnn and known else "auto")
        assert call.kernel.rectangular_causal == first.rectangular_causal
        assert bool(resolved(call).a2a_backward_heads) == is_cudnn
        packed = AttentionCall(row, shape, mask=Mask(right=0, documents=True))
        assert by_auto(packed, preset(name)) == packed


def test_network_cards_are_shared_by_those_who_send():
    machine = preset("a800")
    assert machine.node.nics == 4
    assert [machine.inter_share(senders) for senders in (1, 4, 8)] == [1, 1, 0.5]


def test_hardware_can_be_a_key():
    machine = preset("h200")
    assert hash(machine) == hash(replace(machine, sources={}))


CALIBRATION = """
name = "mine"
gpu = "NVIDIA H200"
memory_gib = 139.0
matmul_tflops = 700.0
[[kernels]]
backend = "fa4"
direction = "forward"
head_dim = 128
seq = 2048
tflops = 500.0
[[kernels]]
backend = "fa4"
direction = "forward"
head_dim = 128
seq = 131072
tflops = 650.0
[[kernels]]
backend = "fa4"
direction = "backward"
head_dim = 128
seq = 131072
tflops = 600.0
[[links]]
kind = "intra"
message_bytes = 100000000
gb_per_s = 200.0
latency_us = 100.0
[[links]]
kind = "inter"
message_bytes = 1000000000
gb_per_s = 10.0
latency_us = 0.0
[[links]]
kind = "host"
message_bytes = 1000000000
gb_per_s = 25.0
latency_us = 10.0
"""


def test_what_calibrate_measured_replaces_the_presets_figures():
    machine, base = parse_hardware(CALIBRATION, "c.toml"), preset("h200")
    assert machine.name == "mine" and machine.gpu.memory_gib == 139
    assert machine.gpu.matmul_tflops == 700 and machine.gpu.host_gbs == 25
    assert machine.kernels[0].forward.at(5) == 650 and machine.kernels[0].backward.at(5) == 600
    assert machine.kernel(64) == base.kernel(64) and machine.links.pull == base.links.pull
    # messages take their measured time: start-up is not counted twice
    assert machine.links.intra.seconds(1e8) == pytest.approx(1e8 / 200e9)
    assert machine.links.inter.seconds(1e9) == pytest.approx(0.1)


def test_a_measured_kernel_keeps_what_is_known_of_tiles_without_a_mask():
    text = CALIBRATION.replace('"fa4"', '"cudnn"')
    found = parse_hardware(text, "mine.toml").kernel(128, "cudnn")
    assert found.forward.at(1) == 650 and found.unmasked_forward == 1.1


def test_tiles_without_a_mask_have_a_speed_of_their_own():
    """cuDNN's backward with heads of 192/128 takes 1.5 times as long for them."""
    shape, rows = AttentionShape(1, 1 << 15, 32, 8, 192, 128, 2, 4, 4), Span(0, 1 << 15)
    timer = Timer(preset("h200"), "cudnn")
    for direction, ratio in ((Direction.FORWARD, 1.0), (Direction.BACKWARD, 0.65)):
        masks = Mask.CAUSAL, Mask()
        half, whole = (timer.tile(Tile(rows, rows, mask), shape, direction) for mask in masks)
        assert whole == pytest.approx(2 * half / ratio, rel=0.03)


def test_a_card_that_several_ranks_shared_while_it_was_measured_is_faster():
    text = CALIBRATION.replace("NVIDIA H200", "NVIDIA A800-SXM4-80GB")
    machine = parse_hardware(text, "c.toml")
    assert machine.node.nics == 4
    assert machine.links.inter.seconds(1e9, machine.inter_share(8)) == pytest.approx(0.1)
    assert machine.links.inter.seconds(1e9, machine.inter_share(1)) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("matmul_tflops = 700.0", "", "must hold name, gpu.*got no 'matmul_tflops'"),
        ("seq = 2048", "", ": kernels 1 must hold .*got no 'seq'"),
        ("NVIDIA H200", "Riva 128", "must be for a GPU with a preset.*got 'Riva 128'"),
    ],
)
def test_wrong_calibrations_are_refused(old, new, match):
    with pytest.raises(BurstError, match=f"(?s)hardware: c.toml.*{match}") as refused:
        parse_hardware(CALIBRATION.replace(old, new), "c.toml")
    assert str(refused.value).count("hardware: ") == 1
