"""The diff for users who maintain their own Megatron-LM, for the installed release.

Guards against a diff that no longer applies or touches more than Megatron's parser, and entry
points that collide: a patched Megatron may also be started by `python -m megatron_burst`.
"""

import difflib
import importlib.util
import os
import sys
from pathlib import Path

import pytest

from megatron_burst.errors import BurstError
from tests.mcore.gpt import Parallel, build, loss_and_grads, start
from tests.mcore.lacking import needs
from tests.mcore.patched import DIFF, git_apply, patch_megatron
from tests.mcore.pretraining import FLAGS as MODEL
from tests.ranks import run_ranks

pytestmark = [pytest.mark.numeric, needs("training")]
MODULE = "megatron.training.arguments"
FLAGS = (
    "--context-parallel-impl burst --burst-tune force.circulate=q --burst-keep all "
    "--burst-fused-loss"
)


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    return patch_megatron(tmp_path_factory.mktemp("megatron"))


@pytest.fixture(scope="module")
def module(patched):
    return patched / "megatron" / "training" / "arguments.py"


def replaced_by(path):
    """The patched module, instead of the installed one."""
    import megatron.training

    spec = importlib.util.spec_from_file_location(MODULE, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = megatron.training.arguments = module
    spec.loader.exec_module(module)
    return module


def parsed(rank, path, flags, by_another_entry=False, package=True, validate=False):
    """What the patched Megatron makes of flags: some of its arguments, or the kind of error."""
    arguments = replaced_by(path)
    if by_another_entry:
        from megatron_burst.mcore import launch

        launch.prepare(sys.argv)
    if not package:
        for name in [name for name in sys.modules if name.split(".")[0] == "megatron_burst"]:
            del sys.modules[name]
        importlib.util.find_spec = lambda name: None
    sys.argv = ["pretrain_gpt.py", *flags.split()]
    try:
        args = arguments.parse_args()
        if validate:
            arguments.validate_args(args)
    except (AssertionError, SystemExit, ValueError) as error:
        return type(error).__name__, str(error)
    return args.context_parallel_impl, getattr(args, "burst_keep", None)


def outcome(*arguments, **options):
    ((kind, what),) = run_ranks(parsed, 1, *arguments, *options.values())
    return kind, what


def test_the_diff_touches_megatrons_parser_only_and_adds_what_it_shows(module):
    from megatron.training import arguments

    assert [line for line in DIFF.read_text().splitlines() if line.startswith("+++ ")] == [
        "+++ b/megatron/training/arguments.py"
    ]
    before = Path(arguments.__file__).read_text().splitlines()
    after = module.read_text().splitlines()
    changes = list(difflib.unified_diff(before, after, n=0))[2:]
    changes = [line for line in changes if not line.startswith("@@")]
    assert all(line[0] == "+" for line in changes) and 10 < len(changes) < 25


def test_it_can_be_taken_out_again(patched):
    assert git_apply(patched, "--reverse", "--check").returncode == 0


@pytest.mark.parametrize("by_another_entry", [False, True])
def test_megatrons_own_parser_takes_all_of_bursts_flags(module, by_another_entry):
    """Also if another entry point has already added them."""
    assert outcome(module, FLAGS, by_another_entry=by_another_entry) == ("burst", "all")


def test_what_burst_cannot_do_is_refused_as_by_every_entry_point(module):
    flags = f"{FLAGS} --context-parallel-size 2 --attention-dropout 0.1"
    kind, what = outcome(module, flags, by_another_entry=False, package=True, validate=True)
    assert kind == BurstError.__name__ and "attention_dropout=0.1" in what


def test_without_the_package_burst_is_refused_and_nothing_else(module):
    alone = {"by_another_entry": False, "package": False}
    assert outcome(module, "", **alone) == ("megatron", None)
    kind, what = outcome(module, "--context-parallel-impl burst", **alone, validate=True)
    assert kind == "AssertionError" and "needs the package megatron_burst" in what
    kind, what = outcome(module, "", **alone, validate=True)
    assert kind == "AssertionError" and "megatron_burst" not in what  # it wants model sizes
    assert outcome(module, "--burst-keep all", **alone) == ("SystemExit", "2")


def trained(rank, path, flags):
    """Losses of a patched Megatron's model before and after a step, and its core attention."""
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    arguments = replaced_by(path)
    os.environ |= {"WORLD_SIZE": str(torch.distributed.get_world_size()), "RANK": str(rank)}
    sys.argv = ["pretrain_gpt.py", *MODEL.split(), *flags.split()]
    args = arguments.parse_args()
    arguments.validate_args(args)
    start(Parallel(cp=args.context_parallel_size))
    config = arguments.core_transformer_config_from_args(args)
    model = build(config, get_gpt_layer_local_spec(normalization="RMSNorm"))
    before = loss_and_grads(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter -= 1e-3 * before.grads[name]
    after = loss_and_grads(model)
    core = model.decoder.layers[0].self_attention.core_attention
    return type(core).__name__, float(before.loss), float(after.loss)


def test_a_patched_megatron_trains_a_step_with_burst(module):
    """As Megatron's own does without context parallelism, to float32 rounding in RoPE."""
    ((own, *truth),) = run_ranks(trained, 1, module, "")
    assert own == "DotProductAttention" and truth[1] < 0.99 * truth[0]
    flags = "--context-parallel-size 2 --context-parallel-impl burst"
    for core, *losses in run_ranks(trained, 2, module, flags):
        assert core == "BurstCoreAttention" and losses == pytest.approx(truth, rel=1e-6)
