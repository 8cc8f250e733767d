"""Runs a Megatron script with burst's flags; the list of all patches and which are in force."""

import functools
import runpy
import sys
from argparse import ArgumentParser
from pathlib import Path

import torch

from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from megatron_burst.installed import require_megatron
from megatron_burst.mcore import arguments
from megatron_burst.mcore.argument_values import global_args
from megatron_burst.mcore.datasets import HELPERS_PATCH
from megatron_burst.mcore.flags import add_flags
from megatron_burst.mcore.loss_arguments import loss_patches
from megatron_burst.mcore.switch import SwitchOn, hint_at_burst
from megatron_burst.patching import Patch

_DOOR = "python -m megatron_burst"
_USAGE = "[torchrun ...] python -m megatron_burst SCRIPT [script's arguments]"
_MEANING = "Runs a Megatron-LM training script unchanged, with these flags added to Megatron's own."
_REST = """Without --context-parallel-impl burst the script runs as it would without megatron_burst.
On a machine without a CUDA GPU add --distributed-backend gloo: Megatron then runs on the CPU."""


def all_patches() -> tuple[Patch, ...]:
    """Every patch of Megatron that megatron_burst can apply; `Patch.live` tells which are on."""
    from megatron_burst.mcore.keep import input_patches, keep_patches
    from megatron_burst.mcore.providers import provider_patches

    keeping = (*keep_patches(), *input_patches(BurstConfig()))
    return (*flag_patches(), *provider_patches(), *keeping, *loss_patches())


def flag_patches() -> tuple[Patch, ...]:
    """What `prepare` applies: flags, their check, and a missing Makefile."""
    return (
        Patch(
            owner="megatron.training.arguments",
            name="add_megatron_arguments",
            parameters=("parser",),
            why="adds burst's flags: Megatron's parser has no hook for plugins",
            wrap=functools.partial(arguments.with_flags, on_impl=SwitchOn),
        ),
        Patch(
            owner="megatron.training.arguments",
            name="validate_args",
            parameters=("args", "defaults"),
            why="checks burst's flags, and switches burst on if they ask for it",
            wrap=arguments.validate_flags,
        ),
        Patch(
            owner="megatron.training.yaml_arguments",
            name="load_yaml",
            parameters=("yaml_path",),
            why="refuses burst with --yaml-cfg, which drops the command line unseen",
            wrap=arguments.refuse_yaml,
        ),
        Patch(
            owner="megatron.core.transformer.dot_product_attention:DotProductAttention",
            name="__init__",
            parameters=(
                "self", "config", "layer_number", "attn_mask_type", "attention_type",
                "attention_dropout", "softmax_scale", "cp_comm_type", "pg_collection",
            ),
            why="names burst's flag where Megatron asserts that context parallelism needs "
            "TransformerEngine",
            wrap=hint_at_burst,
        ),
        HELPERS_PATCH,
    )  # fmt: skip


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
        from megatron_burst.mcore import on_cpu

        on_cpu.install()
    for patch in flag_patches():
        patch.apply()


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
