"""`import megatron_burst.auto`: models configured for burst run it, others run as before.

Guards against an entry point that changes models that never asked for burst, options that are
dropped, and a plugin that loads Megatron, or fails, where a framework imports it in every process.
"""

import importlib
import os
import subprocess
import sys
from argparse import Namespace
from importlib.metadata import entry_points
from unittest import mock

import pytest

from megatron_burst.config import BurstConfig, Force
from megatron_burst.errors import BurstError
from megatron_burst.loss.options import FusedLossConfig
from megatron_burst.mcore.args import wants_fused_loss
from megatron_burst.mcore.options import burst_config_of, environment_args, with_environment
from tests.mcore.gpt import (
    Model,
    Parallel,
    build,
    config_of,
    loss_and_grads,
    megatrons_own,
    relative_errors,
    start,
)
from tests.mcore.lacking import needs, why_not
from tests.mcore.test_arguments import CP4, parse
from tests.ranks import run_ranks
from tests.said import hearing

RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
OPTIONS = "keep=all, fused_loss=1,loss_z_loss=1e-4,force.circulate=q,overlap=false,invariant=0"


def under(text):
    return mock.patch.dict(os.environ, {"MEGATRON_BURST": text})


def test_words_of_the_environment_are_those_of_the_flags():
    with under(OPTIONS):
        args = environment_args()
        assert BurstConfig.from_args(args) == BurstConfig(
            keep="all", force=Force(circulate="q"), overlap=False
        )
        assert wants_fused_loss(args)
        assert FusedLossConfig.from_args(args) == FusedLossConfig(z_loss=1e-4)
        assert burst_config_of(Namespace()).keep == "all"
        given = Namespace(burst=BurstConfig(intra="ring"))
        assert burst_config_of(given) == given.burst
    with under(""):
        assert burst_config_of(Namespace()) == BurstConfig()


@pytest.mark.parametrize(
    "text, got",
    [
        ("kep=all", "got 'kep=all'; choose each name once among plan, intra, inter, .*overlap"),
        ("plan=a.json", "a.json must be a readable file"),
        ("keep=all,keep=half", "got 'keep=all'"),
        ("keep=al", "invalid choice: 'al' .*none.*half"),
        ("overlap=1", "got 'overlap=1'"),
        ("fused_loss=yes", "got 'fused_loss=yes'; choose one of 1, true, 0, false"),
        ("keep_layers=2", "keep_layers must come with keep"),
        ("loss_z_loss=0.1", "--burst-loss-z-loss: must come with --burst-fused-loss"),
    ],
)
def test_what_the_environment_cannot_mean_is_refused_and_said(text, got):
    """verl does not report a plugin that fails."""
    from megatron_burst.mcore.launch import switch_on_automatically

    with under(text), hearing() as said, pytest.raises(BurstError, match=got) as refused:
        switch_on_automatically()
    assert said == [str(refused.value)]


VARIABLE = "keep=all,overlap=false,loss_z_loss=0.1,fused_loss=1"


@needs("training")
def test_the_environment_counts_where_the_command_line_has_no_flags_of_bursts():
    """With burst's flags in Megatron's parser and without, and each tuning by itself."""
    (found,) = run_ranks(flags_count, 1, environment={"MEGATRON_BURST": VARIABLE})
    all_kept = BurstConfig(keep="all", overlap=False)
    assert found == [
        (all_kept, FusedLossConfig(z_loss=0.1), True),
        (all_kept, FusedLossConfig(z_loss=0.1), True),
        (BurstConfig(keep="half", overlap=False, nodes=2), FusedLossConfig(z_loss=0.0), True),
        (BurstConfig(keep="all", overlap=True), FusedLossConfig(z_loss=0.1), True),
    ]


def flags_count(rank):
    """Options on a Megatron command line without burst's flags, with them, and with some given:
    of layers, and of a model that does not ask for burst."""
    from megatron.training import global_vars

    from megatron_burst.mcore import fused_loss
    from megatron_burst.mcore.launch import prepare

    os.environ |= {"WORLD_SIZE": "4", "RANK": "0"}
    cpu_mode = importlib.import_module("megatron_burst.tools.cpu_mode")
    cpu_mode.install()
    burst = f"{CP4} --context-parallel-impl burst --attention-dropout 0 {RECOMPUTED}"
    lines = [CP4, burst, f"{burst} --burst-keep half --burst-loss-z-loss 0 --burst-tune nodes=2"]
    lines.append(f"{burst} --burst-tune overlap=true")
    found = []
    for number, line in enumerate(lines):
        args, _ = parse(line, validate=number > 0)
        global_vars._GLOBAL_ARGS = Namespace(**args)
        options = with_environment(Namespace(**args))
        loss = FusedLossConfig.from_args(options), wants_fused_loss(options)
        found.append((burst_config_of(Namespace()), *loss))
        if number == 0:
            prepare([])
    given = []
    with mock.patch.object(fused_loss, "fuse_loss", lambda model, config: given.append(config)):
        model = Namespace(config=Namespace(cp_comm_type="p2p"))
        fused_loss.build_with_loss(lambda self: None, FusedLossConfig(), True, model)
    assert given == [FusedLossConfig(z_loss=0.1)]  # not what megatron_burst.auto asked for
    return found


IN_A_FRAMEWORK = """
import sys
import megatron_burst.auto
print([name for name in sys.modules if name.startswith("megatron.")])
from megatron.core.transformer.attention import Attention
from megatron_burst.mcore import patches
print([patch.live for patch in patches.rows("attention", "asked")])
"""


def test_nothing_is_imported_until_the_framework_imports_megatron():
    done = subprocess.run(
        [sys.executable, "-c", IN_A_FRAMEWORK], capture_output=True, text=True,
        env=os.environ | {"MEGATRON_BURST": "keep=all", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.stdout.split("\n")[:2] == [
        "[]", str([True, True, False]),
    ], done.stderr  # fmt: skip
    line = "burst attention: layers with cp_comm_type=burst run it (MEGATRON_BURST: keep=all)"
    assert done.stderr.count(line) == 1


def by_configuration(rank):
    """Errors of a model of Megatron's own spec with burst; which attention others use."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    start(Parallel())
    truth = megatrons_own(Model(recompute=True), Parallel())
    with hearing() as said:
        importlib.import_module("megatron_burst.auto")
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    alone = build(config_of(attention_dropout=0.1), spec)
    start(Parallel(cp=2))
    with hearing() as recomputing:
        gpt = build(config_of(Parallel(cp=2), Model(recompute=True)), spec)
    with hearing() as idle:
        build(config_of(Parallel(cp=2)), spec)
    assert not [line for line in recomputing if "no effect" in line]
    assert len(idle) == (rank == 0) and all("keep=all has no effect" in line for line in idle)
    cores = [alone.decoder.layers[0], gpt.decoder.layers[0]]
    if not why_not("MLA"):
        latent = get_gpt_layer_local_spec(normalization="RMSNorm", multi_latent_attention=True)
        model = build(config_of(Parallel(cp=2), Model(latent=True)), latent)
        cores.append(model.decoder.layers[1])
    cores = [type(layer.self_attention.core_attention).__name__ for layer in cores]
    fused = hasattr(alone, "fused_head"), hasattr(gpt, "fused_head")
    keep = gpt.decoder.layers[0].self_attention.core_attention.burst.config.keep
    with pytest.raises(Exception, match="[Cc]ontext [Pp]arallel") as own:
        build(config_of(Parallel(cp=2), cp_comm_type="p2p"), spec)
    megatrons = not isinstance(own.value, BurstError)
    return relative_errors(loss_and_grads(gpt), truth), cores, fused, keep, megatrons, said


def test_models_that_ask_for_burst_run_it_and_others_are_megatrons_own():
    """Without TransformerEngine, Megatron asserts that the last model's layers hold whole
    samples."""
    options = {"MEGATRON_BURST": "keep=all,fused_loss=true"}
    for errors, cores, fused, keep, megatrons, said in run_ranks(
        by_configuration, 2, environment=options
    ):
        assert max(errors.values()) <= 1e-9, errors
        assert cores[0] == "DotProductAttention" and set(cores[1:]) == {"BurstCoreAttention"}
        assert fused == (False, True) and keep == "all" and megatrons
        assert len(said) == 1 and said[0].endswith("(MEGATRON_BURST: keep=all,fused_loss=true)")


def seam_that_changed(rank):
    """The message where Megatron's attention takes one more argument, on import."""
    from megatron.core.transformer.attention import Attention

    Attention.__init__ = lambda self, config, sequence_ids: None
    with hearing() as said:
        importlib.import_module("megatron_burst.auto")
    return said


def test_a_megatron_that_does_not_fit_stays_as_it_is_and_the_seam_is_named():
    ((line,),) = run_ranks(seam_that_changed, 1)
    assert "attention.Attention.__init__ must have" in line and "'sequence_ids'" in line


def test_verl_finds_the_plugin():
    """verl/__init__.py of 0.9.1 loads this entry-point group."""
    (plugin,) = entry_points(group="verl.plugins", name="megatron_burst")
    assert plugin.value == "megatron_burst.auto"


def test_slime_hands_over_its_arguments(monkeypatch):
    """Called as --custom-megatron-init-path megatron_burst.auto.init, before models are built."""
    from megatron_burst.mcore.launch import take_args

    given = dict(
        seq_length=64, context_parallel_size=2, rank=0, create_attention_mask_in_dataloader=True
    )
    args = Namespace(cp_comm_type=["burst"], attention_dropout=0.0, **given)
    take_args(args)
    assert args.create_attention_mask_in_dataloader is False
    with pytest.raises(BurstError, match=r"^megatron_burst\.auto\.init: .*attention_dropout=0\.1"):
        take_args(Namespace(cp_comm_type=["burst"], attention_dropout=0.1, **given))
    others = Namespace(cp_comm_type=["p2p"], attention_dropout=0.1, **given)
    take_args(others)
    assert others.create_attention_mask_in_dataloader is True
