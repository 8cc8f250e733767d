"""What tests need that some releases of Megatron-Core lack: one table, and pytest marks from it."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import pytest

from megatron_burst.installed import find_megatron, minor

LACKING = {  # need: releases without it, and why, as the tables in docs show it
    "model classes": ("0.16 0.17 0.18", "not tested: its model classes are in other modules"),
    "--spec": ("0.16 0.17 0.18", "--spec takes a function from 0.19 on"),
    "MLA": ("0.16", "its own MLA fails without TransformerEngine"),
    "experts": ("0.16", "its routers need a function of TransformerEngine's"),
    "MTP": ("0.20", "its layers of MTP cannot be built without TransformerEngine (d98e8a6)"),
    "recomputed MTP": (
        "0.18",
        "its full recomputation of MTP fails: _checkpointed_forward() takes no padding_mask",
    ),
    "MTP of an empty document": ("0.16", "its MTP cannot roll a packed document without tokens"),
    "MTP layers from 1": ("0.16", "its layers of MTP have the numbers behind the model's"),
    "torch FSDP2": (
        "0.16 0.17 0.18",
        "its own FSDP2 fails: finish_grad_sync() takes no force_all_reduce",
    ),
    "Megatron-FSDP": (
        "0.16 0.17",
        "its own Megatron-FSDP trains otherwise than DDP on a CPU, also on one rank without burst",
    ),
    "documents anywhere": ("0.16 0.17 0.18", "--dataloader-inter-document-masking is of 0.19"),
    "model configurations": ("0.16 0.17 0.18", "gpt_config_from_args() is of 0.19"),
    "hybrid groups in one function": (
        "0.16 0.17",
        "its --hybrid-context-parallel shards by a function of its own up to 0.17",
    ),
    "documents without TransformerEngine": (
        "0.16 0.17",
        "packed samples ask for TransformerEngine's version up to 0.17",
    ),
    "inference mode": ("0.16 0.17", "megatron.core.inference has an InferenceMode from 0.18 on"),
    "emerging optimizers": ("0.16 0.17", "it cannot run Emerging-Optimizers 0.4"),
    "output_processor": ("0.16 0.17", "models take an output_processor from 0.18 on"),
    "logged scores of a step": (
        "0.16 0.17 0.18",
        "its clip_qk never forgets the largest scores that it only logs",
    ),
}
_HERE = find_megatron()


def why_not(need: str | None) -> str:
    """Why this Megatron cannot run what needs this; "" if it can."""
    if need is None:
        return ""
    if need == "training":
        return "" if _HERE.training else "the wheel comes without megatron.training"
    releases, why = LACKING[need]
    return why if "{}.{}".format(*minor(_HERE.version)) in releases.split() else ""


def needs(need: str) -> pytest.MarkDecorator:
    """A mark for a test, or for a module's `pytestmark`."""
    return pytest.mark.skipif(bool(why_not(need)), reason=why_not(need))


def no_option(options: Iterable[str]) -> str:
    """Why a model cannot be built with these `TransformerConfig` options; "" if it can."""
    from megatron.core.transformer import TransformerConfig

    unknown = sorted(set(options) - TransformerConfig.__dataclass_fields__.keys())
    return f"TransformerConfig has no {', '.join(unknown)}" if unknown else ""


def parameters(
    cases: Mapping[str, Any], why: Callable[[Any], str], seldom: Collection[str] = ()
) -> list:
    """Case names for `parametrize`; `why`: why this Megatron cannot run one, or ""; `seldom`: what
    runs with --all only."""
    marked = []
    for name, case in cases.items():
        marks = [pytest.mark.skip(reason=why(case))] if why(case) else []
        marks += [pytest.mark.whole] if name in seldom else []
        marked.append(pytest.param(name, marks=marks))
    return marked


def present(
    cases: Mapping[str, Any], why: Callable[[Any], str], left: Collection[str] = ()
) -> dict[str, Any]:
    """The cases that this Megatron can run, without those that are left out."""
    return {name: case for name, case in cases.items() if not why(case) and name not in left}
