"""Megatron's packed samples (PackedSeqParams) for burst, and what Megatron lacks for them without
TransformerEngine, or if documents start at any token."""

import copy
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core import parallel_state, utils
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_burst.comm.group import state_of
from megatron_burst.comm.store import BoundedDict
from megatron_burst.comm.transport import Placement
from megatron_burst.errors import require
from megatron_burst.masks.sample import identity, indices_of
from megatron_burst.mcore import patches
from megatron_burst.mcore.args import global_args
from megatron_burst.mcore.refusals import CUDA_GRAPHS, OFF, needs_documents
from megatron_burst.schedule.layout import Layout, positions
from megatron_burst.shards import in_documents

# From Megatron's #6821 on, an attention layer returns to this group of its own in each forward
_BUILT_FOR = "_build_time_cp_group"
# whether the sample of the attention layer that runs is sharded as a whole
_WHOLE: ContextVar[bool | None] = ContextVar("sharded whole", default=None)
# Caches of this process. Results derived from boundaries, once per sample instead of per layer:
_RESULTS: BoundedDict[Hashable, tuple[Any, Any]] = BoundedDict(32)
# a group of this rank alone, for the life of the default group
_ALONE: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
# by size, this rank's sub-group of a context-parallel group, for the life of that
_PARTS: WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = WeakKeyDictionary()


# ---- a layer's call -------------------------------------------------------------------------


def slices_in(params: PackedSeqParams | None) -> Tensor | None:
    """The slices of a call, if its mask is made of them."""
    return getattr(params, "slices", None)


def is_packed(params: PackedSeqParams | None) -> bool:
    """Whether a call's tensors are [tokens, heads, dim] of a packed sample."""
    return params is not None and params.qkv_format == "thd"


def format_of(params: PackedSeqParams | None, tokens: int, samples: int) -> str | None:
    """Names the format of a packed call's tensors; None if it is not packed.

    Parameters in Megatron's usual format without boundaries only set a group, and Megatron's VLM
    passes those of `samples` whole rows of `tokens` (models/multimodal/context_parallel.py:91).
    """
    if params is None:
        return None

    def end_rows(ends: Tensor) -> bool:
        rows = torch.arange(samples + 1, dtype=ends.dtype, device=ends.device) * tokens
        return ends.shape == rows.shape and bool((ends == rows).all())

    boundaries = [params.cu_seqlens_q, params.cu_seqlens_q_padded]
    is_unpacked = params.qkv_format == "sbhd" and all(
        cached(partial(end_rows, ends), ("rows", tokens, samples), ends)
        for ends in boundaries if ends is not None
    )  # fmt: skip
    return None if is_unpacked else str(params.qkv_format)


def group_of(params: PackedSeqParams | None, cp_group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The context-parallel group of a micro-batch: its own if that has different ranks than the
    layer's."""
    if params is None or (params.cp_group is None and params.local_cp_size is None):
        return cp_group
    own, ranks = params.cp_group, dist.get_process_group_ranks
    if own is None:
        return cp_group if cp_group.size() == 1 else group_of_one()
    if own is cp_group or (own.size() == cp_group.size() and ranks(own) == ranks(cp_group)):
        return cp_group
    return own


def group_of_one() -> dist.ProcessGroup:
    """A group of this rank only; this raises the rank's count of groups, which burst evens out when
    it makes later ones (comm/group.py)."""
    default = dist.group.WORLD
    if default not in _ALONE:
        _ALONE[default] = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return _ALONE[default]


def sample_of(params: PackedSeqParams | None, cp_size: int) -> dict[str, Any]:
    """The layout of a call's tensors, as arguments of `burst_attention`."""
    slices = slices_in(params)
    sample = {"qkv_format": "thd" if is_packed(params) else "sbhd"}
    sample |= {} if slices is None else {"slices": slices}
    if params is None or not is_packed(params):
        return sample
    # document by document as in TransformerEngine, but for samples of documents of any length
    layout = Layout.ZIGZAG if cp_size == 1 or is_sharded_whole(params) else Layout.DOCUMENTS
    if slices is not None and layout is not Layout.DOCUMENTS:
        return sample
    padded, longest = params.cu_seqlens_q_padded, params.max_seqlen_q
    # reading a tensor on a GPU would synchronize; burst then finds the length once per sample
    is_hidden = longest is None or (isinstance(longest, Tensor) and longest.is_cuda)
    return sample | {"layout": str(layout), "cu_seqlens": params.cu_seqlens_q,
                     "cu_seqlens_padded": None if padded is params.cu_seqlens_q else padded,
                     "max_seqlen": None if is_hidden else int(longest)}  # fmt: skip


def shards_whole_sample() -> bool:
    """Whether samples are sharded as a whole, so that documents may have any length: with
    --dataloader-inter-document-masking (get_batch_on_this_cp_rank, core/utils.py:2601)."""
    args = global_args()
    anywhere = getattr(args, "dataloader_inter_document_masking", False)
    return bool(anywhere and not getattr(args, "sft", False))


def is_sharded_whole(params: PackedSeqParams) -> bool:
    """Whether this sample is: from Megatron's #6912 on, pretrain_hybrid.py pads each document and
    shards it on its own, and only the padded boundaries say so."""
    is_padded = params.cu_seqlens_q_padded is not None
    is_padded = is_padded or getattr(params, "pad_between_seqs", None) is not None
    return shards_whole_sample() and not is_padded


def forget_boundaries_of_shard(group: dist.ProcessGroup) -> None:
    """Stop the group's calls from asking for the boundaries of the user's last `shard`: Megatron
    shards its samples itself, and its parameters say which are packed."""
    state = state_of(group)
    state.sharded = state.sharded and (state.sharded[0], False, 0)


def keys_are_alike(params: PackedSeqParams) -> bool:
    """Whether keys have the boundaries of the queries."""
    real = _alike(params.cu_seqlens_q, params.cu_seqlens_kv)
    return real and _alike(params.cu_seqlens_q_padded, params.cu_seqlens_kv_padded)


def _alike(q: Tensor | None, kv: Tensor | None) -> bool:
    if kv is None or q is kv:
        return True
    if q is None or q.shape != kv.shape:
        return False
    return cached(lambda: bool((q == kv.to(q.device)).all()), "alike", q, kv)


def cached[T](compute: Callable[[], T], name: Hashable, *boundaries: Tensor) -> T:
    """The result of `compute` for these boundaries on the current stream. The entry also holds the
    boundaries, to recognize them."""
    key = name, Placement.of(boundaries[0]), *map(identity, boundaries)
    entry = _RESULTS.recent(key)
    if entry is None:
        entry = _RESULTS[key] = compute(), boundaries
    return entry[0]


# ---- a micro-batch's own group --------------------------------------------------------------


def follow_groups(layer: torch.nn.Module) -> bool:
    """Make an attention layer apply RoPE to packed samples over a micro-batch's own group; whether
    it does.

    Megatron applies it over the layer's group (transformer/attention.py:1505), which is swapped
    while the layer's forward runs. Not with CUDA graphs, which Megatron makes only of layers
    without hooks (transformer/cuda_graphs.py:1964).
    """
    if any(getattr(layer.config, name, None) not in (None, *OFF) for name in CUDA_GRAPHS):
        return False
    # MLA's constructor calls Attention's
    if _take_own_group not in layer._forward_pre_hooks.values():
        layer.register_forward_pre_hook(_take_own_group, with_kwargs=True)
        layer.register_forward_hook(_give_back_group, always_call=True)
    return True


def check_rotated(
    params: PackedSeqParams | None, cp_group: dist.ProcessGroup, follows: bool
) -> None:
    """Refuse samples that Megatron's RoPE would rotate wrongly: with a micro-batch's own group in a
    layer that does not follow it, or with documents that start at any token."""
    if not is_packed(params):
        return
    group = group_of(params, cp_group)
    whole = cp_group.size() > 1 and is_sharded_whole(params)
    change = "import megatron_burst.auto, or start the script with python -m megatron_burst"
    require("packed samples", [
        (group is cp_group or follows, "a packed micro-batch must run on the layer's group with "
         "CUDA graphs and in models that only name burst in their spec, because Megatron's RoPE "
         "uses positions in the layer's group",
         f"a group of {group.size()} ranks in a layer of {cp_group.size()}", change),
        (not whole or all(patch.live for patch in patches.rows("anywhere")),
         "documents must not start at arbitrary tokens in models that only name burst in their "
         "spec, because Megatron's RoPE assumes that each document is sharded on its own",
         "--dataloader-inter-document-masking", change),
        (cp_group.size() == 1 or follows or whole == shards_whole_sample(),
         "documents must not be padded one by one with CUDA graphs, because Megatron's RoPE is "
         "then replaced for all samples alike", "--dataloader-inter-document-masking with padded "
         "boundaries", "leave CUDA graphs out"),
        (not whole or not needs_documents(global_args()),
         "multi-token prediction, Mamba, GDN and MLA with fused yarn need samples whose documents "
         "are sharded each on its own", "a sample that is sharded as a whole",
         "leave out --dataloader-inter-document-masking"),
    ])  # fmt: skip


def _take_own_group(layer, args, options) -> None:
    params, groups = options.get("packed_seq_params"), layer.pg_collection
    own = group_of(params, groups.cp) if is_packed(params) else groups.cp
    layer.groups_of_all = groups
    whole = is_packed(params) and is_sharded_whole(params)
    _WHOLE.set(whole)
    if not is_packed(params) or (own is groups.cp and whole == shards_whole_sample()):
        return
    fused = layer.config.multi_latent_attention and layer.config.apply_rope_fusion
    require("packed samples", [
        (not fused or own.size() == groups.cp.size(), "a packed micro-batch must run on the "
         "layer's group with MLA and fused RoPE, because the fused kernels use positions in that "
         "group", f"a group of {own.size()} ranks in a layer of {groups.cp.size()}",
         "pass --no-rope-fusion"),
        (not getattr(layer, "recompute_up_proj", False),
         "a packed micro-batch must run on the layer's group, and be sharded as a whole with "
         "--dataloader-inter-document-masking, if RoPE is recomputed in backward, because the "
         "recomputation assumes both",
         "recomputation of mla_up_proj", "leave mla_up_proj out of --recompute-modules"),
    ])  # fmt: skip
    layer.pg_collection = copy.copy(groups)
    layer.pg_collection.cp = own
    if hasattr(layer, _BUILT_FOR):
        setattr(layer, _BUILT_FOR, own)


def _give_back_group(layer, args, output) -> None:
    _WHOLE.set(None)
    layer.pg_collection = layer.groups_of_all
    if hasattr(layer, _BUILT_FOR):
        setattr(layer, _BUILT_FOR, layer.pg_collection.cp)


def consecutive_part(cp_group: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    """This rank's part of a context-parallel group that is cut into parts of `size` consecutive
    ranks. Made once; all ranks of the part ask for their parts in the same order."""
    if size == cp_group.size():
        return cp_group
    if size == 1:
        return group_of_one()
    parts = _PARTS.setdefault(cp_group, {})
    if size not in parts:
        first = cp_group.rank() // size * size
        ranks = dist.get_process_group_ranks(cp_group)[first : first + size]
        parts[size] = dist.new_group(ranks, use_local_synchronization=True)
    return parts[size]


# ---- TransformerEngine's rows of a rank -----------------------------------------------------


def partitioned_indices(
    cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int
) -> Tensor:
    """Rows of a packed sample that a rank holds: chunks r and 2P-1-r of every document; int32
    [total_tokens / world_size], on the device of `cu_seqlens`.

    Equal to TransformerEngine's `thd_get_partitioned_indices`, on any device. `cu_seqlens`, int32
    [documents + 1], says where documents begin, and the last one ends; rows after that count as
    part of it. Refuses documents that cannot be split into chunks, as far as the CPU knows.
    """
    pieces, on_cpu = 2 * world_size, cu_seqlens.device.type == "cpu"
    are_padded = not on_cpu or not bool((cu_seqlens % pieces).any())
    ends = f"boundaries {cu_seqlens[:8].tolist()} of " if on_cpu else ""
    require("packed samples", [(
        are_padded and total_tokens % pieces == 0,
        f"each document must be padded to a multiple of {pieces} tokens, because each of "
        f"{world_size} ranks holds two chunks of it",
        f"{ends}{total_tokens} tokens", "pad the documents",
    )])  # fmt: skip
    starts = cu_seqlens // world_size
    rows = torch.arange(total_tokens // world_size, dtype=torch.int32, device=starts.device)
    document = torch.searchsorted(starts[1:-1].contiguous(), rows, right=True)
    start = starts[document]
    chunk = (starts[document + 1] - start) // 2
    row = rows - start
    chunks_before = torch.where(row < chunk, rank, 2 * (world_size - 1) - rank)
    return (row + start * world_size + chunk * chunks_before).to(torch.int32)


# ---- what functions of Megatron are replaced by: see patches.py -----------------------------


def shard_without_te(shard, /, batch, cp_group):
    """Shards each document of a batch, by row indices from TransformerEngine, else from burst."""
    extension = utils.tex
    utils.tex = extension or SimpleNamespace(thd_get_partitioned_indices=partitioned_indices)
    try:
        return shard(batch, cp_group)
    finally:
        utils.tex = extension


def rotate_anywhere(
    rotate, /, t, freqs, config, cu_seqlens=None, mscale=1.0, cp_group=None, *more, **options
):
    """`apply_rotary_pos_emb`, also for documents that start at any token."""
    group = parallel_state.get_context_parallel_group() if cp_group is None else cp_group
    whole = shards_whole_sample() if _WHOLE.get() is None else _WHOLE.get()
    if cu_seqlens is None or group.size() == 1 or not whole:
        return rotate(t, freqs, config, cu_seqlens, mscale, group, *more, **options)
    of_sample = len(freqs) == len(t) * group.size()  # as Megatron tells them apart
    rows = _positions(cu_seqlens, len(t), group, by_document=not of_sample)
    rotated = rotate(t.unsqueeze(1), freqs[rows], config, None, mscale, group, *more, **options)
    return rotated.squeeze(1)


def _positions(cu_seqlens: Tensor, tokens: int, group, by_document: bool) -> Tensor:
    """Positions of this rank's rows, in the sample or in their documents."""

    def compute() -> Tensor:
        places = places_in_zigzag(tokens, group).to(cu_seqlens.device)
        return in_documents(places, cu_seqlens if by_document else None)

    name = "positions", tokens, group.rank(), group.size(), by_document
    return cached(compute, name, cu_seqlens)


def places_in_zigzag(tokens: int, group: dist.ProcessGroup) -> Tensor:
    """Where in the sample this rank's rows are, of which it has so many."""
    return indices_of(positions(Layout.ZIGZAG, group.rank(), group.size(), tokens))
