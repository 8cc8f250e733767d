"""slime: micro-batches that end together, from the balance of megatron_burst.

    export BALANCE_COSTS=plan.json PYTHONPATH=examples/frameworks
    python train.py --use-dynamic-batch-size --max-tokens-per-gpu 16384 \
        --rollout-function-path balance_slime.generate_rollout ...

slime shares out the samples of a rollout in `RolloutManager`, which loads this file as its rollout
function: the one that slime has by default. Steps stay slime's: --global-batch-size rollouts each.
"""

import os
from argparse import Namespace
from itertools import chain
from unittest import mock

from slime.ray import rollout
from slime.rollout.sglang_rollout import generate_rollout  # noqa: F401
from slime.utils import dp_schedule

from megatron_burst import balance

COSTS = balance.Costs.from_plan(os.environ["BALANCE_COSTS"])
build_dp_schedule = dp_schedule.build_dp_schedule


def balanced(args: Namespace, sizes: dict[str, int], total_lengths: list[int], **steps) -> tuple:
    """slime's schedule, with the micro-batches of each step chosen here."""

    def pack(lengths: list[int], **_) -> list[list[int]]:
        grid = balance.BatchGrid(
            sizes["dp_size"], sizes["cp_size"], 1, args.max_tokens_per_gpu,
            args.pipeline_model_parallel_size, args.expert_model_parallel_size,
        )  # fmt: skip
        group = sizes["microbatch_group_size_per_vp_stage"] if sizes["vpp_size"] > 1 else 1
        plan = balance.assign_fewest(lengths, grid, COSTS, group)
        in_turn = chain.from_iterable(zip(*plan.micro_batches, strict=True))  # rank after rank
        return [list(one.documents) for (one,) in in_turn]

    in_turn = Namespace(**vars(args) | {"balance_data": False})
    with mock.patch.object(dp_schedule, "_pack_step_into_mbs", pack):
        return build_dp_schedule(in_turn, sizes, total_lengths, **steps)


rollout.build_dp_schedule = balanced
