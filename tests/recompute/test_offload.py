"""Host memory of kept tensors: what is fetched back, its size, prefetching.

Guards against buffers released too early, more memory than allowed, and fetches in the wrong order.
"""

import gc
from contextlib import nullcontext

import pytest
import torch

from megatron_burst.logs import log_message_once
from megatron_burst.recompute.keeping import Frame, Resident
from megatron_burst.recompute.offload import HostMemory, HostParcel, host_memory

CPU = torch.device("cpu")


def packed(memory, *tensors, frame=None):
    with frame or Frame():
        return memory.pack(tensors)


def test_tensors_come_back_with_their_strides():
    memory = HostMemory(CPU, 1 << 20)
    strided = torch.randn(5, 2, 3, 4).transpose(0, 1)
    sliced = torch.randn(2, 6, 3)[:, 1:4]
    tensors = strided, sliced, torch.arange(7, dtype=torch.int16), torch.tensor(2.0).double()
    parcel = packed(memory, *tensors)
    assert parcel.get()[0] is strided  # its memory is still there
    for _ in range(2):
        for got, tensor in zip(parcel.get(), tensors, strict=True):
            assert torch.equal(got, tensor) and got.dtype == tensor.dtype
            assert got.data_ptr() != tensor.data_ptr()
    assert parcel.get()[0].stride() == strided.stride()


def test_buffers_are_used_again_and_never_exceed_the_limit(caplog):
    log_message_once.cache_clear()
    memory = HostMemory(CPU, 4096)
    for _ in range(5):
        parcels = [packed(memory, torch.full((256,), float(i))) for i in range(4)]
        assert memory.taken_bytes == 4096
        assert all(torch.equal(p.get()[0], torch.full((256,), float(i))) for i, p in
                   enumerate(parcels))  # fmt: skip
        full = packed(memory, torch.ones(256))
        assert isinstance(full, Resident) and torch.equal(full.get()[0], torch.ones(256))
        del parcels, full
        gc.collect()
    assert caplog.messages == [
        "burst keep: 0.00 GiB of host memory per rank are full; further results stay on the device"
    ]
    other = packed(memory, torch.ones(1024))  # free buffers of another size make room
    assert isinstance(other, HostParcel) and memory.taken_bytes == 4096


def fetched(parcels):
    return [name for name, parcel in parcels.items() if parcel.on_device is not None]


@pytest.fixture
def three_layers():
    """Two layers with one call each, then one with two; inputs are packed after the first pass."""
    memory, parcels, frames = HostMemory(CPU, 1 << 20), {}, [Frame(), Frame(), Frame()]
    for layer, frame in enumerate(frames):
        with frame:
            for call in range(2 if layer == 2 else 1):
                parcels[f"out {layer}.{call}"] = memory.pack((torch.ones(2),))
        parcels[f"in {layer}"] = memory.pack((torch.ones(2),), input_of=frame)
    return parcels, frames


def test_what_a_layer_packs_leaves_the_device_two_layers_later():
    """So that its copy has that long, and no more than two layers' is there twice."""
    memory, parcels, there = HostMemory(CPU, 1 << 20), {}, []
    for layer in range(4):
        with Frame():
            for call in range(2 if layer else 1):
                parcels[f"{layer}.{call}"] = memory.pack((torch.ones(2),))
                there.append(fetched(parcels))
    assert there == [
        ["0.0"], ["0.0", "1.0"], ["0.0", "1.0", "1.1"], ["1.0", "1.1", "2.0"],
        ["1.0", "1.1", "2.0", "2.1"], ["1.1", "2.0", "2.1", "3.0"], ["2.0", "2.1", "3.0", "3.1"],
    ]  # fmt: skip
    parcels["1.1"].get()  # another micro-batch's backward
    assert fetched(parcels) == []


def test_what_backward_needs_next_is_fetched_ahead(three_layers):
    parcels, _ = three_layers
    ahead = []
    for name in ("in 2", "out 2.0", "out 2.1", "in 1", "out 1.0", "in 0", "out 0.0"):
        parcels[name].get()
        ahead.append(fetched(parcels))
    assert ahead == [
        ["out 1.0", "in 1", "out 2.0", "out 2.1"], ["out 1.0", "in 1", "out 2.1"],
        ["out 1.0", "in 1"], ["out 0.0", "in 0", "out 1.0"], ["out 0.0", "in 0"], ["out 0.0"], [],
    ]  # fmt: skip


def test_what_stays_on_the_device_starts_the_next_layers_fetch_too():
    memory, frames = HostMemory(CPU, 1 << 20), [Frame(), Frame()]
    with frames[0]:
        on_host = memory.pack((torch.ones(2),))
    with frames[1]:
        stays = memory.stay((torch.full((2,), 3.0),))
    on_host.leave()
    assert on_host.on_device is None and memory.taken_bytes == 256
    assert torch.equal(stays.get()[0], torch.full((2,), 3.0))
    assert torch.equal(on_host.on_device[0], torch.ones(2))


def test_what_was_fetched_in_vain_is_dropped(three_layers):
    parcels, _ = three_layers
    parcels["out 2.1"].get()
    assert fetched(parcels) == ["out 1.0", "in 1"]
    parcels["in 0"].get()  # backward went elsewhere, as between micro-batches
    assert fetched(parcels) == ["out 0.0"]
    assert torch.equal(parcels["in 1"].get()[0], torch.ones(2))


def test_a_frame_that_is_gone_is_passed_over(three_layers):
    parcels, frames = three_layers
    del parcels["out 1.0"], parcels["in 1"], frames[1]
    gc.collect()
    parcels["out 2.1"].get()
    assert fetched(parcels) == []


def test_there_is_one_memory_for_a_device_and_limit_and_it_says_its_bound_once(caplog):
    host_memory.cache_clear()
    assert host_memory(CPU, 0.5) is host_memory(CPU, 0.5)
    assert host_memory(CPU, 0.5).limit_bytes == 1 << 29
    said = "burst keep: takes at most 0.50 GiB of host memory per rank (as asked)"
    assert caplog.messages == [said]
    limit = host_memory(CPU, None).limit_bytes
    assert limit > 0
    assert f"at most {limit / 2**30:.2f} GiB" in caplog.messages[1]


class Card:
    """CUDA's calls that pin memory and order copies, without a GPU."""

    device = CPU

    def __init__(self):
        self.pinned, self.copying, self.wrong = {}, False, []
        self.copies, self.waited = 0, []

    def cudaHostRegister(self, address, num_bytes, flags):
        self.pinned[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address):
        if self.copying or address not in self.pinned:
            self.wrong.append(address)
        self.pinned.pop(address, None)
        return 0

    def wait_stream(self, stream):
        self.copying = True

    def synchronize(self):
        self.copying = False

    def record_event(self):
        self.copies += 1
        return self.copies

    def wait_event(self, copy):
        self.waited.append(copy)


@pytest.fixture
def card(monkeypatch):
    card = Card()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: card)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: card)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: card)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    yield card
    assert card.wrong == []


def on_card(limit_bytes):
    memory = HostMemory(CPU, limit_bytes)
    memory.stream = torch.cuda.Stream(CPU)
    return memory


def test_pages_that_make_room_for_others_are_unpinned_once_copies_are_over(card):
    memory = on_card(4096)
    parcels = [packed(memory, torch.ones(256)) for _ in range(4)]
    assert sorted(card.pinned.values()) == [1024] * 4
    del parcels
    assert len(card.pinned) == 4  # for reuse
    parcel = packed(memory, torch.ones(512))
    assert list(card.pinned.values()) == [2048] and memory.taken_bytes == 2048
    assert torch.equal(parcel.get()[0], torch.ones(512))


@pytest.mark.parametrize("last", ["memory", "parcel"])
def test_pages_of_a_memory_that_is_gone_are_unpinned(card, last):
    """A new limit or device once evicted one from a cache, and its pages were freed while
    pinned."""
    memory = on_card(4096)
    parcels = [packed(memory, torch.ones(256)) for _ in range(2)]
    parcels.pop()
    if last == "memory":
        del parcels, memory
    else:
        del memory
        assert len(card.pinned) == 2
        del parcels
    gc.collect()
    assert card.pinned == {}


def test_memory_on_the_device_is_free_after_the_copy_that_used_it(card):
    """Of the copy to the host, then of that back."""
    memory = on_card(4096)
    first, *others = (packed(memory, torch.ones(256)) for _ in range(3))
    assert first.on_device is None and card.waited == [1] and card.copies == 3
    others[1].get()
    assert card.waited == [1, 3, 2] and card.copies == 3  # backward began elsewhere
    first.get()
    assert card.waited[-1] == card.copies == 4


def test_no_memory_is_driven_out_by_others():
    host_memory.cache_clear()
    first = host_memory(CPU, 0.25)
    for limit in range(1, 20):
        host_memory(CPU, limit)
    assert host_memory(CPU, 0.25) is first
