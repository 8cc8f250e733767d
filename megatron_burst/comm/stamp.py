"""What a rank begins, in 16 bytes and in words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain


class Kind(IntEnum):
    """What a stamp stands at the beginning of."""

    AGREEMENT = 0
    FORWARD = 1
    BACKWARD = 2
    LATER_ROWS = 3
    EARLY_HALF = 4
    END = 5
    REFUSAL = 6


_IN_WORDS = {
    Kind.AGREEMENT: "a call that is new to it",
    Kind.FORWARD: "a forward",
    Kind.BACKWARD: "the backward of",
    Kind.LATER_ROWS: "the passing on of later rows",
    Kind.EARLY_HALF: "the recomputation of an early half",
    Kind.END: "the end of a step",
    Kind.REFUSAL: "a call that it refuses",
}


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a rank begins.

    Attributes:
        kind: forward, backward ...
        call: number of the forward that a backward belongs to; of anything else its own number.
        layer: a number of the caller's; 0 if it gave none.
        digest: of the call's terms.
    """

    kind: Kind
    call: int
    layer: int
    digest: int

    def packed(self) -> tuple[int, int]:
        """As two 64-bit integers."""
        return self.call << 24 | (self.layer & 0xFFFFF) << 4 | self.kind, self.digest

    @classmethod
    def of(cls, what: int, digest: int) -> "Stamp":
        """From what was packed."""
        return cls(Kind(what & 0xF), what >> 24, what >> 4 & 0xFFFFF, digest)

    def __str__(self) -> str:
        words = _IN_WORDS[self.kind]
        if self.kind is Kind.BACKWARD:
            words += f" pass {self.call}"
        return words + (f" in layer {self.layer}" if self.layer else "")


def differences(stamps: Sequence[Stamp], told: Sequence[Mapping[str, str] | None]) -> str:
    """What ranks have begun, in words: what all have in common is left out."""
    known = [terms for terms in told if terms]
    names = dict.fromkeys(chain.from_iterable(known))
    differing = [name for name in names if len({terms.get(name) for terms in known}) > 1]
    ranks: dict[str, list[int]] = {}
    for rank, (stamp, terms) in enumerate(zip(stamps, told, strict=True)):
        words = f"{stamp}"
        if terms is None:
            words += " whose terms it has not told yet"
        elif terms and differing:
            words += " with " + ", ".join(f"{name}={terms.get(name)}" for name in differing)
        ranks.setdefault(words, []).append(rank)
    return " and ".join(f"{words} on cp ranks {of}" for words, of in ranks.items())
