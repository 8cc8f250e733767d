"""Where burst attaches to Megatron, and whether the installed one has those places."""

import importlib
import inspect
from dataclasses import dataclass

from megatron_burst.mcore.core_attention import BurstCoreAttention
from megatron_burst.mcore.launch import all_patches

_BUILDER = "megatron.core.transformer.attention"
_SPEC = "megatron.training.models.gpt"


@dataclass(frozen=True, slots=True)
class Seam:
    """A place of Megatron's or torch's that burst attaches to.

    Attributes:
        target: dotted path.
        why: what it is for.
        problem: why it does not fit, or None.
        live: whether burst is attached now.
    """

    target: str
    why: str
    problem: str | None
    live: bool = False


def seams() -> list[Seam]:
    """All of them; changes nothing."""
    found = [_core_attention(), _layer_spec()]
    for patch in all_patches():
        try:
            problem, live = patch.misfit(), patch.live
        except (ImportError, AttributeError) as error:
            problem, live = f"{patch.owner.replace(':', '.')} cannot be imported: {error}", False
        found.append(Seam(patch.target, patch.why, problem, live))
    return found


def _core_attention() -> Seam:
    """Megatron builds core attention with these keywords; ours must take them all."""
    target = f"{_BUILDER}.CoreAttentionBuilder"
    why = "specs name burst as core attention"
    builder = getattr(importlib.import_module(_BUILDER), "CoreAttentionBuilder", None)
    if builder is None:
        return Seam(target, why, "there is none in this Megatron-Core")
    wanted = set(inspect.signature(builder.__call__).parameters) - {"self"}
    unknown = sorted(wanted - set(inspect.signature(BurstCoreAttention.__init__).parameters))
    return Seam(target, why, f"it passes {', '.join(unknown)} too" if unknown else None)


def _layer_spec() -> Seam:
    target, why = f"{_SPEC}.default_layer_spec", "--spec megatron_burst.spec layer_spec"
    try:
        there = hasattr(importlib.import_module(_SPEC), "default_layer_spec")
    except ImportError as error:
        return Seam(target, why, str(error))
    return Seam(target, why, None if there else "there is none in this Megatron")
