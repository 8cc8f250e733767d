"""Keeping under Megatron's recomputation, schedules and multi-token prediction.

Every gradient is compared with that of the same model without recomputation. Catches results that
reach another layer or micro-batch, replays that compute or communicate though they need not, and
layers that keep though they should not.
"""

import gc
from dataclasses import dataclass, replace

import pytest
import torch

from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from tests.mcore import pipeline
from tests.mcore.gpt import FULL_RECOMPUTE, HEADS, SEQ
from tests.mcore.pipeline import LAYERS, Setting, Step, build, config_for, run_step
from tests.ranks import run_ranks

MTP, VPP = Setting(pp=2, cp=2, mtp=True), Setting(pp=2, vp=2, cp=2, mtp=True)
TWO = Setting(pp=2, cp=2)  # for two layers a checkpoint: layers of MTP are recomputed alone
BLOCK = dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=1)
PAIRS, BOTH_BLOCK = (options | dict(recompute_num_layers=2) for options in (FULL_RECOMPUTE, BLOCK))
SELECTIVE = dict(recompute_granularity="selective", recompute_modules=["core_attn"])
ALL, HALF = BurstConfig(keep="all"), BurstConfig(keep="half")
AUTO = dict(keep="auto", keep_budget_gib=1.0, keep_host_gib=1.0)


@dataclass(frozen=True)
class Case:
    """What keeps how, and how many attention calls a layer's replays then make in a step.

    Attributes:
        burst: options.
        recompute: Megatron's options.
        replayed: layers of a stage whose attention is computed again, MTP's not counted; with
            chunks of two layers (1F1B) and of one (interleaved).
        mtp_replayed: the same of MTP's layer.
    """

    burst: BurstConfig
    recompute: tuple = tuple(FULL_RECOMPUTE.items())
    replayed: tuple[int, int] = (0, 0)
    mtp_replayed: int = 0


def recompute(options: dict) -> tuple:
    return tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in options.items())


BOTH, ONE = dict(replayed=(2, 2), mtp_replayed=1), dict(replayed=(1, 1), mtp_replayed=1)
OFFLOAD, FIRST = BurstConfig(keep="all", keep_offload=True), BurstConfig(keep="all", keep_layers=1)
CASES = {
    "none": Case(BurstConfig(), **BOTH),
    "none, block": Case(BurstConfig(), recompute(BLOCK), (1, 2)),
    "all": Case(ALL),
    "all, two layers a checkpoint": Case(ALL, recompute(PAIRS)),
    "all, block": Case(ALL, recompute(BLOCK)),
    "all, selective": Case(ALL, recompute(SELECTIVE)),
    "all, q circulates": Case(BurstConfig(keep="all", circulate="q")),
    "all, offload, debug": Case(replace(OFFLOAD, keep_debug=True)),
    "all, offload, two": Case(OFFLOAD, recompute(PAIRS)),
    "all, no room on the host": Case(replace(OFFLOAD, keep_host_gib=1e-5)),
    "all of one layer": Case(FIRST, **ONE),
    "auto": Case(BurstConfig(**AUTO)),
    "half": Case(HALF, **BOTH),
    "half, offload": Case(BurstConfig(keep="half", keep_offload=True), **BOTH),
    "half of one layer": Case(BurstConfig(keep="half", keep_layers=1), **BOTH),
    "all, inputs on the host too": Case(replace(OFFLOAD, keep_offload_inputs=True)),  # stays on
    "none, inputs on the host": Case(
        BurstConfig(keep_offload_inputs=True, keep_host_gib=1.0), **BOTH
    ),
    "all, two layers, inputs on the host": Case(OFFLOAD, recompute(PAIRS)),
    "all of one layer of two": Case(FIRST, recompute(PAIRS), (1, 1)),
    "all of one layer, block of two": Case(FIRST, recompute(BOTH_BLOCK), (1, 1)),
    "half of one layer of two": Case(
        BurstConfig(keep="half", keep_layers=1), recompute(PAIRS), (2, 2)
    ),
}
RUNS = [
    (setting, name)
    for setting in (MTP, VPP, TWO)
    for name, case in CASES.items()
    if setting.mtp == (("recompute_num_layers", 2) not in case.recompute)
]
EXACT = [name for name in CASES if not name.startswith("half")]


def relative_error(got: Step, truth: Step) -> float:
    """Largest difference of any gradient over its largest true value."""
    assert got.grads.keys() == truth.grads.keys()
    return max(
        float((got.grads[name] - true).abs().max() / true.abs().max())
        for name, true in truth.grads.items()
    )


def compare_all(rank: int) -> dict:
    """By setting and case: error, kernel calls and hops beyond those without recomputation."""
    found = {}
    for setting in (MTP, VPP, TWO):
        pipeline.start(setting)
        truth = run_step(setting, build(setting, config_for(setting, BurstConfig())))
        for name in (name for each, name in RUNS if each == setting):
            case = CASES[name]
            options = {k: list(v) if isinstance(v, tuple) else v for k, v in case.recompute}
            chunks = build(setting, config_for(setting, case.burst, **options))
            evaluate(setting, chunks)
            got = run_step(setting, chunks)
            extra = got.kernels - truth.kernels, got.hops - truth.hops
            has_mtp = bool(setting.mtp and chunks[-1].post_process)
            found[setting, name] = relative_error(got, truth), *extra, has_mtp, kept_recordings()
    return found


def evaluate(setting: Setting, chunks: list) -> None:
    """Evaluation before the step, which must leave nothing behind; also in training mode."""
    for training in (True, False):
        if not (training and setting.mtp):  # MTP's loss needs a graph then
            for chunk in chunks:
                chunk.train(training)
            run_step(setting, chunks, forward_only=True)
    for chunk in chunks:
        chunk.train()


def kept_recordings() -> int:
    from megatron_burst.recompute.recording import Recording

    gc.collect()
    return sum(type(each) is Recording for each in gc.get_objects())


@pytest.fixture(scope="module")
def comparisons():
    return run_ranks(compare_all, 4, timeout_s=300)


@pytest.mark.parametrize("setting, name", RUNS, ids=str)
def test_gradients_are_those_without_recomputation(comparisons, setting, name):
    """Bitwise, but for the early half, whose kernel calls have other shapes."""
    for results in comparisons:
        error, *_, left = results[setting, name]
        assert error <= (0 if name in EXACT else 1e-12)
        assert left == 0


@pytest.mark.parametrize("setting, name", RUNS, ids=str)
def test_replays_run_no_attention_and_send_nothing_where_all_is_kept(comparisons, setting, name):
    case = CASES[name]
    for results in comparisons:
        _, kernels, hops, has_mtp, _ = results[setting, name]
        layers = case.replayed[setting.vp - 1] + case.mtp_replayed * has_mtp
        replays = setting.micro_batches * layers
        if "half" in name:
            assert kernels >= replays and hops >= replays  # of a half, which is dealt out and home
        else:
            assert (kernels, hops) == (setting.cp * replays, replays)


LEAK = Setting(pp=1, cp=2, micro_batches=2)


def fail_often(rank: int) -> tuple:
    """200 steps, of which most fail: in a first pass, in a replay, between forward and backward."""
    from megatron_burst.mcore import core_attention

    pipeline.start(LEAK)
    burst = BurstConfig(keep="all", keep_offload=True, keep_host_gib=0.01)
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
    for number in range(200):
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
        if number % 40 == 39:
            left.append(kept_recordings())
    import torch

    from megatron_burst.recompute.host import host_memory

    memory = host_memory(torch.device("cpu"), 0.01)
    free = sum(buffer.numel() for free in memory._free.values() for buffer in free)
    return failures, max(errors), len(errors), left, memory.taken_bytes, free


def test_nothing_is_left_after_200_steps_that_fail_anywhere():
    for failures, error, good, left, taken, free in run_ranks(fail_often, 2, timeout_s=200):
        assert failures == 200 - good and good == 23
        assert error == 0
        assert left == [0] * 5
        assert 0 < taken == free  # every host buffer came back, and no more were made


class TheirCheckpoint(torch.autograd.Function):
    """A reentrant checkpoint such as TransformerEngine's, which runs its function itself."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.function(x)
        torch.autograd.backward(out, grad)
        return None, x.grad


def transformer_engines_checkpoint(rank: int) -> list:
    """Attention calls, bytes on the host and gradients without and with patches of its
    checkpoint."""
    from megatron_burst import keep
    from megatron_burst.mcore.keep import _inputs_on_host, _te_in_frames
    from megatron_burst.recompute.host import host_memory

    def checkpoint(function, *args, **options):
        assert options == dict(tp_group=3)
        return TheirCheckpoint.apply(function, *args)

    found, calls = [], []

    def square(x):
        calls.append(1)
        return x * x

    attend = keep(square)
    for function in (checkpoint, framed := _te_in_frames(checkpoint), _inputs_on_host(1.0, framed)):
        x = torch.linspace(0, 1, 2000).requires_grad_()
        calls.clear()
        y = function(lambda x: attend(x + 1), x, tp_group=3)
        function(lambda x: attend(x).sum(), y, tp_group=3).backward()
        on_host = host_memory(torch.device("cpu"), 1.0).taken_bytes
        found.append((len(calls), on_host, x.grad.tolist()))
    return found


def test_transformer_engines_checkpoint_runs_in_frames_too():
    """fp8 layers use it. Its own is on the GPU only; this one calls its function as that does."""
    (found,) = run_ranks(transformer_engines_checkpoint, 1)
    assert [(calls, on_host) for calls, on_host, _ in found] == [(4, 0), (2, 0), (2, 2 * 8192)]
    true = 4 * (1 + torch.linspace(0, 1, 2000)) ** 3
    for *_, grad in found:
        torch.testing.assert_close(torch.tensor(grad), true)


def own_attention(rank: int) -> dict:
    """Megatron's own attention without context parallelism: errors, kernel calls, refusals."""
    from megatron_burst.mcore import keep

    setting, found = Setting(micro_batches=2), {}
    pipeline.start(setting)
    truth = run_step(setting, build(setting, config_for(setting)))
    keep.switch_on(ALL)
    for name, burst in {
        "none": None,
        "all": ALL,
        "three": BurstConfig(keep="all", keep_layers=3),
        "auto": BurstConfig(**AUTO),
    }.items():
        got = run_step(setting, build(setting, config_for(setting, burst, **FULL_RECOMPUTE)))
        found[name] = relative_error(got, truth), got.kernels - truth.kernels
    for burst, overrides in ((HALF, {}), (ALL, dict(attention_dropout=0.1))):
        config = config_for(setting, burst, **FULL_RECOMPUTE | overrides)
        try:
            run_step(setting, build(setting, config))
        except BurstError as error:
            found[str(error)] = None
    return found


def test_megatrons_own_attention_is_kept_too():
    (found,) = run_ranks(own_attention, 1)
    refusals = [text for text, value in found.items() if value is None]
    values = {name: value for name, value in found.items() if value is not None}
    replays = 2 * LAYERS
    assert values == {
        "none": (0, replays), "all": (0, 0), "three": (0, 2), "auto": (0, 0)
    }  # fmt: skip
    assert refusals[0].startswith("burst keep: half must be kept of burst attention only, because")
    assert "got Megatron's own attention in layer 1; pass --burst-keep all" in refusals[0]
    assert refusals[1].startswith("burst keep: attention must not drop weights, because")
    assert refusals[1].endswith("got attention_dropout=0.1; pass --attention-dropout 0")


def layers_and_replays(rank: int) -> tuple:
    """By how a stage is recomputed its layers, and which keep if two shall; attention calls
    of replays within budgets."""
    from megatron_burst.mcore import keep
    from megatron_burst.mcore.keep_layers import settled, stage_layers

    numbers, keeping = [], []
    for setting in (TWO, replace(VPP, mtp=False)):
        pipeline.start(setting)
        for options in (FULL_RECOMPUTE, BLOCK, SELECTIVE):
            config = config_for(setting, num_layers=8, **options)
            numbers.append(stage_layers(config))
            two = BurstConfig(keep="all", keep_layers=2)
            of_layer = (settled(two, config, number, None, None, 0.75) for number in range(1, 9))
            keeping.append([number for number, got in enumerate(of_layer, 1) if got.keep == "all"])
    setting, replays = Setting(mtp=True, micro_batches=1), []
    pipeline.start(setting)
    plain = run_step(setting, build(setting, config_for(setting)))
    keep.switch_on(ALL)
    layer_gib = SEQ * HEADS * (16 + 1) * 8 / 2**30  # out and lse
    for layers in range(1, LAYERS + 2):
        burst = BurstConfig(keep="auto", keep_budget_gib=layers * layer_gib, keep_host_gib=1e-6)
        chunks = build(setting, config_for(setting, burst, **FULL_RECOMPUTE))
        replays.append(run_step(setting, chunks).kernels - plain.kernels)
    return numbers, keeping, replays


def test_auto_counts_layers_that_are_recomputed_and_those_of_multi_token_prediction():
    (first, first_keep, replays), *_, (second, second_keep, _) = run_ranks(layers_and_replays, 4)
    assert first == [[1, 2, 3, 4], [1], [1, 2, 3, 4], [1, 2, 5, 6], [1, 5], [1, 2, 5, 6]]
    assert second == [[5, 6, 7, 8], [5], [5, 6, 7, 8], [3, 4, 7, 8], [3, 7], [3, 4, 7, 8]]
    assert first_keep == [layers[:2] for layers in first]
    assert second_keep == [layers[:2] for layers in second]
    assert replays == [5, 3, 2, 1, 0]  # of five layers, of which two have number 1


def fetches(rank: int) -> tuple:
    """What backward fetches from the host, in order, and how many bytes wait there before it."""
    from megatron_burst.mcore import keep
    from megatron_burst.recompute import host

    setting, names, log = Setting(micro_batches=1), {}, []
    pipeline.start(setting)
    burst = replace(OFFLOAD, keep_offload_inputs=True, keep_host_gib=0.25)
    keep.switch_on(burst)
    chunks = build(setting, config_for(setting, burst, **FULL_RECOMPUTE))
    pack, prefetch, get = host.HostMemory.pack, host.HostParcel.prefetch, host.HostParcel.get

    def packing(self, tensors, input_of=None):
        parcel = pack(self, tensors, input_of)
        kind = "out" if input_of is None else "in"
        names[parcel] = f"{kind} {sum(name.startswith(kind) for name in names.values())}"
        return parcel

    def prefetching(self):
        if self._fetched is None:
            log.append(f"fetch {names[self]}")
        prefetch(self)

    def getting(self):
        log.append(f"get {names[self]}")
        return get(self)

    host.HostMemory.pack, host.HostParcel.prefetch, host.HostParcel.get = (
        packing,
        prefetching,
        getting,
    )
    run_step(setting, chunks)
    return log, host.host_memory(torch.device("cpu"), 0.25).taken_bytes


def test_inputs_and_results_wait_on_the_host_and_come_one_layer_ahead():
    ((log, taken),) = run_ranks(fetches, 1)
    own = SEQ * (HEADS * 16 + HEADS * SEQ) * 8  # Megatron's unfused attention keeps probabilities
    assert taken >= LAYERS * (own + SEQ * HEADS * 16 * 8)
    ahead = ("get out {}", "fetch in {}", "fetch out {}", "get in {}")
    expected = [
        line.format(layer + (index == 0)) for layer in (2, 1, 0) for index, line in enumerate(ahead)
    ]
    assert log[log.index("get out 3") :] == [*expected, "get out 0"]
