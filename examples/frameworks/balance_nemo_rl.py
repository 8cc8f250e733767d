"""NeMo-RL: micro-batches that end together, from the balance of megatron_burst.

    export BALANCE_COSTS=plan.json BALANCE_CP=4 PYTHONPATH=examples/frameworks

and, as the first line of the script that starts the job, such as examples/run_grpo.py:

    import balance_nemo_rl

NeMo-RL packs in the driver. This replaces its packer `modified_first_fit_decreasing`, so leave
`policy.sequence_packing.algorithm` at that.
"""

import os
from itertools import chain

from nemo_rl.data.packing import algorithms

from megatron_burst import balance

COSTS = balance.Costs.from_plan(os.environ["BALANCE_COSTS"])
CP, PP, EP = (int(os.environ.get(f"BALANCE_{name}", "1")) for name in ("CP", "PP", "EP"))


class BalancedPacker(algorithms.SequencePacker):
    """Bins for the data-parallel ranks in turn."""

    def _pack_implementation(self, sequence_lengths: list[int]) -> list[list[int]]:
        dp = self.bin_count_multiple or 1
        grid = balance.BatchGrid(dp, CP, 1, self.bin_capacity // CP, PP, EP)
        plan = balance.assign_fewest(sequence_lengths, grid, COSTS)
        in_turn = chain.from_iterable(zip(*plan.micro_batches, strict=True))  # rank after rank
        return [list(one.documents) for (one,) in in_turn]


algorithms.ModifiedFirstFitDecreasingPacker = BalancedPacker
