"""What Megatron divides its losses by under context parallelism, where ranks have unequally many
labels: one step of its own schedule, data parallelism and report, compared with one rank.

Guards against heads of multi-token prediction that count this rank's labels alone, and shows when
Megatron's own losses are wrong, of which burst warns.
"""

from argparse import Namespace
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isnan
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_burst.logs import log_message_once
from tests.mcore.gpt import SEQ, VOCAB, sharded
from tests.mcore.lacking import needs, no_option, parameters, present
from tests.mcore.loss_model import Case, begin, model_of
from tests.ranks import preload, run_ranks
from tests.said import hearing

pytestmark = pytest.mark.numeric
preload("megatron.core.pipeline_parallel.schedules", "megatron.core.distributed")
PER_TOKEN = {"calculate_per_token_loss": True}
TOLERANCE = 2e-5  # as in test_loss.py: DDP's gradients are float32


@dataclass(frozen=True)
class Step:
    """What a step reports, on each rank, and the gradients that its optimizer would see."""

    loss: float
    heads: list[float]
    grads: dict[str, torch.Tensor]

    @property
    def norm(self) -> float:
        return float(torch.stack([grad.norm() for grad in self.grads.values()]).norm())

    def errors(self, truth: "Step") -> dict[str, float]:
        """Relative errors by name."""
        assert self.grads.keys() == truth.grads.keys() and len(self.heads) == len(truth.heads)
        errors = {"loss": abs(self.loss / truth.loss - 1), "norm": abs(self.norm / truth.norm - 1)}
        for head, (loss, true) in enumerate(zip(self.heads, truth.heads, strict=True), 1):
            errors[f"head {head}"] = abs(loss / true - 1)
        for name, true in truth.grads.items():
            errors[name] = float((self.grads[name] - true).abs().max() / true.abs().max())
        return {name: inf if isnan(error) else error for name, error in errors.items()}


def micro_batches():
    """The same two on all data-parallel ranks, of which each has labels on some ranks only."""
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(7)
    for supervised in (slice(SEQ - 12, SEQ), slice(SEQ // 4, SEQ // 4 + 2)):
        tokens, labels = torch.randint(0, VOCAB, (2, 2, SEQ), generator=generator)
        mask = torch.zeros(2, SEQ)
        # an answer behind a prompt; two labels that begin a chunk: a head's are in the chunk before
        mask[: 2 if supervised.stop == SEQ else 1, supervised] = 1
        positions = torch.arange(SEQ).expand_as(tokens).contiguous()
        batch = {"tokens": tokens, "labels": labels, "position_ids": positions, "loss_mask": mask}
        yield sharded(batch, parallel_state.get_context_parallel_group())


def sums(mask, losses):
    """pretrain_gpt.py's loss: the schedule divides by this rank's number of labels."""
    total, count = (losses * mask).sum(), mask.sum()
    return total, count.int(), {"sums": torch.stack([total.detach(), count])}


def means(mask, losses):
    """A loss that is right by itself: the schedule multiplies it by the number of ranks."""
    from megatron.core import parallel_state

    total, _count, report = sums(mask, losses)
    every = mask.sum()
    dist.all_reduce(every, group=parallel_state.get_context_parallel_group())
    return total / every, report


def forward_step(loss_of, iterator, model):
    batch = next(iterator)
    inputs = batch["tokens"], batch["position_ids"], None
    mask = batch["loss_mask"]
    return model(*inputs, labels=batch["labels"], loss_mask=mask), partial(loss_of, mask)


def step(case: Case, fused: bool, loss_of=sums) -> Step:
    """One step of two micro-batches; `fused`: with burst's loss."""
    from megatron.core import distributed, parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_burst import fuse_loss
    from megatron_burst.tools import cpu_mode

    begin(case)
    cpu_mode.install()
    bare = model_of(case)
    if fused:
        fuse_loss(bare, case.fused)
    ddp = distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = distributed.DistributedDataParallel(bare.config, ddp, bare)
    model.zero_grad_buffer()
    bare.config.finalize_model_grads_func = distributed.finalize_model_grads
    reports = get_forward_backward_func()(
        forward_step_func=partial(forward_step, loss_of), data_iterator=micro_batches(),
        model=model, num_microbatches=2, seq_length=SEQ, micro_batch_size=2, forward_only=False,
    )  # fmt: skip
    total = torch.stack([report["sums"] for report in reports]).sum(0)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    grads = {name: parameter.main_grad.clone() for name, parameter in bare.named_parameters()}
    return Step(float(total[0] / total[1]), heads_logged(), grads)


def heads_logged() -> list[float]:
    """Losses of the heads of multi-token prediction, as Megatron logs them; not those of 0.16,
    which are 0 / 0 on a rank without labels."""
    from megatron.core.transformer import multi_token_prediction as mtp

    logged: dict[str, torch.Tensor] = {}
    if hasattr(mtp, "process_mtp_loss"):
        helper = mtp.MTPLossLoggingHelper
        helper.track_mtp_metrics(0.5, 1, None, total_loss_dict=logged)
    return [float(loss) for loss in logged.values()]


def errors_of(case: Case, runs, loss_of=sums) -> list[dict[str, float]]:
    """Of runs, context-parallel size and whether fused, against Megatron's own on one rank."""
    truth = step(replace(case, cp=1), False, loss_of)
    return [step(replace(case, cp=cp), fused, loss_of).errors(truth) for cp, fused in runs]


def main_losses(rank: int) -> list[list[dict[str, float]]]:
    """Errors without and with --calculate-per-token-loss, of Megatron's own loss and of burst's."""
    cases = Case(ddp=True), Case(ddp=True, options=PER_TOKEN)
    return [errors_of(case, [(2, False), (2, True)]) for case in cases]


def test_gradients_need_the_per_token_loss_where_some_ranks_have_no_labels():
    """Megatron's own schedule divides by a rank's own labels (schedules.py:334): with all of them
    on one of two ranks it halves the gradients, whoever computes the losses."""
    for plain, per_token in run_ranks(main_losses, 4):
        for errors in plain:
            assert errors["loss"] < TOLERANCE and abs(errors["norm"] - 0.5) < TOLERANCE
        assert max(max(errors.values()) for errors in per_token) < TOLERANCE


HEADS = {  # cases with heads of multi-token prediction; context-parallel sizes; the script's loss
    "one head": (Case(mtp=1, options=PER_TOKEN), [2], sums),
    "two heads": (Case(mtp=2, options=PER_TOKEN), [2, 4], sums),
    "TP2": (Case(2, sp=True, mtp=2, options=PER_TOKEN), [2], sums),
    "MuP": (Case(mtp=1, options=PER_TOKEN | {"use_mup": True, "mup_width_mult": 4.0}), [2], sums),
    "one head, means": (Case(mtp=1), [2], means),
    "two heads, means": (Case(mtp=2), [2, 4], means),
    "TP2, means": (Case(2, sp=True, mtp=2), [2], means),
}


def why(cell) -> str:
    """Why this Megatron cannot run it."""
    return no_option(cell[0].options)


def with_heads(rank: int) -> dict[str, list[dict[str, float]]]:
    """Errors of Megatron's own loss at the first size, then of burst's at each."""
    found = {}
    for name, (case, sizes, loss_of) in present(HEADS, why).items():
        runs = [(sizes[0], False), *((size, True) for size in sizes)]
        found[name] = errors_of(replace(case, ddp=True), runs, loss_of)
    return found


@pytest.fixture(scope="module")
def comparisons(once):
    return once(lambda: run_ranks(with_heads, 4))


@needs("MTP")
@pytest.mark.parametrize("name", parameters(HEADS, why))
def test_heads_of_multi_token_prediction_are_those_of_one_rank(comparisons, name):
    """Megatron's own are not, up to d98e8a6 of main (but in 0.16 sums are): when they are, drop the
    correction."""
    for own, *fused in (results[name] for results in comparisons):
        assert max(max(errors.values()) for errors in fused) < TOLERANCE, fused
        assert own["loss"] < TOLERANCE
        assert max(own.values()) > 0.2 or "head 1" not in own, own


LOSS, MTP = "pass --calculate-per-token-loss", "pass --burst-fused-loss"
SAID = {  # by what is passed with --context-parallel-size 2: how lines end
    "": [],
    "mtp_num_layers": [],
    "sft": [LOSS],
    "eod_mask_loss": [LOSS],
    "allow_ambiguous_pad_tokens": [LOSS],
    "sft calculate_per_token_loss": [],
    "sft mtp_num_layers": [LOSS, MTP],
    "sft calculate_per_token_loss mtp_num_layers": [MTP],
    "sft calculate_per_token_loss mtp_num_layers burst_fused_loss": [],
    "sft use_torch_fsdp2": [f"{LOSS}, and --use-megatron-fsdp instead of --use-torch-fsdp2"],
}


@pytest.mark.parametrize("flags", SAID)
def test_what_megatron_gets_wrong_is_said_once_where_labels_are_masked(flags):
    from megatron_burst.mcore.checks import warn_if_counts_differ

    options = dict.fromkeys(("calculate_per_token_loss", "burst_fused_loss"), False)
    options |= dict.fromkeys(flags.split(), 1)
    log_message_once.cache_clear()
    with hearing() as lines:
        for size in (1, 2, 2):
            warn_if_counts_differ(Namespace(context_parallel_size=size, **options))
    assert [line.partition("; got ")[2].partition("; ")[2] for line in lines] == SAID[flags]
    assert all("--context-parallel-size 2" in line for line in lines)


@pytest.mark.parametrize("start", ["attention", "loss"])
def test_it_is_said_when_burst_is_built(start):
    """Attention and the fused loss each work without the other."""
    from megatron_burst.mcore import checks, fused_loss

    args = Namespace(context_parallel_size=2, calculate_per_token_loss=False, sft=True,
                     burst_fused_loss=start == "loss")  # fmt: skip
    module, build = checks, checks.check_run
    if start == "loss":
        model, own = Namespace(), lambda self: None
        module, build = fused_loss, partial(fused_loss.build_with_loss, own, None, False, model)
    log_message_once.cache_clear()
    # this is no whole command line, nor a model
    no_more = suppress(AttributeError), mock.patch.object(module, "global_args", return_value=args)
    with no_more[0], no_more[1], hearing() as lines:
        build()
    assert [line for line in lines if line.endswith(LOSS)]
