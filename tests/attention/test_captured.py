"""A call that a CUDA graph captures, run on CPUs as if one did.

Guards against captured calls that share memory with others, that ranks do not agree on, and that a
replay would get wrong. GPU tests replay graphs (`tests/gpu/test_captured.py`).
"""

import pytest
import torch
import torch.distributed as dist

from megatron_burst import attention, burst_attention, cuda_graphs
from megatron_burst.comm.pulled import PulledSlots
from megatron_burst.comm.transport import OneQueue, Placement
from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from megatron_burst.masks import slices
from tests.ranks import run_ranks

ROWS = 16
WAYS = {
    "gather": BurstConfig(intra="gather"), "a2a": BurstConfig(intra="a2a"),
    "ring": BurstConfig(intra="ring"), "two nodes": BurstConfig(nodes=2),
}  # fmt: skip


def as_if_captured(monkeypatch):
    for module in (attention, slices):
        monkeypatch.setattr(module, "is_captured", lambda x: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    # streams do nothing on CPUs
    monkeypatch.setattr(cuda_graphs.LaunchOrder, "launch", lambda self, work: work())


def both_passes(tensors, **options):
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = burst_attention(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def draw(seed=0):
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return [torch.randn(1, ROWS, 4, 8, generator=generator) for _ in range(3)]


def compared(rank):
    """By way, whether a captured call has the bits of a call, with other calls in between."""
    equal = {}
    for way, config in WAYS.items():
        expected = both_passes(draw(), config=config)
        with pytest.MonkeyPatch.context() as patch:
            as_if_captured(patch)
            results = both_passes(draw(), config=config)
        both_passes(draw(1), config=config)
        equal[way] = all(map(torch.equal, results, expected))
    return equal


def test_a_captured_call_computes_what_a_call_does():
    for equal in run_ranks(compared, 2):
        assert len(equal) == 4 and all(equal.values()), equal


def captured_on_one(rank):
    """The error of a call that one rank captures and the other makes."""
    tensors = draw()
    burst_attention(*tensors)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            as_if_captured(patch)
        with pytest.raises(BurstError) as raised:
            burst_attention(*tensors)
    return str(raised.value)


def test_ranks_agree_that_a_graph_captures_a_call():
    for sentence in run_ranks(captured_on_one, 2):
        assert "in a CUDA graph" in sentence


REFUSED = {
    "a call must have run once before": {},
    "keep must be off while": dict(config=BurstConfig(keep="all")),
    "check must be off while": dict(config=BurstConfig(check=9)),
    "nan_guard must be off while": dict(config=BurstConfig(nan_guard=True)),
    "cu_seqlens must be on the GPU while": dict(cu_seqlens=torch.tensor([0, 9, ROWS])),
    "the backend must not be reference for packed samples while": dict(
        cu_seqlens=torch.tensor([0, 9, ROWS]), config=BurstConfig(backend="reference")
    ),
    "slices and prefix_tree must not be captured": dict(
        slices=torch.tensor([[0, ROWS, 0, ROWS, 1]])
    ),
}


def sentences(rank):
    tensors, got = draw(), {}
    for words, options in REFUSED.items():
        if options:
            burst_attention(*tensors, **options)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(BurstError) as refused:
            as_if_captured(patch)
            burst_attention(*tensors, **options)
        got[words] = str(refused.value)
    return got


def test_what_a_replay_would_get_wrong_is_refused():
    (got,) = run_ranks(sentences, 1)
    assert len(got) == len(REFUSED)
    for words, sentence in got.items():
        assert words in sentence and "; " in sentence


def test_a_call_in_a_graph_numbers_slots_from_the_first_behind_a_barrier():
    """Whatever ran before, since a replay repeats the numbers that were captured."""
    flats, passed = [torch.zeros(8, dtype=torch.uint8) for _ in range(3)], []
    barriers = [lambda number=number: passed.append(number) for number in range(3)]
    slots = PulledSlots([{0: flat} for flat in flats], barriers, 0)
    queues = OneQueue(Placement(torch.device("cpu")))
    for calls in range(3):
        slots.begin()
        slots.transfer(0, slots.prepare(0, slots.flat(0), (), ()), (), queues)
        passed.clear()
        own = slots.in_graph(lambda barrier: (passed.append("launched"), barrier()))
        own.transfer(0, own.prepare(0, own.flat(0), (), ()), (), queues)
        assert passed == ["launched", 0] * 2 and own.flat(0) is flats[0], calls
    assert slots.suffices(3, 8) and not slots.suffices(4, 8) and not slots.suffices(3, 9)
