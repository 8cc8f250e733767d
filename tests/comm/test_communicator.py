"""Communicators of a group: which sub-groups they use, and that buffers are allocated only once."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_burst.attention import burst_attention
from megatron_burst.comm import transport
from megatron_burst.comm.communicator import communicator_of
from megatron_burst.comm.group import state_of
from megatron_burst.comm.store import seconds_of
from megatron_burst.config import BurstConfig, Force
from megatron_burst.schedule.spec import Cargo
from megatron_burst.schedule.topology import Link
from tests.ranks import run_ranks

pytestmark = pytest.mark.numeric


def sub_groups(rank):
    """Ranks of each communicator of a 2 x 2 group, with nodes given and detected."""
    nested = communicator_of(dist.group.WORLD, BurstConfig(nodes=2))
    flat = communicator_of(dist.group.WORLD, BurstConfig())
    again = communicator_of(dist.group.WORLD, BurstConfig(nodes=2))
    groups = {key: dist.get_process_group_ranks(group) for key, group in nested.groups.items()}
    distinct = len({group.group_name for group in nested.groups.values()})
    return groups, distinct, sorted(flat.groups), flat.topology.grid, nested is again


def test_read_and_gradients_intra_and_inter_have_a_communicator_each():
    for rank, (groups, distinct, flat, grid, same) in enumerate(run_ranks(sub_groups, 4)):
        row, column = divmod(rank, 2)
        for cargo in Cargo:
            assert groups[Link.INTRA, cargo] == [2 * row, 2 * row + 1]
            assert groups[Link.INTER, cargo] == [column, column + 2]
        assert distinct == 4 and same
        assert grid == ((0, 1, 2, 3),)  # all on this node
        assert flat == sorted((Link.INTRA, cargo) for cargo in Cargo)


def groups_before(rank):
    """Ranks that have created different numbers of process groups make their communicators."""
    for _ in range(rank):
        dist.new_group([rank], use_local_synchronization=True)
    q, k, v = (torch.randn(1, 4, 2, 8).requires_grad_() for _ in range(3))
    burst_attention(q, k, v, config=BurstConfig(timeout_s=30)).sum().backward()
    return bool(q.grad.isfinite().all())


def test_ranks_with_different_numbers_of_groups_find_each_other():
    """torch names a locally synchronised group by that number; unequal ones hang in new_group."""
    assert run_ranks(groups_before, 3) == [True] * 3


def named_nodes(rank):
    """Nodes by NCCL's own override: uneven ones are flattened, with a warning."""
    import os

    os.environ["NCCL_HOSTID"] = "a" if rank < 3 else "b"
    with pytest.warns(UserWarning, match=r"got \[3, 1\] ranks on 2 nodes"):
        communicator = communicator_of(dist.group.WORLD, BurstConfig())
    out = burst_attention(*(torch.randn(1, 4, 2, 8) for _ in range(3)))
    return str(communicator.topology), bool(out.isfinite().all())


def test_uneven_nodes_run_one_flat_ring():
    assert run_ranks(named_nodes, 4) == [("flat ring of 4 ranks over 2 nodes", True)] * 4


def addresses(rank):
    """Where the group's buffer lies after each of several calls, and its size."""
    transport._LATEST = 16
    memory, seen = state_of(dist.group.WORLD).memory, []
    for tokens in (4, 64, 64, 4, 64, *[4] * 32, 64):
        q, k, v = (torch.randn(1, tokens, 2, 8) for _ in range(3))
        for nodes in (1, 2) if tokens == 64 else (1,):
            burst_attention(q, k, v, config=BurstConfig(nodes=nodes, intra="ring"))
        (flat,) = (x for used in memory._buffers.values() for x in used.flats)
        seen.append((flat.data_ptr(), flat.numel()))
    return seen


def test_one_buffer_serves_all_calls_and_is_as_large_as_the_latest_ones_need():
    for seen in run_ranks(addresses, 2):
        small, *large = seen[:5]
        assert len(set(large)) == 1 and small[1] < large[0][1]
        assert seen[-2][1] == small[1] and seen[-1][1] == large[0][1]


def shared_groups(rank):
    """Sub-groups of many configurations, and the total number of process groups."""
    alike = [
        BurstConfig(nodes=2), BurstConfig(nodes=2, overlap=False),
        BurstConfig(nodes=2, force=Force(transfer="send")),
    ]  # fmt: skip
    world = dist.group.WORLD
    first = communicator_of(world, alike[0])
    count = len(distributed_c10d._world.pg_map)
    others = [communicator_of(world, config) for config in alike[1:]]
    same = all(made.groups == first.groups and made is not first for made in others)
    more = len(distributed_c10d._world.pg_map) - count
    flat = communicator_of(world, BurstConfig(nodes=2), flat=True).groups
    whole = communicator_of(world, BurstConfig(nodes=1)).groups
    apart = communicator_of(world, BurstConfig(nodes=4)).groups  # a column of all ranks
    bounded = communicator_of(world, BurstConfig(nodes=2, nccl_ctas=4)).groups
    own = all(bounded[key] is not group for key, group in first.groups.items())
    column = {(Link.INTRA, cargo): apart[Link.INTER, cargo] for cargo in Cargo}
    calls = [run_all(config) for config in (*alike, BurstConfig(nodes=4))]
    return same, more, flat == whole == column, own, max(calls)


def run_all(config):
    """Largest difference between a call and one on a flat ring."""
    torch.manual_seed(dist.get_rank())
    q, k, v = (torch.randn(1, 4, 2, 8, dtype=torch.float64) for _ in range(3))
    out, flat = (burst_attention(q, k, v, config=c) for c in (config, BurstConfig(nodes=1)))
    return float((out - flat).abs().max())


def test_configurations_share_groups_of_equal_ranks():
    for same, more, is_one, own, error in run_ranks(shared_groups, 4):
        assert same and more == 0 and is_one and own and error < 1e-12


def lacking_on_one_rank(rank):
    """A rank that lacks a group which the others have makes it with them."""
    state = state_of(dist.group.WORLD, 20.0)
    communicator_of(dist.group.WORLD, BurstConfig())
    if rank == 0:
        state.sub_groups._groups.clear()
    made = communicator_of(dist.group.WORLD, BurstConfig(overlap=False))
    x = torch.ones(1)
    dist.all_reduce(x, group=made.groups[Link.INTRA, Cargo.GRAD])
    return x.item()


def test_a_group_that_one_rank_lacks_is_made_by_all():
    assert run_ranks(lacking_on_one_rank, 3) == [3.0] * 3


def patience(rank):
    """Time-outs of sub-groups: as given, as the group's own, and after that changes."""
    world = dist.group.WORLD
    distributed_c10d._set_pg_timeout(timedelta(seconds=50), world)
    found = []
    for given, later in ((None, None), (20.0, None), (None, None), (None, 70)):
        if later:
            distributed_c10d._set_pg_timeout(timedelta(seconds=later), world)
        made = communicator_of(world, BurstConfig(timeout_s=given))
        found.append((made.consensus.timeout_s, *map(seconds_of, made.groups.values())))
    return found


def test_groups_wait_as_long_as_the_context_parallel_group_unless_told():
    expected = [(seconds,) * (1 + len(Cargo)) for seconds in (50.0, 20.0, 50.0, 70.0)]
    assert run_ranks(patience, 2) == [expected] * 2
