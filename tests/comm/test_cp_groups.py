"""Intra and inter groups: which ranks, that they are those that burst sends through, refusals.

Guards against groups that mix nodes or rails, against a second set of groups beside burst's own,
and against a table that shows other ranks.
"""

import os
import warnings

import pytest
import torch
import torch.distributed as dist

from megatron_burst import BurstConfig, BurstError, burst_attention, cp_groups
from megatron_burst.comm.communicator import communicator_of
from megatron_burst.comm.grid import grid, nodes_of
from megatron_burst.compat import burst_attn_func
from megatron_burst.schedule.spec import Cargo
from megatron_burst.schedule.topology import Link, pretend_nodes, topology_of
from tests.ranks import preload, run_ranks

preload("megatron_burst.comm.cp_groups", "megatron_burst.compat")


def members(group):
    return group and tuple(dist.get_process_group_ranks(group))


def on_nodes(rank, names, ranks=None):
    """What a rank on the node of that name finds, and the sum of ranks over each of its groups."""
    os.environ["NCCL_HOSTID"], os.environ["LOCAL_RANK"] = names[rank], str(rank)
    group = dist.new_group(ranks) if ranks else None
    if ranks and rank not in ranks:
        with pytest.raises(BurstError, match="cp_groups: the calling rank must belong"):
            cp_groups(group)
        return None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = cp_groups(group)
    sums = []
    for part in (found.intra, found.inter):
        x = torch.tensor([rank])
        if part:
            dist.all_reduce(x, group=part)
        sums.append(int(x))
    assert cp_groups(group).intra is found.intra and cp_groups(group).inter is found.inter
    flat = any("one flat ring" in str(warning.message) for warning in warned)
    facts = found.ranks, found.nodes, found.rows, found.columns, str(found)
    return facts, members(found.intra), members(found.inter), sums, flat


def test_rows_are_nodes_and_columns_join_equal_places():
    """Six ranks on three nodes that take turns."""
    results = run_ranks(on_nodes, 6, "abcabc")
    nodes, columns = ((0, 3), (1, 4), (2, 5)), ((0, 1, 2), (3, 4, 5))
    for rank, ((ranks, found, rows, across, _), intra, inter, sums, flat) in enumerate(results):
        assert ranks == tuple(range(6)) and not flat
        assert found == rows == nodes and across == columns
        assert intra == nodes[rank % 3] and inter == columns[rank // 3]
        assert sums == [sum(intra), sum(inter)]


def test_uneven_nodes_are_one_ring_that_visits_them_one_by_one():
    for rank, (facts, intra, inter, sums, flat) in enumerate(run_ranks(on_nodes, 3, "aba")):
        _, nodes, rows, columns, text = facts
        assert nodes == ((0, 2), (1,)) and rows == ((0, 2, 1),) and columns == ((0,), (2,), (1,))
        assert (intra, inter, sums) == ((0, 1, 2), None, [3, rank]) and flat
        assert text == "flat ring of 3 ranks over 2 nodes\nnode 0  0  2\nnode 1  1"


def test_a_group_of_some_ranks_is_described_by_their_global_numbers():
    """Tensor-parallel neighbours are left out, as in Megatron's context-parallel groups."""
    one, _, two, outside, *_ = run_ranks(on_nodes, 5, "aabbb", [0, 2])
    assert outside is None and one[0] == two[0]
    assert one[0][:4] == ((0, 2), ((0,), (2,)), ((0,), (2,)), ((0, 2),))
    assert one[0][4] == "2 nodes x 1 rank\n        rail 0\nnode 0       0\nnode 1       2"
    assert (one[1], one[2]) == (None, (0, 2))


def burst_uses_them(rank):
    """Whether attention sends through these same groups, and gives them to the original's call."""
    config = BurstConfig(nodes=2)
    found = cp_groups(config=config)
    sent, original = set(), dist.P2POp

    def noted(operation, tensor, peer, group=None, tag=0):
        sent.add(members(group))
        return original(operation, tensor, peer, group, tag)

    dist.P2POp = noted
    q, k, v = (torch.randn(1, 4, 2, 8, dtype=torch.float64) for _ in range(3))
    out = burst_attention(q, k, v, config=config)
    double = [found.intra, found.inter]
    theirs = burst_attn_func(q, k, v, causal=True, double_group=double)
    groups = communicator_of(dist.group.WORLD, config).groups
    same = [groups[link, Cargo.READ] for link in Link] == double
    return sent == set(map(members, double)), same, torch.equal(out, theirs)


def test_attention_sends_through_the_same_groups_and_the_originals_call_takes_them():
    assert run_ranks(burst_uses_them, 4) == [(True, True, True)] * 4


def refusals(rank):
    with pytest.raises(BurstError, match="cp_groups: group must be a process group.*got a str"):
        cp_groups("cp")
    with pytest.raises(BurstError, match="nodes must divide the context-parallel size.*got 2 nod"):
        cp_groups(config=BurstConfig(nodes=2))
    with pytest.raises(BurstError, match="config"):  # ranks with other options: all of them raise
        cp_groups(config=BurstConfig(nodes=1 if rank else 3))
    return True


def test_wrong_groups_and_options_are_refused_on_all_ranks():
    assert run_ranks(refusals, 3) == [True] * 3


def test_a_process_alone_is_one_node():
    found = cp_groups()
    assert (found.nodes, found.intra, found.inter) == (((0,),), None, None)
    assert str(found) == "1 node x 1 rank\nnode 0  0"


def test_a_large_table_has_the_first_and_the_last():
    """64 nodes of 72: every line has as many cells, and what is left out is shown by dots."""
    topology = pretend_nodes(64 * 72, 64)
    lines = grid(topology, range(0, 2 * 64 * 72, 2)).splitlines()
    assert len(lines) == 9 and lines[7].split() == ["..."]
    assert lines[0].split()[:4] == ["rail", "0", "rail", "1"] and lines[0].endswith("rail 71")
    assert lines[8].split()[:3] == ["node", "63", "9072"] and lines[8].endswith(" 9214")
    assert {len(line) for line in (*lines[:7], lines[8])} == {len(lines[0])}
    with pytest.warns(UserWarning, match="one flat ring"):
        uneven = topology_of("aab")
    assert nodes_of(uneven) == ((0, 1), (2,)) and "rail" not in grid(uneven, range(3))
