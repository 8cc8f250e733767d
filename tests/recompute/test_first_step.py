"""What "auto" measures in the first step, on the CPU. Guards against a choice that is made before
the optimizer has its states."""

from math import inf
from types import SimpleNamespace

import pytest
import torch

from megatron_burst.recompute.auto.first_step import FirstStep, host_gbs
from megatron_burst.recompute.keeping import Frame, RunningFrame

CPU = torch.device("cpu")


def step_of(optimizer, weight):
    weight.square().sum().backward()
    optimizer.step()


def test_the_first_step_is_over_once_any_optimizer_has_made_it():
    weight = torch.ones(3, requires_grad=True)
    optimizer, other = torch.optim.Adam([weight]), torch.optim.SGD([weight], lr=0.1)
    step_of(optimizer, weight)
    first = FirstStep(CPU)
    with first.timing(8):
        weight.sum().backward()
    assert not first.is_over
    step_of(other, weight)
    assert first.is_over and first.forward_s() == 0
    assert first.left_bytes(8) > 0
    again = FirstStep(CPU)  # the first one's hooks are gone, and disturb no other
    step_of(optimizer, weight)
    assert again.is_over and again.left_bytes(8) > 0


def test_without_a_gpu_half_of_the_available_memory_is_left(monkeypatch):
    monkeypatch.setattr(
        "megatron_burst.recompute.auto.first_step.available_host_bytes", lambda: 1 << 20
    )
    assert FirstStep(CPU).left_bytes(8) == 1 << 19 and host_gbs(CPU) is None


class Gpu:
    """The counters that torch.cuda has, without a GPU: in GiB."""

    def __init__(self, monkeypatch):
        self.allocated = self.peak = self.reserved = 0
        gib = 1 << 30
        for name, value in {
            "memory_stats_as_nested_dict": lambda device: {
                "allocated_bytes": {"all": {"current": self.allocated * gib}}
            },
            "current_blas_handle": lambda: setattr(self, "has_workspace", True),
            "max_memory_allocated": lambda device: self.peak * gib,
            "reset_peak_memory_stats": lambda device: setattr(self, "peak", self.allocated),
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
    assert first.left_bytes(8) == int(0.92 * (100 << 30)) - ((3 + 40 + 20) << 30)
    gpu.peak = 70  # the optimizer alone took more
    assert first.left_bytes(8) == int(0.92 * (100 << 30)) - (73 << 30)


def test_what_pytorch_cached_is_given_back_on_gpus(monkeypatch):
    """On the CPU there is no cache, and no CUDA to ask."""
    Gpu(monkeypatch)
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    FirstStep(CPU).release_cache()
    assert not calls
    FirstStep(torch.device("cuda")).release_cache()
    assert calls == [1]


def test_what_came_before_the_first_step_does_not_count(monkeypatch):
    """As a conversion of weights, or an evaluation, that takes more memory than the step."""
    gpu, weight = Gpu(monkeypatch), torch.ones(1, requires_grad=True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    gpu.allocated, gpu.peak = 10, 60
    first = FirstStep(torch.device("cuda"))
    with first.timing(8):
        gpu.peak = max(gpu.peak, 20)
    first.turn(RunningFrame(Frame(), recomputes=True))
    gpu.peak = gpu.reserved = max(gpu.peak, 25)
    step_of(torch.optim.SGD([weight], lr=0.1), weight)
    assert first.free_bytes() == 5 << 30
    assert first.left_bytes(8) == int(0.92 * (100 << 30)) - ((3 + 25) << 30)


def test_a_rank_with_short_micro_batches_counts_what_the_longest_would_take(monkeypatch):
    """Twice as long: up to four times the activations of 2 GiB."""
    gpu, weight = Gpu(monkeypatch), torch.ones(1, requires_grad=True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    gpu.allocated = gpu.peak = 10
    first = FirstStep(torch.device("cuda"))
    for tokens in (30, 50):
        with first.timing(tokens):
            pass
    gpu.peak = gpu.reserved = 12
    step_of(torch.optim.SGD([weight], lr=0.1), weight)
    with first.timing(99):
        pass
    assert first.tokens == 50
    left = first.left_bytes(50)
    assert left == int(0.92 * (100 << 30)) - ((3 + 12) << 30)
    assert first.left_bytes(40) == left and left - first.left_bytes(100) == 3 * 2 << 30


def forward(weight, x):
    return (torch.nn.functional.silu(x @ weight) * x).sum()


def test_a_layer_holds_what_its_graph_saves_beside_its_input_results_and_parameters():
    """Two tensors of the size of the input, the first of which is saved twice."""
    first, run = FirstStep(CPU), RunningFrame(Frame(), recomputes=True)
    weight, x = torch.ones(8, 8, requires_grad=True), torch.ones(4, 8, requires_grad=True)
    first.weigh(lambda: forward(weight, x), x, run, "a")
    assert first.held_share == 2 and first.kinds == {"a"}
    # less, and counts no more
    first.weigh(lambda: forward(weight, x + 1), x.repeat(2, 1), run, "a")
    assert first.held_share == 2
    frozen = torch.ones(8, 1000)
    first.weigh(lambda: x @ frozen, x, run, "b", lambda: (frozen,))
    assert first.held_share == 2 and first.kinds == {"a", "b"}
    step_of(torch.optim.SGD([weight], lr=0.1), weight)
    first.weigh(lambda: forward(weight, x).exp(), x, run, "c")
    assert first.held_share == 2 and first.kinds == {"a", "b"}


class Fused(torch.autograd.Function):
    """As of Megatron and TransformerEngine, a product that adds to a buffer of gradients."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.main_grad = weight.main_grad
        return x @ weight


@pytest.mark.parametrize("trained", [True, False])
def test_buffers_of_gradients_are_no_part_of_what_a_layer_holds(trained):
    """One buffer has those of all weights."""
    first, run = FirstStep(CPU), RunningFrame(Frame(), recomputes=True)
    x, weight = torch.ones(4, 8, requires_grad=True), torch.ones(8, 8, requires_grad=trained)
    weight.main_grad = torch.zeros(1000, 8)[:8]
    first.weigh(lambda: Fused.apply(x, weight).exp(), x, run, "a", lambda: (weight,))
    assert first.held_share == 0


def test_results_are_no_part_of_what_a_layer_holds():
    """The next layer's checkpoint has them anyway."""
    first, run = FirstStep(CPU), RunningFrame(Frame(), recomputes=True)
    x = torch.ones(4, 8, requires_grad=True)
    first.weigh(x.exp, x, run, "a")
    assert first.held_share == 0


def test_torchs_own_look_at_what_is_saved_is_left_alone():
    first, x = FirstStep(CPU), torch.ones(4, requires_grad=True)
    run = RunningFrame(Frame(stops_early=True), recomputes=True)
    assert first.weigh(lambda: x.exp(), x, run, "a") is not None and first.held_share == 0
    assert not first.kinds


class OfGib:
    """A tensor's size, without one."""

    def __init__(self, gib):
        self.nbytes = int(gib * (1 << 30))


def weighed(monkeypatch, grown: int, found: int) -> float:
    """The share of a layer on a GPU: of so many GiB more that are allocated in recomputation, and
    so many that its graph saves; 2 were kept in the first pass."""
    gpu, gib = Gpu(monkeypatch), 1 << 30
    first, frame = FirstStep(torch.device("cuda")), Frame()
    frame._results = {
        0: SimpleNamespace(num_bytes=2 * gib),
        1: "no tensors",
        2: SimpleNamespace(num_bytes=gib),
    }  # of another layer
    monkeypatch.setattr("megatron_burst.recompute.auto.first_step.graph_bytes",
                        lambda results, others: found * gib)  # fmt: skip
    monkeypatch.setattr(
        "megatron_burst.recompute.auto.first_step.storages", lambda results: {1: gib}
    )

    def layer():
        assert gpu.has_workspace
        gpu.allocated += grown + 1  # with its results
        del frame._results[0]  # which its graph has now

    gpu.allocated = 10
    first.weigh(layer, OfGib(0.5), RunningFrame(frame, recomputes=True), "a")
    return first.held_share


def test_on_a_gpu_a_layer_holds_what_is_allocated_more_and_what_was_kept_for_it(monkeypatch):
    assert weighed(monkeypatch, grown=5, found=6) == 14
    # what a module had from its last call was freed meanwhile, but a graph holds what it has now
    assert weighed(monkeypatch, grown=5, found=8) == 16


def test_a_layer_that_holds_more_than_was_counted_is_told_of_once(monkeypatch, caplog):
    gpu, first = Gpu(monkeypatch), FirstStep(torch.device("cuda"))
    gpu.allocated = 10
    for counted, more, told in ((10, 11, 0), (0, 99, 0), (10, 12, 1), (10, 13, 1)):
        with first.expecting(counted << 30):
            gpu.allocated += more
        assert len(caplog.records) == told
    assert "12.00 GiB in a micro-batch, but 10.00 in the first step" in caplog.text


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
    gpu = Gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    first = FirstStep(torch.device("cuda"))
    assert first.turn_s() == 0
    assert first.free_bytes() == inf
    for _ in range(2):
        with first.timing(8):
            pass
    Event.clock += 10  # the loss
    frame, weight = Frame(), torch.ones(1, requires_grad=True)
    frame._results = {0: SimpleNamespace(num_bytes=1 << 30)}
    for peak in (20, 30):
        gpu.peak = peak
        first.turn(RunningFrame(frame, recomputes=True))
        Event.clock += 100
    assert (first.forward_s(), first.turn_s()) == (1e-3, 11e-3)
    step_of(torch.optim.SGD([weight], lr=0.1), weight)
    assert first.free_bytes() == (30 - (20 - 1)) << 30  # of which the layer had kept one


def test_what_only_a_whole_layer_saves_is_measured_without_what_is_kept_anyway(monkeypatch):
    Gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    first, core = FirstStep(torch.device("cuda")), torch.nn.Identity()
    assert first.rest_s() == 0
    with first.timing(8, [core]):
        for _ in range(2):
            core(torch.ones(1))
        Event.clock += 10
    core(torch.ones(1))  # not in a layer's forward
    assert (first.forward_s(), first.rest_s()) == (15e-3, 13e-3)
    with pytest.raises(ZeroDivisionError), first.timing(8, [core]):
        raise ZeroDivisionError
    assert not core._forward_hooks and not core._forward_pre_hooks
