"""Layers that "auto" does not recompute, where micro-batches, replicas or models differ: all of
them choose so that the budget holds, and ranks that share experts choose alike."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

from megatron_burst.config import BurstConfig
from tests.mcore import gpt
from tests.mcore.gpt import FULL_RECOMPUTE, Parallel
from tests.mcore.lacking import needs
from tests.mcore.test_kept_modules import (
    ALLTOALL,
    EXPERTS,
    Case,
    differing,
    end_step,
    spec_of,
    two_steps,
)
from tests.mcore.test_whole_layers import AUTO, CASES, FOUR, countable, living_bytes
from tests.ranks import run_ranks


@contextmanager
def sequences(count: int):
    """Context in which a batch has so many sequences; the usual one has two."""
    batch = {name: x[:1].repeat(count, 1) for name, x in gpt.whole_batch().items()}
    with mock.patch.object(gpt, "whole_batch", return_value=batch):
        yield


@countable()
def with_a_longer_one(rank: int) -> tuple:
    """After a first step that left 20 times what a layer held, of four layers, and took 4 times as
    much, with micro-batches that are twice as long: the budget, and what a layer is said to hold,
    by that; how many are whole; bytes of all tensors before backward, beyond full recomputation's,
    by the budget; parameters whose gradients differ, and the log."""
    from megatron_burst.mcore import patches
    from megatron_burst.mcore.keep import recompute, stage

    gpt.start(Parallel())
    case, chosen, said, choose = CASES["dense"], [], [], recompute.choose_modules

    def choosing(problem, costs, budget, *args):
        chosen.append((problem.whole_bytes, budget, choose(problem, costs, budget, *args)))
        return chosen[-1][-1]

    patches.switch_on_keep(AUTO)
    two_steps(case, Parallel(), AUTO)
    end_step()
    living = []
    with (
        mock.patch.object(recompute, "choose_modules", choosing),
        mock.patch.object(stage, "log_message", said.append),
        mock.patch.object(recompute, "log_of_stage", said.append),
    ):
        two_steps(case, Parallel(), AUTO)
        (here,) = stage._STAGES.values()
        usual = chosen[-1][0]
        here.left_bytes, here.taken_bytes = 20 * usual, 4 * usual
        with sequences(4):
            options = case, Parallel()
            truth, _ = two_steps(*options, BurstConfig(), lambda: living.append(living_bytes()))
            got, _ = two_steps(*options, AUTO, lambda: living.append(living_bytes()))
    wrong = differing(truth, got)
    counted, budget, made = chosen[-1]
    held = living[3] - living[1]
    return budget / usual, counted / usual, made["layer"].device, held / budget, wrong, said[-4:]


def test_a_longer_micro_batch_keeps_less():
    """Twice as long, it takes up to four times as much, as where attention stores its scores."""
    (found,) = run_ranks(with_a_longer_one, 1)
    budget, counted, layers, held, wrong, said = found
    assert budget == pytest.approx(20 - 3 * 4) and counted == pytest.approx(4)
    assert layers == 2 and 0 < held <= 1.02 and not wrong
    assert any("256 tokens is longer than those of the first step (128)" in text for text in said)


def beside_other_sequences(rank: int) -> tuple:
    """Two replicas with experts of their own and sequences of other lengths, one of which would
    keep all layers, the other half of them: parameters whose gradients differ, how many layers
    are whole, what is said of a micro-batch that is longer than any of the first step, and the
    bytes and bandwidth of host memory that the choice is made with."""
    from megatron_burst.mcore import patches
    from megatron_burst.mcore.keep import kept_modules, recompute, stage
    from megatron_burst.tools import cpu_mode

    parallel, case = Parallel(ep=2), CASES["routed experts"]
    gpt.start(parallel)
    cpu_mode.install()
    chosen, said, choose = [], [], recompute.choose_modules

    def choosing(problem, *args):
        chosen.append((problem, choose(problem, *args)))
        return chosen[-1][1]

    patches.switch_on_keep(AUTO)
    with (
        mock.patch.object(recompute, "choose_modules", choosing),
        mock.patch.object(kept_modules, "log_message_once", said.append),
        mock.patch.object(stage, "host_gbs", return_value=50.0 - rank),
        mock.patch.object(stage, "host_limit_bytes", return_value=1000 + rank),
    ):
        with sequences(1 + rank):
            truth, _ = two_steps(case, parallel, BurstConfig())
            two_steps(case, parallel, AUTO)
            end_step()
            two_steps(case, parallel, AUTO)
            gib = 0.6 * 4 * chosen[-1][0].whole_bytes / 2**30
            burst = replace(AUTO, keep_budget_gib=gib)
            got, _ = two_steps(case, parallel, burst)
            assert not said
        with sequences(3 - rank):
            two_steps(case, parallel, burst)
    wrong = differing(truth, got)
    (here,) = stage._STAGES.values()
    return wrong, chosen[-1][1]["layer"].device, said, (here.host_bytes, here.rates.host_gbs)


@needs("experts")
def test_replicas_that_share_experts_keep_the_same_layers():
    """Else one would recompute a layer's all-to-all that the other does not make again."""
    first, second = run_ranks(beside_other_sequences, 2)
    assert not first[0] and not second[0]
    assert 0 < first[1] == second[1] < 4
    assert "192 tokens is longer than those of the first step (128)" in first[2][0]
    assert not second[2]
    assert first[3] == second[3] == (1000, 49.0)  # measured by each


def with_padding_on_one(rank: int) -> tuple[list[str], int]:
    """Two replicas that share experts, of which one has padded sequences: parameters whose
    gradients differ from full recomputation's; layers whose experts were not told of padding."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_burst.mcore import patches
    from megatron_burst.tools import cpu_mode

    parallel, case = Parallel(ep=2), Case(options=FOUR | EXPERTS | ALLTOALL)
    gpt.start(parallel)
    cpu_mode.install()
    masks, build, forward = [], gpt.build, MoELayer.forward

    def padded(*args):
        model, tokens = build(*args), gpt.whole_batch()["tokens"]
        if rank:
            mask = (torch.arange(tokens.shape[1]) >= tokens.shape[1] - 5).expand_as(tokens)
            model.forward = partial(model.forward, padding_mask=mask)
        return model

    def noting(self, x, *args, **options):
        masks.append(any(each is not None for each in (*args, *options.values())))
        return forward(self, x, *args, **options)

    with mock.patch.object(gpt, "build", padded):
        truth, _ = two_steps(case, parallel, BurstConfig())
        patches.switch_on_keep(AUTO)
        two_steps(case, parallel, AUTO)
        end_step()
        with mock.patch.object(MoELayer, "forward", noting):
            got, _ = two_steps(case, parallel, AUTO)
    assert len(masks) == 2 * 4  # each layer once a step
    wrong = differing(truth, got)
    return wrong, masks.count(bool(rank))


@needs("experts")
def test_padding_of_one_replica_changes_nothing_on_the_other():
    """Both run the same layers without a checkpoint, which get the mask in all releases."""
    assert run_ranks(with_padding_on_one, 2) == [([], 8), ([], 8)]


def of_two_models(rank: int) -> tuple[int, list[float]]:
    """How many models the first step recomputed, and shares of what it left that they then have."""
    from megatron_burst.mcore import patches
    from megatron_burst.mcore.keep import recompute, stage

    gpt.start(Parallel())
    patches.switch_on_keep(AUTO)
    case, models, shares, choose = CASES["dense"], [], [], recompute.choose_modules

    def choosing(problem, costs, budget, *args):
        shares.append(budget / here.left_bytes)
        return choose(problem, costs, budget, *args)

    for layers in (2, 3):
        options = FULL_RECOMPUTE | case.options | dict(num_layers=layers)
        config = gpt.config_of(model=case.model, **options)
        config.burst = AUTO
        models.append(gpt.build(config, spec_of(case)))
    for model in models:
        gpt.loss_and_grads(model)
    end_step()
    (here,) = stage._STAGES.values()
    with mock.patch.object(recompute, "choose_modules", choosing):
        for model in models:
            gpt.loss_and_grads(model)
    return here.num_models, shares


def test_models_of_a_process_share_what_is_left():
    assert run_ranks(of_two_models, 1) == [(2, [0.5, 0.5])]
