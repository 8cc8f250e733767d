"""What a script, or a YAML, with Megatron's arguments says of a job: sizes, recomputation, what is
kept of it, and how samples are packed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_burst.plan.model import PRESETS
from megatron_burst.plan.model_file import megatron_arguments, text_of
from megatron_burst.plan.strategy import Strategy
from megatron_burst.schedule.layout import Layout
from megatron_burst.units import whole_number

Arguments = Mapping[str, Any]
_SIZES = {  # Megatron's names, and where they go
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
}
_OFFLOADS = {"results": (True, False), "inputs": (False, True), "both": (True, True)}
_COUNTED = {"core_attn", "mlp", "moe"}  # modules of selective recomputation


@dataclass(frozen=True, slots=True)
class Script:
    """What is said, and what of it the planner counts otherwise."""

    sizes: Mapping[str, int]  # fields of `Strategy`
    policy: Mapping[str, Any]  # the same; empty where the file says nothing of recomputation
    layout: Layout | None  # of packed samples; None: they are not packed
    notes: tuple[str, ...]  # sentences

    @property
    def in_words(self) -> str:
        """What was read, or ""."""
        said = [f"{name.upper()} {size}" for name, size in self.sizes.items()]
        if self.policy:
            default = Strategy(keep=self.policy.get("keep", "auto"))
            said.append(replace(default, **self.policy).policy)
        if self.layout:
            zigzag = self.layout is Layout.ZIGZAG
            said.append(f"packed samples, {'boundaries anywhere' if zigzag else 'THD'}")
        return ", ".join(said)


def arguments_in(model: str) -> Arguments:
    """What a file of Megatron's arguments says, but for what a shell would have to expand."""
    path = Path(model)
    if model.lower() in PRESETS or path.suffix == ".json" or not path.is_file():
        return {}
    found = megatron_arguments(text_of(path))
    return {name: value for name, value in found.items() if "$" not in str(value)}


def read_script(arguments: Arguments) -> Script:
    """What arguments say of a job.

    Raises:
        BurstError: if a size is no number.
    """
    sizes = {
        name: whole_number(str(arguments[flag]), f"--{flag}".replace("_", "-"))
        for name, flag in _SIZES.items()
        if flag in arguments
    }
    return Script(sizes, _policy(arguments), _layout(arguments), tuple(_notes(arguments)))


def _granularity(arguments: Arguments) -> str:
    """As Megatron will have it: --recompute-activations is its old name of selective."""
    usual = "selective" if arguments.get("recompute_activations") else ""
    return str(arguments.get("recompute_granularity", usual))


def _modules(arguments: Arguments) -> set[str]:
    return set(str(arguments.get("recompute_modules", "core_attn")).split())


def _policy(arguments: Arguments) -> dict[str, Any]:
    granularity, keep = _granularity(arguments), arguments.get("burst_keep", "none")
    if granularity == "selective":
        modules = _modules(arguments)
        feeds = "moe" if arguments.get("num_experts") else "mlp"
        again = "core_attn" in modules and keep in ("none", "half")
        return {"recompute": "selective" if feeds in modules else "none", "core_attn": again}
    if granularity != "full":
        return {}
    results, inputs = _OFFLOADS.get(str(arguments.get("burst_keep_offload")), (False, False))
    kept = {} if keep == "auto" else {"keep": keep, "offload": results and keep != "none"}
    return {"recompute": "full", "offload_inputs": inputs, **kept}


def _layout(arguments: Arguments) -> Layout | None:
    """THD of --sft shards each document; boundaries between documents may also be anywhere."""
    if arguments.get("sft"):
        return Layout.DOCUMENTS
    anywhere = "dataloader_inter_document_masking", "reset_attention_mask"
    return Layout.ZIGZAG if any(map(arguments.get, anywhere)) else None


def _notes(arguments: Arguments) -> Iterator[str]:
    granularity, count = _granularity(arguments), arguments.get("recompute_num_layers", "1")
    method = arguments.get("recompute_method", "uniform")
    if granularity == "full" and (method, str(count)) != ("uniform", "1"):
        yield (
            f"--recompute-method {method} --recompute-num-layers {count} is counted as uniform 1: "
            "every layer is recomputed from its own input"
        )
    others = sorted(_modules(arguments) - _COUNTED)
    if granularity == "selective" and others:
        yield f"recomputation of {', '.join(others)} is not counted: it takes little time"
    if granularity and arguments.get("burst_keep") == "auto":
        yield "--burst-keep auto is counted as what is fastest of what fits"
    if layers := arguments.get("burst_keep_layers"):
        yield f"--burst-keep-layers {layers} is not counted: all layers keep"
    if arguments.get("reset_attention_mask"):
        yield (
            "burst attention refuses --reset-attention-mask: pass "
            "--dataloader-inter-document-masking, which this plan is of"
        )
