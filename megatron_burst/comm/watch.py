"""Agreement of ranks out of band, through the process group's store.

A collective would hang when one rank alone has something new to agree on; the store can say who
is missing.
"""

import json
from collections.abc import Hashable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_burst.errors import BurstError, DisagreementError

_PREFIX = "megatron_burst"


class Board:
    """A board on which each rank of a group posts texts and reads those of the others.

    Args:
        group: the context-parallel group; all its ranks must post the same topics in the same
            order.
        timeout_s: seconds to wait for the others' posts; may be changed later.

    Attributes:
        settled: what has come of calls that were agreed upon and accepted, for their repetition.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self._store = group.get_group_store()
        self._rank, self._size = group.rank(), group.size()
        self.timeout_s = timeout_s
        self._posts = 0
        self._agreed: set[str] = set()
        self.settled: dict[Hashable, Any] = {}
        self._said: set[str] = set()

    def share(self, text: str, who: str) -> list[str]:
        """Post a text; return the texts of all ranks in rank order.

        Raises:
            BurstError: naming the ranks that posted nothing in time.
        """
        if self._size == 1:
            return [text]
        keys = [self._key(rank) for rank in range(self._size)]
        self._store.set(keys[self._rank], text)
        self._posts += 1
        try:
            self._store.wait(keys, timedelta(seconds=self.timeout_s))
        except RuntimeError as error:  # what a FileStore raises; a TCPStore a sub-class of it
            late = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise BurstError(
                f"{who}: all ranks of a context-parallel group must make the same calls, because "
                f"they exchange shards in every call; got no word from cp ranks {late} within "
                f"{self.timeout_s:g} s about {text}; check that they run and that "
                "their batches have the same shape"
            ) from error
        return [self._store.get(key).decode() for key in keys]

    def agree(self, terms: Mapping[str, str], who: str) -> bool:
        """Make sure that all ranks have the same terms; asks the others only about new terms.

        Returns:
            whether the terms were new.

        Raises:
            DisagreementError: on all ranks, naming the first term that differs.
        """
        text = json.dumps(dict(terms))
        if text in self._agreed:
            return False
        for rank, other in enumerate(self.share(text, who)):
            if other != text:
                raise _disagreement(who, dict(terms), self._rank, json.loads(other), rank)
        self._agreed.add(text)
        return True

    def say_once(self, text: str) -> None:
        """Print a text on global rank 0, the first time only."""
        if text not in self._said and dist.get_rank() == 0:
            print(text, flush=True)
        self._said.add(text)

    def explain(self, error: Exception, who: str, hop: str) -> BurstError:
        """What a failed hop means: another rank's new terms if it posted any, else a lost rank."""
        for rank in range(self._size):
            if rank != self._rank and self._store.check([self._key(rank)]):
                news = self._store.get(self._key(rank)).decode()
                return DisagreementError(
                    f"{who}: all ranks of a context-parallel group must make the same calls, "
                    f"because they exchange shards in every call; got a call from cp rank {rank} "
                    f"that this rank (cp rank {self._rank}) did not make: {news}; give all ranks "
                    "batches of the same shape and the same options"
                )
        return BurstError(
            f"{who}: every rank must take part in every hop, because the rings pass shards from "
            f"rank to rank; got a failure in the {hop}: {str(error).splitlines()[0]}; look at the "
            "output of that rank first"
        )

    def _key(self, rank: int) -> str:
        return f"{_PREFIX}/{self._posts}/{rank}"


def _disagreement(
    who: str, mine: dict[str, str], my_rank: int, theirs: dict[str, str], their_rank: int
) -> DisagreementError:
    term = next(key for key in [*mine, *theirs] if mine.get(key) != theirs.get(key))
    return DisagreementError(
        f"{who}: all ranks of a context-parallel group must call with the same shapes and options, "
        f"because they exchange shards; got {term}={mine.get(term)} on cp rank {my_rank} and "
        f"{term}={theirs.get(term)} on cp rank {their_rank}; give all ranks the same"
    )
