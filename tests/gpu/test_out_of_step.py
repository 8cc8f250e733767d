"""Ranks out of step on GPUs: the next pass reports it, though no CPU waits for a GPU.

Guards against transports without stamps, and differences that only hang.
"""

import time
from itertools import product

import pytest
import torch
import torch.distributed as dist

from megatron_burst.attention import burst_attention
from megatron_burst.comm.group import check_in_step
from megatron_burst.errors import DisagreementError
from tests.gpu import needs_gpus
from tests.options import burst_config
from tests.ranks import run_ranks
from tests.sampling import whole

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(),
]
WAYS = {
    "ring": {"intra": "ring", "nodes": 1},
    "send": {"intra": "gather", "transfer": "send", "nodes": 1},
    "pull": {"intra": "gather", "transfer": "pull", "nodes": 1},
    "a2a": {"intra": "a2a", "nodes": 1},
    "two nodes": {"nodes": 2},
}


def causal(attend, odd):
    attend(causal=not odd).sum().backward()


def size(attend, odd):
    attend(tokens=1024 if odd else 2048).sum().backward()


def skipped(attend, odd):
    for call in range(3):
        if not (odd and call == 1):
            attend()
    attend().sum().backward()


def astray(rank, name, calls):
    """What a rank is told at its next pass, or at the end of the step. Nothing here waits for a
    GPU: what was sent may never arrive."""
    config, group = burst_config(timeout_s=60, **WAYS[name]), dist.group.WORLD

    def attend(causal=True, tokens=2048):
        q, k, v = (
            torch.randn(1, tokens, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        )
        q.requires_grad_()
        time.sleep(0.1)  # stamps have arrived by then
        return burst_attention(q, k, v, causal=causal, config=config, group=group)

    for options in ({}, {"causal": False}, {"tokens": 1024}):  # all agree on these
        attend(**options).sum().backward()
    check_in_step(group)
    torch.cuda.synchronize()
    begun = time.monotonic()
    with pytest.raises(DisagreementError) as error:
        calls(attend, odd=rank == 1)
        check_in_step(group)
    return str(error.value), time.monotonic() - begun


def stepped(rank):
    """What an optimizer's step raises after a last pass that differed; the weight after it."""
    shape = 1, 2048, 8, 64
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    config = burst_config(timeout_s=60, **WAYS["ring"])
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for causal in (True, False):  # all agree on these
        burst_attention(*tensors, causal=causal, config=config)
    weight.grad = torch.ones(1)
    optimizer.step()
    burst_attention(*tensors, causal=rank == 0, config=config)
    with pytest.raises(DisagreementError) as error:
        optimizer.step()
    return str(error.value), weight.item()


def test_no_weight_is_written_after_a_pass_that_differed():
    for sentence, weight in run_ranks(stepped, 2, backend="nccl", fresh=True):
        assert "causal=False" in sentence and "in a new group" in sentence and weight == 0.0


DIFFERENCES = {  # what differs, and its words on rank 1 and on the others
    "mask": (causal, "causal=False", "causal=True"),
    "size": (size, "q=(1, 1024, 8, 64)", "q=(1, 2048, 8, 64)"),
    "skipped call": (skipped, "the backward of pass", "a forward"),
}
EACH = [(way, list(DIFFERENCES)[n % 3]) for n, way in enumerate(WAYS)]  # in turn
REST = [case for case in product(WAYS, DIFFERENCES) if case not in EACH]


@pytest.mark.parametrize("name, difference", [*EACH, *whole(*REST)])
def test_both_ranks_are_told_who_differs_and_in_what(name, difference):
    calls, odd, others = DIFFERENCES[difference]
    # fresh: unmatched transfers hang in NCCL until the processes end
    for sentence, took in run_ranks(astray, 2, name, calls, backend="nccl", fresh=True):
        of = {words: sentence.index(words) for words in (odd, others)}
        assert " on cp ranks [0]" in sentence[of[others] :].partition(odd)[0]
        assert " on cp ranks [1]" in sentence[of[odd] :].partition(others)[0]
        assert took < 20
