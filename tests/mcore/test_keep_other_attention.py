"""Keeping with other attention than burst's: Megatron's own, TransformerEngine's checkpoint.

Guards against needless recomputation, and results that are silently not kept.
"""

from functools import partial

import pytest
import torch

from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from tests.mcore import pipeline
from tests.mcore.gpt import FULL_RECOMPUTE, SEQ
from tests.mcore.pipeline import LAYERS, Setting, build, config_for, relative_error, run_step
from tests.ranks import run_ranks

ALL, HALF = BurstConfig(keep="all"), BurstConfig(keep="half")
AUTO = dict(keep="auto", keep_budget_gib=1.0, keep_host_gib=1.0)


def own_attention(rank: int) -> dict:
    """Megatron's own attention without context parallelism: errors, kernel calls, refusals."""
    from megatron_burst.mcore import patches

    setting, found = Setting(micro_batches=2), {}
    pipeline.start(setting)
    truth = run_step(setting, build(setting, config_for(setting)))
    patches.switch_on_keep(ALL)
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
    recomputed = 2 * LAYERS
    assert values == {
        "none": (0, recomputed), "all": (0, 0), "three": (0, 2), "auto": (0, 0)
    }  # fmt: skip
    assert (
        refusals[0].startswith("burst keep: ")
        and "in layer 1; pass --burst-keep all" in refusals[0]
    )
    assert refusals[1].startswith("burst keep: ") and "attention_dropout=0.1; pass" in refusals[1]


def writes(rank: int) -> list[str]:
    """The result of an in-place write: to attention's output, kept on the device and on the host,
    and to an offloaded layer input."""
    from megatron_burst.mcore import patches

    setting, found = Setting(micro_batches=1), []
    pipeline.start(setting)

    def write(module, args):
        args[0].mul_(2)

    taken = []

    def write_input(module, args, options):
        taken.append(options["hidden_states"])
        if len(taken) == 2:  # the first one's checkpoint has ended
            taken[0].mul_(2)

    offload = BurstConfig(keep="all", keep_offload="results")
    inputs = BurstConfig(keep_offload="inputs", keep_host_gib=1.0)
    for burst in (ALL, offload, inputs):
        patches.switch_on_keep(burst)
        (gpt,) = build(setting, config_for(setting, burst, **FULL_RECOMPUTE))
        if burst is inputs:
            for layer in gpt.decoder.layers[1:3]:
                layer.register_forward_pre_hook(write_input, with_kwargs=True)
        else:
            gpt.decoder.layers[1].self_attention.linear_proj.register_forward_pre_hook(write)
        with pytest.raises(BurstError) as error:
            run_step(setting, [gpt])
        found.append(str(error.value))
    return found


def test_a_write_to_what_waits_for_backward_is_refused():
    """Autograd's own check sees none of the three."""
    (found,) = run_ranks(writes, 1)
    out = f"got a write to shape ({SEQ}, 1, 64);"
    assert [text.count(out) for text in found] == [1, 1, 1]


class TheirCheckpoint(torch.autograd.Function):
    """A reentrant checkpoint like TransformerEngine's, which runs its function itself."""

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
    """Attention calls, host bytes and gradients without and with patches of its checkpoint."""
    from megatron_burst import keep
    from megatron_burst.mcore.keep.recompute import inputs_on_host, te_in_frames
    from megatron_burst.recompute.offload import host_memory

    def checkpoint(function, *args, **options):
        assert options == dict(tp_group=3)
        return TheirCheckpoint.apply(function, *args)

    found, calls = [], []

    def square(x):
        calls.append(1)
        return x * x

    attend = keep(square)
    framed = partial(te_in_frames, checkpoint)
    for function in (checkpoint, framed, partial(inputs_on_host, framed, 1.0)):
        x = torch.linspace(0, 1, 2000).requires_grad_()
        calls.clear()
        y = function(lambda x: attend(x + 1), x, tp_group=3)
        function(lambda x: attend(x).sum(), y, tp_group=3).backward()
        on_host = host_memory(torch.device("cpu"), 1.0).taken_bytes
        found.append((len(calls), on_host, x.grad.tolist()))
    return found


def test_transformer_engines_checkpoint_runs_in_frames_too():
    """fp8 layers use it. The real one needs a GPU; this one calls its function the same way."""
    (found,) = run_ranks(transformer_engines_checkpoint, 1)
    assert [(calls, on_host) for calls, on_host, _ in found] == [(4, 0), (2, 0), (2, 2 * 8192)]
    true = 4 * (1 + torch.linspace(0, 1, 2000)) ** 3
    for *_, grad in found:
        torch.testing.assert_close(torch.tensor(grad), true)
