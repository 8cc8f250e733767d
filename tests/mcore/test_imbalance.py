"""What ranks lose in a step to slower ones: measured where they wait, and said.

Guards against seconds that contain the wait itself, another step's, and a wrong rank's name.
"""

from argparse import Namespace
from math import isnan, nan
from time import sleep

import pytest
import torch.distributed as dist

from megatron_burst.mcore.imbalance import Part, line_of, lost, of_all
from tests.ranks import preload, run_ranks

preload("megatron_burst.mcore.imbalance")
WORK = 0.05, 0.4, 0.1  # seconds of each rank


def measured(rank: int) -> tuple[list[float], float]:
    """The ranks' seconds of a step in which each works and then waits for all; and afterwards."""

    def finalize(given):
        dist.barrier()  # as gradients are summed
        return given + 1

    config, part = Namespace(finalize_model_grads_func=finalize), Part()
    with part.of_step(config):
        sleep(WORK[rank])
        assert config.finalize_model_grads_func(1) == 2
    assert config.finalize_model_grads_func is finalize
    every = of_all(part.seconds(), dist.group.WORLD)
    return every, part.seconds()


def test_a_ranks_part_ends_before_it_waits():
    for every, afterwards in run_ranks(measured, 3):
        assert isnan(afterwards)
        for seconds, work in zip(every, WORK, strict=True):
            assert work <= seconds < work + 0.25
        assert 0 < lost(every) < 0.4 and " for rank 1, and " in line_of(every, range(3))


def test_the_line_names_global_ranks():
    said = line_of([1.0, 2.5, 1.5, 2.0], [4, 5, 12, 13])
    assert said == (
        "imbalance: in this step ranks waited 0.750 s on average (30.0% of 2.500 s) for rank 5, "
        "and rank 4 waited 1.500 s"
    )
    assert lost([1.0, 2.5, 1.5, 2.0]) == 0.75 and isnan(lost([1.0, nan]))


def test_a_step_that_fails_or_has_no_end_leaves_nothing():
    part, config = Part(), Namespace(finalize_model_grads_func=None)
    with part.of_step(config):
        assert config.finalize_model_grads_func is None
    assert isnan(part.seconds())
    config.finalize_model_grads_func = print
    with pytest.raises(ZeroDivisionError), part.of_step(config):
        config.finalize_model_grads_func()
        raise ZeroDivisionError
    assert config.finalize_model_grads_func is print
