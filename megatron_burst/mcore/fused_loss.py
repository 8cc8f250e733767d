"""Attaches the fused LM head and loss to a Megatron model, which then never materializes logits.

With labels, the output layer returns `LazyLogits` instead of logits, and
`compute_language_model_loss` computes the loss from them, inside a call of the layer. Both are
replaced on the instance, so they serve the main head and those of multi-token prediction
(core/transformer/multi_token_prediction.py:760), in GPTModel and HybridModel. Without labels
nothing changes.
"""

import inspect
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch import Tensor

from megatron_burst.installed import minor, version_of
from megatron_burst.loss.linear import TokenLogProbs, linear_cross_entropy, token_log_probs
from megatron_burst.loss.next_tokens import next_tokens
from megatron_burst.loss.options import FusedLossConfig
from megatron_burst.loss.statistics import LossOptions
from megatron_burst.loss.supervised import Supervised, count_supervised, valid_tokens
from megatron_burst.loss.tensor_parallel import TensorParallel
from megatron_burst.mcore import packed
from megatron_burst.mcore.args import global_args, wants_fused_loss
from megatron_burst.mcore.checks import warn_if_counts_differ
from megatron_burst.mcore.options import burst_config_of
from megatron_burst.mcore.output_layer import ColumnParallelLinear as LazyLinear
from megatron_burst.mcore.output_layer import (
    LazyLogits,
    inside,
    no_logits,
    refuse_sharded,
    weights_of_heads,
)
from megatron_burst.mcore.refusals import LOSS_FLAG, names_burst, refuse

IGNORED = -100  # label of tokens that are left out
PLAIN = ColumnParallelLinear, LazyLinear  # heads that compute `hidden @ weight.T`


class FusedHead:
    """Attached to one GPTModel or HybridModel of a pipeline stage with an output layer."""

    def __init__(self, model, config: FusedLossConfig) -> None:
        check_model(model, config)
        self.model, self.config, self.model_config = model, config, model.config
        self.layer = model.output_layer
        self.tp = TensorParallel.of(self.layer.tp_group, self.layer.sequence_parallel)
        self.invariant = burst_config_of(model.config).invariant
        self.parameters = inspect.signature(model.forward).parameters
        self.loss_of = model.compute_language_model_loss
        self.end()

    def end(self, *_: Any) -> None:
        """After the model's forward, even if it failed."""
        self.active = False
        self.mask: Tensor | None = None
        self.supervised: Supervised = "all"
        self.main_labels: Tensor | None = None
        self.head_weights: Iterator[tuple[Tensor, Tensor]] = iter(())

    @property
    def pg_collection(self):
        """The model's, which Megatron-Bridge swaps for evaluation."""
        return self.model.pg_collection

    def begin(self, model, args, kwargs) -> None:
        """Before the model's forward: find out whether to compute a loss, and for which tokens."""
        options = dict(zip(self.parameters, args, strict=False)) | kwargs
        labels = options.get("labels")
        self.active = labels is not None and options.get("output_processor") is None
        if not self.active:
            return
        if options.get("runtime_gather_output"):
            got = "runtime_gather_output=True"
            raise no_logits("logits cannot be gathered, because there are none", got)
        if model.output_layer is not self.layer:  # an adapter around it, which would add to logits
            check_model(model, self.config)
        if model.share_embeddings_and_output_weights:
            refuse_sharded(model.shared_embedding_or_output_weight())
        mask, self.main_labels = options.get("loss_mask"), labels
        if mask is not None and mask.shape == labels.shape:
            self.mask = mask.t()
            self.supervised = count_supervised(
                labels.t(), self.mask, tp_group=self.tp.group,
                sequence_parallel=self.tp.sequence_parallel,
            )  # fmt: skip
        if self.model_config.mtp_num_layers and self.pg_collection.cp.size() > 1:
            mask = torch.ones_like(labels) if mask is None else mask
            self.head_weights = weights_of_heads(
                mask, self.model_config, self.pg_collection.cp, options.get("packed_seq_params")
            )

    def with_hooks(self, forward: Callable) -> Callable:
        """A model's forward that begins and ends itself where its caller does not."""

        @wraps(forward)
        def begun(*args: Any, **kwargs: Any) -> Any:
            if self.active:
                return forward(*args, **kwargs)
            self.begin(self.model, args, kwargs)
            try:
                return forward(*args, **kwargs)
            finally:
                self.end()

        return begun

    def loss(self, labels: Tensor, logits: Tensor | LazyLogits) -> Tensor:
        """Replaces `compute_language_model_loss`: [b, s] losses of [b, s] labels."""
        if not isinstance(logits, LazyLogits):
            return self.loss_of(labels, logits)
        options: dict[str, Any] = asdict(self.config)
        is_main = labels is self.main_labels
        if is_main:
            options |= {"loss_mask": self.mask, "supervised": self.supervised}
        else:  # a head of multi-token prediction: its mask comes after the loss
            # labels out of range are ignored: if they count, the main loss reports them
            vocab = self.layer.output_size_per_partition * self.tp.size
            is_class = (labels >= 0) & (labels < vocab)
            labels = torch.where(is_class, labels, IGNORED)
            # these heads' logits would all be in memory at the same time
            options |= {"grads": "recompute", "keep_logits": False}
        losses_of = partial(
            linear_cross_entropy, labels=labels.t(), reduction="none", invariant=self.invariant,
            tp_group=self.tp.group, sequence_parallel=self.tp.sequence_parallel,
            logit_scale=logits.scale, **options,
        )  # fmt: skip
        loss = logits.compute(losses_of)  # type: ignore[arg-type]  # a pair only with return_lse
        loss = loss.t().contiguous()
        factors = None if is_main else next(self.head_weights, None)
        if factors is None:
            return loss
        weights, log_factor = factors
        # no gradient passes through what Megatron does with the result, which may multiply it by 0;
        # Megatron's class for losses beside the main one gives it the scale of those
        return MTPLossAutoScaler.apply(loss.detach() * log_factor, weights * loss)


def fuse_loss(model: Any, config: FusedLossConfig | None = None) -> Any:
    """Make a model compute its losses with the fused LM head and loss. Idempotent.

    Args:
        model: Megatron's GPTModel or HybridModel, not yet wrapped (for example in DDP). It is
            modified and returned. A pipeline stage without an output layer is left unchanged.
        config: options; None: the defaults.

    Raises:
        BurstError: if the fused loss does not support the model's output layer.
    """
    if not model.post_process or isinstance(getattr(model, "fused_head", None), FusedHead):
        return model
    model.fused_head = head = FusedHead(model, config or FusedLossConfig())
    head.layer.__class__, head.layer.fused_head = LazyLinear, head
    model.compute_language_model_loss = head.loss
    model.register_forward_pre_hook(head.begin, with_kwargs=True)
    model.register_forward_hook(head.end, always_call=True)
    if minor(version_of("megatron-core")) < (0, 19):  # its Megatron-FSDP calls no hooks
        model.forward = head.with_hooks(model.forward)
    if model.share_embeddings_and_output_weights and model.config.pipeline_model_parallel_size == 1:
        model.shared_embedding_or_output_weight().zero_out_wgrad = True
    return model


def log_probs_and_entropy(
    *, hidden_states, output_layer, output_weight, labels=None, loss_mask=None, context=None,
    config, input_ids=None, packed_seq_params=None, compute_language_model_loss=None, **_,
) -> TokenLogProbs:  # fmt: skip
    """An `output_processor` for reinforcement learning: pass it to the model's forward.

    `model(..., output_processor=log_probs_and_entropy)`; the context, where given, is the
    temperature. Without `labels` they are the next token of each token's document, across the
    shards of context parallelism (`next_tokens`). Needs no flag.

    Returns:
        [b, s] log-probabilities of the labels, [b, s] entropies, and [b, s] which tokens count.
    """
    if labels is None and input_ids is None:
        must = "log-probabilities need labels or tokens, because these say of which tokens"
        raise no_logits(must, "labels=None and input_ids=None")
    if any(isinstance(inner, ColumnParallelLinear) for inner in output_layer.children()):
        must = "the output layer must have no adapter, because its weight alone is read"
        raise no_logits(must, type(output_layer).__name__)
    if labels is None:
        cp_group = _cp_group_of(compute_language_model_loss)
        targets = _next_tokens(input_ids, cp_group, config, packed_seq_params)
    else:
        targets = labels.t()
    scale = 1.0 / (1.0 if context is None else context)
    if config.use_mup:
        scale *= config.mup_output_mult
    mask = None if loss_mask is None else loss_mask.t()
    values = values_inside(output_layer, hidden_states, output_weight, targets, mask, scale)
    return TokenLogProbs._make(None if x is None else x.t() for x in values)


def values_inside(
    layer: ColumnParallelLinear, hidden: Tensor, weight: Tensor | None, labels: Tensor,
    loss_mask: Tensor | None, scale: float, entropy: bool = True,
) -> TokenLogProbs:  # fmt: skip
    """`token_log_probs` of [s, b] labels inside the call of an output layer. `weight`: as in a call
    of the layer; `scale`: factor of its logits."""
    tp = layer.tp_group

    def values_of(hidden: Tensor, weight: Tensor) -> Tensor:
        values = token_log_probs(
            hidden, weight, labels, tp_group=tp, loss_mask=loss_mask, entropy=entropy,
            sequence_parallel=layer.sequence_parallel and tp.size() > 1,
            options=LossOptions(logit_scale=scale), keep_logits=False,  # many wait for backward
            invariant=burst_config_of(layer.config).invariant,
        )  # fmt: skip
        return torch.stack([x for x in values[:2] if x is not None])

    values = inside(layer, values_of, hidden, weight)
    mask = valid_tokens(labels, loss_mask, IGNORED)
    return TokenLogProbs(values[0], values[1] if entropy else None, mask)


def _next_tokens(input_ids: Tensor, cp_group: dist.ProcessGroup, config: Any, packed_seq_params
                 ) -> Tensor:  # fmt: skip
    """The token after each one in its document, [s, b]."""
    group = packed.group_of(packed_seq_params, cp_group)
    if group.size() > 1 and getattr(config, "linear_cp_layout", "zigzag") != "zigzag":
        must = "log-probabilities need labels, because next tokens are looked up in zigzag rows"
        raise no_logits(must, f"linear_cp_layout={config.linear_cp_layout} without labels")
    sample = packed.sample_of(packed_seq_params, group.size())
    packed.forget_boundaries_of_shard(group)
    names = sample.keys() & {"layout", "cu_seqlens", "cu_seqlens_padded"}
    return next_tokens(input_ids.t(), group=group, **{name: sample[name] for name in names})


def _cp_group_of(loss: Any) -> dist.ProcessGroup:
    """The context-parallel group of the model whose loss this is, a method of the model or of its
    `FusedHead`; Megatron's global group if a framework has put a function there."""
    groups = getattr(getattr(loss, "__self__", None), "pg_collection", None)
    return parallel_state.get_context_parallel_group() if groups is None else groups.cp


def check_model(model: Any, config: FusedLossConfig) -> None:
    """Refuse a head that computes anything but `hidden @ weight.T`."""
    layer: Any = getattr(model, "output_layer", None)
    head = dict(
        output_layer=None if type(layer) in PLAIN else type(layer).__name__,
        bias=getattr(layer, "bias", None) is not None, burst_loss_grads=config.grads,
        gtp_remat_size=getattr(layer, "gtp_remat_size", None),
        disable_grad_reduce=getattr(layer, "disable_grad_reduce", None),
        parallel_output=not getattr(layer, "gather_output", False) or layer.tp_group.size() == 1,
        fp16_lm_cross_entropy=getattr(model, "fp16_lm_cross_entropy", False),
    )  # fmt: skip
    refuse("head", Namespace(**vars(model.config) | head), LOSS_FLAG)


# ---- what replaces functions of Megatron, called with the original: see patches.py -----------


def build_with_loss(build, fused: FusedLossConfig, only_burst: bool, /, self, *args, **options):
    """A model's constructor; `only_burst`: skip models that do not ask for burst.

    A command line wins over what megatron_burst.auto asked for.
    """
    build(self, *args, **options)
    command_line = global_args() or Namespace()
    if wants_fused_loss(command_line):
        warn_if_counts_differ(command_line)
        fused, only_burst = FusedLossConfig.from_args(command_line), False
    if not only_burst or names_burst(self.config.cp_comm_type):
        fuse_loss(self, fused)
