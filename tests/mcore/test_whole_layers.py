"""Layers that "auto" does not recompute at all, which have no checkpoint.

Every gradient is bitwise that of full recomputation. Guards against layers that are run again, keep
more than was counted, or leave random number generators in another state.
"""

import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from time import sleep
from unittest import mock

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megatron_burst.config import BurstConfig
from megatron_burst.recompute.auto.budget import Placed
from tests.mcore import fsdp, gpt, loss_model, pipeline
from tests.mcore.gpt import BLOCK_RECOMPUTE, FULL_RECOMPUTE, Model, Parallel
from tests.mcore.lacking import needs, why_not
from tests.mcore.pipeline import (
    Setting,
    build,
    config_for,
    kept_recordings,
    run_step,
)
from tests.mcore.test_kept_modules import (
    ALLTOALL,
    EXPERTS,
    PAIRS,
    TP,
    Case,
    differing,
    end_step,
    spec_of,
    two_steps,
)
from tests.ranks import run_ranks
from tests.sampling import whole

AUTO = BurstConfig(keep="auto", keep_host_gib=1e-6)
NONE = dict.fromkeys(FULL_RECOMPUTE)
FOUR, DROPS = dict(num_layers=4), dict(hidden_dropout=0.1)
DROPPED = "biases, dropout"
CASES = {
    "dense": Case(options=FOUR),
    "one KV head": Case(model=Model(groups=1), options=FOUR),
    DROPPED: Case(options=FOUR | DROPS | dict(add_bias_linear=True)),
    "block": Case(options=FOUR | BLOCK_RECOMPUTE | dict(recompute_num_layers=3)),
    "experts": Case(options=FOUR | EXPERTS),
    "routed experts": Case(options=FOUR | DROPS | EXPERTS | ALLTOALL | dict(
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
        moe_input_jitter_eps=0.1, moe_z_loss_coeff=1e-3,
    )),
    "experts in some layers": Case(options=FOUR | EXPERTS | dict(moe_layer_freq=[0, 1, 0, 1])),
}  # fmt: skip
PAIRED = Case(options=FOUR | DROPS | PAIRS)
SHARED = "a part of the input"
USUAL = ["routed experts"]
SHARDED = [DROPPED, "experts", SHARED]
USUAL_SHARDED = [DROPPED]
PARTS = Case(options=FOUR | dict(distribute_saved_activations=True, sequence_parallel=False))
# of a sequence: Megatron's own attention keeps them, where a flash attention's results are counted
SCORES = gpt.HEADS * gpt.SEQ**2 * 8
SOME_GIB = 8e-4, 5e-4  # some layers of the first stage, and of the second one


def case_of(name: str) -> Case:
    return PARTS if name == SHARED else CASES[name]


def here(names: Iterable[str]) -> list[str]:
    """Those of the cases that this Megatron has."""
    lacks = why_not("experts")
    return [name for name in names if not (lacks and "num_moe_experts" in case_of(name).options)]


def of_all(names: Iterable[str], usual: list[str]) -> list:
    """Names for `parametrize`, of which all but the usual ones run with --all only."""
    return [*usual, *whole(*(name for name in names if name not in usual))]


@dataclass
class Found:
    """What a second step was like.

    Attributes:
        wrong: parameters whose gradients differ from full recomputation's, and generators that end
            in another state.
        again: calls of linear layers that recomputation made, by name.
        held: bytes of all tensors before backward, beyond those of full recomputation.
        counted: bytes that a layer was said to hold.
        layers: of which everything was kept.
    """

    wrong: list[str]
    again: Counter = field(default_factory=Counter)
    held: int = 0
    counted: int = 0
    layers: int = 0


@contextmanager
def countable() -> Iterator[None]:
    """Context in which all tensors that a graph saves are objects of Python, which can be found."""

    def pack(x: torch.Tensor) -> torch.Tensor:
        return x if x.is_leaf else x.detach()

    with saved_tensors_hooks(pack, lambda x: x):
        yield


def living_bytes() -> int:
    """Bytes of all tensors' memory; the least of some looks, as gloo's threads drop what they have
    sent a little later."""
    return min(_living_bytes() for _ in range(3))


def _living_bytes() -> int:
    sleep(0.01)
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    tensors = [x for x in tensors if not hasattr(type(x), "to_local")]  # DTensors have no storage
    storages = [x.untyped_storage() for x in tensors]
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())


def states() -> dict[str, torch.Tensor]:
    """Of all random number generators."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return get_cuda_rng_tracker().get_states() | {"torch": torch.get_rng_state()}


@countable()
def compared(case: Case, parallel: Parallel) -> list[Found]:
    """Steps in which all layers fit, and in which about half of their bytes do."""
    from megatron_burst.mcore import patches
    from megatron_burst.mcore.keep import recompute, stage

    stage._STAGES.clear()
    recompute._modules.cache_clear()
    truth, _ = two_steps(case, parallel, BurstConfig())
    truth |= states()
    _, once = two_steps(replace(case, options=case.options | NONE), parallel, BurstConfig())
    patches.switch_on_keep(AUTO)
    living: list[int] = []
    two_steps(case, parallel, AUTO, lambda: living.append(living_bytes()))  # keeps nothing yet
    end_step()
    everything = second_step(case, parallel, AUTO, truth, once[1], living[1])
    most_gib = everything.layers * everything.counted / 2**30
    burst = replace(AUTO, keep_budget_gib=0.6 * most_gib)
    return [everything, second_step(case, parallel, burst, truth, once[1], living[1])]


def second_step(
    case: Case, parallel: Parallel, burst: BurstConfig, truth: dict, once: Counter, living: int
) -> Found:
    """Compared with gradients and generators' states, with the calls of one that recomputes
    nothing, and with bytes of full recomputation."""
    from megatron_burst.mcore.keep import recompute

    chosen, held, choose = [], [], recompute.choose_modules

    def choosing(problem, *args):
        chosen.append((problem, choose(problem, *args)))
        return chosen[-1][1]

    with mock.patch.object(recompute, "choose_modules", choosing):
        got, calls = two_steps(case, parallel, burst, lambda: held.append(living_bytes()))
    got |= states()
    wrong = differing(truth, got)
    again = Counter(calls[1])
    again.subtract(once)
    problem, made = chosen[-1]
    return Found(wrong, +again, held[1] - living, problem.whole_bytes, made["layer"].device)


def compare(rank: int, parallel: Parallel, names: list[str]) -> dict[str, list[Found]]:
    from megatron_burst.tools import cpu_mode

    gpt.start(parallel)
    cpu_mode.install()
    return {name: compared(case_of(name), parallel) for name in names}


@pytest.fixture(scope="module")
def one_rank(request):
    every = request.config.getoption("--all")
    (found,) = run_ranks(compare, 1, Parallel(), here(CASES if every else USUAL))
    return found


@pytest.fixture(scope="module")
def tensor_parallel(request):
    every = request.config.getoption("--all")
    return run_ranks(compare, 2, TP, here(SHARDED if every else USUAL_SHARDED))


def check(name: str, found: dict[str, list[Found]], tp: int = 1) -> None:
    if name not in found:
        pytest.skip(why_not("experts"))
    everything, half = found[name]
    layers = 3 if name == "block" else 4
    assert not everything.wrong and not half.wrong
    assert not everything.again and everything.layers == layers
    assert 0 < half.layers < layers and set(half.again) <= {"linear_fc2", "all-to-alls"}
    counted = layers * everything.counted
    least = 0.85 if "in some" in name else 0.97  # the largest layer counts
    assert least * counted < everything.held < 1.02 * counted
    held = half.held - half.counted  # the running layer's are there anyway
    assert held - (layers - half.layers) * 2 * SCORES / tp < 1.02 * 0.6 * counted


@pytest.mark.parametrize("name", of_all(CASES, USUAL))
def test_layers_run_once_with_the_gradients_of_full_recomputation(one_rank, name):
    check(name, one_rank)


@pytest.mark.parametrize("name", of_all(SHARDED, USUAL_SHARDED))
def test_so_they_do_with_tensor_parallelism(tensor_parallel, name):
    for found in tensor_parallel:
        check(name, found, tp=2)


# ---- pipelines ------------------------------------------------------------------------------

HAS_MTP = not (why_not("MTP") or why_not("recomputed MTP"))
SETTINGS = {
    "1F1B": Setting(pp=2, cp=2, mtp=HAS_MTP, micro_batches=3),
    "interleaved": Setting(pp=2, vp=2, cp=2, mtp=HAS_MTP),
}


def in_pipelines(rank: int, names: list[str]) -> dict[str, list[tuple]]:
    """By setting, for steps in which all layers fit, and in which some do: parameters whose
    gradients differ from those without recomputation; calls of attention's kernels beyond theirs;
    recordings that are left."""
    return {name: with_schedule(SETTINGS[name]) for name in names}


def with_schedule(setting: Setting) -> list[tuple]:
    from megatron_burst.mcore import patches
    from megatron_burst.mcore.keep import stage

    pipeline.start(setting)
    stage._STAGES.clear()
    options = FULL_RECOMPUTE | dict(deallocate_pipeline_outputs=True)
    truth = run_step(setting, build(setting, config_for(setting, BurstConfig())))
    patches.switch_on_keep(AUTO)
    run_step(setting, build(setting, config_for(setting, AUTO, **options)))
    end_step()
    found = []
    for burst in (AUTO, *(replace(AUTO, keep_budget_gib=gib) for gib in SOME_GIB)):
        got = run_step(setting, build(setting, config_for(setting, burst, **options)))
        wrong = [key for key, x in truth.grads.items() if not torch.equal(x, got.grads[key])]
        found.append((wrong, got.kernels - truth.kernels, kept_recordings()))
    return found


@pytest.fixture(scope="module")
def pipelines(request):
    every = request.config.getoption("--all")
    return run_ranks(in_pipelines, 4, list(SETTINGS if every else ["1F1B"]))


@pytest.mark.parametrize("name", of_all(SETTINGS, ["1F1B"]))
def test_so_they_do_in_pipelines(pipelines, name):
    for results in pipelines:
        for wrong, kernels, left in results[name]:
            assert not wrong and kernels == 0 and left == 0


# ---- what fails, and what is not kept --------------------------------------------------------


@countable()
def after_failures(rank: int) -> tuple[list[int], list[str]]:
    """Recordings that are left after steps that fail, in a forward and in a backward, where some
    layers are recomputed; parameters whose gradients a step after them has otherwise than full
    recomputation, with the options of a block that has failed."""
    from megatron_burst.mcore import patches

    gpt.start(Parallel())
    case = CASES["dense"]
    truth, once = two_steps(case, Parallel(), BurstConfig())
    patches.switch_on_keep(AUTO)
    two_steps(case, Parallel(), AUTO)
    end_step()
    everything = second_step(case, Parallel(), AUTO, truth, once[1], 0)
    some = replace(AUTO, keep_budget_gib=0.6 * 4 * everything.counted / 2**30)
    config = gpt.config_of(model=case.model, **(FULL_RECOMPUTE | case.options))
    config.burst = some
    model = gpt.build(config, spec_of(case))
    mlp = model.decoder.layers[0].mlp
    left = [
        left_by_failing(model, register)
        for register in (mlp.register_forward_hook, mlp.linear_fc1.weight.register_hook)
    ]
    got, _ = two_steps(case, Parallel(), some)
    assert model.decoder.config is config
    return left, differing(truth, got)


def left_by_failing(model, register) -> int:
    """Recordings after a step in which a hook fails."""

    def fail(*_):
        raise ZeroDivisionError(kept_recordings())

    hook = register(fail)
    try:
        gpt.loss_and_grads(model)
    except ZeroDivisionError as error:
        assert error.args[0] > 0
    else:
        raise AssertionError("it did not fail")
    hook.remove()
    return kept_recordings()


def test_a_step_that_fails_leaves_nothing():
    assert run_ranks(after_failures, 1) == [([0, 0], [])]


def none_is_whole(rank: int, nested: bool) -> tuple[list[str], int]:
    """Where a checkpoint is around all of Megatron's, or each of these has two layers: parameters
    whose gradients differ; calls of the layers' last linear ones in a step."""
    from megatron_burst.mcore import patches

    gpt.start(Parallel())
    case, build = CASES["dense"] if nested else PAIRED, gpt.build

    def within_torchs_own(*args):
        model = build(*args)
        forward = model.decoder.forward

        def outer(hidden_states, **options):
            run = partial(forward, **options)
            return checkpoint(run, hidden_states, use_reentrant=False)

        model.decoder.forward = outer
        return model

    truth, _ = two_steps(case, Parallel(), BurstConfig())
    patches.switch_on_keep(AUTO)
    two_steps(case, Parallel(), AUTO)
    end_step()
    with mock.patch.object(gpt, "build", within_torchs_own if nested else build):
        got, calls = two_steps(case, Parallel(), AUTO)
    wrong = differing(truth, got)
    return wrong, calls[1]["linear_fc2"]


@pytest.mark.parametrize("nested, calls", [(True, 3 * 4), (False, 2 * 4)])
def test_none_is_whole_where_a_checkpoint_is_around_several(nested, calls):
    """Megatron's "block" has a checkpoint for each layer; one around all would recompute them
    anyway."""
    assert run_ranks(none_is_whole, 1, nested) == [([], calls)]


# ---- FSDP ------------------------------------------------------------------------------------

STRATEGIES = {"torch FSDP2": "", "Megatron-FSDP": "optim_grads_params"}


def under_fsdp(rank: int, names: list[str]) -> dict[str, tuple]:
    """By FSDP, for steps with full recomputation and with "auto": gradients, and bytes that
    tensors take more after the last forward. How many layers are whole, and bytes that one is said
    to hold."""
    return {name: with_sharded_weights(STRATEGIES[name]) for name in names}


@countable()
def with_sharded_weights(strategy: str) -> tuple:
    from megatron_burst.mcore import patches
    from megatron_burst.mcore.keep import recompute, stage

    chosen, choose = [], recompute.choose_modules

    def choosing(problem, *args):
        chosen.append((problem.whole_bytes, choose(problem, *args)))
        return chosen[-1][1]

    stage._STAGES.clear()
    case = loss_model.Case(ddp=bool(strategy), options=FULL_RECOMPUTE | FOUR)
    patches.switch_on_keep(AUTO)
    with mock.patch.object(recompute, "choose_modules", choosing):
        full = sharded_step(case, BurstConfig(), strategy)
        sharded_step(case, AUTO, strategy)
        end_step()
        whole = sharded_step(case, AUTO, strategy)
    return full, whole, chosen[-1][1]["layer"].device, chosen[-1][0]


def sharded_step(case, burst: BurstConfig, strategy: str) -> tuple[dict, int]:
    """Gradients of two micro-batches, and bytes that tensors take more after the last forward."""
    from megatron.core.models.common.embeddings import language_model_embedding as embedding
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_burst.tools import cpu_mode

    loss_model.begin(case)
    cpu_mode.install()
    model, held = loss_model.model_of(case), []
    model.config.burst = burst
    units = TransformerLayer, embedding.LanguageModelEmbedding
    model = fsdp.wrapped(model, strategy, *units)
    model.register_forward_pre_hook(lambda *_: held.append(living_bytes()))
    model.register_forward_hook(lambda *_: held.append(living_bytes()))
    fsdp.losses_of(model, loss_model.batch_of(case))
    model.finish_grad_sync()
    return fsdp.gradients(model), held[-1] - held[-2]


@needs("torch FSDP2")
@pytest.mark.whole
def test_whole_layers_hold_no_weights_that_fsdp_gathers():
    for ranks in run_ranks(under_fsdp, 2, list(STRATEGIES), timeout_s=500):
        for (truth, before), (got, held), layers, counted in ranks.values():
            assert layers == 4
            assert not differing(truth, got)
            assert 0 < held - before <= 1.02 * 4 * counted


# ---- several nodes ---------------------------------------------------------------------------


@countable()
def on_two_nodes(rank: int) -> tuple[list[int], list[str], float]:
    """Four context-parallel ranks, two on a node, with a budget for all layers: calls of
    attention's kernels beyond those without recomputation, in a first step and in a second;
    parameters whose gradients differ; bytes that tensors take more before the second backward than
    with full recomputation, by those that were counted."""
    from megatron_burst.mcore import patches
    from megatron_burst.mcore.keep import recompute

    setting, living, chosen = Setting(cp=4, micro_batches=1), [], []
    pipeline.start(setting)
    plain = BurstConfig(nodes=2, intra="gather")
    burst = replace(plain, keep="auto", keep_host_gib=1e-6, keep_budget_gib=1.0)
    patches.switch_on_keep(burst)
    choose = recompute.choose_modules

    def choosing(problem, *args):
        chosen.append((problem.whole_bytes, choose(problem, *args)))
        return chosen[-1][1]

    def step(iterator, model):
        results = pipeline.forward_step(iterator, model)
        living.append(living_bytes())
        return results

    def run(burst, **options):
        return run_step(setting, build(setting, config_for(setting, burst, **options)), step=step)

    truth = run(plain)
    kernels = [truth.kernels]
    run(plain, **FULL_RECOMPUTE)
    with mock.patch.object(recompute, "choose_modules", choosing):
        for _ in range(2):
            got = None  # whose gradients take memory too
            got = run(burst, **FULL_RECOMPUTE)
            kernels.append(got.kernels - truth.kernels)
            end_step()
    wrong = [key for key, x in truth.grads.items() if not torch.equal(x, got.grads[key])]
    whole_bytes, made = chosen[-1]
    counted = whole_bytes * made["layer"].device
    return kernels[1:], wrong, (living[-1] - living[1]) / counted


@pytest.mark.whole
def test_other_nodes_keys_and_values_are_counted():
    """They are saved for backward where attention's results are not kept. Guards against a first
    step that keeps those, within a budget, and so measures 8 % too little."""
    for (first, second), wrong, held in run_ranks(on_two_nodes, 4):
        assert first > 0 and second == 0 and not wrong
        assert 0.9 < held <= 1.02


# ---- multi-token prediction, whose layer has the number of a decoder layer -------------------


@countable()
def with_a_shared_number(rank: int) -> list[tuple]:
    """For budgets that let some layers, and all, be kept whole: how many are; parameters whose
    gradients differ; bytes that are held in the last layer's backward, by the budget's."""
    from megatron_burst.mcore import patches
    from megatron_burst.mcore.keep import recompute

    setting, found, choose = Setting(mtp=True, micro_batches=1), [], recompute.choose_modules
    pipeline.start(setting)
    truth = run_step(setting, build(setting, config_for(setting)))
    patches.switch_on_keep(AUTO)
    living, chosen = [], []

    def step(iterator, model):
        results = pipeline.forward_step(iterator, model)
        living.append(living_bytes())
        return results

    def choosing(*args):
        chosen.append(choose(*args))
        return chosen[-1]

    chunks = build(setting, config_for(setting, AUTO, **FULL_RECOMPUTE))
    run_step(setting, chunks, step=step)
    end_step()
    for gib in (16e-4, 26e-4, 32e-4, 1.0):
        chunks = build(
            setting, config_for(setting, replace(AUTO, keep_budget_gib=gib), **FULL_RECOMPUTE)
        )
        with mock.patch.object(recompute, "choose_modules", choosing):
            got = run_step(setting, chunks, step=step)
        wrong = [key for key, x in truth.grads.items() if not torch.equal(x, got.grads[key])]
        whole = chosen[-1].get("layer", Placed()).device
        held = living[-1] - living[0] - (5 - whole) * SCORES
        found.append((whole, wrong, held / (gib * 2**30)))
        del got
    return found


@pytest.mark.skipif(not HAS_MTP, reason=f"{why_not('MTP') or why_not('recomputed MTP')}")
@pytest.mark.whole
def test_a_layer_of_multi_token_prediction_is_always_recomputed():
    """First of all, where all that decoder layers keep is there."""
    (found,) = run_ranks(with_a_shared_number, 1)
    assert [layers for layers, *_ in found] == [0, 2, 4, 4]
    for _, wrong, share in found[:3]:
        assert not wrong and 0.8 < share <= 1.02
