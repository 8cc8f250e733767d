"""Windows across nodes on processes: unequal halos, hops that only send or only receive.

Guards against halo rows that end up in the wrong place, and a rank that waits for an empty hop.
"""

import pytest
import torch

from megatron_burst.attention import burst_attention
from megatron_burst.config import BurstConfig, Force
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from tests.attention.engine import problem, truth
from tests.oracle import rows_of
from tests.ranks import run_ranks


def errors_of_halos(rank, world, layout):
    """Errors of out, dq, dk and dv by what backward resends; one rank per node."""
    tensors, errors = problem(world, 6, (4, 2), (6, 4), 1), {}
    expected, rows = truth(*tensors, Mask(2, 0), 6**-0.5), rows_of(Layout(layout), rank, world, 6)
    for resend in ("auto", "always"):
        q, k, v = (x[:, rows].clone().requires_grad_() for x in tensors[:3])
        config = BurstConfig(
            nodes=world, intra="gather", force=Force(heads_per_round=1, resend=resend)
        )
        out = burst_attention(q, k, v, window=(2, 0), layout=layout, config=config)
        found = [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3][:, rows])]
        both = zip(found, expected, strict=True)
        errors[resend] = max(float((x - y[:, rows]).abs().max()) for x, y in both)
    return errors


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_halos_come_and_go_between_nodes(layout):
    for errors in run_ranks(errors_of_halos, 3, 3, layout):
        assert len(errors) == 2 and max(errors.values()) <= 1e-12, errors
