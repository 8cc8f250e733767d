"""FSDP (ZeRO-3) in plans: memory and time by hand, what a script says of it, its flags.

Guards against weights that are counted whole, gathers that cost nothing however slow the links are,
and flags with which Megatron or burst would not start.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from megatron_burst.errors import BurstError
from megatron_burst.mcore.refusals import refuse
from megatron_burst.tools.hardware_file import preset
from megatron_burst.tools.job.candidate import candidate
from megatron_burst.tools.job.flags import flag_values
from megatron_burst.tools.job.hugging_face import PRESETS
from megatron_burst.tools.job.layer_time import UPDATE
from megatron_burst.tools.job.layers import Experts
from megatron_burst.tools.job.memory import memory_of
from megatron_burst.tools.job.model import Model
from megatron_burst.tools.job.model_file import megatron_arguments
from megatron_burst.tools.job.script import read_script
from megatron_burst.tools.job.search import search
from megatron_burst.tools.job.step import step_time
from megatron_burst.tools.job.strategy import Job, Strategy
from megatron_burst.tools.main import app
from megatron_burst.tools.simulate.kernels import Timer

MODEL = Model("x", 4, 1024, 8, 8, 128, 128, 4096, 32000)
LAYER = 4 * 1024 * 1024 + 3 * 1024 * 4096  # q, k, v, out; a gated feed-forward
PARAMS = 4 * LAYER + 2 * 32000 * 1024
SHARDED = Strategy(cp=8, dp=2, fsdp="torch")


def job(seq, batch=4, model=MODEL):
    return Job(model, seq, 16, 8, batch, preset("h100"))


def test_weights_and_gradients_are_sharded_over_all_ranks_but_for_the_layers_at_work():
    memory = memory_of(job(1 << 16), SHARDED)
    assert memory.weights == 2 * PARAMS / 16 + 4 * LAYER  # this layer's and the next one's, in bf16
    assert memory.gradients == 2 * PARAMS / 16 + 2 * LAYER
    assert memory.optimizer == 12 * PARAMS / 16
    whole = memory_of(job(1 << 16), replace(SHARDED, fsdp="none"))
    assert (whole.weights, whole.gradients) == (2 * PARAMS, 4 * PARAMS)
    others = {"saved", "kept", "layer", "head", "attention", "optimizer"}
    assert all(getattr(memory, name) == getattr(whole, name) for name in others)


def test_experts_are_sharded_too():
    model = replace(MODEL, experts=Experts(8, 2, 512, 0, 0))
    expert = 8 * 3 * 1024 * 512  # all of a layer's
    router = 1024 * 8
    layer = 4 * 1024 * 1024 + router
    strategy = replace(SHARDED, fsdp="megatron", ep=2)
    memory = memory_of(job(1 << 16, model=model), strategy)
    dense, experts = 4 * layer + 2 * 32000 * 1024, 4 * expert / 2
    assert memory.weights == 2 * (dense / 16 + experts / 8) + 4 * (layer + expert / 2)


def update_of(seq, model=MODEL):
    """Seconds of gradients and optimizer, of all the rest, and what the optimizer alone takes."""
    where = job(seq, model=model)
    memory = memory_of(where, SHARDED)
    parts = dict(step_time(where, SHARDED, memory).parts)
    alone = Timer(where.hardware).memory(2.5 * memory.optimizer)
    return parts.pop(UPDATE), sum(parts.values()), alone


def gathering(num_bytes):
    """Seconds to gather so many bytes over two nodes of 8: the slower of both links."""
    hardware = preset("h100")
    inside = hardware.links.intra.seconds(num_bytes * 7 / 8)
    return max(inside, hardware.links.inter.seconds(num_bytes / 8, hardware.inter_share(8)))


def test_weights_come_while_others_compute_but_for_the_first_layer():
    """Two micro-batches a rank; long sequences hide everything else."""
    update, _, optimizer = update_of(1 << 20)
    assert update == pytest.approx(2 * gathering(2 * LAYER) + optimizer)


def test_of_short_sequences_gathers_are_waited_for():
    """Of each micro-batch weights twice and gradients once, but for what computing hides."""
    wide = replace(MODEL, hidden=8192, ffn=32768)
    params = 4 * (2 * 8192 * (1024 + 1024) + 3 * 8192 * 32768) + 2 * 32000 * 8192
    update, rest, optimizer = update_of(1 << 9, wide)
    moving = gathering(3 * 2 * params)
    assert 2 * moving > rest
    assert update == pytest.approx(2 * moving - rest + optimizer)


@pytest.mark.parametrize(
    ("sizes", "model"),
    [
        ({"pp": 2, "dp": 1}, MODEL),
        ({"ep": 2}, replace(MODEL, experts=Experts(8, 2, 512, 0, 0))),
        ({}, replace(MODEL, tied=True)),
    ],
)
def test_what_megatron_refuses_with_torchs_is_refused(sizes, model):
    with pytest.raises(BurstError, match="--use-torch-fsdp2 has no pipeline or expert paralle"):
        candidate(job(1 << 16, model=model), replace(SHARDED, **sizes))
    others = replace(SHARDED, fsdp="megatron", **sizes)
    assert candidate(job(1 << 16, model=model), others).fits


@pytest.mark.parametrize("fsdp", ["torch", "megatron"])
def test_flags_start_under_burst_and_say_what_was_counted(fsdp):
    (best, *_) = search(job(1 << 16), (("cp", 8), ("dp", 2), ("fsdp", fsdp), ("keep", "all")))
    assert best.strategy.fsdp == fsdp and "FSDP" in best.strategy.layout
    flags = flag_values(job(1 << 16), best.strategy)
    assert ("--burst-fused-loss" in flags) == best.strategy.fused_loss
    words = {flag[2:].replace("-", "_"): value for flag, value in flags.items()}
    refuse("command", SimpleNamespace(**words), "test")
    if best.strategy.fused_loss:
        refuse("loss", SimpleNamespace(**words), "test")
    on = {flag for flag, value in flags.items() if value is not False}
    assert ("--use-torch-fsdp2" in on, "--use-megatron-fsdp" in on) == (
        fsdp == "torch", fsdp == "megatron",
    )  # fmt: skip
    assert "--use-distributed-optimizer" not in on and "--overlap-param-gather" not in on


def test_a_script_says_it_and_an_option_counts_before_it(tmp_path):
    text = "--use-torch-fsdp2 --tensor-model-parallel-size 2"
    assert read_script(megatron_arguments(text)).in_words == "TP 2, torch's FSDP"
    assert "fsdp" not in read_script(megatron_arguments(text), {"fsdp": "none"}).policy
    assert read_script(megatron_arguments("--use-megatron-fsdp")).policy == {"fsdp": "megatron"}
    from megatron_burst.tools.job.flags import as_words, model_flags

    script = tmp_path / "flags.txt"
    flags = as_words(model_flags(PRESETS["burstengine-7b"]))
    script.write_text("\n".join([*flags, "--use-torch-fsdp2 --bf16 --seq-length 1048576"]))
    options = ["plan", str(script), "--gpus", "32", "--cp", "32", "--keep", "all"]
    said = CliRunner().invoke(app, options, env={"COLUMNS": "200"}).output
    assert "read from the script: torch's FSDP" in said and "DP 1 FSDP, recompute full" in said
    assert "refuses FSDP where CUDA_DEVICE_MAX_CONNECTIONS is 1" in said
    other = CliRunner().invoke(app, [*options, "--fsdp", "none"], env={"COLUMNS": "200"}).output
    assert "DP 1 FSDP" not in other and "--use-distributed-optimizer" in other
