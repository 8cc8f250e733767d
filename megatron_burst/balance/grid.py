"""The ranks and micro-batches that documents are assigned to, and what is refused of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_burst.balance.costs import WHO
from megatron_burst.errors import Need, require


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
        sizes = {name: getattr(self, name) for name in self.__dataclass_fields__}
        wrong = {name: size for name, size in sizes.items()
                 if not isinstance(size, int) or isinstance(size, bool) or size < 1}  # fmt: skip
        yield (
            not wrong,
            "sizes of the grid must be whole numbers from 1 on, because ranks and tokens are "
            "counted",
            wrong,
            "pass those of the job",
        )
        ranks = self.dp * self.cp
        yield (
            ranks % self.ep == 0 and (self.ep <= self.cp or self.ep % self.cp == 0),
            "the expert-parallel size must divide DP x CP, and be a multiple of CP if it is "
            "larger, because expert-parallel ranks are consecutive ones of a pipeline stage",
            f"EP {self.ep}, DP {self.dp}, CP {self.cp}",
            "choose another size",
        )


def check_sizes(grid: BatchGrid, cp_sizes: Sequence[int]) -> None:
    """Refuse context-parallel sizes that are no sub-groups of the grid's.

    Raises:
        BurstError: if one does not divide the group, or the group's own is missing.
    """
    require(WHO, [(
        set(cp_sizes) <= set(grid.cp_sizes) and grid.cp in cp_sizes,
        "context-parallel sizes must be powers of two that divide the group's, with the group's "
        "own, because sub-groups are halves of a group and the longest documents need all of it",
        list(cp_sizes),
        f"choose among {', '.join(map(str, grid.cp_sizes))}",
    )])  # fmt: skip


def checked_lengths(lengths: Sequence[int] | np.ndarray, grid: BatchGrid) -> np.ndarray:
    """The lengths of a batch as int64.

    Raises:
        BurstError: if they are no positive whole numbers, are fewer than the step has
            micro-batches, or if one is longer, or all are more, than the ranks can hold.
    """
    found = np.asarray(lengths)
    check_documents(found, grid)
    tokens = int(found.sum(dtype=np.int64))
    require(WHO, (enough_documents(found.size, grid), room_for(tokens, grid)))
    return found.astype(np.int64)


def check_documents(lengths: np.ndarray, grid: BatchGrid) -> None:
    """Refuse lengths of documents that no batch could have.

    Raises:
        BurstError: if they are no positive whole numbers, or one is longer than the widest group
            can hold.
    """
    require(WHO, _of_documents(lengths, grid))


def enough_documents(count: int, grid: BatchGrid) -> Need:
    """That a step has a document for each of its micro-batches."""
    return (
        count >= grid.slots,
        f"a batch must have a document for each of its {grid.dp} x {grid.micro_batches} "
        "micro-batches, because every data-parallel rank runs all of them",
        f"{count} documents",
        "use fewer micro-batches in a step, or a larger global batch",
    )


def room_for(tokens: int, grid: BatchGrid) -> Need:
    """That a step can hold so many tokens."""
    widest = grid.token_limit * grid.cp
    return (
        tokens <= widest * grid.slots,
        f"a batch must fit into {grid.slots} micro-batches of {widest} tokens, because all "
        "documents are in the same step",
        f"{tokens} tokens",
        "use more micro-batches in a step, or raise the token limit",
    )


def _of_documents(found: np.ndarray, grid: BatchGrid) -> Iterable[Need]:
    yield (
        found.ndim == 1 and found.size and np.issubdtype(found.dtype, np.integer),
        "lengths must be whole numbers, one for each document, because tokens are counted",
        f"shape {found.shape} of {found.dtype}",
        "pass a list of lengths",
    )
    shortest, longest = int(found.min()), int(found.max())
    yield (
        shortest > 0,
        "documents must have tokens, because each is trained on",
        f"a length of {shortest} at index {int(found.argmin())}",
        "leave empty documents out",
    )
    widest = grid.token_limit * grid.cp
    yield (
        longest <= widest,
        f"a document must fit into the {grid.cp} ranks of the widest group, because it is not "
        f"split (token limit {grid.token_limit} a rank)",
        f"{longest} tokens at index {int(found.argmax())}",
        f"raise the limit or the context-parallel size, or cut documents to {widest} tokens",
    )
