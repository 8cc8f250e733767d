"""Ranges around real kernels, and times of waits from events on GPU streams.

Guards against ranges that miss their operation's kernels, events on the wrong stream, and a timed
pass that waits for the GPU.
"""

import time
from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_burst.attention import burst_attention
from megatron_burst.engine.ranges import METER
from tests.gpu import needs_gpus
from tests.options import burst_config
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(2),
]
WAYS = {
    "pull": {"intra": "gather", "transfer": "pull"},
    "send": {"intra": "gather", "transfer": "send"},
    "ring": {"intra": "ring"},
    "a2a": {"intra": "a2a"},
    "nodes": {"intra": "gather", "nodes": 2},
    "no overlap": {"intra": "ring", "overlap": False},
}
LAYERS = 4


def step_of(options):
    config = burst_config(**options)
    q, k, v = (
        torch.randn(1, 8192, heads, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (16, 8, 8)
    )

    def step():
        outs = [burst_attention(q, k, v, config=config, layer=n + 1) for n in range(LAYERS)]
        return torch.autograd.grad([out.sum() for out in outs], (q, k, v))

    return step


def timed(rank, options):
    """Seconds by the meter, of the step, and of issuing it behind a busy GPU; whether gradients
    match."""
    step = step_of(options)
    for _ in range(3):
        METER.begin_step(timed=True)
        step()
        METER.end_step()
    torch.cuda.synchronize()
    truth = step()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    METER.begin_step(timed=True)
    # a transfer of 0.1 ms is over before a busy CPU has issued the wait for it: let it be ahead
    torch.cuda._sleep(400_000_000)  # about 0.2 s
    first.record()
    grads = step()
    last.record()
    METER.end_step()
    torch.cuda.synchronize()
    seconds, sent = METER.seconds(), METER.sent_bytes()
    same = all((a - b).norm() <= 1e-2 * b.norm() for a, b in zip(grads, truth, strict=True))
    METER.begin_step(timed=True)
    torch.cuda._sleep(4_000_000_000)  # about 2 s
    began = time.perf_counter()
    step()
    issued = time.perf_counter() - began
    METER.end_step()
    torch.cuda.synchronize()
    return seconds, sent, first.elapsed_time(last) / 1e3, issued, bool(same)


@pytest.mark.parametrize("name", WAYS)
def test_times_are_positive_and_less_than_the_step(name):
    nodes = WAYS[name].get("nodes", 1)
    for seconds, sent, step, issued, same in run_ranks(timed, 2, WAYS[name], backend="nccl"):
        link, other = ("inter", "intra") if nodes == 2 else ("intra", "inter")
        assert same and issued < 1  # the CPU did not wait for the GPU
        assert sent[link] > 0 and sent[other] == 0
        assert 0 < seconds["exposed"] < seconds[""]
        assert seconds[""] < 1.5 * step  # one pass stands for those of all layers


def profiled(rank, options):
    """Device microseconds by range in one profiled step; and that NVTX ranges do no harm."""
    step = step_of(options)
    step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    events = [event for event in found.events() if event.name.startswith("burst ")]
    with torch.autograd.profiler.emit_nvtx():  # as Megatron's --profile
        grads = step()
    return [(e.name, e.device_time_total) for e in events], all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("name", ["pull", "send"])
def test_kernels_are_in_the_ranges_of_their_operations(name):
    for found, finite in run_ranks(profiled, 2, WAYS[name], backend="nccl"):
        assert finite
        passes = {name for name, _ in found if "layer" in name}
        assert passes == {
            f"burst {direction}, layer {layer}, gather"
            for direction in ("forward", "backward")
            for layer in range(1, LAYERS + 1)
        }
        on_device = Counter()
        for name, microseconds in found:  # CPU ranges, and what torch shows of them on the GPU
            on_device[name] += microseconds
        for kind in ("Attend: ", "AttendBackward: "):
            times = [us for name, us in on_device.items() if name.startswith(f"burst {kind}")]
            assert times and min(times) > 0
