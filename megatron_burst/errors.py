"""Errors. One sentence each: who, what must hold and why; what was got; what to change."""

from collections.abc import Iterable
from difflib import get_close_matches

# (whether it holds, what must hold and why, what was got, what to change)
type Need = tuple[object, str, object, str]


class BurstError(ValueError):
    """An input, option or environment that burst does not support.

    Raised before anything is computed or sent, on all ranks together wherever possible.
    """

    def __init__(self, sentence: str) -> None:
        # Megatron's build_module (core/transformer/spec_utils.py) appends text and raises again
        super().__init__(sentence.partition(" when instantiating ")[0])


class DisagreementError(BurstError):
    """The ranks of a context-parallel group called with different shapes or options."""


def unmet_needs(caller: str, needs: Iterable[Need]) -> str:
    """The sentence of the first unmet need, "" if all hold. A generator's needs may rely on the
    ones before."""
    for holds, must, got, change in needs:
        if not holds:
            return f"{caller}: {must}; got {got}; {change}"
    return ""


def require(caller: str, needs: Iterable[Need]) -> None:
    """Raise BurstError with the sentence of the first unmet need, if there is one."""
    if sentence := unmet_needs(caller, needs):
        raise BurstError(sentence)


def nearest(word: str, names: Iterable[str]) -> str:
    """ ", did you mean ...?" or nothing."""
    close = get_close_matches(word, list(names), n=1)
    return f", did you mean {close[0]!r}?" if close not in ([], [word]) else ""


def nearest_multiples(number: int, divisor: int) -> str:
    """ "multiple of 8, such as 56 or 64" for 60 and 8; never names 0."""
    below = number // divisor * divisor
    near = " or ".join(str(multiple) for multiple in (below, below + divisor) if multiple)
    return f"multiple of {divisor}, such as {near}"
