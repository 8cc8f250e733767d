"""Which document of a global batch goes where, so that micro-batches and ranks end together.

Pure Python and numpy: no torch, no communication, the same result on every rank.
"""

from megatron_burst.balance.assign import Assignment, MicroBatch, assign, assign_fewest
from megatron_burst.balance.costs import Costs, Measured, fit, pairs_of
from megatron_burst.balance.grid import BatchGrid
from megatron_burst.balance.sampler import AssignedStep, Sampler

__all__ = ["AssignedStep", "Assignment", "BatchGrid", "Costs", "Measured", "MicroBatch", "Sampler",
           "assign", "assign_fewest", "fit", "pairs_of"]  # fmt: skip
