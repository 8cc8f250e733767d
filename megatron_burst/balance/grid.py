"""The ranks and micro-batches that documents are assigned to, and what is refused of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_burst.balance.costs import WHO, Costs
from megatron_burst.errors import Need, require
from megatron_burst.integers import MOST, integer, integers

_COUNTED = "ranks and tokens are counted"
_RANKS = 1 << 20
_INT64 = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class BatchGrid:
    """The data-parallel ranks and micro-batches of a step, and what each can hold."""

    dp: int  # data-parallel size
    cp: int  # context-parallel size
    micro_batches: int  # of a data-parallel rank in a step
    token_limit: int  # tokens of a micro-batch that a rank has memory for: its shard's, not all
    pp: int = 1  # pipeline-parallel size
    # expert-parallel size; above 1, its ranks wait for each other in every layer
    ep: int = 1

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            size = getattr(self, name)
            object.__setattr__(self, name, integer(WHO, name, size, 1, why=_COUNTED))
        require(WHO, self._needs())

    @property
    def cp_sizes(self) -> tuple[int, ...]:
        """Powers of two that divide the context-parallel size, and that size: ascending."""
        powers = (1 << n for n in range(self.cp.bit_length()))
        return tuple(sorted({self.cp, *(size for size in powers if self.cp % size == 0)}))

    @property
    def slots(self) -> int:
        """Micro-batches of a step, of all data-parallel ranks together."""
        return self.dp * self.micro_batches

    @property
    def in_step(self) -> bool:
        """Whether ranks wait for each other in every micro-batch, not only at the step's end."""
        return self.pp > 1 or self.ep > 1

    def _needs(self) -> Iterable[Need]:
        ranks = self.dp * self.cp
        yield (ranks * self.pp <= _RANKS,
               f"a job must have at most {_RANKS} ranks, because times are kept for each rank",
               f"DP {self.dp}, CP {self.cp}, PP {self.pp}", "pass the job's sizes")  # fmt: skip
        yield (self.token_limit * self.cp <= MOST,
               f"a micro-batch must have at most {MOST} tokens, because its pairs are counted in "
               "64 bits", f"a token limit of {self.token_limit} on {self.cp} ranks",
               "pass the number of tokens for which a rank has memory")  # fmt: skip
        yield (ranks % self.ep == 0 and (self.ep <= self.cp or self.ep % self.cp == 0),
               "the expert-parallel size must divide DP x CP, and be a multiple of CP if it is "
               "larger, because expert-parallel ranks are consecutive ranks of a pipeline stage",
               f"EP {self.ep}, DP {self.dp}, CP {self.cp}", "choose another EP")  # fmt: skip


def check_sizes(grid: BatchGrid, costs: Costs, cp_sizes: Any) -> tuple[int, ...]:
    """The context-parallel sizes, by default the group's own.

    Raises:
        BurstError: if one does not divide the group, or the group's own is missing; or if grid and
            costs are none.
    """
    require(WHO, [(
        isinstance(grid, BatchGrid) and isinstance(costs, Costs),
        "grid must be a BatchGrid and costs must be Costs, because documents are assigned by them",
        f"{type(grid).__name__} and {type(costs).__name__}", "make both first",
    )])  # fmt: skip
    if cp_sizes is None:
        return (grid.cp,)
    cp_sizes = tuple(integers(WHO, "cp_sizes", cp_sizes, 1, why=_COUNTED))
    require(WHO, [(
        set(cp_sizes) <= set(grid.cp_sizes) and grid.cp in cp_sizes,
        "context-parallel sizes must be powers of two that divide the group's size, and include "
        "it, because sub-groups are halves of a group and the longest documents need the whole one",
        list(cp_sizes),
        f"choose among {', '.join(map(str, grid.cp_sizes))}",
    )])  # fmt: skip
    return cp_sizes


def check_documents(lengths: Sequence[int] | np.ndarray, grid: BatchGrid) -> np.ndarray:
    """Lengths of documents as int64.

    Raises:
        BurstError: if they are no positive whole numbers, or one is longer than the widest group
            can hold.
    """
    if not isinstance(lengths, np.ndarray):  # checked one by one: numpy would make numbers of bools
        lengths = np.array(integers(WHO, "lengths", lengths, 0, _INT64), dtype=np.int64)
    require(WHO, _of_documents(lengths, grid))
    return lengths.astype(np.int64)


def enough_documents(count: int, grid: BatchGrid) -> Need:
    """That a step has a document for each of its micro-batches."""
    return (count >= grid.slots, f"a batch must have a document for each of its {grid.dp} x "
            f"{grid.micro_batches} micro-batches, because every data-parallel rank runs all of "
            "them", f"{count} documents",
            "use fewer micro-batches in a step, or a larger global batch")  # fmt: skip


def room_for(tokens: int, grid: BatchGrid) -> Need:
    """That a step can hold so many tokens."""
    widest = grid.token_limit * grid.cp
    return (tokens <= widest * grid.slots, f"a batch must fit into {grid.slots} micro-batches of "
            f"{widest} tokens, because all documents are in the same step", f"{tokens} tokens",
            "use more micro-batches in a step, or raise the token limit")  # fmt: skip


def _of_documents(lengths: np.ndarray, grid: BatchGrid) -> Iterable[Need]:
    yield (lengths.ndim == 1 and lengths.size and np.issubdtype(lengths.dtype, np.integer),
           "lengths must be whole numbers, one for each document, because tokens are counted",
           f"shape {lengths.shape} of {lengths.dtype}", "pass a list of lengths")  # fmt: skip
    shortest, longest = int(lengths.min()), int(lengths.max())
    yield (shortest > 0, "documents must have tokens, because each is trained on",
           f"a length of {shortest} at index {int(lengths.argmin())}",
           "leave empty documents out")  # fmt: skip
    widest = grid.token_limit * grid.cp
    yield (longest <= widest,
           f"a document must fit into the {grid.cp} ranks of the widest group, because it is not "
           f"split (token limit {grid.token_limit} a rank)", f"{longest} tokens at index "
           f"{int(lengths.argmax())}", "raise the limit or the context-parallel size, or cut "
           f"documents to {widest} tokens")  # fmt: skip
