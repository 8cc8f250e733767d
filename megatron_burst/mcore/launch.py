"""Entry point of the flag: adds burst's flags to Megatron's parser, and runs scripts with them.

Loads no Megatron at import, because a script's own comes first.
"""

import functools
import importlib.util
import logging
import os
import runpy
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from megatron_burst.imports import when_imported
from megatron_burst.installed import require_megatron
from megatron_burst.logs import log_message
from megatron_burst.loss.options import FusedLossConfig
from megatron_burst.mcore import args as flags
from megatron_burst.mcore import patches
from megatron_burst.mcore.log_probs import frameworks
from megatron_burst.mcore.options import VARIABLE, environment_args, with_environment
from megatron_burst.mcore.plan_file import DUMP_FLAG, check_plan, take_plans
from megatron_burst.mcore.refusals import FLAG, KEEP_FLAG, names_burst, refuse
from megatron_burst.patching import Patch, on_undo

_ENTRY = "python -m megatron_burst"
_USAGE = "[torchrun ...] python -m megatron_burst SCRIPT [script's arguments]"
_MEANING = "Runs a Megatron-LM training script unchanged, with these flags added to Megatron's own."
_REST = """Without --context-parallel-impl burst the script runs as it would without megatron_burst.
On a machine without a CUDA GPU add --distributed-backend gloo: Megatron then runs on the CPU."""


def prepare(argv: list[str], entry: str = "megatron_burst") -> None:
    """Add burst's flags to Megatron's parser; run on the CPU if the arguments say gloo.

    `argv` is like sys.argv; `entry` names the entry point in messages.

    Raises:
        BurstError: if there is no Megatron, or one that burst does not support; if Megatron has
            parsed the arguments without burst's flags.
    """
    megatron = require_megatron(entry)
    if megatron.training is None:
        raise BurstError(f"{entry}: megatron.training must be importable, because burst's flags "
                         f"are added to its parser; got {megatron} alone; use megatron_burst.auto, "
                         "or a checkout of Megatron-LM")  # fmt: skip
    own = [word for word in argv if word.startswith(("--context-parallel-impl", "--burst-"))]
    parsed = flags.global_args()
    if own and parsed is not None and not hasattr(parsed, "context_parallel_impl"):
        raise BurstError(f"{entry}: it must be imported before Megatron parses its arguments, "
                         f"because otherwise the arguments lack burst's flags; got {own[0]} in "
                         "arguments that are already parsed; import it first")  # fmt: skip
    if _wants_cpu(argv):
        from megatron_burst.tools import cpu_mode

        cpu_mode.install()
    patches.apply("flags", "helpers")


def run_script(argv: list[str]) -> None:
    """Run a script as `python SCRIPT ...` would, after `prepare`.

    The script's folder is put first on sys.path before Megatron is imported, so scripts of a
    checkout run that checkout's Megatron. `argv`: the script's path, then its arguments.

    Raises:
        BurstError: if there is no such script, no Megatron that burst supports, or no GPU and no
            --distributed-backend gloo.
    """
    if not argv or argv[0] in ("-h", "--help"):
        parser = ArgumentParser(usage=_USAGE, description=_MEANING, epilog=_REST, add_help=False)
        flags.add_flags(parser)
        parser.print_help()
        return
    script = Path(argv[0])
    if not script.is_file():
        is_what = "is not a file" if script.exists() else f"does not exist in {Path.cwd()}"
        raise BurstError(f"{_ENTRY}: the first argument must be a script, because it is run with "
                         f"burst's flags added; got {argv[0]!r}, which {is_what}; pass the path of "
                         "your pretrain_gpt.py")  # fmt: skip
    only_dumps = any(word.partition("=")[0] == DUMP_FLAG for word in argv)
    if not (torch.cuda.is_available() or _wants_cpu(argv) or only_dumps):
        raise BurstError(f"{_ENTRY}: a CUDA GPU must be visible, because Megatron trains on GPUs; "
                         "got none; add --distributed-backend gloo to try it on the "
                         "CPU")  # fmt: skip
    sys.argv = [str(script), *argv[1:]]
    sys.path.insert(0, str(script.resolve().parent))
    prepare(sys.argv, _ENTRY)
    runpy.run_path(str(script), run_name="__main__")


def switch_on_automatically() -> None:
    """Make all layers of this process with cp_comm_type "burst" run it, whoever builds them.

    Imports no Megatron: functions are replaced when their module is imported. Options come from
    `environment_args`; a fused loss applies to models with such layers.

    Raises:
        BurstError: for invalid options in the environment. Also logged, because verl hides the
            errors of plugins.
    """
    try:
        options = environment_args()
        burst = BurstConfig.from_args(options)
        loss = FusedLossConfig.from_args(options), True
        flags.check_unused(Namespace(**vars(options) | {"cp_comm_type": ["burst"]}))
    except BurstError as error:
        log_message(str(error), logging.ERROR)
        raise
    patches.apply_when_imported("attention", "layers", *["invariant"] * burst.invariant)
    if flags.wants_fused_loss(options):
        patches.apply_when_imported("loss", arguments=loss)
    if getattr(options, "burst_log_probs", False):
        frameworks.replace_functions()
    first, *_ = patches.rows("attention")
    on_undo(when_imported(first.module, functools.partial(_log_active, first)))


def _log_active(patch: Patch) -> None:
    if patch.live and os.environ.get("RANK", "0") == "0":
        how = f"({VARIABLE}: {os.environ.get(VARIABLE) or 'defaults'})"
        log_message(f"burst attention: layers with cp_comm_type=burst run it {how}")


def take_args(args: Namespace) -> None:
    """Hook for frameworks that pass Megatron's arguments to a callback before they build models.

    Raises:
        BurstError: if they combine burst with something that it does not support.
    """
    if names_burst(args.cp_comm_type):
        flags.check_command(with_environment(args), "megatron_burst.auto.init")
        flags.force_args(args)


def _wants_cpu(argv: list[str]) -> bool:
    has_gloo = "--distributed-backend gloo" in " ".join(argv).replace("=", " ")
    return has_gloo and not torch.cuda.is_available()


# ---- what replaces functions of Megatron, called with the original: see patches.py -----------


def switch_on(args: Namespace) -> None:
    """Make Megatron's layers build burst as soon as arguments that ask for it are parsed.

    A script may bypass `validate_args`, which checks the run and sets implied arguments. Burst's
    core attention is built even then, and refuses if they are not set.
    """
    if flags.wants_burst(args):
        patches.apply("attention", "asked")


def with_flags(add_megatron_arguments, /, parser: ArgumentParser,
               when_parsed: Callable[[Namespace], None] = switch_on) -> ArgumentParser:  # fmt: skip
    """`add_megatron_arguments` that adds burst's flags; see `add_flags`."""
    _refuse_yaml()
    parser = add_megatron_arguments(parser)
    flags.add_flags(parser)
    take_plans(parser, when_parsed)
    return parser


def validate_flags(validate_args, /, args: Namespace, defaults=None) -> Namespace:
    """`validate_args` that first checks burst's requirements and switches burst on."""
    # Burst's options that the command line leaves open are those of the environment
    vars(args).update(vars(with_environment(args)))
    if (options := os.environ.get(VARIABLE)) and args.rank == 0:
        log_message(f"burst attention: options that no flag sets come from {VARIABLE}: {options}")
    check_plan(args)
    flags.check_unused(args)
    burst, has_loss = BurstConfig.from_args(args), flags.wants_fused_loss(args)
    if flags.wants_burst(args):
        flags.check_command(args)
        flags.force_args(args)
    if burst.keep != "none" or burst.offloads_inputs:
        _hint_at_kept(args)
        flags.check_keep_args(args)
    if has_loss:
        flags.check_loss_args(args)
    validated = validate_args(args, {} if defaults is None else defaults)
    if flags.wants_burst(args):
        patches.apply("attention", "asked", "packed", *["invariant"] * burst.invariant)
        if getattr(args, "heterogeneous_layers_config_encoded_json", None):
            patches.apply("layers")
        flags.log_attention_backend(args)
    else:
        _hint_at_burst(args)
    _warn_of_sums(args)
    patches.switch_on_keep(burst)
    if getattr(args, "burst_log", None):
        patches.apply("log")
    if has_loss:
        patches.apply("loss", arguments=(FusedLossConfig.from_args(args), False))
    if getattr(args, "burst_log_probs", False):
        frameworks.replace_functions()
    return validated


def _refuse_yaml() -> None:
    """Refuse burst with a YAML file, which replaces the parsed command line."""
    words = sys.argv[1:]
    has_yaml = any(word.partition("=")[0] == "--yaml-cfg" for word in words)
    has_own = any(word.startswith("--burst-") for word in words)
    if has_yaml and (has_own or {"burst", "--context-parallel-impl=burst"} & set(words)):
        raise BurstError(f"{FLAG}: cannot run with --yaml-cfg, because Megatron then ignores the "
                         "command line; got --yaml-cfg; pass the file's values as "
                         "flags")  # fmt: skip


def _hint_at_burst(args: Namespace) -> None:
    """Warn about what Megatron does not check: its ranks attend within their own rows."""
    is_local, size = getattr(args, "transformer_impl", None) == "local", args.context_parallel_size
    if is_local and size > 1 and not names_burst(args.cp_comm_type) and args.rank == 0:
        log_message("Megatron's local attention: the context parallel size must be 1, because this "
                    f"attention only attends within a rank; got --context-parallel-size {size}; "
                    f"pass {FLAG}, or install transformer-engine")  # fmt: skip


def _hint_at_kept(args: Namespace) -> None:
    """Log whose results are kept where burst is not selected: perhaps its flag was forgotten."""
    size = args.context_parallel_size
    runs_burst = flags.wants_burst(args) or names_burst(args.cp_comm_type)
    if size > 1 and args.rank == 0 and not runs_burst:
        log_message(f"{KEEP_FLAG}: burst attention is not selected, so results of Megatron's own "
                    f"attention are kept; got --context-parallel-size {size} without {FLAG}; pass "
                    "that flag to run burst")  # fmt: skip


def _warn_of_sums(args: Namespace) -> None:
    """Warn about gradients that Megatron does not divide by the number of tokens under FSDP2, whose
    `scale_gradients` does nothing (core/distributed/data_parallel_base.py:45)."""
    summed = getattr(args, "calculate_per_token_loss", False)
    if summed and getattr(args, "use_torch_fsdp2", False) and args.rank == 0:
        log_message(
            "Megatron's FSDP2: --calculate-per-token-loss must be left out, because with it "
            "gradients are not divided by the number of tokens, whether burst runs or not; got "
            "both, so gradients and their norm are too large by a step's tokens / (data-parallel x "
            "context-parallel ranks); leave the flag out, or pass --use-megatron-fsdp",
            logging.WARNING,
        )


def at_any_cp_size(post_init, /, self) -> None:
    """`TransformerConfig.__post_init__` that lets layers which run burst be batch-invariant with
    several context-parallel ranks.

    Raises:
        BurstError: for what Megatron asserts besides.
    """
    if not (names_burst(self.cp_comm_type) and self.batch_invariant_mode):
        post_init(self)
        return
    self.batch_invariant_mode = False
    post_init(self)
    self.batch_invariant_mode = True
    refuse("invariant", self, FLAG)


def compile_unless_built(compile_helpers) -> None:
    """Replaces `make` for the data set helpers, which Megatron's wheel ships built."""
    from megatron.core.datasets import utils

    built = importlib.util.find_spec("megatron.core.datasets.helpers_cpp")
    if not built or (Path(utils.__file__).parent / "Makefile").is_file():
        compile_helpers()
