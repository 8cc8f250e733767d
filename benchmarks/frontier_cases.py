"""What `benchmarks/frontier.py` measures, without Megatron: models, settings, rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

from typer import Option

from benchmarks.documents import SEED, lengths_of, multiple_for
from benchmarks.impls import pick
from benchmarks.sheets import FrontierRow
from megatron_burst.config import BurstConfig
from megatron_burst.errors import require
from megatron_burst.tools.job.hugging_face import PRESETS
from megatron_burst.tools.job.layers import Experts
from megatron_burst.tools.job.model import Model
from megatron_burst.tools.units import in_units, whole_number

WHO = "benchmarks.frontier"
_LAYERS = {"qwen3-8b": 4, "qwen3-30b-a3b": 4}  # as many as one GPU holds; of the others all
_NAMED = "qwen3-8b", "qwen3-1.7b", "qwen3-4b", "llama3.2-1b", "qwen3-30b-a3b"
_NORMS = (("--qk-layernorm", True),)  # Qwen3's, of each head of q and k
_TINY = Model("tiny", 2, 64, 4, 2, 16, 16, 128, 128, beside=_NORMS)
MODELS = {
    **{name: replace(PRESETS[name], layers=_LAYERS.get(name, PRESETS[name].layers))
       for name in _NAMED},
    "tiny": _TINY,
    "tiny-moe": replace(_TINY, name="tiny-moe", tied=True, experts=Experts(4, 2, 64)),
}  # fmt: skip
_FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
_KEPT = {  # modules kept besides attention's results
    "keep": (),
    "keep+proj": ("linear_proj",),
    "keep+qkv+proj": ("linear_qkv", "linear_proj"),
    "keep+fc1": ("linear_fc1",),
    "keep+qkv+proj+fc1": ("linear_qkv", "linear_proj", "linear_fc1"),
}
_KEPT_OF_EXPERTS = {"keep+router": ("router",), "keep+router+fc1": ("router", "linear_fc1")}
_BUDGETS = 2, 4, 7, 12, 18, 36  # GiB that "auto" is given
_OFFLOADED = "attn_norm", "core_attn", "attn_proj", "mlp_norm", "qkv_linear"
_OF_EXPERTS = "expert_fc1", "moe_act"


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to save memory in layers."""

    impl: str  # "burst" or "megatron": whose attention, and whose way it is
    name: str  # of the setting
    config: Mapping[str, Any] = field(default_factory=dict)  # of Megatron's TransformerConfig
    burst: BurstConfig | None = None  # burst's options; Megatron's own settings have none

    def __str__(self) -> str:
        return f"{self.impl}:{self.name}"

    @property
    def warm_up(self) -> int:
        """Steps that do not count; Megatron's offloading and "auto" choose after their first."""
        chooses = self.burst is not None and self.burst.keep == "auto"
        return 2 if chooses or "offload_modules" in self.config else 1


NOTHING, FULL = "burst:off", "megatron:full"  # a = 1 and a = 0; ratios are to the first
FULL_OF_BURST = "burst:full"  # a = 0 where Megatron's was not measured
OWN_LOSS = "full+own-loss"  # Megatron's loss, of logits that are stored


def settings_of(model: Model) -> dict[str, Setting]:
    """All settings that a model can have, by name."""
    auto = partial(BurstConfig, keep="auto")
    burst = {"off": ({}, BurstConfig()), "full": (_FULL, BurstConfig())}
    for suffix, place in (("", "none"), ("@host", "results")):
        for name, modules in (_KEPT | (_KEPT_OF_EXPERTS if model.experts else {})).items():
            config = BurstConfig(keep="all", keep_modules=modules, keep_offload=place)
            burst[f"{name}{suffix}"] = _FULL, config
    burst["auto"] = _FULL, auto()
    burst |= {f"auto-{gib}": (_FULL, auto(keep_budget_gib=gib)) for gib in _BUDGETS}
    first = model.layers - 1
    burst[f"keep+block-{first}"] = _block(first), BurstConfig(keep="all")
    burst[f"auto-12+block-{first}"] = _block(first), auto(keep_budget_gib=12)
    some = {round(model.layers * part) for part in (0.25, 0.5, 0.75)} - {0, model.layers}
    offloads, part = _offloading(_OFFLOADED), "moe" if model.experts else "mlp"
    again = {
        name: {"recompute_granularity": "selective", "recompute_modules": [name]}
        for name in (part, *["moe_act"] * bool(model.experts))
    }
    offloading = {"offload": offloads, f"offload+{part}": offloads | again[part]}
    if model.experts:
        offloading["offload+experts"] = _offloading(_OFFLOADED + _OF_EXPERTS)
    blocks = {f"block-{count}": _block(count) for count in sorted(some)}
    settings = [Setting("burst", name, *how) for name, how in burst.items()]
    for impl, configs, *options in (
        ("megatron", {"off": {}, "full": _FULL, **blocks}), ("burst", again, BurstConfig()),
        ("megatron", again | offloading | {OWN_LOSS: _FULL}),
    ):  # fmt: skip
        settings += [Setting(impl, name, config, *options) for name, config in configs.items()]
    return {str(one): one for one in settings}


def _block(layers: int) -> dict[str, Any]:
    return _FULL | {"recompute_method": "block", "recompute_num_layers": layers}


def _offloading(modules: Sequence[str]) -> dict[str, Any]:
    return {"fine_grained_activation_offloading": True, "offload_modules": list(modules)}


def chosen(model: Model, only: str) -> list[Setting]:
    """Settings with these names, or words in theirs; "": all. BurstError if a word is in none."""
    every = settings_of(model)
    words = [word.strip() for word in only.split(",") if word.strip()]
    matches = {
        word: [word] if word in every else [name for name in every if word in name]
        for word in words
    }
    require(WHO, [(
        names, "--only must list words of settings, because it chooses among them", repr(word),
        f"choose among {', '.join(every)}",
    ) for word, names in matches.items()])  # fmt: skip
    some = {name for names in matches.values() for name in names}
    return [every[name] for name in every if name in some or not words]


@dataclass(frozen=True, slots=True)
class Sample:
    """What a step trains on."""

    seq: int  # tokens, over all ranks
    documents: str = ""  # kind of a packed sample (`benchmarks.documents`); "": one document
    ranks: int = 1  # of the one context-parallel group, which hold each document in zigzag order

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document."""
        if not self.documents:
            return (self.seq,)
        return lengths_of(self.documents, self.seq, SEED, multiple_for(self.ranks))

    def __str__(self) -> str:
        return f"{self.documents}-{SEED}: {len(self.lengths)}" if self.documents else ""


# options of a command that say what is trained: see `problem_of`
ModelName = Annotated[str, Option(help=f"one of {', '.join(MODELS)}")]
Layers = Annotated[int | None, Option(min=1, help="default: the model's in MODELS")]
Tokens = Annotated[str, Option(help="tokens of the sample")]
_KIND = "kind of a packed sample, as in benchmarks.packed; none: one document"
Documents = Annotated[str, Option(help=_KIND)]


def problem_of(
    model: ModelName, layers: Layers, seq: Tokens, documents: Documents
) -> tuple[Model, Sample]:
    """The model and the sample that options name; BurstError if there is no such one."""
    must = f"{WHO}: --model must name one that there is, because each has sizes of its own"
    (sizes,) = pick([model], MODELS, must)
    sample = Sample(whole_number(seq, "--seq", WHO), "" if documents == "none" else documents)
    assert sample.lengths  # refuses a kind that there is not
    return replace(sizes, layers=layers or sizes.layers), sample


def problem_in(row: FrontierRow) -> str:
    """What was trained, for a reader: "Qwen3-8B, 4 layers, 64K, packed"."""
    kind = "packed" if row.documents else "one document"
    return f"{row.model.title()}, {row.layers} layers, {in_units(row.seq)}, {kind}"


def columns_of(model: Model, sample: Sample) -> dict[str, Any]:
    """The columns of a row that say what was trained."""
    return {
        "model": model.name, "layers": model.layers, "hidden": model.hidden,
        "ffn": model.experts.ffn if model.experts else model.ffn,
        "experts": model.experts.count if model.experts else 0,
        "heads_q": model.heads_q, "heads_kv": model.heads_kv, "vocab": model.vocab,
        "seq": sample.seq, "documents": str(sample), "ranks": sample.ranks,
    }  # fmt: skip


def flops_of(model: Model, sample: Sample) -> float:
    """Model FLOPs of a step on each rank."""
    return sum(n * model.flops_per_token(n) for n in sample.lengths) / sample.ranks
