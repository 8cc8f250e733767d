"""LM heads that `benchmarks.loss` measures: tensors, true gradients, and ways to compute them."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.impls import pick
from megatron_burst.errors import require
from megatron_burst.loss.linear import linear_cross_entropy, token_log_probs
from megatron_burst.tools.units import in_units, whole_numbers
from megatron_burst.tools.world import World

_WHO = "benchmarks.loss"


@dataclass(frozen=True, slots=True)
class LossCase:
    """One head and batch."""

    tokens: int  # of all tensor-parallel ranks together; each has all of them
    hidden: int  # width of the hidden states
    vocab: int  # classes of all ranks
    dtype: str  # torch's name
    counted: str = "all"  # which tokens have a label, by `COUNTED`

    def __str__(self) -> str:
        return (
            f"{in_units(self.tokens)} tokens, {self.hidden} x {in_units(self.vocab)} classes, "
            f"{self.dtype}, {self.counted} counted"
        )

    def flops(self, ranks: int) -> float:
        """Operations of a rank: three GEMMs of [tokens that count, hidden, classes]."""
        tokens = self.tokens if self.counted == "all" else self.tokens // 10
        return 3 * 2.0 * tokens * self.hidden * self.vocab / ranks


COUNTED = {  # positions between 0 and 1, and random numbers, of the tokens that have a label
    "all": lambda places, numbers: places >= 0,
    "10 % at random": lambda places, numbers: numbers < 0.1,
    "10 % in one block": lambda places, numbers: places < 0.1,
}


_K = 1024
LOSS_PRESETS = {  # widths, vocabularies, tokens: what a run that is cut short should have first
    "quick": ((4096,), (128 * _K,), (32 * _K, 8 * _K, 128 * _K)),
    "full": (
        (4096, 8192), (128 * _K, 32 * _K, 256 * _K), (32 * _K, 8 * _K, 128 * _K, 256 * _K),
    ),
}  # fmt: skip


def cases_of(preset: str, tokens: str, hidden: str, vocab: str, dtype: str) -> list[LossCase]:
    """Every combination of the lists, and of the preset's where one is empty."""
    options = ((hidden, "--hidden"), (vocab, "--vocab"), (tokens, "--tokens"))
    widths, vocabularies, lengths = (
        whole_numbers(text, option, _WHO) if text else default
        for (text, option), default in zip(options, LOSS_PRESETS[preset], strict=True)
    )
    return [LossCase(n, h, v, dtype) for n in lengths for h in widths for v in vocabularies]


def with_counts(cases: Sequence[LossCase], counted: Sequence[str]) -> list[LossCase]:
    """Each case with each of these choices of tokens; none named means all."""
    why = "--counted must say which tokens have a label, because others are not computed"
    choices = (
        pick(counted, {name: name for name in COUNTED}, f"{_WHO}: {why}") if counted else ["all"]
    )
    return [replace(case, counted=choice) for case in cases for choice in choices]


def listed_cases(texts: Sequence[str], dtype: str) -> list[LossCase]:
    """Heads such as "32K,4096,128K": tokens, width, classes; BurstError if one has other sizes."""
    sizes_by_text = {text: whole_numbers(text, "--case", _WHO) for text in texts}
    require(_WHO, [(
        len(sizes) == 3, "--case must name tokens, width and classes, because these make a problem",
        repr(text), "write for example 32K,4096,128K",
    ) for text, sizes in sizes_by_text.items()])  # fmt: skip
    return [LossCase(*sizes, dtype) for sizes in sizes_by_text.values()]


@dataclass(slots=True)
class HeadTensors:
    """A rank's tensors."""

    hidden: Tensor  # [tokens, h], the same on all ranks; takes a gradient
    weight: Tensor  # [vocab / ranks, h]; takes a gradient
    labels: Tensor  # [tokens] int64
    group: dist.ProcessGroup  # of the ranks that share the vocabulary

    def first(self, tokens: int) -> "HeadTensors":
        """The same head with the first tokens only; shares no gradient."""
        hidden, weight = (x.detach().clone() for x in (self.hidden[:tokens], self.weight))
        leaves = (x.requires_grad_() for x in (hidden, weight))
        return HeadTensors(*leaves, self.labels[:tokens], self.group)


def draw(case: LossCase, rank: int, device: torch.device, group) -> HeadTensors:
    """Random tensors of a rank; logits have a deviation of about 1."""
    options = {"device": device, "dtype": getattr(torch, case.dtype)}
    shared = torch.Generator(device).manual_seed(3)
    hidden = torch.randn(case.tokens, case.hidden, generator=shared, **options)
    labels = torch.randint(0, case.vocab, (case.tokens,), generator=shared, device=device)
    numbers = torch.rand(case.tokens, generator=shared, device=device)
    places = torch.arange(case.tokens, device=device) / case.tokens
    labels[~COUNTED[case.counted](places, numbers)] = -100
    own = torch.Generator(device).manual_seed(100 + rank)
    shape = case.vocab // group.size(), case.hidden
    weight = torch.randn(*shape, generator=own, **options) * case.hidden**-0.5
    return HeadTensors(hidden.requires_grad_(), weight.requires_grad_(), labels, group)


@torch.no_grad()
def truth_of(x: HeadTensors) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, dX, dW) by definition, in float64."""
    hidden, weight = x.hidden.double(), x.weight.double()
    logits, first = hidden @ weight.t(), x.group.rank() * weight.shape[0]
    parts = [torch.empty_like(lse) for lse in [logits.logsumexp(1)] * x.group.size()]
    dist.all_gather(parts, logits.logsumexp(1), x.group)
    lse = torch.stack(parts).logsumexp(0)
    places = x.labels - first
    here = (places >= 0) & (places < weight.shape[0])
    rows = here.nonzero().flatten()
    picked = torch.zeros_like(lse)
    picked[rows] = logits[rows, places[rows]]
    dist.all_reduce(picked, group=x.group)
    dlogits = (logits - lse[:, None]).exp()
    dlogits[rows, places[rows]] -= 1
    counts = x.labels >= 0
    dlogits *= counts[:, None] / counts.sum()
    dhidden = dlogits @ weight
    dist.all_reduce(dhidden, group=x.group)
    return _mean(lse - picked, x), dhidden, dlogits.t() @ hidden


Mean = Callable[[HeadTensors], Tensor]  # the mean loss, differentiable


def _mean(losses: Tensor, x: HeadTensors) -> Tensor:
    """Of the tokens that count."""
    counts = x.labels >= 0
    return torch.where(counts, losses, 0).sum() / counts.sum()


def burst(grads: str, x: HeadTensors) -> Tensor:
    """Ours; "auto" is what it does for a mean, and without main_grad it returns dW as others do."""
    return linear_cross_entropy(x.hidden, x.weight, x.labels, tp_group=x.group, grads=grads)


def megatron(fused: bool, x: HeadTensors) -> Tensor:
    """Megatron's own head and loss with all logits in memory, combined as in GPTModel; fused: with
    --cross-entropy-loss-fusion, whose steps torch compiles."""
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

    from megatron_burst.tools import cpu_mode

    if not x.hidden.is_cuda:
        cpu_mode.install(training=False)
    hidden, labels = copy_to_tensor_model_parallel_region(x.hidden, x.group), x.labels.clamp(0)
    logits, labels = F.linear(hidden, x.weight).unsqueeze(1), labels.unsqueeze(1)
    if fused:
        losses = fused_vocab_parallel_cross_entropy(logits, labels, x.group)
    else:
        losses = vocab_parallel_cross_entropy(logits, labels, 0.0, x.group)
    return _mean(losses.squeeze(1), x)


def burst_log_probs(entropy: bool, x: HeadTensors) -> Tensor:
    """Log-probabilities of the tokens that count; several ranks hold parts of the sequence."""
    size, rank = x.group.size(), x.group.rank()
    hidden = x.hidden.chunk(size)[rank] if size > 1 else x.hidden
    values = token_log_probs(
        hidden, x.weight, x.labels, tp_group=x.group, sequence_parallel=size > 1, entropy=entropy
    )
    return _mean(-values.log_probs, x)


def of_logits(framework: str, x: HeadTensors) -> Tensor:
    """What a framework computes of Megatron's logits in float32; entropies too, except NeMo-RL."""
    labels, ranks, rank = x.labels.clamp(0), x.group.size(), x.group.rank()
    if framework == "verl":  # with use_fused_kernels: no logits
        kernel = import_quietly("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
        group = x.group if ranks > 1 else None
        return _mean(-kernel(x.hidden, x.weight, labels, 1.0, "none", group)[0], x)
    logits = F.linear(x.hidden, x.weight).float()
    if framework == "slime":
        function = import_quietly("slime.utils.ppo_utils").calculate_log_probs_and_entropy
        values = function(logits, labels, x.group, True, -1, None, False)[0].squeeze(1)
    elif framework == "ms-swift":
        from megatron.core import parallel_state

        if not parallel_state.is_initialized():
            parallel_state.initialize_model_parallel(ranks)
        module = import_quietly("swift.megatron.trainers.vocab_parallel_utils")
        options = {"compute_entropy": True}
        values = module.compute_logps_and_entropy_from_logits(logits[None], labels[None], **options)
        values = values[0][0]
    else:
        module, first = import_quietly("nemo_rl.distributed.model_utils"), rank * len(x.weight)
        values = module.DistributedLogprob.apply(
            logits[None], labels[None], first, first + len(x.weight), x.group, False
        )[0]
    return _mean(-values, x)


def import_quietly(name: str) -> ModuleType:
    """A module whose parents' own code is left out, because that imports inference engines."""
    parents = [name[:i] for i, letter in enumerate(name) if letter == "."]
    for parent in parents:
        if parent not in sys.modules:
            spec = find_spec(parent)
            assert spec is not None
            sys.modules[parent] = module_from_spec(spec)  # which is not executed
    return import_module(name)


def grpo(implementation: str, x: HeadTensors) -> Tensor:
    """GRPO with advantages of 1 and policies that are still equal, whose gradient is that of the
    mean of log-probabilities; sequences of 4K tokens."""
    if implementation == "burst":
        values = token_log_probs(x.hidden, x.weight, x.labels, entropy=False).log_probs
        ratio = (values - values.detach()).exp()
        return _mean(-torch.minimum(ratio, ratio.clamp(0.8, 1.2)), x)
    module, rows = import_module("liger_kernel.chunked_loss"), min(4096, len(x.labels))
    labels, counts = (y.view(-1, rows) for y in (x.labels.clamp(0), (x.labels >= 0).int()))
    loss = module.LigerFusedLinearGRPOLoss(beta=0.0, loss_type="bnpo", use_ref_model=False)
    hidden = x.hidden.view(*labels.shape, -1)
    advantages = torch.ones(len(labels), device=labels.device)
    return loss(hidden, x.weight, labels, counts, advantages)[0]


def liger(x: HeadTensors) -> Tensor:
    """Liger-Kernel's, chunk by chunk; gradients along with the loss."""
    module = import_module("liger_kernel.transformers.fused_linear_cross_entropy")
    return module.LigerFusedLinearCrossEntropyLoss()(x.weight, x.hidden, x.labels)


def cut(x: HeadTensors) -> Tensor:
    """Apple's Cut Cross-Entropy: no logits in memory."""
    return import_module("cut_cross_entropy").linear_cross_entropy(x.hidden, x.weight, x.labels)


def quack(x: HeadTensors) -> Tensor:
    """QuACK's, a chunk of rows at a time."""
    rows = 3072 if x.hidden.shape[-1] == 4096 else 4096  # its own 4096; square products fail in it
    loss = import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return loss(x.hidden, x.weight, x.labels, chunk_size=rows, reduction="mean")


@dataclass(frozen=True, slots=True)
class LossPeer:
    """One implementation."""

    name: str  # what the user calls it
    mean: Mean  # computes the mean loss
    package: str | None = None  # that must be installed; None: nothing more
    shards: bool = False  # whether it knows of a vocabulary that is sharded
    # whether it adds to Megatron's float32 buffer of the weight's gradient
    into_main_grad: bool = False
    gives_parts: bool = False  # whether each rank has the hidden states' gradient of its rows only
    is_policy: bool = False  # whether its loss is not the mean of losses, but has its gradient

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
        # all logits, then torch's loss in fp32; torch's own in one, of its newer versions
        LossPeer(
            "torch", lambda x: F.cross_entropy(F.linear(x.hidden, x.weight).float(), x.labels)
        ),
        LossPeer("torch:linear", lambda x: F.linear_cross_entropy(x.hidden, x.weight, x.labels)),
        LossPeer("liger", liger, "liger_kernel"),
        LossPeer("burst:log-probs", partial(burst_log_probs, True), None, True, True, True),
        LossPeer("burst:grpo", partial(grpo, "burst"), into_main_grad=True, is_policy=True),
        LossPeer("liger:grpo", partial(grpo, "liger"), "liger_kernel", is_policy=True),
        LossPeer("verl", partial(of_logits, "verl"), "verl"),
        LossPeer("slime", partial(of_logits, "slime"), "slime"),
        LossPeer("ms-swift", partial(of_logits, "ms-swift"), "swift"),
        LossPeer("nemo-rl", partial(of_logits, "nemo-rl"), "nemo_rl"),
        LossPeer("cce", cut, "cut_cross_entropy"),
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
    """The implementations of a list of names; none named means all."""
    return pick(
        names, PEERS, f"{_WHO}: --impl must name an implementation that there is, because each "
        "is called in its own way",
    )  # fmt: skip
