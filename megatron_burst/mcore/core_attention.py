"""Burst attention under Megatron-Core's core_attention contract."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
from megatron.core.transformer.cuda_graphs import is_graph_capturing
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_burst.arguments import window_of
from megatron_burst.attention import burst_attention
from megatron_burst.call import attention_shape, spec_of
from megatron_burst.comm.announce import reporting_errors
from megatron_burst.comm.communicator import communicator_of
from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from megatron_burst.masks.slice_checks import sees_later
from megatron_burst.mcore import checks, packed
from megatron_burst.mcore.checks import WHO, check_layer
from megatron_burst.mcore.keep.recompute import keeping_nothing, resolved
from megatron_burst.mcore.options import burst_config_of
from megatron_burst.mcore.patches import apply, switch_on_keep
from megatron_burst.mcore.refusals import refuse
from megatron_burst.mcore.sinks import mark_sharded, sinks_of
from megatron_burst.mcore.sliced import check_placed
from megatron_burst.recompute.keeping import running
from megatron_burst.recompute.later_plan import recomputed_share
from megatron_burst.resolve import resolve
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.spec import Kernel
from megatron_burst.schedule.topology import Topology
from megatron_burst.transforms import is_captured, uncompiled

CAUSAL = {  # supported masks; in packed samples padding is at the documents' ends
    AttnMaskType.causal: True,
    AttnMaskType.no_mask: False,
    AttnMaskType.padding_causal: True,
    AttnMaskType.padding: False,
}


class _RaisesMaxLogits:
    """What `clip_qk` reads of a core attention (core/optimizer/qk_clip.py), and sets to None."""

    current_max_attn_logits: Tensor | None = None

    def _results(self, out: Tensor, *max_logits: Tensor) -> Tensor:
        """`out`, once the largest scores of a call [h] are among those of the step."""
        for scores in max_logits:
            before = self.current_max_attn_logits
            scores = scores if before is None else torch.maximum(before, scores)
            self.current_max_attn_logits = scores
        return out


class BurstCoreAttention(_RaisesMaxLogits, MegatronModule):
    """Core attention of specs without TransformerEngine.

    Args: those of Megatron's `CoreAttentionBuilder`, and `k_channels`, `v_channels` of its MLA.

    Raises:
        BurstError: if the configuration asks for something that burst does not do.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, attn_mask_type: AttnMaskType,
                 attention_type: str, attention_dropout: float | None = None,
                 softmax_scale: float | None = None, k_channels: int | None = None,
                 v_channels: int | None = None, cp_comm_type: str | None = None,
                 pg_collection=None) -> None:  # fmt: skip
        super().__init__(config=config)
        if config.context_parallel_size > 1 and cp_comm_type not in (None, "burst"):
            raise BurstError(f"{WHO}: without TransformerEngine every layer must run burst, "
                             "because Megatron's own context parallelism needs it; got "
                             f"cp_comm_type={cp_comm_type!r} in layer {layer_number}; install "
                             "transformer-engine or pass --cp-comm-type burst")  # fmt: skip
        check_layer(config, layer_number, attn_mask_type, attention_type, attention_dropout)
        self.burst = BurstForward.of(config, layer_number, softmax_scale, pg_collection)
        tp_group = getattr(pg_collection, "tp", None)
        self.tp_group = tp_group or parallel_state.get_tensor_model_parallel_group()
        self.softmax_offset = sinks_of(config, self.tp_group)

    # the checkpoint of the sinks is that of Megatron's own class
    sharded_state_dict = DotProductAttention.sharded_state_dict

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                attn_mask_type: AttnMaskType | None = None, attention_bias: Tensor | None = None,
                packed_seq_params=None) -> Tensor:  # fmt: skip
        """Attention of [s_local, b, h, d] tensors, or [t_local, h, d] of packed samples; returns
        [s_local, b, h * d_v] or [t_local, h * d_v]."""
        return self._results(*self.burst(
            query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params,
            self.softmax_offset))  # fmt: skip

    @property
    def cp_group(self) -> dist.ProcessGroup:
        """The layer's group; Megatron-Bridge sets another one for evaluation."""
        return self.burst.cp_group

    @cp_group.setter
    def cp_group(self, group: dist.ProcessGroup | None) -> None:
        self.burst = self.burst.over(group)


if HAVE_TE:

    class BurstTECoreAttention(_RaisesMaxLogits, TEDotProductAttention):
        """Core attention of TransformerEngine specs: burst in layers whose cp_comm_type says so.

        Other layers run TransformerEngine's own. Its checkpoint format is TransformerEngine's.

        Args: those of `TEDotProductAttention`.

        Raises:
            BurstError: if the configuration asks for something that burst does not do.
        """

        def __init__(self, config: TransformerConfig, layer_number: int,
                     attn_mask_type: AttnMaskType, attention_type: str,
                     attention_dropout: float | None = None, softmax_scale: float | None = None,
                     cp_comm_type: str | None = None, pg_collection=None,
                     **options) -> None:  # fmt: skip
            refuse("model", config, WHO)
            runs_burst = asks_for_burst(config, layer_number, cp_comm_type, pg_collection)
            super().__init__(config, layer_number, attn_mask_type, attention_type,
                             attention_dropout=attention_dropout, softmax_scale=softmax_scale,
                             cp_comm_type="p2p" if runs_burst else cp_comm_type,
                             pg_collection=pg_collection, **options)  # fmt: skip
            self.burst = None
            if not hasattr(self, "softmax_offset"):  # before TransformerEngine 2.8
                self.softmax_offset = None
            if runs_burst:
                check_layer(config, layer_number, attn_mask_type, attention_type, attention_dropout)
                self.burst = BurstForward.of(config, layer_number, softmax_scale, pg_collection)
                mark_sharded(self.softmax_offset)

        def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                    attn_mask_type: AttnMaskType, attention_bias: Tensor | None = None,
                    packed_seq_params=None, num_splits: int | None = None) -> Tensor:  # fmt: skip
            """As of `BurstCoreAttention`."""
            extras = attention_mask, attn_mask_type, attention_bias, packed_seq_params
            if self.burst is None:
                checks.check_slices(packed_seq_params)
                return super().forward(query, key, value, *extras, num_splits)
            return self._results(*self.burst(query, key, value, *extras, self.softmax_offset))

        def set_context_parallel_group(
            self, cp_group, cp_global_ranks, cp_stream, cp_comm_type: str = "p2p"
        ) -> None:
            """Run over another group from now on (None: this rank alone), as Megatron-Bridge does
            for evaluation (training/eval_context_parallel_rebinding.py); collective over that
            group, which must not be a list of groups."""
            super().set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
            if self.burst is not None:
                self.burst = self.burst.over(cp_group)


def asks_for_burst(
    config: TransformerConfig, layer_number: int, cp_comm_type: str | None, pg_collection
) -> bool:
    """Whether a layer's `cp_comm_type` is burst.

    Megatron passes it on only with context parallelism (core/transformer/transformer_layer.py:361).
    Without, the configuration decides, except in a layer that holds whole sequences within a
    context-parallel model.
    """
    if config.context_parallel_size > 1:
        return cp_comm_type == "burst"
    kind = comm_type_of_layer(config.cp_comm_type, layer_number)
    return kind == "burst" and cp_group_of(pg_collection).size() == 1


def comm_type_of_layer(kinds: str | list[str] | None, layer_number: int) -> str | None:
    """A layer's own of a configuration's `cp_comm_type`."""
    return kinds[layer_number - 1] if isinstance(kinds, list) else kinds


@dataclass(frozen=True)
class BurstForward:
    """What a layer's core attention needs to call `burst_attention`."""

    cp_group: dist.ProcessGroup
    softmax_scale: float | None
    config: BurstConfig
    layer_config: TransformerConfig
    layer_number: int
    topology: Topology
    follows_groups: bool = False  # whether RoPE uses a micro-batch's own group

    @classmethod
    def of(
        cls, config: TransformerConfig, layer_number: int, softmax_scale, pg_collection
    ) -> "BurstForward":
        """Also makes the group's communicators, since all its ranks build their layers together."""
        checks.check_run()
        apply("hook points")
        burst_config, cp_group = burst_config_of(config), cp_group_of(pg_collection)
        if config.deterministic_mode:
            burst_config = replace(burst_config, deterministic=True)
        if config.context_parallel_size != cp_group.size():
            raise BurstError(f"{WHO}: the layer's context parallel size must be its group's size, "
                             "because a layer that holds whole sequences must not join a ring; got "
                             f"context_parallel_size={config.context_parallel_size} and a group of "
                             f"{cp_group.size()} ranks; pass the layer a pg_collection whose cp "
                             "group has that size")  # fmt: skip
        topology = communicator_of(cp_group, burst_config).topology
        switch_on_keep(burst_config)
        checks.warn_if_keep_is_idle(burst_config, config)
        return cls(
            cp_group, softmax_scale, burst_config.for_calls(), config, layer_number, topology
        )

    def over(self, group: dist.ProcessGroup | None) -> "BurstForward":
        """The same over another group, whose communicators are made if needed."""
        if isinstance(group, Sequence):
            raise BurstError(f"{WHO}: a layer's context-parallel group must be one group, because "
                             f"burst finds the nodes itself; got a list of {len(group)} groups; "
                             "pass the group of all ranks")  # fmt: skip
        group = packed.group_of_one() if group is None else group
        topology = communicator_of(group, self.config).topology
        return replace(self, cp_group=group, topology=topology)

    @uncompiled
    def __call__(self, query: Tensor, key: Tensor, value: Tensor, attention_mask, attn_mask_type,
                 attention_bias, packed_seq_params,
                 sink: Tensor | None) -> tuple[Tensor, ...]:  # fmt: skip
        """A layer's forward: [s_local, b, h, d] to [s_local, b, h * d_v]; packed samples: [t_local,
        h, d] to [t_local, h * d_v]; `sink` [h]: Megatron's `softmax_offset`. If the configuration
        asks for them, also the largest scores [h]."""
        if is_graph_capturing():  # TransformerEngine's graphs have a mask as an input, zeros later
            attention_mask = None
        extras = attention_mask, attn_mask_type, attention_bias, packed_seq_params
        with reporting_errors(self.cp_group):  # other ranks may be in the call
            group = packed.group_of(packed_seq_params, self.cp_group)
            checks.check_call(*extras, tokens=len(query) * group.size(), samples=query.shape[1])
            own = self.config.keep, self.cp_group, self.layer_config.mtp_num_layers
            checks.check_packed(packed_seq_params, *own, is_captured(query))
            packed.check_rotated(packed_seq_params, self.cp_group, self.follows_groups)
            check_placed(packed_seq_params)
            checks.check_decoding(query, key)
            slices = packed.slices_in(packed_seq_params)
            # slices say alone what is seen
            causal = CAUSAL[attn_mask_type] if slices is None else not sees_later(slices)
            window = window_of_layer(self.layer_config, self.layer_number, causal)
            has_sample_mask = slices is not None or packed.is_packed(packed_seq_params)
            config = self._resolved(query, key, value, window, causal, has_sample_mask)
            sample = packed.sample_of(packed_seq_params, group.size())
            packed.forget_boundaries_of_shard(group)
        # Gemma 2 in Megatron-Bridge has a soft cap
        softcap = getattr(self.layer_config, "attn_logit_softcapping", None) or 0.0
        flags = "qk_clip", "log_max_attention_logit"  # of `clip_qk`
        finds_max_logits = any(getattr(self.layer_config, flag, False) for flag in flags)
        results = burst_attention(
            query, key, value, group=group, causal=causal, window=window, sink=sink,
            softmax_scale=self.softmax_scale, softcap=softcap, config=config,
            layer=self.layer_number, return_max_logit=finds_max_logits, **sample,
        )  # fmt: skip
        out, *max_logits = results if isinstance(results, tuple) else (results,)
        return out.flatten(-2), *max_logits

    def _resolved(self, query: Tensor, key: Tensor, value: Tensor, *mask) -> BurstConfig:
        """Options of this layer's calls, with `keep` resolved."""
        is_auto = self.config.keep == "auto"
        if is_auto and not running():  # nothing, or all of the layer, is kept
            return keeping_nothing(self.config)
        if query.dim() == 3:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        return resolved(
            self.config, self.layer_config, self.layer_number, query, value,
            half_saves=self._half_saves(query, key, value, *mask) if is_auto else 0.0,
            # what is kept would hide how much of other nodes' keys and values a whole layer holds
            waits=self.topology.inter_size > 1,
        )  # fmt: skip

    def _half_saves(
        self, query: Tensor, key: Tensor, value: Tensor, window, causal: bool, has_sample_mask: bool
    ) -> float:
        """Share of recomputation that keeping half saves; `has_sample_mask`: documents or slices
        come with the call."""
        mask = Mask(*window_of(window, causal), has_sample_mask)
        shapes = [x.transpose(0, 1).shape for x in (query, key, value)]
        shape = attention_shape(shapes, query.dtype)
        spec = spec_of(self.config, self.topology, shape, Layout.ZIGZAG, mask, Kernel())
        return 1 - recomputed_share(resolve(spec)[0])


def window_of_layer(
    config: TransformerConfig, layer_number: int, causal: bool
) -> tuple[int, int] | None:
    """Numbers of earlier and later positions that a layer's queries see; None: all.

    (left, right) means the same in Megatron and burst: `left` + 1 keys including the query's own,
    and no later ones with a causal mask. Without a causal mask TransformerEngine treats (-1, 0) as
    no window.
    """
    window, skip = config.window_size, config.window_attn_skip_freq
    has_none = not is_layer_window_attention(window, skip, layer_number)
    return None if has_none or (tuple(window) == (-1, 0) and not causal) else tuple(window)


def cp_group_of(pg_collection) -> dist.ProcessGroup:
    """The context-parallel group, from Megatron's collection or from its global state."""
    return getattr(pg_collection, "cp", None) or parallel_state.get_context_parallel_group()
