"""Restart in the process: ranks that lost another one form a new group, and compute on.

Guards against state of the old group that survives: a log that raises, threads, connections.
"""

import gc
import threading
import time

import pytest
import torch
import torch.distributed as dist

from megatron_burst.comm import group as state
from megatron_burst.errors import BurstError
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.spec import Direction
from tests.attention.failing import failing
from tests.attention.test_processes import inputs, run, truth_of, worst
from tests.faults.acts import dies
from tests.faults.table import MODES, ODD, TIMEOUT_S, WORLD
from tests.options import burst_config
from tests.oracle import rows_of


def error_in(world, rank, config):
    """Of a call and its gradients in the default group."""
    tensors = inputs(world, 6, (12, 12), (4, 4), torch.float64)
    rows = rows_of(Layout.ZIGZAG, rank, world, 6)
    return worst(run(tensors, rows, config=config), truth_of(tensors, True, 0.5), rows)


def restarted(rank, mode):
    """Errors before a rank ends and after the others have started again without it; and whether
    burst then knows as many groups as before, and how many of its threads there are."""
    config = burst_config(timeout_s=TIMEOUT_S, **MODES[mode] | {"nodes": 1})
    before = error_in(WORLD, rank, config)
    store, groups = dist.group.WORLD.get_group_store(), len(state._STATES)
    act, told = dies if rank == ODD else step_on, rf"cp ranks \[{ODD}\]"
    with failing(Direction.BACKWARD, "middle", act=act), pytest.raises(BurstError, match=told):
        error_in(WORLD, rank, config)
    dist.destroy_process_group()
    again = rank - (rank > ODD)
    new = dist.PrefixStore("again", store)
    dist.init_process_group("gloo", store=new, rank=again, world_size=WORLD - 1)
    after = error_in(WORLD - 1, again, config)
    gc.collect()
    for _ in range(50):  # the old group's thread sleeps
        threads = [each for each in threading.enumerate() if "_watch" in each.name]
        if len(threads) == 1:
            break
        time.sleep(0.1)
    return before, after, len(state._STATES) == groups, len(threads)


def step_on(step, op, binder, run):
    return step.run(run)


@pytest.mark.parametrize("mode", ["ring", *[pytest.param(m, marks=pytest.mark.whole)
                                            for m in ("gather", "a2a")]])  # fmt: skip
def test_ranks_that_lost_one_go_on_in_a_new_group_of_the_same_processes(mode, patients):
    found = patients.run(restarted, mode, fresh=True)
    assert found[ODD] is None
    for before, after, same, threads in (x for x in found if x):
        assert before <= 1e-12 and after <= 1e-12
        assert same and threads == 1
