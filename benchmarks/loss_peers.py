"""Ways to compute an LM head's loss and gradients, for `benchmarks.loss`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.impls import pick
from benchmarks.loss_heads import HeadTensors
from megatron_burst.loss.linear import linear_cross_entropy
from megatron_burst.tools.world import World

_WHO = "benchmarks.loss"


Mean = Callable[[HeadTensors], Tensor]  # the mean loss, differentiable


def burst(grads: str, x: HeadTensors) -> Tensor:
    """Ours; "auto" is what it does for a mean, and without main_grad it returns dW as others do."""
    return linear_cross_entropy(x.hidden, x.weight, x.labels, tp_group=x.group, grads=grads)


def megatron(fused: bool, x: HeadTensors) -> Tensor:
    """Megatron's own head and loss with all logits in memory, combined as in GPTModel.

    Args:
        fused: with --cross-entropy-loss-fusion, whose steps torch compiles.
        x: the head.
    """
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

    from megatron_burst.tools import cpu_mode

    if not x.hidden.is_cuda:
        cpu_mode.install(training=False)
    hidden, labels = copy_to_tensor_model_parallel_region(x.hidden, x.group), x.labels.unsqueeze(1)
    logits = F.linear(hidden, x.weight).unsqueeze(1)
    if fused:
        return fused_vocab_parallel_cross_entropy(logits, labels, x.group).mean()
    return vocab_parallel_cross_entropy(logits, labels, 0.0, x.group).mean()


def torchs(x: HeadTensors) -> Tensor:
    """All logits, then torch's loss in fp32."""
    return F.cross_entropy(F.linear(x.hidden, x.weight).float(), x.labels)


def torchs_linear(x: HeadTensors) -> Tensor:
    """Torch's own head and loss in one, of its newer versions."""
    return F.linear_cross_entropy(x.hidden, x.weight, x.labels)


def liger(x: HeadTensors) -> Tensor:
    """Liger-Kernel's, chunk by chunk; gradients along with the loss."""
    module = import_module("liger_kernel.transformers.fused_linear_cross_entropy")
    return module.LigerFusedLinearCrossEntropyLoss()(x.weight, x.hidden, x.labels)


def cce(x: HeadTensors) -> Tensor:
    """Apple's Cut Cross-Entropy: no logits in memory."""
    return import_module("cut_cross_entropy").linear_cross_entropy(x.hidden, x.weight, x.labels)


def quack(x: HeadTensors) -> Tensor:
    """QuACK's, a chunk of rows at a time."""
    rows = 3072 if x.hidden.shape[-1] == 4096 else 4096  # its own 4096; square products fail in it
    module = import_module("quack.linear_cross_entropy")
    return module.chunked_linear_cross_entropy(
        x.hidden, x.weight, x.labels, chunk_size=rows, reduction="mean"
    )


@dataclass(frozen=True, slots=True)
class LossPeer:
    """One implementation.

    Attributes:
        name: what the user calls it.
        mean: computes the mean loss.
        package: that must be installed; None: nothing more.
        shards: whether it knows of a vocabulary that is sharded.
        into_main_grad: whether it adds to Megatron's float32 buffer of the weight's gradient.
    """

    name: str
    mean: Mean
    package: str | None = None
    shards: bool = False
    into_main_grad: bool = False

    def refusal(self, ranks: int) -> str | None:
        """Why it cannot run, or None."""
        if self.package and find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if self.name == "torch:linear" and not hasattr(F, "linear_cross_entropy"):
            return f"torch {torch.__version__} has no linear_cross_entropy"
        if ranks > 1 and not self.shards:
            return f"it wants the whole vocabulary on one rank; got {ranks} ranks"
        return None

    def prepare(self, x: HeadTensors) -> None:
        """Make the buffer that gradients are added to, where it has one."""
        if self.into_main_grad and x.weight.dtype != torch.float64:
            x.weight.main_grad = torch.zeros_like(x.weight, dtype=torch.float32)
            x.weight.grad_added_to_main_grad = False

    def run(self, x: HeadTensors) -> tuple[Tensor, Tensor, Tensor]:
        """(loss, dX, dW) of a forward and a backward pass; main_grad has what it had besides."""
        x.hidden.grad = x.weight.grad = None
        main_grad = getattr(x.weight, "main_grad", None)
        loss = self.mean(x)
        loss.backward()
        dhidden, x.hidden.grad = x.hidden.grad, None
        dweight, x.weight.grad = x.weight.grad, None
        return loss.detach(), dhidden, dweight if main_grad is None else main_grad


PEERS = {
    peer.name: peer
    for peer in (
        LossPeer("burst:recompute", partial(burst, "recompute"), None, True, True),
        LossPeer("burst:forward", partial(burst, "forward"), None, True, True),
        LossPeer("burst:plain", partial(burst, "auto"), None, True),
        LossPeer("megatron:fused", partial(megatron, True), "megatron", True),
        LossPeer("megatron:unfused", partial(megatron, False), "megatron", True),
        LossPeer("torch", torchs),
        LossPeer("torch:linear", torchs_linear),
        LossPeer("liger", liger, "liger_kernel"),
        LossPeer("cce", cce, "cut_cross_entropy"),
        LossPeer("quack", quack, "quack"),
    )
}


def usual_peers(world: World) -> tuple[LossPeer, ...]:
    """All implementations that can run; says which others there are, and why they cannot."""
    refused = {name: peer.refusal(world.size) for name, peer in PEERS.items()}
    reasons = [f"{name} ({reason})" for name, reason in refused.items() if reason]
    if reasons:
        world.progress.say(f"left out: {'; '.join(reasons)}")
    return tuple(peer for name, peer in PEERS.items() if not refused[name])


def peers_of(names) -> tuple[LossPeer, ...]:
    """The implementations of a list of names; none named means all.

    Raises:
        BurstError: if there is no such implementation.
    """
    return pick(
        names, PEERS, f"{_WHO}: --impl must name an implementation that there is, because each "
        "is called in its own way",
    )  # fmt: skip
