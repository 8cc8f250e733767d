"""Groups, however they were made: what carries their data, and how out-of-step ranks are told."""

import time

import pytest
import torch
import torch.distributed as dist

from megatron_burst.attention import burst_attention
from megatron_burst.comm.communicator import communicator_of
from megatron_burst.comm.store import backend_of
from megatron_burst.config import BurstConfig
from megatron_burst.errors import DisagreementError
from tests.options import burst_config
from tests.ranks import run_ranks


def attend(causal=True, **options):
    q = torch.ones(1, 8, 2, 8)
    return burst_attention(q, q, q, causal=causal, config=burst_config(**options))


def without_a_name(rank, folder):
    """A default group made without a backend, on ranks that then differ."""
    dist.destroy_process_group()
    dist.init_process_group(init_method=f"file://{folder}/store", rank=rank, world_size=2)
    attend()
    attend(causal=False)
    with pytest.raises(DisagreementError):
        attend(causal=rank == 0)
    return backend_of(dist.group.WORLD)


def test_a_group_that_names_no_backend_is_what_it_runs_on(tmp_path):
    """Its ranks used to compute wrong numbers for one more call before they were told."""
    assert run_ranks(without_a_name, 2, tmp_path) == ["gloo", "gloo"]


def wrapped(rank):
    attend()
    return backend_of(dist.group.WORLD)


def test_torchs_checks_of_collectives_may_be_on():
    environment = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    assert run_ranks(wrapped, 2, environment=environment) == ["gloo", "gloo"]


def on_meta(rank):
    with torch.device("meta"):
        communicator_of(dist.group.WORLD, BurstConfig())
    return attend().shape


def test_layers_may_be_built_on_meta():
    """As with Megatron's --init-model-with-meta-device."""
    assert run_ranks(on_meta, 2) == [(1, 8, 2, 8)] * 2


def late(rank):
    attend(timeout_s=1)
    time.sleep(4 * rank)
    return attend(timeout_s=30).shape


def test_a_longer_time_out_counts_from_the_next_call_on():
    assert run_ranks(late, 2) == [(1, 8, 2, 8)] * 2
