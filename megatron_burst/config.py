"""Options: the only place where flags become values."""

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin

from megatron_burst.errors import BurstError, Need, nearest, require

_ENDLESS = 1e9  # timers and counts of bytes overflow somewhere above
_NUMBERS = {int: re.compile(r"-?\d+"), float: re.compile(r"-?\d*\.?\d+(e-?\d+)?")}


@dataclass(frozen=True, slots=True)
class BurstConfig:
    """Options of burst attention. All ranks of a context-parallel group must pass the same.

    Those from `nodes` on are for experiments (`--burst-tune name=value,...`): their defaults suit
    every run.

    Attributes:
        intra: how K and V are combined inside a node: "ring" passes shards from rank to rank,
            "gather" collects a few KV heads at a time, "a2a" is an all-to-all that trades rows for
            heads; "auto" gathers on GPUs, or trades where that is faster.
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
            Under Megatron only.
        keep_offload: what to offload to pinned host memory: kept "results", "inputs" of recomputed
            layers (under Megatron only), "both" or "none".
        keep_budget_gib: device memory per rank that "auto" may add to full recomputation's peak;
            None: what the first training step, which keeps nothing, leaves of the GPU.
        nodes: pretend that the group spans this many nodes of contiguous ranks; None: detect them.
        deterministic: compute bitwise reproducible gradients.
        flat: run one ring over all ranks as if there were one node, to measure the gain of nested
            rings.
        circulate: what circulates in backward (nothing does in a gather or an all-to-all on one
            node); "auto" chooses what has fewer bytes.
        heads_per_round: KV heads that are gathered, or that a rank computes, at a time (fewer in
            the last round). Refused if there are fewer, and in a ring, which has no rounds. None
            chooses what fills the GPU within a bounded buffer.
        pieces: process the heads in rounds; False uses a single round, so that transfers between
            nodes are whole shards, to measure the gain of sending pieces.
        grad_wire: dtype of gradients sent between ranks. "accumulate" is max(float32, input dtype);
            "input" halves bf16's bytes; "auto" is "input", whose error does not grow with the
            number of ranks, as each contribution is rounded once, but "accumulate" inside a ring of
            more than two ranks, which sums on the way. Gradients that a kernel itself rounds to the
            input dtype, and that are not summed, are sent in that dtype.
        resend: whether gathered K and V are sent between nodes again in backward: "always";
            "never": they stay in memory from forward if backward follows it directly, which is
            refused where they cannot; "auto": never, if that takes no more memory than the queries
            and sends no more than circulating Q. K and V from an all-to-all over all ranks always
            stay.
        transfer: how gathered keys and their gradients move between the GPUs of a node: "send" by
            NCCL; "pull" by copy engines, which leave the multiprocessors to the kernels but do not
            support rings; "auto" chooses what was measured to be faster.
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
    flat: bool = False
    circulate: Literal["auto", "kv", "q"] = "auto"
    heads_per_round: int | None = None
    pieces: bool = True
    grad_wire: Literal["auto", "accumulate", "input"] = "auto"
    resend: Literal["auto", "never", "always"] = "auto"
    transfer: Literal["auto", "send", "pull"] = "auto"
    nccl_ctas: int | None = None
    overlap: bool = True
    keep_modules: tuple[str, ...] = ()
    keep_host_gib: float | None = None
    keep_debug: bool = False
    nan_guard: bool = False
    check: int | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        require("burst keep", _needs_of_share(self.keep))
        _check_words(self)
        require("burst attention", self._needs_of_modes())
        require("burst attention", _needs_of_tunings({n: getattr(self, n) for n in TUNINGS}))
        require("burst keep", self._needs_of_keep())

    def __str__(self) -> str:
        """The options that are not the defaults."""
        given = [(f.name, getattr(self, f.name), f.default) for f in fields(self)]
        return f"BurstConfig({', '.join(f'{n}={x!r}' for n, x, usual in given if x != usual)})"

    @property
    def offloads_results(self) -> bool:
        """Whether kept results are offloaded."""
        return self.keep_offload in ("results", "both")

    @property
    def offloads_inputs(self) -> bool:
        """Whether inputs of recomputed layers are offloaded."""
        return self.keep_offload in ("inputs", "both")

    @property
    def reproducible(self) -> bool:
        """Whether gradients must be bitwise reproducible."""
        return self.deterministic or self.invariant

    def _needs_of_modes(self) -> list[Need]:
        a2a, only = self.inter == "a2a", "ring" if self.flat else "a2a"
        over_all = {"flat": self.flat, "invariant": self.invariant, "inter=a2a": a2a}
        given = [name for name, is_given in over_all.items() if is_given]
        clash = (self.flat and given[1:]) or self.inter == "ring"
        return [
            (not given or (self.intra in ("auto", only) and not clash),
             f"{' and '.join(given)} must come without another mode, because one mode then runs "
             "over all ranks, ignoring nodes",
             f"intra={self.intra}, inter={self.inter}", "leave one of them out"),
        ]  # fmt: skip

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
            (room is None or 0 < room < _ENDLESS,
             "keep_budget_gib must be positive and below 1e9, because it limits what is kept", room,
             "pass GiB, or leave it out"),
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
             "keep_offload=results, because it chooses them", f"keep_modules={self.keep_modules}, "
             f"keep_layers={layers}, keep_offload={self.keep_offload}", "leave them out"),
            (host is None or self.keep_offload != "none" or auto,
             "keep_host_gib must come with keep_offload or keep=auto, because it limits the "
             "memory for offloading", f"keep_host_gib={host} alone",
             "pass --burst-keep-offload, or leave it out"),
        ]  # fmt: skip

    @classmethod
    def from_args(cls, args: Namespace) -> "BurstConfig":
        """The configuration in Megatron's parsed arguments (`--burst-*`)."""
        given: dict[str, Any] = {name: getattr(args, f"burst_{name}", None) for name in OPTIONS}
        given = {name: value for name, value in given.items() if value is not None}
        return cls(**given, **tunings_of_args(args))


_TYPES = {field.name: field.type for field in fields(BurstConfig)}
OPTIONS = tuple(_TYPES)[: list(_TYPES).index("nodes")]  # options with a flag of their own
TUNINGS = tuple(_TYPES)[len(OPTIONS) :]  # those of --burst-tune


def parse_tunings(text: str, who: str = "--burst-tune") -> dict[str, Any]:
    """The tunings in a string such as "circulate=q,overlap=false".

    Args:
        text: name=value, joined by commas.
        who: where it was given, for messages.

    Raises:
        BurstError: listing the valid ones, if a name is unknown or repeated, or its value invalid.
    """
    given: dict[str, Any] = {}
    for pair in text.split(",") if text else ():
        name, _, word = pair.partition("=")
        fresh = name in TUNINGS and name not in given
        value = _value(_TYPES[name], word) if fresh else None
        if value is None:
            legal = f"{name}={_legal(_TYPES[name])}" if name in TUNINGS else "name=value"
            raise BurstError(
                f"{who}: each tuning must be given once, as {legal}, because a misspelt one would "
                f"be silently ignored; got {pair!r}{nearest(name, TUNINGS)}; see docs/tuning.md"
            )
        given[name] = value
    require("burst attention", _needs_of_tunings(given))
    return given


def _needs_of_share(keep: object) -> Iterator[Need]:
    yield (
        not isinstance(keep, int | float),
        "the option keep must be one of none, half, all, auto, because no other share of the rows "
        "can be kept", keep, "pass half",
    )  # fmt: skip


def _needs_of_tunings(given: Mapping[str, Any]) -> Iterator[Need]:
    for name, why in (
        *((name, "nothing would be sent otherwise") for name in ("heads_per_round", "nccl_ctas")),
        ("keep_host_gib", "it limits the memory for offloading"),
        ("check", "one of so many calls is compared"),
        ("timeout_s", "a rank waits that long for the others"),
    ):
        value, kind = given.get(name), "__index__" if _TYPES[name] == int | None else "__float__"
        whole = "whole, " * (kind == "__index__")
        yield (
            value is None or (hasattr(value, kind) and 0 < value < _ENDLESS),
            f"{name} must be {whole}positive and below 1e9, because {why}", value, "leave it out",
        )  # fmt: skip
    heads = given.get("heads_per_round")
    yield (
        heads is None or given.get("pieces", True),
        "pieces=False and heads_per_round must not both be set, because pieces=False is one round "
        "of all heads", f"heads_per_round={heads}", "leave one of them out",
    )  # fmt: skip


def legal_tunings() -> str:
    """All names, with the values that each may have."""
    return ", ".join(f"{name}={_legal(_TYPES[name])}" for name in TUNINGS)


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


def _check_words(options: Any, who: str = "burst attention") -> None:
    """Refuse a word that its field does not accept."""
    for field in fields(options):
        value = getattr(options, field.name)
        if get_origin(field.type) is Literal and value not in get_args(field.type):
            legal = ", ".join(get_args(field.type))
            raise BurstError(
                f"{who}: the option {field.name} must be one of {legal}, because a "
                f"misspelt one would be silently ignored; got {value!r}; choose one of these"
            )


@dataclass(frozen=True, slots=True)
class FusedLossConfig:
    """Options of the fused LM head and loss in Megatron (`--burst-fused-loss`).

    Attributes:
        grads: "recompute" computes logits again in backward, which is a third more work, and is
            correct for any use of the losses. "forward" computes gradients along with the loss. It
            needs a second float32 gradient of the weight, and losses that are multiplied by the
            loss mask and one number, as in pretrain_gpt.py; other uses give NaN gradients.
        label_smoothing: as in Megatron's vocab_parallel_cross_entropy.
        z_loss: weight of the squared log-sum-exp.
        softcap: soft cap of the logits; 0: none.
    """

    grads: Literal["recompute", "forward"] = "recompute"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0

    def __post_init__(self) -> None:
        _check_words(self, "--burst-fused-loss")

    @classmethod
    def from_args(cls, args: Namespace) -> "FusedLossConfig":
        """The configuration in Megatron's parsed arguments (`--burst-loss-*`)."""
        given = {f.name: getattr(args, f"burst_loss_{f.name}", None) for f in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})
