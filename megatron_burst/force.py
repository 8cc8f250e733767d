"""Choices of `auto` made beforehand, and what all options have in common."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin

from megatron_burst.errors import BurstError, Need, require

_ENDLESS = 1e9  # timers and counts of bytes overflow somewhere above
_POSITIVE = {  # why a number must be positive
    "nccl_ctas": "nothing would be sent otherwise",
    "heads_per_round": "nothing would be sent otherwise",
    "keep_budget_gib": "it limits what is kept",
    "keep_host_gib": "it limits the memory for offloading",
    "check": "one call in that many is compared",
    "timeout_s": "a rank waits that long for the others",
}


@dataclass(frozen=True, slots=True, repr=False)
class Force:
    """Choices of `auto` made beforehand, to measure what each gains: `BurstConfig(force=...)`.

    Attributes:
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
    """

    flat: bool = False
    circulate: Literal["auto", "kv", "q"] = "auto"
    heads_per_round: int | None = None
    pieces: bool = True
    grad_wire: Literal["auto", "accumulate", "input"] = "auto"
    resend: Literal["auto", "never", "always"] = "auto"
    transfer: Literal["auto", "send", "pull"] = "auto"

    def __post_init__(self) -> None:
        check_words(self)
        require("burst attention", needs_of_numbers({"heads_per_round": self.heads_per_round}))
        together = f"pieces=False, heads_per_round={self.heads_per_round}"
        require("burst attention", [
            (self.pieces or self.heads_per_round is None,
             "pieces=False and heads_per_round must not both be set, because pieces=False is one "
             "round of all heads", together, "leave one of them out"),
        ])  # fmt: skip

    def __repr__(self) -> str:
        return changed_options(self)


def check_words(options: Any, who: str = "burst attention") -> None:
    """Refuse a word that its field does not accept."""
    for field in fields(options):
        value = getattr(options, field.name)
        if get_origin(field.type) is Literal and value not in get_args(field.type):
            legal = ", ".join(get_args(field.type))
            raise BurstError(
                f"{who}: the option {field.name} must be one of {legal}, because a "
                f"misspelt one would be silently ignored; got {value!r}; choose one of these"
            )


def needs_of_numbers(numbers: Mapping[str, Any]) -> Iterator[Need]:
    """What these options must be, by name; others than numbers are skipped."""
    for name in (name for name in _POSITIVE if name in numbers):
        value, is_count = numbers[name], name in ("nccl_ctas", "heads_per_round", "check")
        is_number = hasattr(value, "__index__" if is_count else "__float__")
        yield (
            value is None or (is_number and 0 < value < _ENDLESS),
            f"{name} must be {'whole, ' * is_count}positive and below 1e9, because "
            f"{_POSITIVE[name]}", value, "leave it out",
        )  # fmt: skip


def changed_options(options: Any) -> str:
    """A configuration's fields that are not the defaults."""
    named = ((f.name, getattr(options, f.name), f.default) for f in fields(options))
    changed = (f"{name}={value!r}" for name, value, default in named if value != default)
    return f"{type(options).__name__}({', '.join(changed)})"
