"""The fused loss in real Megatron-Core models on CPU processes: uses other than a training step.

Guards against logits other than the model's, options and log-probabilities that differ from torch's
on these logits, and heads for which the loss would be wrong.
"""

import re

import pytest
import torch
import torch.distributed as dist

from megatron_burst.errors import BurstError
from megatron_burst.loss.options import FusedLossConfig
from tests.mcore.gpt import SEQ, VOCAB
from tests.mcore.lacking import why_not
from tests.mcore.loss_model import FORWARD, Case, batch_of, begin, model_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.numeric


def other_uses(rank):
    """Errors by name for what is neither a grid case nor a refusal."""
    import torch.nn.functional as F
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from megatron_burst import fuse_loss

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
    if not why_not("output_processor"):
        found |= log_probs_of(model, inputs, batch["labels"], logits)
    begin(Case())
    model, batch = model_of(Case()), batch_of(Case())
    inputs = batch["tokens"], batch["position_ids"], None
    logits = model(*inputs).detach().transpose(0, 1).contiguous()
    truth = vocab_parallel_cross_entropy(logits, batch["labels"].t().contiguous(), 0.1).t()
    losses = fuse_loss(model, FusedLossConfig(label_smoothing=0.1))(*inputs, labels=batch["labels"])
    found["smoothing as Megatron's"] = float((losses - truth).abs().max())
    return found


def log_probs_of(model, inputs, labels, logits) -> dict[str, float]:
    """Errors against torch's on these logits."""
    from megatron_burst.mcore.fused_loss import log_probs_and_entropy

    rl = model(*inputs, labels=labels, output_processor=log_probs_and_entropy,
               output_processor_context=0.5)  # fmt: skip
    assert {*kept_by(rl.log_probs)} == {None}  # many micro-batches may wait for backward
    truth = torch.distributions.Categorical(logits=logits / 0.5)
    return {
        "log-probabilities": float((rl.log_probs - truth.log_prob(labels)).abs().max()),
        "entropy": float((rl.entropy - truth.entropy()).abs().max()),
    }


def kept_by(x) -> list:
    """Logits kept for backward by the losses behind a tensor."""
    nodes, kept = [x.grad_fn], []
    while nodes:
        node = nodes.pop()
        if type(node).__name__ == "RecomputedBackward":
            kept.append(node.tile)
        elif node is not None:
            nodes.extend(before for before, _ in node.next_functions)
    return kept


def gathered(x, group):
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group)
    return parts


def test_logits_options_log_probabilities_and_smoothing():
    for found in run_ranks(other_uses, 4):
        assert (
            len(found) == (3 if why_not("output_processor") else 5) and max(found.values()) < 1e-5
        ), found


def refused(rank):
    """Messages about heads for which the loss would be wrong; the rest still works."""
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
    ask(lambda m: setattr(m.config, "cuda_graph_impl", "full_iteration"))
    ask(lambda m: setattr(m.config, "fp16", True), FORWARD)
    model, batch = fuse_loss(model_of(Case(tp=2))), batch_of(Case(tp=2))
    inputs = batch["tokens"], batch["position_ids"], None
    with pytest.raises(BurstError, match="logits cannot be gathered.*; leave that out, or --"):
        model(*inputs, labels=batch["labels"], runtime_gather_output=True)
    assert model(*inputs).shape == (2, SEQ, VOCAB // 2)  # no longer active
    return said


def test_refuses_heads_that_it_would_be_wrong_for():
    expected = (
        "ColumnParallelLinear.*got Own", "got bias=True", "got parallel_output=False",
        "got gtp_remat_size=2", "got defer_embedding_wgrad_compute=True",
        "got disable_grad_reduce=True", "got fp16_lm_cross_entropy=True",
        "got cuda_graph_impl=full_iteration", "got grads=forward with --fp16",
    )  # fmt: skip
    for said in run_ranks(refused, 2):
        for message, pattern in zip(said, expected, strict=True):
            assert re.match(f"^--burst-fused-loss: .*{pattern}", message), message
