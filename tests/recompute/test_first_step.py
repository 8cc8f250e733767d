"""What "auto" measures in the first step, on the CPU. Guards against a choice that is made before
the optimizer has its states."""

import torch

from megatron_burst.recompute.first_step import FirstStep, host_gbs

CPU = torch.device("cpu")


def step_of(optimizer, weight):
    weight.square().sum().backward()
    optimizer.step()


def test_the_first_step_is_over_once_any_optimizer_has_made_it():
    weight = torch.ones(3, requires_grad=True)
    optimizer, other = torch.optim.Adam([weight]), torch.optim.SGD([weight], lr=0.1)
    step_of(optimizer, weight)
    first = FirstStep(CPU)
    with first.timing():
        weight.sum().backward()
    assert not first.is_over
    step_of(other, weight)
    assert first.is_over and first.forward_s() is None
    assert first.left_bytes() > 0
    again = FirstStep(CPU)  # the first one's hooks are gone, and disturb no other
    step_of(optimizer, weight)
    assert again.is_over and again.left_bytes() > 0


def test_without_a_gpu_half_of_the_available_memory_is_left(monkeypatch):
    monkeypatch.setattr("megatron_burst.recompute.first_step.available_host_bytes", lambda: 1 << 20)
    assert FirstStep(CPU).left_bytes() == 1 << 19 and host_gbs(CPU) is None


class Gpu:
    """The counters that torch.cuda has, without a GPU: in GiB."""

    def __init__(self, monkeypatch):
        self.allocated = self.peak = self.reserved = 0
        gib = 1 << 30
        for name, value in {
            "memory_allocated": lambda device: self.allocated * gib,
            "max_memory_allocated": lambda device: self.peak * gib,
            "memory_reserved": lambda device: self.reserved * gib,
            "mem_get_info": lambda device: ((100 - self.reserved - 3) * gib, 100 * gib),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


def test_a_further_step_has_the_optimizers_states_and_the_same_activations(monkeypatch):
    """Weights of 10 GiB, activations of 20; then states of 30; 3 GiB are others'."""
    gpu, weight = Gpu(monkeypatch), torch.ones(1, requires_grad=True)
    gpu.allocated = gpu.peak = 10
    first = FirstStep(torch.device("cuda"))
    gpu.peak = gpu.reserved = 30
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.sum().backward()
    optimizer.register_step_post_hook(lambda *_: setattr(gpu, "peak", 45))
    optimizer.step()
    gpu.allocated, gpu.reserved = 40, 50
    assert first.left_bytes() == int(0.92 * (100 << 30)) - ((3 + 40 + 20) << 30)
    gpu.peak = 70  # the optimizer alone took more
    assert first.left_bytes() == int(0.92 * (100 << 30)) - (73 << 30)


class Event:
    """A CUDA event, without a GPU: the clock goes on by 1 ms with each."""

    clock = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        Event.clock += 1
        self.at = Event.clock

    def elapsed_time(self, other):
        return other.at - self.at


def test_the_first_recomputation_ends_what_is_between_forward_and_backward(monkeypatch):
    Gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    first = FirstStep(torch.device("cuda"))
    assert first.turn_s() == 0
    for _ in range(2):
        with first.timing():
            pass
    Event.clock += 10  # the loss
    for _ in range(2):
        first.turn()
        Event.clock += 100
    assert (first.forward_s(), first.turn_s()) == (1e-3, 11e-3)
