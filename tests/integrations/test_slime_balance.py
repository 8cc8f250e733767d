"""slime's micro-batches, by the example in examples/frameworks: slime at 624b824, from a clone.

Guards against a choice that slime no longer makes where the example is put, and steps of other
rollouts.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from argparse import Namespace
from unittest import mock

import pytest

from tests.integrations import balanced

if "SLIME" not in os.environ:
    pytest.skip("SLIME must be a clone of slime: it is in no registry", allow_module_level=True)


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """SGLang and what comes with it, which the choice of micro-batches does not call."""

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("aiohttp", "pylatexenc", "sglang", "sglang_router"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return mock.MagicMock(__path__=[], __spec__=spec)

    def exec_module(self, module):
        pass


def schedules_of_slime() -> dict:
    """slime's schedule of two steps of 32 rollouts on 2 x 2 ranks, without and with the example;
    lists of indices by rank and micro-batch."""
    sys.meta_path.append(Absent())
    sys.path.insert(0, os.environ["SLIME"])
    from slime.ray import rollout
    from slime.utils.misc import load_function

    args = Namespace(
        use_dynamic_batch_size=True, max_tokens_per_gpu=balanced.LIMIT, micro_batch_size=None,
        balance_data=False, balance_by_flops=False, pipeline_model_parallel_size=1,
        expert_model_parallel_size=1,
    )  # fmt: skip
    sizes = dict(dp_size=2, cp_size=2, vpp_size=1, microbatch_group_size_per_vp_stage=1)
    found = {}
    for name in ("theirs", "ours"):
        if name == "ours":
            load_function("balance_slime.generate_rollout")
        parts, some, counts, _ = rollout.build_dp_schedule(
            args, sizes, balanced.LENGTHS, global_batch_size=32, rollout_indices=list(range(64))
        )
        ranks = [
            [[part[at] for at in one] for one in each]
            for part, each in zip(parts, some, strict=True)
        ]
        found[name] = {"ranks": ranks, "counts": counts}
    return found


def test_slimes_micro_batches_are_those_of_the_balance(tmp_path):
    """Each step has its own rollouts, and ranks end it together."""
    found = balanced.in_a_new_process(schedules_of_slime, tmp_path / "plan.json")
    spreads = {}
    for name, one in found.items():
        first = one["counts"][0]
        steps = [slice(first), slice(first, None)]
        for number, step in enumerate(steps):
            ranks = [each[step] for each in one["ranks"]]
            assert [len(each) for each in ranks] == one["counts"][number : number + 1] * 2
            spreads[name, number] = balanced.spread_of_step(ranks, number)
    assert max(spreads["ours", 0], spreads["ours", 1]) < 1.01 < spreads["theirs", 0], spreads
