"""What the arguments of a user's script say of a job: sizes, recomputation, what is kept of it, and
how samples are packed."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from megatron_burst.errors import BurstError, require
from megatron_burst.schedule.layout import Layout
from megatron_burst.tools.job.flags import OFFLOADED, SIZES
from megatron_burst.tools.job.hugging_face import preset_name
from megatron_burst.tools.job.megatron import Arguments, letters_of_layer
from megatron_burst.tools.job.model_file import arguments_of
from megatron_burst.tools.job.strategy import FSDP_ARGUMENTS, Strategy, policy_words
from megatron_burst.tools.units import whole_number

_OPTIONS = {flag.lstrip("-").replace("-", "_"): option for option, flag in SIZES.items()}
_OFFLOADS = {value: pair for pair, value in OFFLOADED.items()}
_COUNTED = {"core_attn", "mlp", "moe"}  # modules of selective recomputation
_MODULES = "recompute_modules"
_NARROW = ("fp8", "fp8_format", "fp4", "fp4_format")


@dataclass(frozen=True, slots=True)
class Script:
    """What is said and no option says otherwise, and what of it the planner counts otherwise."""

    sizes: Mapping[str, int]  # fields of `Strategy`
    # the same; empty where the file says nothing of recomputation; `core_attn` is there where
    # selective recomputation has it among its modules, and is False where its results are kept
    policy: Mapping[str, Any]
    layout: Layout | None  # of packed samples; None: they are not packed
    flags: Mapping[str, Any]  # Megatron's, of that policy, as the script has them
    notes: tuple[str, ...]  # sentences

    @property
    def named(self) -> tuple[tuple[str, str], ...]:
        """What is given, with Megatron's flags of sizes."""
        return tuple((name, SIZES.get(name, "")) for name in (*self.sizes, *self.policy))

    @property
    def in_words(self) -> str:
        """What was taken, or ""."""
        words = [f"{name.upper()} {size}" for name, size in self.sizes.items()]
        words += policy_words(self.policy)
        if self.layout:
            zigzag = self.layout is Layout.ZIGZAG
            words.append(f"packed samples, {'boundaries anywhere' if zigzag else 'THD'}")
        return ", ".join(words)


def arguments_in(model: str) -> Arguments:
    """What a file of Megatron's arguments has; {} for other models. Raises as `model_of` does."""
    path = Path(model)
    arguments = None if preset_name(model) or not os.path.isfile(path) else arguments_of(path)
    return arguments or {}


def read_script(arguments: Arguments, options: Arguments | None = None) -> Script:
    """What arguments say of a job where `options`, fields of `Strategy`, are None or absent.

    Raises:
        BurstError: if a size is no number, or modules of recomputation cannot be read.
    """
    own = {name: value for name, value in (options or {}).items() if value is not None}
    sizes = {
        name: whole_number(str(arguments[argument]), SIZES[name])
        for argument, name in _OPTIONS.items()
        if argument in arguments and name not in own
    }
    policy = {name: value for name, value in _policy(arguments, own).items() if name not in own}
    kinds = [kind for kind, name in FSDP_ARGUMENTS.items() if arguments.get(name)]
    if kinds and "fsdp" not in own:
        policy["fsdp"] = kinds[0]
    flags = _flags(arguments, own)
    overruled: tuple[str, ...] = ("burst_keep",) if "keep" in own else ()
    overruled += ("recompute_",) if "recompute" in own and not flags else ()
    rest = {name: value for name, value in arguments.items() if not name.startswith(overruled)}
    return Script(sizes, policy, _layout(arguments), flags, tuple(_notes(rest)))


def _granularity(arguments: Arguments) -> str:
    """As Megatron will have it: --recompute-activations is its old name of selective."""
    usual = "selective" if arguments.get("recompute_activations") else ""
    return str(arguments.get("recompute_granularity", usual))


def _modules(arguments: Arguments) -> list[str]:
    text = arguments.get(_MODULES, "core_attn")
    names = [] if text is True else str(text).split()
    if not all(re.fullmatch("[a-z_]+", name) for name in names):
        raise BurstError(
            "plan: --recompute-modules of the script must be names separated by spaces, because "
            f"time and memory depend on each module; got {text!r}; write for example "
            "--recompute-modules mlp core_attn"
        )
    return names


def _policy(arguments: Arguments, options: Arguments) -> dict[str, Any]:
    """Fields of a strategy, without those that options make meaningless."""
    own = _granularity(arguments)
    granularity = options.get("recompute", own)
    if granularity == "full" and (own == "full" or "burst_keep" in arguments):
        return _full(arguments, options)
    if granularity != "selective" or own != "selective":
        return {}
    modules = _modules(arguments)
    feeds = "moe" if arguments.get("num_experts") else "mlp"
    policy: dict[str, Any] = {"recompute": "selective" if feeds in modules else "none"}
    if "core_attn" in modules:
        keep = options.get("keep", arguments.get("burst_keep", "none"))
        policy["core_attn"] = keep in ("none", "half")
    return policy


def _full(arguments: Arguments, options: Arguments) -> dict[str, Any]:
    keep = arguments.get("burst_keep", "none")
    results, inputs = _OFFLOADS.get(str(arguments.get("burst_keep_offload")), (False, False))
    policy: dict[str, Any] = {"recompute": "full", "offload_inputs": inputs}
    if arguments.get("recompute_method") == "block":
        count = str(arguments.get("recompute_num_layers", "1"))
        layers = whole_number(count, "--recompute-num-layers")
        policy["again_layers"] = ceil(layers / letters_of_layer(arguments))
    if keep == "auto":
        policy["keep"] = "auto"
        budget = arguments.get("burst_keep_budget_gib")
        if budget is not None and options.get("keep", "auto") == "auto":
            policy["keep_budget_gib"] = _gib(str(budget))
        return policy
    offload = results and options.get("keep", keep) != "none"
    return policy | {"keep": keep, "offload": offload}


def _gib(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BurstError(
            "plan: --burst-keep-budget-gib of the script must be a number, because what is kept "
            f"depends on it; got {text!r}; write it there, or pass --keep-budget-gib"
        ) from None


def _flags(arguments: Arguments, options: Arguments) -> dict[str, Any]:
    """The script's flags of recomputation and of what is kept, if no option says otherwise."""
    wanted = {name: value for name, value in options.items() if name != "recompute"}
    own = _policy(arguments, wanted).get("recompute")
    requested = options.get("recompute")
    if own is None or requested not in (None, own) or requested == "none":
        return {}
    selective = _granularity(arguments) == "selective"
    starts: tuple[str, ...] = ("recompute_",)
    if selective or not options.keys() & {"keep", "offload", "offload_inputs"}:
        starts += ("burst_keep",)
    flags = {name: value for name, value in arguments.items() if name.startswith(starts)}
    if flags.pop(_MODULES, None) is not None and selective:  # full recomputation has none
        flags[_MODULES] = _modules(arguments)
    if selective and "keep" in options:
        flags["burst_keep"] = options["keep"]
    return {
        f"--{name}".replace("_", "-"): value for name, value in flags.items() if value is not False
    }


def _layout(arguments: Arguments) -> Layout | None:
    """THD of --sft shards each document; boundaries between documents may also be anywhere."""
    if arguments.get("sft"):
        return Layout.DOCUMENTS
    anywhere = "dataloader_inter_document_masking", "reset_attention_mask"
    return Layout.ZIGZAG if any(map(arguments.get, anywhere)) else None


def _notes(arguments: Arguments) -> Iterator[str]:
    granularity, count = _granularity(arguments), arguments.get("recompute_num_layers", "1")
    method, each = arguments.get("recompute_method", "uniform"), letters_of_layer(arguments)
    if granularity == "full" and method != "block" and str(count) != str(each):
        layer = "layer" if each == 1 else "mixer with its feed-forward"
        yield (
            f"--recompute-method {method} --recompute-num-layers {count} is counted as uniform "
            f"{each}: every {layer} is recomputed from its own input"
        )
    others = set(_modules(arguments)) - _COUNTED if granularity == "selective" else ()
    if others:
        yield f"recomputation of {', '.join(sorted(others))} is not counted: it takes little time"
    if layers := arguments.get("burst_keep_layers"):
        yield f"--burst-keep-layers {layers} is not counted: all layers keep results"
    optimizer = arguments.get("optimizer", "adam")
    if optimizer != "adam":
        yield f"--optimizer {optimizer} is counted as adam: its memory and time were not measured"
    bits = next((name[2] for name in _NARROW if arguments.get(name)), "")
    if bits:
        recipe = arguments.get(f"fp{bits}_recipe")
        yield (
            f"linear layers in fp{bits}{f' ({recipe})' if recipe else ''} are counted as bf16: "
            "their memory and time were not measured (mxfp8 and nvfp4 need Blackwell)"
        )
    if arguments.get("reset_attention_mask"):
        yield (
            "burst attention refuses --reset-attention-mask: pass "
            "--dataloader-inter-document-masking, as this plan assumes"
        )


def given(script: Script, options: Arguments) -> tuple[tuple[str, Any], ...]:
    """What is given of a strategy: by a script, and by options, which count before it.

    Raises:
        BurstError: if options contradict each other, or a script's recomputation.
    """
    own = {name: value for name, value in options.items() if value is not None}
    fields = {**script.sizes, **script.policy, **own}
    if "core_attn" in script.policy and fields.get("keep") in ("none", "all"):
        del fields["keep"]  # core_attn says what comes of it
    _check_policy(fields, own)
    return tuple(sorted(fields.items()))


def _check_policy(fields: Arguments, options: Arguments) -> None:
    """Refuse options that contradict each other, or a script's recomputation; what is missing is
    left to the search."""
    recompute, keep = fields.get("recompute", "full"), fields.get("keep", "none")
    needs_full = {
        "--keep": keep != "none", "--offload": fields.get("offload"),
        "--offload-inputs": fields.get("offload_inputs"),
    }  # fmt: skip
    option = next((option for option, is_on in needs_full.items() if is_on), "")
    is_full, offload = not option or recompute == "full", fields.get("offload")
    got = f"--recompute {recompute}"
    if "recompute" not in options and not is_full:
        of = Strategy(recompute=recompute, core_attn=fields.get("core_attn", False))
        got = f"{of.policy} from the script"
    none = "--keep none" if "keep" in options else "keep none from the script"
    needs = [
        (is_full, f"{option} must come with --recompute full, because it concerns the inputs of "
         "recomputed layers", got, f"leave {option} out, or pass --recompute full"),
        (keep == "auto" or fields.get("keep_budget_gib") is None, "--keep-budget-gib must come "
         "with --keep auto, because only auto has a budget", f"--keep {keep}",
         "pass --keep auto, or leave it out"),
        (not offload or keep != "auto", "--offload must not come with --keep auto, because auto "
         "chooses what goes to host memory", "both", "leave one of them out"),
        (not offload or fields.get("keep") != "none", "--offload must come with --keep half or "
         "all, because nothing is kept without it", none, "pass --keep all, or leave it out"),
    ]  # fmt: skip
    require("plan", needs)
