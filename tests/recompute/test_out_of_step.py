"""Ranks of which some keep results and others do not, or find other inputs in recomputation.

Guards against programs that do not fit together, ranks that wait for one that has raised an error,
and false alarms of `keep_debug`.
"""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_burst import BurstConfig, burst_attention
from megatron_burst.errors import BurstError, DisagreementError
from tests.options import burst_config
from tests.ranks import run_ranks

ODD = 1  # the rank that differs
WAYS = {
    "a2a": {"intra": "a2a"},
    "two nodes": {"nodes": 2, "intra": "gather", "resend": "never"},
}


def attend(x, config, **options):
    return burst_attention(x * 1, x[:, :, :2] * 1, x[:, :, :2] * 2, config=config, **options)


def checkpointed(x, config, **options):
    return checkpoint(attend, x, config, use_reentrant=False, **options)


def grad_of(function, x, config, **options):
    (grad,) = torch.autograd.grad(function(x, config, **options).square().sum(), x)
    return grad


def raised(function, *args, **options):
    try:
        function(*args, **options)
    except BurstError as error:
        return type(error), str(error)
    return None, ""


def some_keep(rank):
    """By mode: what ranks are told if one of them keeps; whether the next passes agree."""
    x, by_mode = torch.randn(2, 8, 4, 8, dtype=torch.float64, requires_grad=True), {}
    for name, way in WAYS.items():
        config = burst_config(timeout_s=60, keep="all", **way)
        attend(x, config)
        error = raised(grad_of, checkpointed if rank == ODD else attend, x, config)
        difference = grad_of(checkpointed, x, config) - grad_of(attend, x, config)
        by_mode[name] = error, difference.abs().max().item()
    return by_mode


def test_a_rank_that_keeps_alone_is_named_before_anything_is_sent():
    for by_mode in run_ranks(some_keep, 4):
        for (kind, sentence), difference in by_mode.values():
            assert kind is DisagreementError and difference <= 1e-12
            assert "a forward whose results are kept for recomputation on cp ranks [1]" in sentence


def first_checkpoint(rank):
    """One rank has run a checkpoint before, with itself, so only this one is set up to keep."""
    config = BurstConfig(timeout_s=60, keep="all")
    alone = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    x = torch.randn(2, 8, 4, 8, requires_grad=True)
    if rank == ODD:
        grad_of(checkpointed, x, config, group=alone)
    error = raised(grad_of, checkpointed, x, config)
    return error, raised(grad_of, checkpointed, x, config)


def test_a_rank_that_was_set_up_to_keep_before_others_is_named_and_the_next_step_is_right():
    for (kind, sentence), (_, later) in run_ranks(first_checkpoint, 3):
        assert kind is DisagreementError and not later
        assert "a forward whose results are kept for recomputation on cp ranks [1]" in sentence


def twice(x, config):
    return attend(attend(x, config), config)


def debugged(rank):
    """What `keep_debug` says of two calls in one checkpoint; of inputs that changed on one rank."""
    torch.manual_seed(rank)
    x = torch.randn(2, 64, 4, 8, requires_grad=True)
    config = BurstConfig(timeout_s=60, keep="half", keep_debug=True)
    errors = []
    for _ in range(3):  # the first call sets it up
        out = checkpoint(twice, x, config, use_reentrant=False)
        errors.append(raised(out.sum().backward))
    change = torch.ones(())
    out = checkpoint(lambda x: attend(x * change, config), x, use_reentrant=False)
    change.add_(rank == ODD)
    errors.append(raised(out.sum().backward))
    return errors, raised(grad_of, checkpointed, x, config)


@pytest.fixture(scope="module")
def of_debug():
    return run_ranks(debugged, 4)


def test_inputs_that_follow_a_half_recomputed_call_may_be_rounded_otherwise(of_debug):
    for errors, _ in of_debug:
        assert [sentence for _, sentence in errors[:3]] == [""] * 3


def test_if_inputs_changed_on_one_rank_the_others_hear_of_it(of_debug):
    for rank, (errors, later) in enumerate(of_debug):
        kind, sentence = errors[3]
        assert "recomputation's inputs must equal the first pass's inputs bit by bit" in sentence
        assert later == (None, "")
        if rank != ODD:
            assert kind is DisagreementError and "on cp rank 1, while" in sentence
