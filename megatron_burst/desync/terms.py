"""What a rank says of terms in which ranks differ; loaded when they do."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_burst.errors import DisagreementError


def refuse_differences(who: str, terms: Sequence[Mapping[str, str]], rank: int, of: Any) -> None:
    """Refuse terms, in rank order, that differ from this rank's; names the first. `of`: a
    `watch.Parallel`."""
    mine = terms[rank]
    for their_rank, theirs in enumerate(terms):
        if theirs == mine:
            continue
        term = next(key for key in [*mine, *theirs] if mine.get(key) != theirs.get(key))
        change = of.changes.get(term, "give all ranks the same")
        raise DisagreementError(
            f"{who}: all ranks of a {of.group} group must call with the same shapes and options, "
            f"because {of.reason}; got {term}={mine.get(term)} on {of.rank} {rank} and "
            f"{term}={theirs.get(term)} on {of.rank} {their_rank}; {change}"
        )
