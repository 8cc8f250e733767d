"""Deferred logits of real Megatron-Core models on CPU processes, without a framework.

Guards against an operation of a framework's that is recorded wrongly, logits without gradients
where something needs them, and hooks on the output layer that take its output apart.
"""

import sys
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from tests.mcore.gpt import SEQ, VOCAB
from tests.mcore.lacking import why_not
from tests.mcore.loss_model import Case, batch_of, begin, model_of
from tests.ranks import preload, run_ranks

pytestmark = pytest.mark.numeric
preload("megatron_burst.mcore.log_probs.head", "megatron_burst.mcore.log_probs.replacements")

SHARDED = Case(tp=2, sp=True)


@contextmanager
def taken():
    """As if a framework's function took deferred logits."""
    from megatron_burst.mcore.log_probs import frameworks

    with mock.patch.object(frameworks, "takes_deferred", return_value=True):
        yield


def deferring(case: Case):
    from megatron_burst.mcore.log_probs.head import defer_logits

    return defer_logits(model_of(case))


def outcome(model, log_probs, entropy):
    """Values and all gradients of a sum over them."""
    weights = torch.linspace(-1, 1, log_probs.numel()).view(log_probs.shape)
    (log_probs * weights - 0.1 * entropy).sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    return [log_probs.detach(), entropy.detach(), *grads]


def of_logits(logits, labels):
    """Log-probabilities and entropies by torch, over all ranks' classes."""
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    if logits.shape[-1] != VOCAB:
        group = mpu.get_tensor_model_parallel_group()
        logits = gather_from_tensor_model_parallel_region(logits, group=group)
    log_probs = logits.log_softmax(-1)
    return log_probs.gather(-1, labels[..., None])[..., 0], -(log_probs.exp() * log_probs).sum(-1)


# what frameworks do with logits [b, s, vocab / tp] before they take log-probabilities, and what
# that is for labels [b, s]
CHANGES = {
    "nothing": (lambda x: x, lambda y: y),
    "temperature": (lambda x: x.div_(0.7), lambda y: y),  # NeMo-RL, ms-swift
    "scaled copy": (lambda x: 2 * (x.clone() / 0.7).contiguous(), lambda y: y),  # slime
    "part of a copy": (lambda x: x.double().contiguous()[:, 3:9], lambda y: y[:, 3:9]),  # ROLL
    "narrow": (lambda x: x.narrow(1, 2, 8), lambda y: y.narrow(1, 2, 8)),  # NeMo-RL
    "one sample": (lambda x: x[1:2].squeeze(0).unsqueeze(0), lambda y: y[1:2]),
    "without gradients": (lambda x: x.transpose(0, 1).contiguous().detach(), lambda y: y.t()),
}


def recorded(rank, sharded):
    """For each change: errors of values and gradients, without logits."""
    from megatron_burst.mcore.log_probs.deferred import DeferredLogits
    from megatron_burst.mcore.log_probs.replacements import log_probs_of

    case = SHARDED if sharded else Case()
    begin(case)
    found = {}
    for name, (change, rows) in CHANGES.items():
        batch, results = batch_of(case), []
        labels = rows(batch["labels"])
        for build in (model_of, deferring):
            model = build(case)
            with taken():
                logits = change(model(batch["tokens"], batch["position_ids"], None))
            if build is model_of:
                values = of_logits(logits, labels)
            else:
                assert type(logits) is DeferredLogits and logits.source.computed is None
                values = log_probs_of(logits, labels)[:2]
            if logits.requires_grad:
                results.append(outcome(model, *values))
            else:
                assert not values[0].requires_grad
                results.append([x.detach() for x in values])
        found[name] = max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))
    return found


@pytest.mark.parametrize("sharded", [False, True])
def test_what_frameworks_do_with_logits_is_recorded(sharded):
    """In float64: 2.2e-16 a rounding, sums of 96 classes and 256 tokens."""
    for errors in run_ranks(recorded, 2 if sharded else 1, sharded):
        assert len(errors) == len(CHANGES) and max(errors.values()) < 1e-10, errors


class Squares(torch.autograd.Function):
    """What frameworks' own functions are, for instance of top-k distillation."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x * x).sum(-1)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad[..., None]


OTHERS = {
    "largest": lambda x: x.max(-1).values,
    "a function": Squares.apply,
    "top k of scaled": lambda x: (x.transpose(0, 1) / 0.7).topk(3).values,
    "a part in place": lambda x: (x[:, :3].div_(2), x.logsumexp(-1))[1],
    "masked in place": lambda x: x.div_(0.7).masked_fill_(x > 1, 0.0).sum(-1),
    "two uses": lambda x: x.logsumexp(-1) * x.sum(),
    "sum": lambda x: x.sum(),
}


def computed(rank, sharded):
    """For each other use: errors of values and gradients, and whether logits were computed."""
    from megatron_burst.mcore.log_probs import deferred

    case = SHARDED if sharded else Case()
    begin(case)
    found = {}
    for name, use in OTHERS.items():
        batch, results = batch_of(case), []
        for build in (model_of, deferring):
            model = build(case)
            with taken():
                logits = model(batch["tokens"], batch["position_ids"], None)
            with mock.patch.object(deferred, "_log_why") as log:
                y = use(logits)
            (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
            results.append([y.detach(), *(p.grad for p in model.parameters())])
        error = max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))
        found[name] = error, log.called
    return found


@pytest.mark.parametrize("sharded", [False, True])
def test_other_uses_get_logits_with_gradients(sharded):
    for found in run_ranks(computed, 2 if sharded else 1, sharded):
        for name, (error, has_logits) in found.items():
            assert error < 1e-10 and has_logits == (name != "sum"), (name, error, has_logits)


def kept_as_they_are(rank):
    """Kinds of outputs where logits are not deferred."""
    from megatron_burst import fuse_loss
    from megatron_burst.mcore.log_probs.head import defer_logits

    begin(Case())
    batch = batch_of(Case())
    inputs = batch["tokens"], batch["position_ids"], None
    model = deferring(Case())
    found = {"no framework": model(*inputs)}
    with taken():
        found["labels"] = model(*inputs, labels=batch["labels"])
        found["gathered"] = model(*inputs, runtime_gather_output=True)
        fused = fuse_loss(model)
        found["fused loss"] = fused(*inputs, labels=batch["labels"])
        deferred = fused(*inputs)
        adapted = model_of(Case())
        adapted.output_layer.register_parameter("bias", torch.nn.Parameter(torch.zeros(VOCAB)))
        found["a bias"] = defer_logits(adapted)(*inputs)
    same = float((found["labels"] - found["fused loss"]).abs().max())
    return [type(x).__name__ for x in found.values()], type(deferred).__name__, same


def test_logits_are_deferred_only_where_log_probabilities_are_taken():
    ((kinds, deferred, same),) = run_ranks(kept_as_they_are, 1)
    assert kinds == ["Tensor"] * 5 and deferred == "DeferredLogits" and same < 1e-5


def hooked(rank):
    """Errors of losses and log-probabilities with a hook that takes the layer's output apart."""
    from megatron_burst import fuse_loss
    from megatron_burst.mcore.fused_loss import log_probs_and_entropy

    def hook(module, given, output):  # ROLL's mcore_adapter registers one on every output layer
        logits, bias = output
        return logits * 1.0, bias

    begin(Case())
    batch, found = batch_of(Case()), []
    inputs = batch["tokens"], batch["position_ids"], None
    for register in (False, True):
        model = fuse_loss(model_of(Case()))
        if register:
            model.output_layer.register_forward_hook(hook)
        found.append(list(model(*inputs, labels=batch["labels"])))
        if not why_not("output_processor"):
            values = model(*inputs, labels=batch["labels"], output_processor=log_probs_and_entropy)
            found[-1] += [values.log_probs, values.entropy]
    return [float((a - b).abs().max()) for a, b in zip(*found, strict=True)]


def test_hooks_on_the_output_layer_get_a_tensor_and_no_bias():
    ((errors),) = run_ranks(hooked, 1)
    assert max(errors) == 0, errors


FILES = {
    "slime/utils/ppo_utils.py": "def calculate_log_probs_and_entropy(logits, tokens, tp_group, "
    "with_entropy=False, chunk_size=-1, log_prob_keep_mask=None, with_entropy_grad=True): ...",
    "slime/backends/megatron_utils/loss.py": "from slime.utils.ppo_utils import "
    "calculate_log_probs_and_entropy as by_name\ndef _build_shifted_tokens(tokens): ...",
}


def imported(rank, folder):
    """What a framework's module calls that imported a function by name; whether deferred logits are
    taken before and after; and the patches that are live."""
    from megatron_burst.mcore.launch import switch_on_automatically
    from megatron_burst.mcore.log_probs import frameworks

    switch_on_automatically()
    before = frameworks.takes_deferred()
    sys.path.insert(0, folder)
    from slime.backends.megatron_utils import loss

    live = [patch.target for patch in frameworks.TABLE
            if patch.module in sys.modules and patch.live]  # fmt: skip
    return before, frameworks.takes_deferred(), hasattr(loss.by_name, "__wrapped__"), live


def test_one_import_replaces_functions_also_under_other_names(tmp_path):
    """One with other parameters than the table's is left alone."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    option = {"MEGATRON_BURST": "log_probs=1"}
    (found,) = run_ranks(imported, 1, str(tmp_path), environment=option)
    live = ["slime.utils.ppo_utils.calculate_log_probs_and_entropy"]
    assert found == (False, True, True, live)


def scheduled(rank):
    """Errors of gradients of two micro-batches in Megatron's schedule, which passes logits from the
    step to the loss; and the dtype that its wrapper of 16-bit models makes of deferred logits."""
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
    from megatron.core.transformer.module import float16_to_fp32

    from megatron_burst.mcore.log_probs.replacements import log_probs_of

    def step(data, model):
        batch = next(data)

        def loss_of(logits):
            assert (build is model_of) == (type(logits) is torch.Tensor)
            values = log_probs_of(logits, batch["labels"]) or of_logits(logits, batch["labels"])
            return -values[0].mean() + 0.1 * values[1].mean(), {}

        return model(batch["tokens"], batch["position_ids"], None), loss_of

    begin(SHARDED)
    grads = []
    for build in (model_of, deferring):
        model, batch = build(SHARDED), batch_of(SHARDED)
        with taken(), mock.patch.object(torch.cuda, "synchronize"):
            forward_backward_no_pipelining(
                forward_step_func=step, data_iterator=iter([batch, batch]), model=[model],
                num_microbatches=2, seq_length=SEQ, micro_batch_size=2, forward_only=False,
            )  # fmt: skip
        grads.append([p.grad for p in model.parameters()])
    with taken():
        half = deferring(SHARDED).bfloat16()(batch["tokens"], batch["position_ids"], None)
        wide = float16_to_fp32(half)
        assert half.dtype == torch.bfloat16 and type(wide) is type(half)
        assert log_probs_of(wide, batch["labels"]) is not None
    return max(float((a - b).abs().max()) for a, b in zip(*grads, strict=True)), str(wide.dtype)


def test_deferred_logits_pass_through_megatrons_schedule():
    for error, dtype in run_ranks(scheduled, 2):
        assert error < 1e-10 and dtype == "torch.float32"
