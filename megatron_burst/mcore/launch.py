"""The flag's door: Megatron's parser with burst's flags, and scripts that are run with it.

Loads nothing of Megatron before it is asked to: a script's own comes first.
"""

import importlib.util
import runpy
import sys
from argparse import Action, ArgumentParser, Namespace
from pathlib import Path

import torch

from megatron_burst.config import BurstConfig, FusedLossConfig
from megatron_burst.errors import BurstError
from megatron_burst.installed import require_megatron
from megatron_burst.mcore import patches
from megatron_burst.mcore.args import (
    check_args,
    check_keep_args,
    check_loss_args,
    check_unused,
    force_args,
    global_args,
    say_attention_backend,
    wants_burst,
    wants_fused_loss,
)
from megatron_burst.mcore.flags import FLAG, add_flags
from megatron_burst.mcore.plan_file import check_plan, take_plans

_DOOR = "python -m megatron_burst"
_USAGE = "[torchrun ...] python -m megatron_burst SCRIPT [script's arguments]"
_MEANING = "Runs a Megatron-LM training script unchanged, with these flags added to Megatron's own."
_REST = """Without --context-parallel-impl burst the script runs as it would without megatron_burst.
On a machine without a CUDA GPU add --distributed-backend gloo: Megatron then runs on the CPU."""


def prepare(argv: list[str], door: str = "megatron_burst") -> None:
    """Add burst's flags to Megatron's parser; run on the CPU if the arguments say gloo.

    Args:
        argv: the script's arguments, as in sys.argv.
        door: how it was asked for, for messages.

    Raises:
        BurstError: if there is no Megatron, or one that burst does not support; if Megatron has
            parsed the arguments without burst's flags.
    """
    require_megatron(door)
    asked = [word for word in argv if word.startswith(("--context-parallel-impl", "--burst-"))]
    parsed = global_args()
    if asked and parsed is not None and not hasattr(parsed, "context_parallel_impl"):
        raise BurstError(
            f"{door}: it must come before Megatron parses its arguments, because they lack burst's "
            f"otherwise; got {asked[0]} in arguments that are parsed; import it first"
        )
    if _wants_cpu(argv):
        from megatron_burst.mcore import cpu_mode

        cpu_mode.install()
    patches.apply("flags", "helpers")


def run_script(argv: list[str]) -> None:
    """Run a script as `python SCRIPT ...` would, after `prepare`.

    The script's folder comes first on sys.path before anything of Megatron is imported: scripts of
    a checkout run its own Megatron.

    Args:
        argv: the script's path, then its arguments.

    Raises:
        BurstError: if there is no such script, no Megatron that burst supports, or no GPU and no
            --distributed-backend gloo.
    """
    if not argv or argv[0] in ("-h", "--help"):
        parser = ArgumentParser(usage=_USAGE, description=_MEANING, epilog=_REST, add_help=False)
        add_flags(parser)
        parser.print_help()
        return
    script = Path(argv[0])
    if not script.is_file():
        raise BurstError(
            f"{_DOOR}: the first argument must be a script, because it is run with burst's flags "
            f"added; got {argv[0]!r}; pass the path of your pretrain_gpt.py"
        )
    if not torch.cuda.is_available() and not _wants_cpu(argv):
        raise BurstError(
            f"{_DOOR}: a CUDA GPU must be visible, because Megatron trains on GPUs; got none; add "
            "--distributed-backend gloo to try it on the CPU"
        )
    sys.argv = [str(script), *argv[1:]]
    sys.path.insert(0, str(script.resolve().parent))
    prepare(sys.argv, _DOOR)
    runpy.run_path(str(script), run_name="__main__")


def _wants_cpu(argv: list[str]) -> bool:
    if torch.cuda.is_available():
        return False
    joined = " ".join(argv).replace("=", " ")
    return "--distributed-backend gloo" in joined


# ---- what functions of Megatron are replaced by: see patches.py -----------------------------


class SwitchOn(Action):
    """Has Megatron's specs name burst as soon as `--context-parallel-impl burst` is parsed.

    A script may go past the `validate_args` that checks the run and sets what follows. Burst's core
    attention is built even then, and refuses what was not set.
    """

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        setattr(namespace, self.dest, values)
        if values == "burst":
            patches.apply("attention")


def with_flags(add_megatron_arguments, on_impl: str | type[Action] = SwitchOn):
    """Replacement of `add_megatron_arguments` that adds burst's flags.

    Args:
        add_megatron_arguments: Megatron's.
        on_impl: what parsing --context-parallel-impl does.
    """

    def add_all(parser: ArgumentParser) -> ArgumentParser:
        parser = add_megatron_arguments(parser)
        add_flags(parser, on_impl)
        take_plans(parser)
        return parser

    return add_all


def validate_flags(validate_args):
    """Replacement of `validate_args` that checks burst's needs first and switches burst on."""

    def validate_all(args: Namespace, defaults=None):
        check_plan(args)
        check_unused(args)
        burst = BurstConfig.from_args(args)
        keeps = burst.keep != "none" or burst.offloads_inputs
        if wants_burst(args):
            check_args(args)
            force_args(args)
        if keeps:
            check_keep_args(args)
        if wants_fused_loss(args):
            check_loss_args(args)
        validated = validate_args(args, {} if defaults is None else defaults)
        if wants_burst(args):
            patches.apply("attention")
            say_attention_backend(args)
        if keeps:
            patches.switch_on_keep(burst)
        if wants_fused_loss(args):
            patches.apply("loss", given=(FusedLossConfig.from_args(args),))
            patches.apply("main_grad")
        return validated

    return validate_all


def refuse_yaml(load_yaml):
    """Replacement of `load_yaml` that refuses burst: its result replaces the command line."""

    def load(yaml_path):
        own = any(word.startswith("--burst-") for word in sys.argv)
        if own or {"burst", "--context-parallel-impl=burst"} & set(sys.argv):
            raise BurstError(
                f"{FLAG}: cannot run with --yaml-cfg, because Megatron then drops the command "
                f"line; got --yaml-cfg {yaml_path}; pass the file's values as flags"
            )
        return load_yaml(yaml_path)

    return load


def hint_at_burst(init):
    """Replacement of the constructor of Megatron's local attention, which holds whole sequences."""

    def build(self, config, *arguments, **options) -> None:
        if config.context_parallel_size > 1:
            raise BurstError(
                "Megatron's local attention: the context parallel size must be 1, because it "
                "attends within a rank; got --context-parallel-size "
                f"{config.context_parallel_size}; pass {FLAG}, or install transformer-engine"
            )
        init(self, config, *arguments, **options)

    return build


def use_built_dataset_helpers() -> None:
    """Keep Megatron from running make where there is nothing to make."""
    patches.apply("helpers")


def compile_unless_built(compile_helpers):
    """Replacement of what runs make for the data set helpers, which Megatron's wheel has built."""

    def compile_where_there_is_a_makefile() -> None:
        from megatron.core.datasets import utils

        built = importlib.util.find_spec("megatron.core.datasets.helpers_cpp")
        if not built or (Path(utils.__file__).parent / "Makefile").is_file():
            compile_helpers()

    return compile_where_there_is_a_makefile
