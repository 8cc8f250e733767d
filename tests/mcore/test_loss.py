"""The fused loss in real Megatron-Core models on CPU processes: Megatron's own losses and
gradients.

Each case runs one model twice, as in Megatron and after `fuse_loss`, over the same groups. Guards
against labels or masks in another order, a vocabulary or sequence split other than Megatron's,
gradients lost or counted twice on their way to `main_grad`, and heads left out.
"""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.mcore.gpt import SEQ, VOCAB
from tests.mcore.lacking import no_option, parameters, present, why_not
from tests.mcore.loss_model import FORWARD, Case, batch_of, begin, model_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.numeric
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
    # on one context-parallel rank, as Megatron's own are wrong on several: test_megatron_loss.py
    "MTP": Case(2, sp=True, mtp=2, masked=True),
    "MTP, no TP": Case(mtp=1),
    "MTP, tied, PP": Case(2, 1, 2, sp=True, tied=True, mtp=1, masked=True, fused=FORWARD),
    "MTP, per-token loss": Case(2, sp=True, mtp=1, masked=True, options=PER_TOKEN),
    "MTP, detached heads": Case(2, sp=True, mtp=1, options={"mtp_detach_heads": True}),
    "MuP": Case(2, 1, sp=True, options=MUP),
    "MuP, MTP": Case(mtp=1, options=MUP),
    "Megatron's fused loss": Case(2, 2, sp=True, options=NATIVE_FUSED),
    "DDP": Case(2, 2, sp=True, masked=True, ddp=True),
    "DDP, forward": Case(2, 1, masked=True, ddp=True, fused=FORWARD),
    "DDP, tied": Case(2, 2, sp=True, tied=True, ddp=True),
    "DDP, MTP": Case(2, 1, sp=True, mtp=1, ddp=True),
    "DDP, PP, tied": Case(2, 1, 2, sp=True, tied=True, ddp=True),
}
# with --all only: with tensor parallelism, every sum and every split occurs without them
SELDOM = [name for name, case in GRID.items() if case.tp > 1 and case.sp == case.tied]
SELDOM += ["gradients in forward, TP without SP"]


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
    """Records whenever an output layer makes logits."""
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
    """Wrap in Megatron's DDP, if the case says so."""
    if not case.ddp:
        return model
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megatron_burst.tools import cpu_mode

    cpu_mode.install()
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
    model = DistributedDataParallel(model.config, ddp, model)
    model.zero_grad_buffer()
    return model


def evaluation(case: Case, model, batch, truth) -> float:
    """Error of the loss without gradients, with a single stage."""
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


def why(case: Case) -> str:
    """Why this Megatron cannot run it."""
    return no_option(case.options) or why_not("MTP" if case.mtp else None)


def compare_all(rank, left):
    """Run the cases of one arrangement after the other: see `begin`."""
    cases = present(CASES, why, left)
    names = sorted(cases, key=lambda name: (cases[name].tp, cases[name].cp, cases[name].pp))
    return {name: compare(cases[name]) for name in names}


@pytest.fixture(scope="module")
def comparisons(once, request):
    def compared():
        left = () if request.config.getoption("--all") else SELDOM
        return run_ranks(compare_all, 4, left, timeout_s=500)

    return once(compared)


@pytest.mark.parametrize("name", parameters(CASES, why, SELDOM))
def test_losses_and_gradients_are_megatrons_own(comparisons, name):
    tolerance = 2e-5 if CASES[name].ddp else 3e-6  # Megatron's loss is in float32
    if CASES[name].options is NATIVE_FUSED:  # whose gradient of logits is in bf16
        tolerance = 5e-3
    for errors, native, fused, evaluated in (results[name] for results in comparisons):
        assert max(errors.values()) < tolerance, errors
        assert fused == 0
        assert (native > 0) == ("loss" in errors) and evaluated < 1e-6
