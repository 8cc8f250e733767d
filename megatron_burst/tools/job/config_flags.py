"""Megatron's flags of what no size of a Hugging Face config says, and what of it no flag says.

What is known of keys and of model types is data: `../models/families.toml`.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from megatron_burst.files import excerpt

Config = Mapping[str, Any]
Flags = dict[str, int | float | str | bool | tuple[int, ...]]
_NOTHING = (None, False, 0)
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")


@dataclass(frozen=True, slots=True)
class Type:
    """A model type of transformers; `../models/families.toml` says what the fields mean."""

    name: str = ""  # of its class, if its flags are printed
    reads: tuple[str, ...] = ()
    at: Config = field(default_factory=dict)
    ignores: tuple[str, ...] = ()
    flags: Flags = field(default_factory=dict)
    expert_flags: Flags = field(default_factory=dict)
    usual: Config = field(default_factory=dict)
    epsilon: str = "rms_norm_eps"
    period: int = 0
    gated: bool = True
    biases: bool = False
    sinks: bool = False
    rotary: bool = True
    delta: bool = False
    mamba: Config = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    halves: bool = False


def table(name: str) -> dict[str, Any]:
    """A file of `../models`."""
    path = files("megatron_burst.tools") / "models" / f"{name}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _types(tables: Mapping[str, dict[str, Any]]) -> dict[str, Type]:
    types = {}
    for kind, own in tables.items():
        fields = tables.get(own.get("like", ""), {}) | own
        fields.pop("like", None)
        types[kind] = Type(fields.pop("class", ""), **fields)
    return types


_FAMILIES = table("families")
KEYS: Mapping[str, Any] = _FAMILIES["keys"]
TYPES: Mapping[str, Type] = _types(_FAMILIES["types"])


def flags_of(config: Config, kind: Type) -> tuple[Flags, tuple[str, ...]]:
    """Megatron's flags of what no size says; and, instead of them, the entries that no flag here
    says. `config` has its type's usual values."""
    rotary, unknown = _rotary(config, kind) if kind.rotary else ({}, [])
    epsilon = config.get(kind.epsilon)
    if not isinstance(epsilon, int | float):
        unknown.append(f"no {kind.epsilon}")
    every = (*_of_class(config, kind), *_unread(config, kind), *_of_groups(config, kind), *unknown)
    if every:
        return {}, every
    return {"--norm-epsilon": epsilon or 0.0} | rotary | _own(config, kind), ()


def _of_class(config: Config, kind: Type) -> Iterator[str]:
    if not kind.name:
        yield f"model_type {config['model_type']}" if "model_type" in config else "no model_type"
    elif (classes := config.get("architectures")) not in (None, [f"{kind.name}ForCausalLM"]):
        yield f"architectures {classes}"


def _unread(config: Config, kind: Type) -> Iterator[str]:
    known = {*KEYS["read"], *KEYS["harmless"], *kind.ignores, kind.epsilon}
    known |= {*kind.reads, *(() if kind.name else KEYS["sizes"])}
    known |= {name.partition(".")[0] for name in kind.names.values()}
    harmless = {**KEYS["at"], **kind.at}
    for key, value in config.items():
        off = key in KEYS["off"] and key not in kind.at and value in _NOTHING
        read = key in known and key not in kind.at
        if read or off or (key in harmless and value == harmless[key]):
            continue
        plain = isinstance(value, str | int | float) and len(str(value)) < 30
        yield f"{excerpt(key)} {excerpt(value)}" if plain else excerpt(key)


def _of_groups(config: Config, kind: Type) -> Iterator[str]:
    """Groups of experts are chosen by their best two, in Megatron by as many as are chosen."""
    groups, active = config.get("topk_group"), config.get("num_experts_per_tok")
    grouped = "n_group" in kind.reads and config.get("n_group") not in (None, 1)
    if grouped and active != 2 * (groups or 0):
        yield f"topk_group {groups}"


def _own(config: Config, kind: Type) -> Flags:
    """Flags of what a type has beside a Llama's."""
    flags: Flags = dict(kind.flags)
    flags |= kind.expert_flags if any(map(config.get, _EXPERTS)) else {}
    flags |= {
        flag: config[key]
        for key, flag in KEYS["flags"].items()
        if key in kind.reads and config.get(key)
    }
    if "norm_topk_prob" in kind.reads and not config.get("norm_topk_prob"):
        flags["--moe-router-pre-softmax"] = True  # weights of all experts, not of the chosen ones
    if "no_rope_layers" in kind.reads:
        flags["--no-rope-freq"] = _no_rope(config)
    return flags


def _no_rope(config: Config) -> int | str:
    """Which layers have no rotary embedding: every n-th, or a list; 1 in a config has one."""
    layers, every = config["num_hidden_layers"], config["no_rope_layer_interval"]
    regular = [int(number % every > 0) for number in range(1, layers + 1)]
    has = config.get("no_rope_layers") or regular
    if has == regular and layers % every == 0:
        return int(every)
    return f"[{','.join(str(int(not one)) for one in has)}]"


def _rotary(config: Config, kind: Type) -> tuple[Flags, list[str]]:
    """Flags of rotary embeddings, and what none says; transformers 5 has `rope_parameters`."""
    entries: dict[str, Any] = {"rope_theta": config.get("rope_theta")}
    for key in ("rope_scaling", "rope_parameters"):
        more = config.get(key) or {}
        if not isinstance(more, Mapping):
            return {}, [key]
        entries |= more
    part = entries.pop("partial_rotary_factor", config.get("partial_rotary_factor", 1))
    base, scaling = entries.pop("rope_theta"), entries.pop("type", None)
    scaling = entries.pop("rope_type", scaling) or "default"
    if "mrope_section" in entries and scaling == "default":
        scaling = "mrope"  # positions of images
    if not isinstance(base, int | float) or base % 1:
        return {}, ["no rope_theta that is a whole number"]
    if not all(_is_plain(key, value) for key, value in entries.items()):
        scaled = None
    elif scaling == "mrope":
        scaled = _sections(entries) if "mrope_section" in kind.reads else None
    elif "kv_lora_rank" in config:
        scaled = _scaled_latent(scaling, entries)
    else:
        scaled = _scaled(scaling, entries)
    unknown = [f"{excerpt(scaling)} scaling of rotary embeddings"] if scaled is None else []
    flags: Flags = {"--rotary-base": int(base)} | (scaled or {})
    if part != 1 and "partial_rotary_factor" in kind.reads:
        flags["--rotary-percent"] = part
    elif part != config.get("partial_rotary_factor", 1):  # else that key is named
        unknown.append(f"partial_rotary_factor {part}")
    return flags, unknown


def _is_plain(key: str, value: Any) -> bool:
    """Whether a value of a table of rotary embeddings is of its kind: most are numbers."""
    if key.endswith(("type", "section", "_factor")) and not isinstance(value, dict):
        return True
    return value is None or isinstance(value, int | float)


def _sections(entries: dict[str, Any]) -> Flags | None:
    """Flags of positions of images, whose three parts Megatron keeps apart: not interleaved."""
    sections = entries.pop("mrope_section", None)
    if not isinstance(sections, list) or any(entries.values()):
        return None
    return {"--position-embedding-type": "mrope", "--mrope-section": tuple(map(int, sections))}


def _scaled(kind: str, entries: dict[str, Any]) -> Flags | None:
    """Flags of a scaling of positions; None where Megatron's would compute another."""
    factor = entries.pop("factor", 1)
    if not isinstance(factor, int | float):
        return None
    if kind == "default" and not entries:
        return {}
    if kind == "linear" and not entries and factor == int(factor):
        return {"--rotary-seq-len-interpolation-factor": int(factor)}
    fixed = {  # in Megatron's code
        "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    if kind == "llama3" and entries == fixed:
        return {"--use-rope-scaling": True, "--rope-scaling-factor": factor}
    whole = entries.pop("truncate", True)
    betas = {"beta_fast": 32, "beta_slow": 1} | entries
    length = betas.pop("original_max_position_embeddings", None)
    if kind != "yarn" or length is None or betas.keys() != {"beta_fast", "beta_slow"}:
        return None
    flags: Flags = {
        "--position-embedding-type": "yarn", "--rotary-scaling-factor": factor,
        "--yarn-original-max-position-embeddings": length,
        "--yarn-beta-fast": betas["beta_fast"], "--yarn-beta-slow": betas["beta_slow"],
    }  # fmt: skip
    return flags if whole else flags | {"--no-yarn-correction-range-round-to-int": True}


def _scaled_latent(kind: str, entries: dict[str, Any]) -> Flags | None:
    """The same of latent attention, whose YaRN has other flags and fixed betas and length."""
    if kind == "default" and not entries:
        return {"--rope-type": "rope", "--no-rope-fusion": True}
    factor = entries.pop("factor", None)
    scales = {name: entries.pop(name) for name in ("mscale", "mscale_all_dim") if entries.get(name)}
    fixed = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
    # one scale without the other has no effect in transformers; without both it is 1, 0
    one = len(scales) == 1
    if kind != "yarn" or not isinstance(factor, int | float) or one or fixed | entries != fixed:
        return None
    return {
        "--rotary-scaling-factor": factor, "--mscale": scales.get("mscale", 1),
        "--mscale-all-dim": scales.get("mscale_all_dim", 0),
    }  # fmt: skip
