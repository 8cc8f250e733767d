"""`benchmarks.frontier`: one training step under every setting of recomputation, on the CPU.

Guards against settings that train another model than the others or are measured as another one,
a step that leaves gradients for the next, and a setting that leaves its model.
"""

import gc
import weakref
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.frontier_cases import MODELS, Sample, chosen, flops_of, settings_of
from benchmarks.frontier_table import spread_of
from benchmarks.rows import append, read
from benchmarks.sheets import FRONTIER_CSV
from megatron_burst.errors import BurstError
from tests.ranks import preload, run_ranks

preload("megatron.core.models.gpt", "megatron.core.optimizer", "megatron_burst.mcore.launch")
TINY = MODELS["tiny"]
ONE, PACKED = Sample(64), Sample(64, "each-16")
NEEDS_GPUS = "offload", "moe_act"  # of Megatron's settings
# float32: 1e-7 per rounding, in sums over a batch and over weights, in another order in each kernel
TOLERANCE = 1e-5


def trainer_of(name: str, sample: Sample):
    """A trainer of all ranks."""
    from benchmarks.frontier_step import Trainer
    from benchmarks.stack import start
    from megatron_burst.tools import cpu_mode

    cpu_mode.install()
    start(cpu=True, cp_size=sample.ranks)
    return Trainer(MODELS[name], sample, torch.float32)


@contextmanager
def counted():
    """A list that gets an element for each call of a linear layer."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    calls: list[int] = []

    def counting(forward):
        def call(self, *args, **options):
            calls.append(1)
            return forward(self, *args, **options)

        return call

    with ExitStack() as patches:
        for kind in (ColumnParallelLinear, RowParallelLinear):
            patch = mock.patch.object(kind, "forward", counting(kind.forward))
            patches.enter_context(patch)
        yield calls


@dataclass
class Stepped:
    """A setting's (loss, norm) in two steps, calls of linear layers in the second, whether its
    gradients are bitwise those of nothing recomputed, and whether its model is gone afterwards."""

    first: tuple[float, float]
    second: tuple[float, float]
    calls: int
    same: bool
    is_freed: bool


def every_step(rank: int, name: str, sample: Sample) -> dict[str, Stepped]:
    """By setting; nothing recomputed is the first one."""
    trainer, found, truth = trainer_of(name, sample), {}, None
    for key, setting in settings_of(MODELS[name]).items():
        if any(word in key for word in NEEDS_GPUS):
            continue
        if setting.impl == "megatron" and sample.documents:
            continue  # without TransformerEngine it has no packed samples
        trainer.use(setting)
        with counted() as calls:
            first = trainer.step()
            before = len(calls)
            second = trainer.step()
        grads = [x.clone() for x in trainer.gradients()]
        truth = truth or grads
        same = all(torch.equal(a, b) for a, b in zip(grads, truth, strict=True))
        parts = parts_of(trainer._ddp.module)
        trainer.release()
        gc.collect()
        gone = all(part() is None for part in parts)
        found[key] = Stepped(first, second, len(calls) - before, same, gone)
    return found


def parts_of(model) -> list[weakref.ref]:
    """A model, its layers, and what sends their tokens to experts, which has tensors of a step."""
    senders = (getattr(module, "token_dispatcher", None) for module in model.modules())
    every = model, *model.decoder.layers, *(sender for sender in senders if sender is not None)
    return list(map(weakref.ref, every))


CASES = {"one document": ("tiny", ONE), "packed": ("tiny", PACKED), "experts": ("tiny-moe", ONE)}


@pytest.fixture(scope="module", params=CASES)
def trained(request):
    """A case's name, and its steps by setting."""
    (found,) = run_ranks(every_step, 1, *CASES[request.param])
    return request.param, found


def test_all_settings_train_the_same_weights(trained):
    """Loss, norm and every gradient of burst's settings are bitwise those of nothing recomputed, in
    each step; Megatron's differ by its attention's roundings."""
    case, found = trained
    assert len(found) == {"packed": 22, "one document": 27, "experts": 31}[case]
    truth = found["burst:off"].first
    for key, one in found.items():
        assert one.first == one.second and one.is_freed, key
        if key.startswith("burst:"):
            assert one.first == truth and one.same, key
        assert one.first == pytest.approx(truth, rel=TOLERANCE), key


def test_settings_call_as_many_linear_layers_as_they_say(trained):
    """Of 2 layers with 4 linear ones each; the output layer's call counts as it may, in all."""
    case, found = trained
    calls = {key: one.calls - found["burst:off"].calls for key, one in found.items()}
    if case == "experts":  # a token's experts decide how many there are
        assert calls["burst:full"] > calls["burst:keep"] > calls["burst:keep+proj"] > 0
        assert calls["burst:keep+qkv+proj+fc1"] == 0
        return
    assert found["burst:off"].calls in (8, 9) and calls["burst:full"] == 8
    for suffix in ("", "@host"):  # the last linear layer is not called again
        assert calls[f"burst:keep{suffix}"] == 6
        assert calls[f"burst:keep+proj{suffix}"] == calls[f"burst:keep+fc1{suffix}"] == 4
        assert calls[f"burst:keep+qkv+proj{suffix}"] == 2
        assert calls[f"burst:keep+qkv+proj+fc1{suffix}"] == 0
    if case == "one document":
        assert calls["megatron:off"] == 0 and calls["megatron:full"] == 8
        assert calls["megatron:block-1"] == calls["megatron:mlp"] == 4


def alone(rank: int, sample: Sample) -> tuple:
    """(loss, norm) of a step; and those of Megatron's model without burst, DDP and optimizer, which
    is called with each document by itself."""
    trainer, every = trainer_of("tiny", sample), settings_of(TINY)
    trainer.use(every["burst:off"])
    got = trainer.step()
    model = trainer._built(every["megatron:off"])
    model.load_state_dict(trainer._source.state_dict())
    pieces = {
        name: trainer._batch[name].split(sample.lengths, dim=1)
        for name in ("input_ids", "labels", "position_ids")
    }
    loss = (
        sum(
            model(**dict(zip(pieces, piece, strict=True)), attention_mask=None).sum()
            for piece in zip(*pieces.values(), strict=True)
        )
        / sample.seq
    )
    loss.backward()
    norm = torch.stack([x.grad.norm() for x in model.parameters()]).norm()
    return got, (float(loss), float(norm))


@pytest.mark.parametrize("sample", [ONE, PACKED], ids=["one document", "packed"])
def test_a_step_has_the_loss_and_gradients_of_the_model_alone(sample):
    ((got, truth),) = run_ranks(alone, 1, sample)
    assert got == pytest.approx(truth, rel=TOLERANCE)


def of_ranks(rank: int, sample: Sample) -> list[tuple[float, float]]:
    """(loss, norm) of a step of three settings."""
    trainer, every, found = trainer_of("tiny", sample), settings_of(TINY), []
    for name in ("burst:off", "burst:keep+fc1@host", "burst:auto"):
        trainer.use(every[name])
        found.append(trainer.step())
    return found


@pytest.mark.parametrize("documents", ["", "each-16"], ids=["one document", "packed"])
def test_two_ranks_have_the_loss_and_gradients_of_one(documents):
    one, two = Sample(64, documents), Sample(64, documents, ranks=2)
    (truth,) = run_ranks(of_ranks, 1, one)
    for found in run_ranks(of_ranks, 2, two):
        for got, true in zip(found, truth, strict=True):
            assert got == pytest.approx(true, rel=TOLERANCE)
    assert flops_of(TINY, two) == flops_of(TINY, one) / 2


def measured(rank: int) -> tuple:
    """Rows of two turns, of which one setting cannot run here; and of a run without time."""
    from benchmarks.frontier import Plan, measure
    from megatron_burst.tools.world import world_of

    settings = chosen(TINY, "megatron:full,megatron:offload,burst:off,burst:keep+proj")
    plan = Plan(TINY, ONE, settings, turns=2, steps=3)
    late = measure(replace(plan, budget_s=0.0), world_of("cpu"))
    return list(measure(plan, world_of("cpu"))), list(late)


def test_rows_of_turns(tmp_path):
    ((rows, late),) = run_ranks(measured, 1)
    able = ["burst:off", "burst:keep+proj", "megatron:full"]
    order = [(row.turn, f"{row.impl}:{row.setting}", row.status) for row in rows]
    assert order == [
        *((1, name, "ok") for name in able), (1, "megatron:offload", "failed"),
        *((2, name, "ok") for name in reversed(able)),
    ]  # fmt: skip
    assert late == [] and "Event" in rows[3].note and rows[3].ms is None
    for row in (row for row in rows if row.ms):
        each = [float(ms) for ms in row.each.split()]
        assert len(each) == 3 and row.ms_min <= row.ms <= row.ms_max
        assert sorted(each)[1] == pytest.approx(row.ms, abs=0.01)
        assert row.tflops == pytest.approx(flops_of(TINY, ONE) / row.ms / 1e9)
        assert row.peak_gib is None and row.note == ""
    assert spread_of([row for row in rows if row.impl == "burst"]) == {"loss": 0, "grad_norm": 0}
    append(tmp_path / "a.csv", rows, FRONTIER_CSV)
    assert [row.each for row in read([tmp_path / "a.csv"], FRONTIER_CSV)] == [r.each for r in rows]


def test_names_and_words_choose_settings():
    every = list(map(str, chosen(TINY, "")))
    assert every == list(settings_of(TINY)) and len(every) == 29
    assert [str(one) for one in chosen(TINY, "megatron:full, burst:off")] == [
        "burst:off", "megatron:full"]  # fmt: skip
    assert len(chosen(TINY, "burst:")) == 22 and len(chosen(TINY, "@host")) == 5
    with pytest.raises(BurstError, match="got 'none'; choose among burst:off, burst:full, "):
        chosen(TINY, "off,none")
    blocks = [str(one) for one in chosen(MODELS["qwen3-1.7b"], "megatron:block")]
    assert blocks == ["megatron:block-7", "megatron:block-14", "megatron:block-21"]
    assert {"megatron:moe", "megatron:offload+moe", "megatron:offload+experts"} <= set(
        settings_of(MODELS["qwen3-30b-a3b"])
    )


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--model", "qwen"], "--model must name one that there is"),
        (["--documents", "some"], "--documents must list"),
        (["--only", "nothing"], "--only must list words of settings"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, words, wanted):
    from benchmarks.frontier import app

    result = CliRunner().invoke(app, ["measure", str(tmp_path / "a.csv"), *words])
    assert result.exit_code == 2 and wanted in result.output, result.output
    assert not (tmp_path / "a.csv").exists()


def test_models_have_the_sizes_of_their_configurations():
    """Their weights in all, as published: Qwen3-8B has 36 layers, Qwen3-30B-A3B 48."""
    layers = {"qwen3-8b": 36, "qwen3-30b-a3b": 48, "qwen3-1.7b": 28, "qwen3-4b": 36}
    models = [replace(MODELS[name], layers=count) for name, count in layers.items()]
    params = [model.params for model in (*models, MODELS["llama3.2-1b"])]
    assert params == pytest.approx([8.19e9, 30.5e9, 1.72e9, 4.02e9, 1.236e9], rel=0.003)
    assert not MODELS["llama3.2-1b"].norms_heads and MODELS["qwen3-4b"].norms_heads
