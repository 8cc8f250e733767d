"""What keeping leaves behind under Megatron's schedules, and when it is fetched from the host.

Guards against recordings and host buffers that outlive their step, and late fetches.
"""

import torch

from megatron_burst.config import BurstConfig
from tests.mcore import pipeline
from tests.mcore.gpt import FULL_RECOMPUTE, HEADS, SEQ
from tests.mcore.pipeline import (
    LAYERS,
    Setting,
    build,
    config_for,
    kept_recordings,
    relative_error,
    run_step,
)
from tests.ranks import run_ranks

LEAK = Setting(pp=1, cp=2, micro_batches=2)


def fail_often(rank: int) -> tuple:
    """54 steps; most fail: in a first pass, in recomputation, between forward and backward."""
    from megatron_burst.mcore import core_attention

    pipeline.start(LEAK)
    burst = BurstConfig(keep="all", keep_offload="results", keep_host_gib=0.01)
    chunks = build(LEAK, config_for(LEAK, burst, num_layers=2, **FULL_RECOMPUTE))
    truth = run_step(LEAK, chunks)
    attention, calls, fail_at = core_attention.BurstForward.__call__, 0, None

    def may_fail(*args):
        nonlocal calls
        calls += 1
        if calls == fail_at:
            raise RuntimeError("injected")
        return attention(*args)

    core_attention.BurstForward.__call__ = may_fail
    failures, errors, left = 0, [], []
    for number in range(54):
        calls, fail_at = 0, (None, *range(1, 9))[number % 9]
        try:
            got = run_step(LEAK, chunks)
        except RuntimeError as error:
            assert "injected" in str(error)
            failures += 1
            for parameter in chunks[0].parameters():
                parameter.grad = None
        else:
            errors.append(relative_error(got, truth))
        if number % 9 == 8:
            left.append(kept_recordings())
    from megatron_burst.recompute.offload import host_memory

    memory = host_memory(torch.device("cpu"), 0.01)
    free = sum(buffer.numel() for free in memory._free.values() for buffer in free)
    return failures, max(errors), len(errors), left, memory.taken_bytes, free


def test_nothing_is_left_after_steps_that_fail_anywhere():
    for failures, error, good, left, taken, free in run_ranks(fail_often, 2):
        assert failures == 54 - good and good == 6
        assert error == 0
        assert left == [0] * 6
        assert 0 < taken == free  # every host buffer was returned, and no more were made


def fetches(rank: int) -> tuple:
    """What backward fetches from the host, in order, and how many bytes are there before it."""
    from megatron_burst.mcore import patches
    from megatron_burst.recompute import offload

    setting, names, log = Setting(micro_batches=1), {}, []
    pipeline.start(setting)
    burst = BurstConfig(keep="all", keep_offload="both", keep_host_gib=0.25)
    patches.switch_on_keep(burst)
    chunks = build(setting, config_for(setting, burst, **FULL_RECOMPUTE))
    pack, prefetch, get = (
        offload.HostMemory.pack,
        offload.HostParcel.prefetch,
        offload.HostParcel.get,
    )

    def packing(self, tensors, input_of=None):
        parcel = pack(self, tensors, input_of)
        kind = "out" if input_of is None else "in"
        names[parcel] = f"{kind} {sum(name.startswith(kind) for name in names.values())}"
        return parcel

    def prefetching(self):
        if self.on_device is None:
            log.append(f"fetch {names[self]}")
        prefetch(self)

    def getting(self):
        log.append(f"get {names[self]}")
        return get(self)

    offload.HostMemory.pack, offload.HostParcel.prefetch, offload.HostParcel.get = (
        packing,
        prefetching,
        getting,
    )
    run_step(setting, chunks)
    return log, offload.host_memory(torch.device("cpu"), 0.25).taken_bytes


def test_inputs_and_results_wait_on_the_host_and_come_one_layer_ahead():
    ((log, taken),) = run_ranks(fetches, 1)
    own = SEQ * (HEADS * 16 + HEADS * SEQ) * 8  # Megatron's unfused attention saves probabilities
    assert taken >= LAYERS * (own + SEQ * HEADS * 16 * 8)
    ahead = "get in {1}", "fetch in {0}", "fetch out {0}", "get out {1}"
    expected = [line.format(layer, layer + 1) for layer in (1, 0) for line in ahead]
    # layers 2 and 3 have not left the device when backward begins
    assert log == ["get in 3", "get out 3", *expected, "get in 0", "get out 0"]
