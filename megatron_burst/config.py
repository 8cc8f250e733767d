"""Options: the only place where flags become values."""

import re
from argparse import Namespace
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_origin

from megatron_burst.errors import BurstError, Need, nearest, require
from megatron_burst.force import Force, changed_options, check_words, needs_of_numbers

_NUMBERS = {int: re.compile(r"-?\d+"), float: re.compile(r"-?\d*\.?\d+(e-?\d+)?")}


@dataclass(frozen=True, slots=True)
class BurstConfig:
    """Options of burst attention. All ranks of a context-parallel group must pass the same.

    Those from `nodes` on are for experiments (`--burst-tune name=value,...`): their defaults suit
    every run.

    Attributes:
        intra: how K and V are combined inside a node: "ring" passes shards from rank to rank,
            "gather" collects a few KV heads at a time, "a2a" is an all-to-all that trades rows for
            heads; "auto" gathers, or trades where that is faster.
        inter: how they are combined between nodes: "ring" passes them from node to node, "a2a" is
            an all-to-all over all ranks; "auto" chooses by the bytes sent between nodes.
        backend: name of the attention kernel, or several names joined by commas, of which the first
            one that supports the call is used; "auto" uses the fastest that does.
        invariant: the same bits on any number of ranks, by an all-to-all over all of them, but for
            dk and dv of KV heads that ranks share. Implies `deterministic`.
        keep: which of attention's results (out, lse) to keep for a layer's recomputation: "none",
            "all", or "half": those of the later half of the sequence's rows, whose recomputation
            costs most. "auto" chooses what saves most time, outputs of other modules too, on the
            device and in host memory; under Megatron only.
        keep_layers: keep only in the first N layers of a pipeline stage; None: in all of them.
            Under Megatron and in transformers.
        keep_offload: what to offload to pinned host memory: kept "results", "inputs" of recomputed
            layers (under Megatron and in transformers), "both" or "none".
        keep_budget_gib: device memory per rank that "auto" may add to full recomputation's peak;
            None: what the first training step, which keeps nothing, leaves of the GPU.
        nodes: pretend that the group spans this many nodes of contiguous ranks; None: detect them.
        deterministic: compute bitwise reproducible gradients.
        force: choices of `auto` that are made beforehand, to measure what each gains.
        nccl_ctas: maximum number of thread blocks that an NCCL transfer may take from the GPU's
            multiprocessors; None leaves it to NCCL.
        overlap: hide transfers between ranks behind kernels; False waits for each immediately, to
            measure the gain of hiding them.
        keep_modules: modules of a layer, joined by +, whose outputs are kept too (Megatron only).
        keep_host_gib: maximum host memory per rank for offloading; None: half of the available
            memory, shared by the ranks of the node.
        keep_debug: compare the inputs of recomputation with those of the first pass, bit by bit.
        nan_guard: stop at the first tile whose result has a NaN, and name it; each check waits for
            the GPU.
        check: compare about one of so many calls, drawn at random, with attention by its
            definition: some rows of out and of gradients, in float64. Stop if one is wrong.
        timeout_s: seconds that a rank waits for the others before it names the missing ones; None:
            the timeout of the process group (--distributed-timeout-minutes).
    """

    intra: Literal["auto", "ring", "gather", "a2a"] = "auto"
    inter: Literal["auto", "ring", "a2a"] = "auto"
    backend: str = "auto"
    invariant: bool = False
    keep: Literal["none", "half", "all", "auto"] = "none"
    keep_layers: int | None = None
    keep_offload: Literal["none", "results", "inputs", "both"] = "none"
    keep_budget_gib: float | None = None
    nodes: int | None = None
    deterministic: bool = False
    force: Force = Force()
    nccl_ctas: int | None = None
    overlap: bool = True
    keep_modules: tuple[str, ...] = ()
    keep_host_gib: float | None = None
    keep_debug: bool = False
    nan_guard: bool = False
    check: int | None = None
    timeout_s: float | None = None

    def __new__(cls, *args: Any, **options: Any) -> "BurstConfig":
        require("burst attention", (_need_of_force(name) for name in FORCED if name in options))
        return object.__new__(cls)

    def __post_init__(self) -> None:
        if isinstance(self.keep, int | float):
            raise BurstError(
                "burst keep: the option keep must be one of none, half, all, auto, because no "
                f"other share of the rows can be kept; got {self.keep}; pass half"
            )
        check_words(self)
        require("burst attention", [self._need_of_modes()])
        require("burst attention", needs_of_numbers({name: getattr(self, name) for name in _TYPES}))
        require("burst keep", self._needs_of_keep())

    def __str__(self) -> str:
        return changed_options(self)

    @property
    def offloads_results(self) -> bool:
        """Whether kept results are offloaded."""
        return self.keep_offload in ("results", "both")

    @property
    def offloads_inputs(self) -> bool:
        """Whether inputs of recomputed layers are offloaded."""
        return self.keep_offload in ("inputs", "both")

    def for_calls(self) -> "BurstConfig":
        """The options without those of the checkpoints around calls, and of modules beside
        attention."""
        room = self.keep_host_gib if self.offloads_results or self.keep == "auto" else None
        offload: Literal["results", "none"] = "results" if self.offloads_results else "none"
        return replace(self, keep_host_gib=room, keep_offload=offload, keep_modules=())

    @property
    def reproducible(self) -> bool:
        """Whether gradients must be bitwise reproducible."""
        return self.deterministic or self.invariant

    def _need_of_modes(self) -> Need:
        flat = self.force.flat
        over_all = {"flat": flat, "invariant": self.invariant, "inter=a2a": self.inter == "a2a"}
        names = [name for name, is_given in over_all.items() if is_given]
        clash = (flat and names[1:]) or self.inter == "ring"
        only = "ring" if flat else "a2a"
        return (not names or (self.intra in ("auto", only) and not clash),
                f"{' and '.join(names)} must come without another mode, because a single mode then "
                "runs over all ranks and ignores nodes",
                f"intra={self.intra}, inter={self.inter}", "leave one of them out")  # fmt: skip

    def _needs_of_keep(self) -> list[Need]:
        auto, layers, room = self.keep == "auto", self.keep_layers, self.keep_budget_gib
        host, results = self.keep_host_gib, self.offloads_results
        beside = dict(
            keep_modules=self.keep_modules or None, keep_layers=layers,
            keep_offload=results and self.keep_offload, keep_debug=self.keep_debug,
        )  # fmt: skip
        return [
            (layers is None or layers >= 0,
             "keep_layers must not be negative, because it counts layers", layers, "leave it out"),
            (auto or room is None,
             "keep_budget_gib must come with keep=auto, because only auto keeps as much as a "
             "budget allows", f"keep={self.keep}, keep_budget_gib={room}",
             "pass --burst-keep auto, or leave the budget out"),
            *((self.keep != "none" or value in (None, False),
               f"{name} must come with keep, because nothing is kept without it",
               f"keep=none, {name}={value}", "pass --burst-keep all, or leave it out")
              for name, value in beside.items()),
            (not auto or (layers is None and not results and not self.keep_modules),
             "keep=auto must not be combined with keep_layers, keep_modules or "
             "keep_offload=results, because auto sets them", f"keep_modules={self.keep_modules}, "
             f"keep_layers={layers}, keep_offload={self.keep_offload}", "leave them out"),
            (host is None or self.keep_offload != "none" or auto,
             "keep_host_gib must come with keep_offload or keep=auto, because it limits the "
             "memory for offloading", f"keep_host_gib={host} alone",
             "pass --burst-keep-offload, or leave it out"),
        ]  # fmt: skip

    @classmethod
    def from_args(cls, args: Namespace) -> "BurstConfig":
        """The configuration in Megatron's parsed arguments (`--burst-*`)."""
        options: dict[str, Any] = {name: getattr(args, f"burst_{name}", None) for name in OPTIONS}
        options = {name: value for name, value in options.items() if value is not None}
        return cls(**options, **tunings_of_args(args))


FORCED = {field.name: field.type for field in fields(Force)}  # names before `force`
_TYPES = {field.name: field.type for field in fields(BurstConfig)}
OPTIONS = tuple(_TYPES)[: list(_TYPES).index("nodes")]  # options with a flag of their own
TUNINGS = {  # types by name of --burst-tune
    **{name: _TYPES[name] for name in _TYPES if name not in (*OPTIONS, "force")},
    **{f"force.{name}": kind for name, kind in FORCED.items()},
}


def parse_tunings(text: str, who: str = "--burst-tune") -> dict[str, Any]:
    """The fields of `BurstConfig` in a string such as "force.circulate=q,overlap=false".

    Args:
        text: name=value, joined by commas.
        who: where it was given, for messages.

    Raises:
        BurstError: listing the valid ones, if a name is unknown or repeated, or its value invalid.
    """
    tunings: dict[str, Any] = {}
    for pair in text.split(",") if text else ():
        name, _, word = pair.partition("=")
        require(who, [_need_of_force(name)] if name in FORCED else ())
        fresh = name in TUNINGS and name not in tunings
        value = _value(TUNINGS[name], word) if fresh else None
        if value is None:
            legal = f"{name}={_legal(TUNINGS[name])}" if name in TUNINGS else "name=value"
            raise BurstError(
                f"{who}: each tuning must be given once, as {legal}, because a misspelt one would "
                f"be silently ignored; got {pair!r}{nearest(name, TUNINGS)}; see "
                "docs/how-to/settings.md#tunings"
            )
        tunings[name] = value
    forced = {n: tunings.pop(f"force.{n}") for n in FORCED if f"force.{n}" in tunings}
    require("burst attention", needs_of_numbers(tunings))
    return tunings | ({"force": Force(**forced)} if forced else {})


def _need_of_force(name: str) -> Need:
    return (
        False, f"{name} must be set in force, because it overrides a choice of auto", name,
        f"pass force=Force({name}=...), or --burst-tune force.{name}=...",
    )  # fmt: skip


def legal_tunings() -> str:
    """All names, with the values that each may have."""
    return ", ".join(f"{name}={_legal(kind)}" for name, kind in TUNINGS.items())


def tunings_of_args(args: Namespace) -> dict[str, Any]:
    """The tunings in Megatron's parsed arguments: all --burst-tune combined."""
    return parse_tunings(",".join(getattr(args, "burst_tune", None) or ()))


def _value(kind: Any, word: str) -> Any:
    """The value of a word for a field of this type; None if it is not valid."""
    if get_origin(kind) is Literal:
        return word if word in get_args(kind) else None
    if kind is bool:
        return {"true": True, "false": False}.get(word)
    if get_origin(kind) is tuple:
        return tuple(word.split("+"))
    number = int if int in get_args(kind) else float
    return number(word) if _NUMBERS[number].fullmatch(word) else None


def _legal(kind: Any) -> str:
    """The words that `_value` accepts."""
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    kinds = {bool: "true|false", tuple[str, ...]: "MODULE+..."}
    return kinds.get(kind, "N" if int in get_args(kind) else "X")
