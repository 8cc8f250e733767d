"""Refuses runs, layers and calls that burst attention does not support: see refusals.py."""

from types import SimpleNamespace
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_token_prediction as mtp
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_burst.comm.alone import is_first
from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from megatron_burst.installed import require_megatron
from megatron_burst.logs import log_message_once
from megatron_burst.mcore import packed
from megatron_burst.mcore.args import check_args, global_args, wants_fused_loss
from megatron_burst.mcore.options import burst_config_of, with_environment
from megatron_burst.mcore.refusals import LOSS_FLAG, refuse, refuses

try:
    from megatron.core.inference.utils import InferenceMode
except ImportError:  # before 0.18 engines do not tell that they run
    InferenceMode = None

WHO = "burst core attention"
# flags with which Megatron's data sets mask labels
_MASKING = "sft", "eod_mask_loss", "allow_ambiguous_pad_tokens"


def check_run() -> None:
    """Check the run when burst attention is built, through any entry point; log its Megatron.

    Also refuses a command line, if there is one, that lacks what the flag would have set.
    """
    megatron, command_line = require_megatron(WHO), global_args()
    if is_first():
        log_message_once(f"burst attention: {megatron}")
    if command_line is not None:
        args = with_environment(command_line)
        warn_if_counts_differ(args)
        check_args(args, WHO)
        refuse("built", command_line, WHO)


def warn_if_counts_differ(args: Any) -> None:
    """Log what Megatron divides by each rank's own number of labels, if the data set masks labels.

    Only some flags make Megatron's do so. Elsewhere all ranks have as many labels, or, of
    multi-token prediction, nearly.
    """
    masks = [flag for flag in _MASKING if getattr(args, flag, False)]
    if not masks or args.context_parallel_size == 1 or not is_first():
        return
    why = "because Megatron divides each rank's losses by the rank's own number of labels"
    flag = f"--{masks[0]}".replace("_", "-")
    got = f"{flag} and --context-parallel-size {args.context_parallel_size} without it, so"
    if not args.calculate_per_token_loss:
        fsdp2 = getattr(args, "use_torch_fsdp2", False)
        also = ", and --use-megatron-fsdp instead of --use-torch-fsdp2" if fsdp2 else ""
        log_message_once(f"Megatron's loss: --calculate-per-token-loss must be passed, {why}; got "
                         f"{got} gradients are wrong where ranks have unequally many, at a right "
                         f"loss; pass --calculate-per-token-loss{also}")  # fmt: skip
    if getattr(args, "mtp_num_layers", None) and not wants_fused_loss(args):
        is_weighted = args.calculate_per_token_loss and not hasattr(mtp, "process_mtp_loss")
        wrong = "logged losses" if is_weighted else "gradients and logged losses"  # 0.16 weights
        log_message_once(f"Megatron's multi-token prediction: {LOSS_FLAG} must be passed, {why}; "
                         f"got {got} {wrong} are wrong where ranks have unequally many; pass "
                         f"{LOSS_FLAG}")  # fmt: skip


def warn_if_keep_is_idle(burst: BurstConfig, config: TransformerConfig) -> None:
    """Warn that recomputation options do nothing in a model that does not recompute attention.

    On a command line this is refused. A model is not, because a framework's process may hold models
    that never train besides one that does, in the same environment.
    """
    keeps = burst.keep != "none"
    idle = keeps and refuses("keep", "recompute_modules", config)
    if keeps or burst.offloads_inputs:
        idle |= refuses("recompute", "recompute_granularity", config)
    if idle and is_first():
        option = f"keep={burst.keep}" if keeps else "keep_offload=inputs"
        log_message_once(f"burst attention: {option} has no effect on a model that does not "
                         "recompute attention; if this model is trained, set its "
                         "recompute_granularity to full")  # fmt: skip


def check_layer(config: TransformerConfig, layer_number: int, attn_mask_type: AttnMaskType,
                attention_type: str, attention_dropout: float | None) -> None:  # fmt: skip
    """Refuse a layer whose configuration asks for something that burst does not support."""
    own: dict[str, Any] = dict(attn_mask_type=attn_mask_type, attention_type=attention_type)
    burst = burst_config_of(config)
    own |= dict(burst_invariant=burst.invariant, burst_check=burst.check,
                burst_nan_guard=burst.nan_guard)  # fmt: skip
    if attention_dropout is not None:
        own["attention_dropout"] = attention_dropout
    refuse("attention", SimpleNamespace(**vars(config) | own), f"{WHO}: layer {layer_number}")


def check_call(
    attention_mask, attn_mask_type, attention_bias, packed_seq_params, tokens: int, samples: int
) -> None:
    """Refuse a call with an unsupported mask, bias or packing, rather than ignore it.

    `tokens`, `samples`: of the whole batch, over all ranks.
    """
    mask, bias = (None if x is None else tuple(x.shape) for x in (attention_mask, attention_bias))
    refuse("call", SimpleNamespace(
        attention_mask=mask, attention_bias=bias, attn_mask_type=attn_mask_type,
        packed_seq_params=packed.format_of(packed_seq_params, tokens, samples)), WHO)  # fmt: skip


def check_packed(
    params: PackedSeqParams | None, keep: str, cp_group, mtp_num_layers: int | None = None,
    in_graph: bool = False,
) -> None:  # fmt: skip
    """Refuse a packed sample, or a group, that burst does not support; `keep` and `cp_group` are
    the layer's; `in_graph`: whether a CUDA graph captures the call.

    Keys must have the boundaries of the queries. Distinct tensors are compared once per sample; on
    a GPU that synchronizes.
    """
    if params is None:
        return
    if in_graph:
        raise BurstError(f"{WHO}: a packed sample must not be captured in a CUDA graph, because "
                         "each replay would launch kernels for the longest document of the first "
                         "sample; got packed_seq_params; capture only parts other "
                         "than attention (--cuda-graph-modules)")  # fmt: skip
    if packed.slices_in(params) is not None and mtp_num_layers:
        raise BurstError(f"{WHO}: a mask of slices must come without multi-token prediction, "
                         "because Megatron shifts tokens by documents only; got "
                         f"mtp_num_layers={mtp_num_layers}; pass mtp_num_layers=None")  # fmt: skip
    group = packed.group_of(params, cp_group)
    is_layers = group is cp_group
    call = vars(params) | dict(
        cu_seqlens_q="none" if packed.is_packed(params) and params.cu_seqlens_q is None else None,
        cu_seqlens_kv=None if packed.keys_are_alike(params) else "other boundaries",
        cp_group_size=group.size(),
        keep="none" if is_layers else keep,
        mtp_num_layers=None if is_layers else mtp_num_layers,
    )
    refuse("packed", SimpleNamespace(**call), WHO)


def check_slices(params: PackedSeqParams | None) -> None:
    """Refuse slices in a layer that does not run burst."""
    if packed.slices_in(params) is not None:
        raise BurstError(f"{WHO}: a mask of slices must go to layers that run burst, because other "
                         "layers would ignore it; got a layer with Megatron's own attention; pass "
                         "--cp-comm-type burst for all layers")  # fmt: skip


def check_decoding(query: Tensor, key: Tensor) -> None:
    """Refuse decoding: cached keys are not a shard of the queries' sequence. `query` and `key` are
    [tokens, b, h, d], or [tokens, h, d]."""
    engine = InferenceMode is not None and InferenceMode.is_active()
    call = SimpleNamespace(query_tokens=query.shape[0], key_tokens=key.shape[0], engine=engine,
                           place="an inference engine" if engine else "one call")  # fmt: skip
    refuse("cache", call, WHO)
