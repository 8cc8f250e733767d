"""Gradients in forward under Megatron's schedules and DDP, against recomputed logits.

Each case trains a model twice for three steps of several micro-batches, each with a different
number of counted tokens. Guards against weight gradients added to `main_grad` before it is zeroed
or after it is reduced, micro-batches mixed up in a pipeline, scales that Megatron changes between
forward and backward, and the feature not being used at all.
"""

from dataclasses import dataclass, field

import torch

from megatron_burst.config import FusedLossConfig
from megatron_burst.errors import BurstError
from tests.mcore.gpt import SEQ, VOCAB
from tests.mcore.lacking import present, why_not
from tests.mcore.loss_model import Case, begin, model_of
from tests.ranks import run_ranks

STEPS, MICRO_BATCHES = 3, 4
RECOMPUTE = FusedLossConfig(grads="recompute")
PER_TOKEN = {"calculate_per_token_loss": True}


@dataclass(frozen=True)
class Training:
    """A model, its schedule, and what the script makes of the losses."""

    model: Case
    script: str = "tokens"
    counts: tuple[int, int] = (11, 0)  # hits and misses of a stage with a head
    vp: int = 1
    options: dict = field(default_factory=dict)


ALONE, SHARDED = Case(ddp=True), Case(2, sp=True, ddp=True)
TRAININGS = {
    "one stage": Training(ALONE),
    "TP, SP": Training(SHARDED),
    "TP": Training(Case(2, ddp=True)),
    "tied": Training(Case(tied=True, ddp=True)),
    "tied, PP": Training(Case(1, 1, 2, tied=True, ddp=True)),
    "PP": Training(Case(1, 1, 2, ddp=True)),
    "MTP": Training(Case(mtp=1, ddp=True)),
    "per token": Training(Case(ddp=True, options=PER_TOKEN)),
    "the script's own mean": Training(ALONE, "mean"),
    "skips a micro-batch": Training(ALONE, "skips", (7, 3)),  # and gives up
    "weighs tokens": Training(SHARDED, "weighs", (0, 3)),
    "another number of micro-batches a step": Training(SHARDED, "more", (12, 2)),
}


def batches(script: str, step: int):
    """Micro-batches of a step."""
    generator = torch.Generator().manual_seed(step)
    for turn in range(micro_batches(script, step)):
        tokens, labels = torch.randint(0, VOCAB, (2, 2, SEQ), generator=generator)
        rate = torch.rand((), generator=generator).clamp(min=0.2)
        rate = 0 if (step, turn) == (1, 1) and script == "tokens" else rate  # no token counts
        mask = (torch.rand(2, SEQ, generator=generator) < rate).float()
        yield tokens, labels, mask


def micro_batches(script: str, step: int) -> int:
    return MICRO_BATCHES + (step if script == "more" else 0)


def scripts_loss(script: str, turn: int, mask):
    """What a script's loss function returns."""

    def function(losses):
        total, tokens = (losses * mask).sum(), mask.sum().int()
        if script == "mean":
            return total / tokens, {}
        if script == "skips" and turn == 2:
            total = total * 0
        if script == "weighs":
            total = (losses * mask * torch.arange(SEQ)).sum()
        return total, tokens, {}

    return function


def train(training: Training, config: FusedLossConfig):
    """[main gradients by name of each step], and how the forecast did."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_burst import fuse_loss
    from megatron_burst.mcore import cpu_mode

    cpu_mode.install()
    case = training.model
    begin(case)
    bare = fuse_loss(model_of(case), config)
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
    model = DistributedDataParallel(bare.config, options, bare)
    bare.config.finalize_model_grads_func = finalize_model_grads
    bare.config.no_sync_func = model.no_sync
    found, run = [], get_forward_backward_func()
    for step in range(STEPS):
        model.zero_grad_buffer()
        turns = iter(range(99))

        def forward_step(data, model, turns=turns):
            tokens, labels, mask = next(data)
            positions = torch.arange(SEQ).expand_as(tokens).contiguous()
            out = model(tokens, positions, None, labels=labels, loss_mask=mask)
            return out, scripts_loss(training.script, next(turns), mask)

        run(
            forward_step_func=forward_step, data_iterator=batches(training.script, step),
            model=[model], num_microbatches=micro_batches(training.script, step), seq_length=SEQ,
            micro_batch_size=2, forward_only=False,
        )  # fmt: skip
        found.append({n: p.main_grad.clone() for n, p in bare.named_parameters()})
    head = getattr(bare, "fused_head", None)
    return found, getattr(head, "forecast", None)


def compare(rank, names):
    """By case: the largest relative error, and a forecast's hits, misses, pending."""
    found = {}
    for name in sorted(
        names, key=lambda name: (TRAININGS[name].model.tp, TRAININGS[name].model.pp)
    ):
        truth, none = train(TRAININGS[name], RECOMPUTE)
        ours, forecast = train(TRAININGS[name], FusedLossConfig())
        assert none is None
        errors = [
            float((got[n] - x).abs().max() / x.abs().max().clamp(min=1e-30))
            for got, true in zip(ours, truth, strict=True)
            for n, x in true.items()
        ]
        counts = forecast and (forecast.hits, forecast.misses, forecast.pending, forecast.is_open)
        found[name] = max(errors), counts
    return found


def unfinished(rank):
    """The message about a loss without backward; forward's sums where they are not allowed."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megatron_burst import fuse_loss
    from megatron_burst.mcore import cpu_mode

    cpu_mode.install()
    begin(ALONE)
    said, sums = [], []
    for shared in (False, True):
        bare = fuse_loss(model_of(ALONE))
        options = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        model = DistributedDataParallel(bare.config, options, bare)
        options.reuse_grad_buf_for_mxfp8_param_ag = shared  # its constructor refuses it on CPUs
        model.zero_grad_buffer()
        for turn in range(2):
            tokens, labels, mask = next(batches("", 0))
            positions = torch.arange(SEQ).expand_as(tokens).contiguous()
            losses = model(tokens, positions, None, labels=labels, loss_mask=mask)
            if turn == 0:
                losses.sum().backward()
                bare.output_layer.weight.main_grad.zero_()
        sums.append(bool(bare.output_layer.weight.main_grad.any()))
        try:
            model.finish_grad_sync()
        except BurstError as error:
            said.append(str(error))
    return said, sums


def test_a_loss_without_backward_is_told_before_its_gradient_is_used():
    """And where parameters are gathered in the gradients' memory, forward adds nothing."""
    ((said, sums),) = run_ranks(unfinished, 1)
    assert len(said) == 1 and "got 1 without" in said[0] and sums == [True, False]


def test_gradients_are_those_of_logits_computed_again():
    here = present(TRAININGS, lambda each: why_not("MTP" if each.model.mtp else None))
    ranks = run_ranks(compare, 2, list(here))
    for name, training in here.items():
        results = [found[name] for found in ranks]
        assert all(error < 2e-6 for error, _ in results), (name, results)
        counts = [counts for _, counts in results if counts is not None]
        assert len(counts) == 2 // training.model.pp, (name, results)
        assert set(counts) == {(*training.counts, 0, False)}, (name, results)
