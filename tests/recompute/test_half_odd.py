"""Keeping the later half in the contiguous layout, on an odd number of processes.

Guards against an NCCL communicator that waits for a rank with nothing to send.
"""

from functools import partial
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_burst import BurstConfig, burst_attention
from megatron_burst.comm.communicator import Communicator
from megatron_burst.mcore import patches
from megatron_burst.schedule.layout import Layout
from tests.oracle import full_attention, rows_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.numeric
TOKENS = 8


def odd_contiguous(rank: int, size: int) -> tuple[float, list[int]]:
    """Error of gradients; how many parcels the first transfers between any two ranks had."""
    patches.apply("checkpoints")
    parcels, inner = [], Communicator.send

    def noting(self, link, cargo, sends, recvs):
        parcels.append(len(sends) + len(recvs))
        return inner(self, link, cargo, sends, recvs)

    generator, shapes = torch.Generator().manual_seed(7), [(4, 6), (2, 6), (2, 3)]
    whole = [
        torch.randn(2, size * TOKENS, *shape, generator=generator, dtype=torch.float64)
        for shape in shapes
    ]
    whole = [x.requires_grad_() for x in whole]
    full_attention(*whole, True, 6**-0.5).square().sum().backward()
    rows = rows_of(Layout.CONTIGUOUS, rank, size, TOKENS)
    leaves = [x.detach()[:, rows].requires_grad_() for x in whole]
    config = BurstConfig(keep="half", keep_offload="results", keep_debug=True)
    attend = partial(burst_attention, layout="contiguous", config=config)
    with mock.patch.object(Communicator, "send", noting):
        checkpoint(attend, *leaves, use_reentrant=False).square().sum().backward()
    pairs = zip(leaves, whole, strict=True)
    return max(float((x.grad - y.grad[:, rows]).abs().max()) for x, y in pairs), parcels


def test_a_middle_rank_that_keeps_its_own_rows_is_met_by_the_others_first():
    found = run_ranks(odd_contiguous, 3, 3)
    assert all(error <= 1e-12 and parcels[0] == 2 for error, parcels in found)
    assert found[1][1].count(0) == 2  # where the others pass later rows on, and back
