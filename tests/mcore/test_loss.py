"""The fused loss in real Megatron-Core models on CPU processes: losses and gradients of its own.

Each case runs one model twice, as Megatron has it and after `fuse_loss`, over the same groups.
Catches labels or masks in another order, a split of vocabulary or sequence that is not Megatron's,
gradients that are lost or counted twice on their way to `main_grad`, heads that are passed by.
"""

import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_burst.config import FusedLossConfig
from megatron_burst.errors import BurstError
from tests.mcore.gpt import SEQ, VOCAB, Model, Parallel, config_of
from tests.ranks import preload, run_ranks

preload("megatron_burst.mcore.loss")


@dataclass(frozen=True)
class Case:
    """A model, its groups, and how the loss is asked for."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    sp: bool = False
    tied: bool = False
    mtp: int = 0
    masked: bool = False
    ddp: bool = False
    options: dict = field(default_factory=dict)
    fused: FusedLossConfig = FusedLossConfig()


FORWARD = FusedLossConfig(grads="forward")
PER_TOKEN = {"calculate_per_token_loss": True}
MUP = {"use_mup": True, "mup_width_mult": 4.0}
NATIVE_FUSED = {"cross_entropy_loss_fusion": True}
GRID = {
    f"TP{tp}{' SP' if sp else ''} CP{cp} PP{pp}{' tied' if tied else ''}": Case(
        tp, cp, pp, sp, tied, masked=tied
    )
    for tp, cp, pp in ((1, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (4, 1, 1))
    for sp in ((True, False) if tp > 1 else (False,))
    for tied in (False, True)
}
CASES = GRID | {
    "gradients in forward": Case(2, 2, sp=True, masked=True, fused=FORWARD),
    "gradients in forward, TP without SP": Case(2, 2, fused=FORWARD),
    "MTP": Case(2, 2, sp=True, mtp=2, masked=True),
    "MTP, no TP": Case(1, 2, mtp=1),
    "MTP, tied, PP": Case(2, 1, 2, sp=True, tied=True, mtp=1, masked=True, fused=FORWARD),
    "MTP, per-token loss": Case(2, sp=True, mtp=1, masked=True, options=PER_TOKEN),
    "MTP, detached heads": Case(2, sp=True, mtp=1, options={"mtp_detach_heads": True}),
    "MuP": Case(2, 1, sp=True, options=MUP),
    "MuP, MTP": Case(1, 2, mtp=1, options=MUP),
    "Megatron's fused loss": Case(2, 2, sp=True, options=NATIVE_FUSED),
    "DDP": Case(2, 2, sp=True, masked=True, ddp=True),
    "DDP, forward": Case(2, 1, masked=True, ddp=True, fused=FORWARD),
    "DDP, tied": Case(2, 2, sp=True, tied=True, ddp=True),
    "DDP, MTP": Case(2, 1, sp=True, mtp=1, ddp=True),
    "DDP, PP, tied": Case(2, 1, 2, sp=True, tied=True, ddp=True),
}


def begin(case: Case) -> None:
    """Groups of a case, on four ranks."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    from megatron_burst.mcore import on_cpu

    # gloo groups keep their threads until the process ends: made once for each arrangement, or
    # thousands of threads bring the machine to a halt
    layout = (case.tp, case.cp, case.pp)
    if getattr(begin, "layout", None) != layout:
        on_cpu.install(training=False)
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=case.tp, context_parallel_size=case.cp,
            pipeline_model_parallel_size=case.pp,
        )  # fmt: skip
        begin.layout = layout
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    MTPLossLoggingHelper.tracker.clear()  # is as long as the first model's heads


def model_of(case: Case):
    """This rank's stage."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )

    from megatron_burst import burst_spec

    config = config_of(
        Parallel(cp=case.cp, tp=case.tp), Model(groups=4), sequence_parallel=case.sp,
        mtp_num_layers=case.mtp or None,
        pipeline_model_parallel_size=case.pp, variable_seq_lengths=False,
        **({"params_dtype": torch.float32} if case.ddp else {}), **case.options,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    mtp = get_gpt_mtp_block_spec(config, spec, False) if case.mtp else None
    if case.cp > 1:
        spec, mtp = burst_spec(spec), mtp and burst_spec(mtp)
    torch.manual_seed(1234)
    model = GPTModel(
        config, spec, VOCAB, SEQ, position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=case.tied, mtp_block_spec=mtp,
    )  # fmt: skip
    return model if case.ddp else model.double()


def batch_of(case: Case) -> dict:
    """This rank's part of one batch."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    generator = torch.Generator().manual_seed(7)
    tokens, labels = torch.randint(0, VOCAB, (2, 2, SEQ), generator=generator)
    mask = torch.ones(2, SEQ)
    if case.masked:
        mask = (torch.rand(2, SEQ, generator=generator) < 0.4).float()
        mask[:, : SEQ // 4] = 0
        labels[mask == 0] = -1  # padding of some tokenizers: out of range where nobody looks
    positions = torch.arange(SEQ).expand_as(tokens).contiguous()
    return get_batch_on_this_cp_rank(
        {"tokens": tokens, "labels": labels, "position_ids": positions, "loss_mask": mask},
        is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group(),
    )  # fmt: skip


def step(case: Case, model, batch) -> dict[str, torch.Tensor]:
    """Loss and gradients of this rank after one forward and backward through all stages."""
    from megatron.core import parallel_state as mpu

    bare = model.module if case.ddp else model
    shape = SEQ // case.cp // (case.tp if case.sp else 1), 2, 64
    dtype = torch.float32 if case.ddp else torch.float64
    before = None
    if not mpu.is_pipeline_first_stage():
        before = torch.empty(shape, dtype=dtype)
        dist.recv(before, mpu.get_pipeline_model_parallel_prev_rank())
        bare.set_input_tensor(before.requires_grad_())
    out = model(
        batch["tokens"], batch["position_ids"], None, labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )  # fmt: skip
    found = {}
    if mpu.is_pipeline_last_stage():
        loss = (out * batch["loss_mask"]).sum() * 0.125
        found["loss"] = loss.detach()
        loss.backward()
    else:
        dist.send(out.detach().contiguous(), mpu.get_pipeline_model_parallel_next_rank())
        grad = torch.empty_like(out)
        dist.recv(grad, mpu.get_pipeline_model_parallel_next_rank())
        out.backward(grad)
    if before is not None:
        dist.send(before.grad.contiguous(), mpu.get_pipeline_model_parallel_prev_rank())
    if case.ddp:
        model.finish_grad_sync()
    for name, parameter in bare.named_parameters():
        grad = parameter.main_grad if case.ddp else parameter.grad
        if grad is not None:
            found[name] = grad.clone()
    return found


def clear(case: Case, model) -> None:
    if case.ddp:
        model.zero_grad_buffer()
    else:
        model.zero_grad(set_to_none=True)


@contextmanager
def logits_made(vocab: int):
    """Notes whenever an output layer makes logits."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    made, plain = [], ColumnParallelLinear._forward_impl

    def noted(self, input, weight, *args, **kwargs):
        made.extend([1] if weight.shape[0] == vocab else [])
        return plain(self, input, weight, *args, **kwargs)

    with mock.patch.object(ColumnParallelLinear, "_forward_impl", noted):
        yield made


def compare(case: Case) -> tuple[dict, int, int, float]:
    """Relative errors; how often logits were made with and without; the evaluation's error."""
    from megatron_burst import fuse_loss

    begin(case)
    bare, batch = model_of(case), batch_of(case)
    model = wrapped(case, bare)
    with logits_made(VOCAB // case.tp) as native:
        truth = step(case, model, batch)
    clear(case, model)
    fuse_loss(bare, case.fused)
    fuse_loss(bare, case.fused)
    with logits_made(VOCAB // case.tp) as fused:
        ours = step(case, model, batch)
    assert truth.keys() == ours.keys()
    errors = {n: float((ours[n] - g).abs().max() / g.abs().max()) for n, g in truth.items()}
    return errors, len(native), len(fused), evaluation(case, bare, batch, truth.get("loss"))


def wrapped(case: Case, model):
    """In Megatron's DDP, where the case says so."""
    if not case.ddp:
        return model
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megatron_burst.mcore import on_cpu

    on_cpu.streams_are_the_cpus()
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
    model = DistributedDataParallel(model.config, ddp, model)
    model.zero_grad_buffer()
    return model


def evaluation(case: Case, model, batch, truth) -> float:
    """Error of the loss without gradients, where one stage is all."""
    if case.pp > 1 or case.mtp:
        return 0.0
    with torch.no_grad():
        model.eval()
        losses = model(
            batch["tokens"], batch["position_ids"], None, labels=batch["labels"],
            loss_mask=batch["loss_mask"],
        )  # fmt: skip
        model.train()
    return float(((losses * batch["loss_mask"]).sum() * 0.125 - truth).abs() / truth)


def compare_all(rank, names):
    """Cases of one arrangement after the other: see `begin`."""
    names = sorted(names, key=lambda name: (CASES[name].tp, CASES[name].cp, CASES[name].pp))
    return {name: compare(CASES[name]) for name in names}


def test_losses_and_gradients_are_megatrons_own():
    for rank, results in enumerate(run_ranks(compare_all, 4, list(CASES), timeout_s=500)):
        assert results.keys() == CASES.keys()
        for name, (errors, native, fused, evaluated) in results.items():
            tolerance = 2e-5 if CASES[name].ddp else 3e-6  # Megatron's loss is in float32
            if CASES[name].options is NATIVE_FUSED:  # and that one's gradient of logits in bf16
                tolerance = 5e-3
            assert max(errors.values()) < tolerance, (rank, name, errors)
            assert fused == 0, (name, native, fused)
            last = "loss" in errors
            assert (native > 0) == last and evaluated < 1e-6, (name, native, evaluated)


def other_uses(rank):
    """Errors by name of what is neither a grid case nor a refusal."""
    import torch.nn.functional as F
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from megatron_burst import fuse_loss
    from megatron_burst.mcore.loss import log_probs_and_entropy

    found = {}
    case = Case(2, 1, sp=True, masked=True)
    begin(case)
    model, batch = model_of(case), batch_of(case)
    batch["labels"].clamp_(min=0)
    inputs = batch["tokens"], batch["position_ids"], None
    before = model(*inputs).detach()
    fuse_loss(model, FusedLossConfig(label_smoothing=0.1, z_loss=0.01, softcap=2.0))
    logits = model(*inputs).detach()
    found["logits without labels"] = float((logits - before).abs().max())
    logits = torch.cat(gathered(logits, mpu.get_tensor_model_parallel_group()), -1)
    z = 2.0 * (logits / 2.0).tanh()
    smooth = 0.1 * VOCAB / (VOCAB - 1)
    truth = F.cross_entropy(
        z.transpose(1, 2), batch["labels"], label_smoothing=smooth, reduction="none"
    )
    truth = (truth + 0.01 * z.logsumexp(-1) ** 2) * batch["loss_mask"]
    losses = model(*inputs, labels=batch["labels"], loss_mask=batch["loss_mask"])
    found["smoothing, z-loss, softcap"] = float((losses - truth).abs().max())
    rl = model(*inputs, labels=batch["labels"], output_processor=log_probs_and_entropy,
               output_processor_context=0.5)  # fmt: skip
    truth = torch.distributions.Categorical(logits=logits / 0.5)
    found["log-probabilities"] = float((rl.log_probs - truth.log_prob(batch["labels"])).abs().max())
    found["entropy"] = float((rl.entropy - truth.entropy()).abs().max())
    begin(Case())
    model, batch = model_of(Case()), batch_of(Case())
    inputs = batch["tokens"], batch["position_ids"], None
    logits = model(*inputs).detach().transpose(0, 1).contiguous()
    group = mpu.get_tensor_model_parallel_group()
    truth = vocab_parallel_cross_entropy(logits, batch["labels"].t().contiguous(), 0.1, group).t()
    losses = fuse_loss(model, FusedLossConfig(label_smoothing=0.1))(*inputs, labels=batch["labels"])
    found["smoothing as Megatron's"] = float((losses - truth).abs().max())
    return found


def gathered(x, group):
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group)
    return parts


def test_logits_options_log_probabilities_and_smoothing():
    for found in run_ranks(other_uses, 4):
        assert len(found) == 5 and max(found.values()) < 1e-5, found


def refused(rank):
    """What is said of heads that the loss would not be right for; the rest works on."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from megatron_burst import fuse_loss

    class Own(ColumnParallelLinear):
        pass

    begin(Case(tp=2))
    said = []

    def ask(change, config=None):
        model = model_of(Case(tp=2))
        change(model)
        with pytest.raises(BurstError) as raised:
            fuse_loss(model, config)
        said.append(str(raised.value))

    ask(lambda m: setattr(m.output_layer, "__class__", Own))
    ask(lambda m: m.output_layer.register_parameter("bias", torch.nn.Parameter(torch.zeros(48))))
    ask(lambda m: setattr(m.output_layer, "gather_output", True))
    ask(lambda m: setattr(m.output_layer, "gtp_remat_size", 2))
    ask(lambda m: setattr(m.config, "defer_embedding_wgrad_compute", True))
    ask(lambda m: setattr(m.output_layer, "disable_grad_reduce", True))
    ask(lambda m: setattr(m, "fp16_lm_cross_entropy", True))
    ask(lambda m: setattr(m.config, "cuda_graph_impl", "local"))
    ask(lambda m: setattr(m.config, "fp16", True), FORWARD)
    model, batch = fuse_loss(model_of(Case(tp=2))), batch_of(Case(tp=2))
    inputs = batch["tokens"], batch["position_ids"], None
    with pytest.raises(BurstError, match="logits cannot be gathered.*; leave that out, or the fl"):
        model(*inputs, labels=batch["labels"], runtime_gather_output=True)
    assert model(*inputs).shape == (2, SEQ, VOCAB // 2)  # not active any more
    return said


def test_refuses_heads_that_it_would_be_wrong_for():
    expected = (
        "must be Megatron's ColumnParallelLinear.*got Own", "must have no bias.*got a bias",
        "logits must not be gathered.*got parallel_output=False", "got gtp_remat_size=2",
        "gradient must not be deferred", "must be reduced.*got disable_grad_reduce",
        "must be in float32.*got fp16_lm_cross_entropy", "no CUDA graph.*got local",
        "must be computed in backward in fp16.*got grads='forward'",
    )  # fmt: skip
    for said in run_ranks(refused, 2):
        for message, pattern in zip(said, expected, strict=True):
            assert re.match(f"^--burst-fused-loss: .*{pattern}", message), message
