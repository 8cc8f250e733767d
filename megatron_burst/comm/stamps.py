"""What ranks tell each other at the beginning of a pass, and what differs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from megatron_burst.comm.watch import PROBLEM, Parallel


class Kind(IntEnum):
    """What a stamp announces; in words below, in the same order."""

    AGREEMENT, FORWARD, BACKWARD, LATER_ROWS, EARLY_ROWS, END, REFUSAL, FAILURE, KEPT = range(9)


IN_WORDS = (
    "a call that is new to it", "a forward", "the backward of", "the passing on of later rows",
    "the recomputation of early rows", "the end of a step", "a call that it refuses",
    "a pass that failed", "a forward whose results are kept for recomputation",
)  # fmt: skip
_CALLS = Kind.AGREEMENT, Kind.FORWARD, Kind.KEPT, Kind.REFUSAL  # a call begins, one way or another


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a rank begins; packs into 16 bytes."""

    kind: Kind
    call: int  # of a backward, the number of its forward; of anything else, its own
    layer: int  # the caller's number; 0 if it gave none
    digest: int  # of the call's terms

    def packed(self) -> tuple[int, int]:
        """As two 64-bit integers."""
        return self.call << 24 | (self.layer & 0xFFFFF) << 4 | self.kind, self.digest

    @classmethod
    def of(cls, what: int, digest: int) -> "Stamp":
        """Unpack a stamp."""
        return cls(Kind(what & 0xF), what >> 24, what >> 4 & 0xFFFFF, digest)

    def __str__(self) -> str:
        words = IN_WORDS[self.kind]
        if self.kind is Kind.BACKWARD:
            words += f" pass {self.call}"
        return words + (f" in layer {self.layer}" if self.layer else "")


def at_one_place(stamps: Sequence[Stamp]) -> bool:
    """Whether ranks are in the same call of a step, whatever its terms: then they can go on if all
    of them give it up."""
    places = {(stamp.kind not in _CALLS and stamp.kind, stamp.call) for stamp in stamps}
    layers = {stamp.layer for stamp in stamps if stamp.kind not in (Kind.AGREEMENT, Kind.REFUSAL)}
    return len(places) == 1 and len(layers) <= 1


def differences(
    stamps: Sequence[Stamp], told: Sequence[Mapping[str, str] | None], of: Parallel
) -> str:
    """What each rank has begun, as text, without what all have in common."""
    known = [terms for terms in told if terms and terms.keys() != {PROBLEM}]
    names = dict.fromkeys(name for terms in known for name in terms if name != PROBLEM)
    differing = [name for name in names if len({terms.get(name) for terms in known}) > 1]
    ranks: dict[str, list[int]] = {}
    for rank, (stamp, terms) in enumerate(zip(stamps, told, strict=True)):
        words = f"{stamp}"
        if terms is None:
            words += " whose terms it has not told yet"
        elif terms in known and differing:
            words += " with " + ", ".join(f"{name}={terms.get(name)}" for name in differing)
        if problem := (terms or {}).get(PROBLEM):
            words += f" ({problem})"
        ranks.setdefault(words, []).append(rank)
    return " and ".join(f"{words} on {of.rank}s {those}" for words, those in ranks.items())
