"""The documents of each step, in an order that a run can resume, and where they go."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_burst.balance import grid as grids
from megatron_burst.balance.assign import Assignment, MicroBatch, assign
from megatron_burst.balance.costs import WHO, Costs
from megatron_burst.balance.grid import BatchGrid, enough_documents, room_for
from megatron_burst.errors import Need, require
from megatron_burst.integers import integer


@dataclass(frozen=True, slots=True)
class AssignedStep:
    """The documents of a step, and where they go."""

    documents: np.ndarray  # indices into the data set
    assignment: Assignment  # of indices into `documents`

    def of_rank(self, dp_rank: int, cp_rank: int) -> tuple[MicroBatch, ...]:
        """The micro-batches of one rank, in order, with documents as indices into the data set."""
        return tuple(
            replace(batch, documents=tuple(self.documents[list(batch.documents)].tolist()))
            for batch in self.assignment.of_rank(dp_rank, cp_rank)
        )


class Sampler(Iterator[AssignedStep]):
    """Steps of a data set's documents, each assigned so that ranks end together; without end.

    Each epoch has every document once, in an order of its own. A step may begin in one epoch and
    end in the next. Equal arguments give equal steps on all ranks, and with `consumed` those that
    a run which ended there would have had.
    """

    def __init__(self, lengths: Sequence[int] | np.ndarray, grid: BatchGrid, costs: Costs,
                 documents: int, *, cp_sizes: Sequence[int] | None = None, seed: int | None = 0,
                 consumed: int = 0) -> None:  # fmt: skip
        """Check the data set.

        Args:
            lengths: tokens of each document of the data set, without padding.
            grid: ranks, micro-batches and the token limit.
            costs: seconds of a micro-batch.
            documents: of a step, on all ranks together; Megatron's global batch size.
            cp_sizes: as for `assign`.
            seed: of the order; None leaves documents in the data set's.
            consumed: documents of the steps before the first one.

        Raises:
            BurstError: if a document is longer than the widest group can hold, or a step of the
                first epoch has too few documents or too many tokens.
        """
        self.cp_sizes = grids.check_sizes(grid, costs, cp_sizes)
        self.lengths = grids.check_documents(lengths, grid)
        # as sharding at the widest size needs; narrower sizes need less
        self._padded = -(-self.lengths // (2 * grid.cp)) * (2 * grid.cp)
        grids.check_documents(self._padded, grid)
        self.grid, self.costs = grid, costs
        why = "it counts documents, as Megatron's global batch size and consumed_train_samples do"
        self.documents = integer(WHO, "documents", documents, 1, why=why)
        self.consumed = integer(WHO, "consumed", consumed, 0, 1 << 62, why)
        why = "it seeds the order of documents (None keeps the data set's order)"
        self.seed = None if seed is None else integer(WHO, "seed", seed, 0, 1 << 62, why)
        self._epoch, self._order = -1, np.arange(0)
        require(WHO, self._needs())

    def __next__(self) -> AssignedStep:
        """The next step.

        Raises:
            BurstError: if its documents were not found to fit into the micro-batches.
        """
        documents = self._next_documents(self.documents)
        assignment = assign(self._padded[documents], self.grid, self.costs, self.cp_sizes)
        self.consumed += self.documents
        return AssignedStep(documents, assignment)

    def _next_documents(self, count: int) -> np.ndarray:
        """The next documents, of one epoch or several."""
        parts, at = [], self.consumed
        while count:
            epoch, begin = divmod(at, len(self.lengths))
            parts.append(self._order_of(epoch)[begin : begin + count])
            at += len(parts[-1])
            count -= len(parts[-1])
        return np.concatenate(parts)

    def _order_of(self, epoch: int) -> np.ndarray:
        """An epoch's documents."""
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.arange(len(self.lengths))
            if self.seed is not None:
                np.random.default_rng((self.seed, epoch)).shuffle(self._order)
        return self._order

    def _needs(self) -> Iterable[Need]:
        yield enough_documents(self.documents, self.grid)
        yield room_for(self.documents * int(self._padded.min()), self.grid)
        steps = max(len(self.lengths) // self.documents, 1)
        tokens = self._padded[self._next_documents(steps * self.documents)].reshape(steps, -1)
        yield room_for(int(tokens.sum(axis=1).max()), self.grid)
