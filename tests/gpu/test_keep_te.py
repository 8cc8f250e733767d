"""Megatron's own context parallelism through TransformerEngine, kept under full recomputation.

Guards against recomputation that reruns attention whose results were kept, and results that reach
another layer.
"""

import pytest

from megatron_burst.config import BurstConfig
from tests.gpu import SEVERAL, needs_gpus, needs_transformer_engine
from tests.ranks import run_ranks
from tests.sampling import whole

LAYERS = 2
pytestmark = [
    pytest.mark.gpu,
    needs_gpus(),
]


def steps(rank, world, comm_type):
    """(attention calls, relative error) of the second step by what is recomputed and kept."""
    from transformer_engine.pytorch import DotProductAttention

    from benchmarks.layers import Widths
    from benchmarks.stack import Stack, start

    inner, calls = DotProductAttention.forward, []

    def counted(self, *args, **options):
        calls.append(1)
        return inner(self, *args, **options)

    DotProductAttention.forward = counted
    start(False, world)
    sizes = dict(layers=LAYERS, hidden=512, ffn=1024, heads_q=8, heads_kv=4, head_dim=64)
    stack = Stack(Widths(**sizes, seq=4096, batch=1, dtype="bfloat16"), False, comm_type)
    found, truth = {}, None
    for recompute, keep in (("off", "none"), ("full", "none"), ("full", "all")):
        stack.set(recompute, BurstConfig(keep=keep))
        for _ in range(2):
            calls.clear()
            (grad,) = stack.run()
        truth = grad.double() if truth is None else truth
        error = ((grad.double() - truth).norm() / truth.norm()).item()
        found[recompute, keep] = len(calls), error
    return found


@needs_transformer_engine()
@pytest.mark.parametrize("comm_type", ["p2p", *whole("a2a", "all_gather")])
def test_recomputation_takes_what_transformer_engine_computed(comm_type):
    settings = {"backend": "nccl", "timeout_s": 300, "fresh": True}
    for found in run_ranks(steps, SEVERAL, SEVERAL, comm_type, **settings):
        print(comm_type, found)
        assert found["full", "none"][0] == 2 * LAYERS
        assert found["off", "none"][0] == found["full", "all"][0] == LAYERS
        # dQ is summed in any order; taking anything from the wrong layer is off by its size
        assert max(error for _, error in found.values()) < 1e-2
