"""`shard_batch`: this rank's shard of a batch, and what attention must know of the whole sample."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import get_worker_info

from megatron_burst.arguments import is_dense, short_repr
from megatron_burst.comm.alone import Ranks, group_or_default
from megatron_burst.config import BurstConfig
from megatron_burst.errors import Need, require, unmet_needs
from megatron_burst.loss.next_tokens import labels_of
from megatron_burst.schedule.layout import Layout
from megatron_burst.shards import LayoutName, Sizes, in_documents, shards_of

_WHO, _IGNORED = "shard_batch", -100
_ROWS = "input_ids", "labels", "position_ids", "shift_labels"
_BOUNDARIES = "cu_seqlens", "cu_seq_lens_q"  # the second is transformers' name
# what collators add to packed samples, and follows from boundaries
_FOLLOW = "attention_mask", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"


@dataclass(frozen=True, slots=True, eq=False)
class ShardedBatch:
    """What attention needs to know of a sharded batch.

    Attributes:
        group: ranks that it is sharded over; None: this process alone.
        layout: how.
        cu_seqlens: ends of the whole sample's documents, on the CPU; None if it is not packed.
        config: burst's options of a call of attention.
        keep_layers: how many layers, from the first, keep attention's results; None: as `config`.
        config_beyond: the options in the layers after those.
        input_gib: where inputs of recomputed layers are on the host, the limit of its memory in a
            tuple; None: they stay on the device.
        fused_loss: whether the model's head computes the loss in place of logits.
    """

    group: dist.ProcessGroup | None
    layout: LayoutName
    cu_seqlens: Tensor | None
    config: BurstConfig
    keep_layers: int | None
    config_beyond: BurstConfig
    input_gib: tuple[float | None] | None = None
    fused_loss: bool = False

    def config_of(self, index: int | None) -> BurstConfig:
        """Burst's options in a layer, by its index."""
        keeps = self.keep_layers is None or index is None or index < self.keep_layers
        return self.config if keeps else self.config_beyond


def shard_batch(batch: Mapping[str, Any], *, group: Ranks = None, layout: LayoutName = "zigzag",
                config: BurstConfig | None = None,
                fused_loss: bool = False) -> dict[str, Any]:  # fmt: skip
    """This rank's shard of a batch, for a model with `attn_implementation="burst"`.

    `model(**shard_batch(batch, group=group)).loss` is this rank's part of the mean loss over the
    whole batch: its mean over the ranks of the group is that loss. DDP and FSDP average gradients
    over ranks, so nothing has to be scaled. All ranks of the group pass the same batch, in the main
    process, not in a worker of a DataLoader. Synchronizes with a GPU once, to compare the batches.

    Args:
        batch: "input_ids", int64 [b, s]; also "labels" (not shifted; left out: input_ids) or
            "shift_labels", [b, s], -100 where ignored, and "position_ids", [b, s]. A packed sample
            has batch size 1 and "cu_seqlens" or "cu_seq_lens_q", int [documents + 1], or
            position_ids that start again with each document. "attention_mask" must be all ones:
            padding is refused. "num_items_in_batch" is the number of labels that losses are
            divided by, such as those of several micro-batches; left out: the batch's. Other names
            are refused too, but for those that follow from these.
        group: the context-parallel group, or that dimension of a DeviceMesh; None: all processes.
        layout: which rows a rank gets, as in `burst_attention`. In "zigzag" and "contiguous" rows
            are added at the end of a single sequence where the layout has equal chunks; they attend
            to nothing and have no loss.
        config: options for `burst_attention`. `keep="all"`: activation checkpointing keeps
            attention's results, with `keep_layers` in the first layers alone; `keep_offload`: they,
            or the inputs of layers that are recomputed, are in host memory.
        fused_loss: whether the model's head computes the loss, a tile at a time, in place of
            logits, which then never exist; reading them is refused.

    Returns:
        "input_ids", "position_ids", "labels" and "shift_labels" (both shifted over the whole
        sample), [b, s / ranks]; "num_items_in_batch", the number of labels of the whole batch, or
        the one given, divided by the ranks; and "burst", for attention.

    Raises:
        BurstError: on all ranks of the group, if the batch cannot be sharded, or if ranks pass
            different ones.
    """
    require(_WHO, [(
        get_worker_info() is None, "a batch must be sharded in the main process, because ranks "
        "compare it there", "a worker of a DataLoader",
        "pass num_workers=0, or shard what the loader returns")])  # fmt: skip
    group = group_or_default(group, _WHO)
    problem = unmet_needs(_WHO, _of_batch(batch, _chunks(group.size(), layout)))
    rows, cu_seqlens = {}, None
    if not problem:
        rows, cu_seqlens = _whole_chunks(*_rows_of(batch), group.size(), layout)
    shards = shards_of(_WHO, group, layout, (cu_seqlens, None), True)

    def sizes() -> Sizes:
        ids = rows["input_ids"]
        got = f"input_ids {tuple(ids.shape)} and {group.size()} ranks"
        return ids.shape[1], ids.shape[0], got, ids.device

    documents = shards.opened(problem, sizes, {"rows": ", ".join(rows)}, {"batch": _digest(rows)})
    ids = rows["input_ids"]
    shards.remember(False, ids.shape[1])  # each batch brings its own boundaries to attention
    _add_labels_and_positions(rows, cu_seqlens, layout)
    own_rows = shards.mine(shards.rows(ids.shape[1]), documents, ids.device)
    shard: dict[str, Any] = {name: x.index_select(1, own_rows) for name, x in rows.items()}
    shard["labels"] = shard["shift_labels"]  # without any, transformers computes no loss
    items = batch.get("num_items_in_batch")
    if items is None:
        items = (rows["shift_labels"] != _IGNORED).sum().clamp(min=1)
    # no tensor: FSDP's mixed precision would round it
    shard["num_items_in_batch"] = float(items) / group.size()
    ranks = group if dist.is_initialized() else None
    config = config or BurstConfig()
    per_call = replace(config.for_calls(), keep_layers=None)
    keeping_nothing = replace(per_call, keep="none", keep_offload="none", keep_host_gib=None,
                              keep_budget_gib=None, keep_debug=False)  # fmt: skip
    shard["burst"] = ShardedBatch(
        ranks, layout, cu_seqlens, per_call, config.keep_layers, keeping_nothing,
        (config.keep_host_gib,) if config.offloads_inputs else None, fused_loss,
    )  # fmt: skip
    return shard


def _of_batch(batch: Mapping[str, Any], chunks: int) -> Iterator[Need]:
    ids, legal = batch.get("input_ids"), {*_ROWS, *_BOUNDARIES, *_FOLLOW, "num_items_in_batch"}
    strange = [name for name, x in batch.items() if name not in legal and x is not None]
    yield (not strange, f"a batch must consist of {', '.join(_ROWS)} and cu_seqlens, because "
           "nothing else is sharded", ", ".join(strange), "leave it out")  # fmt: skip
    for name in _ROWS:
        x = batch.get(name, ids)
        yield (is_dense(x) and x.dim() == 2 and is_dense(ids) and x.shape == ids.shape,
               f"{name} must be a tensor [b, s] like input_ids, because it is sharded like them",
               f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else short_repr(x),
               "pass such a tensor")  # fmt: skip
    mask = batch.get("attention_mask")
    yield (mask is None or bool((mask != 0).all()),
           "a batch must have no padding, because attention would see it",
           "zeros in attention_mask", "pack its sequences in one row (a padding-free collator, "
           "such as DataCollatorWithFlattening)")  # fmt: skip
    yield (len(ids) == 1 or len(_begins(batch)) == 0,
           "packed documents must have batch size 1, because attention gets the boundaries of a "
           "single sample", f"{len(ids)} sequences with position_ids that start again",
           "pack them in one")  # fmt: skip
    yield (len(ids) == 1 or not ids.shape[1] % max(chunks, 1),
           f"several sequences must have a multiple of {chunks} tokens, because each rank gets "
           "equal chunks of all", f"{ids.shape[1]} tokens",
           "pack them in one row, of any length")  # fmt: skip


def _chunks(ranks: int, layout: str) -> int:
    """How many equal chunks a layout has; 0 if it has none."""
    return ranks * {Layout.ZIGZAG: 2, Layout.CONTIGUOUS: 1}.get(layout, 0) if ranks > 1 else 0


def _begins(batch: Mapping[str, Any]) -> Tensor:
    """Where position_ids start again: int64 [places, 2], by sequence and position."""
    at = batch.get("position_ids", torch.zeros(1, 1)).cpu()
    return (at[:, 1:] != at[:, :-1] + 1).nonzero()


def _rows_of(batch: Mapping[str, Any]) -> tuple[dict[str, Tensor], Tensor | None]:
    """The tensors to shard, and the boundaries of documents, on the CPU."""
    rows = {name: batch[name] for name in _ROWS if name in batch}
    if names := [name for name in _BOUNDARIES if name in batch]:
        return rows, batch[names[0]].cpu()
    begins = (_begins(batch)[:, 1] + 1).tolist()
    return rows, torch.tensor([0, *begins, rows["input_ids"].shape[1]]) if begins else None


def _whole_chunks(
    rows: dict[str, Tensor], cu_seqlens: Tensor | None, size: int, layout: str
) -> tuple[dict[str, Tensor], Tensor | None]:
    """A single sequence with rows added at its end, after its last document, for equal chunks."""
    batch, tokens = rows["input_ids"].shape
    chunks = _chunks(size, layout)
    lacking = -tokens % chunks if chunks and batch == 1 else 0
    if not lacking:
        return rows, cu_seqlens
    value = {"labels": _IGNORED, "shift_labels": _IGNORED}
    if "labels" not in rows and "shift_labels" not in rows:
        rows = rows | {"labels": rows["input_ids"]}
    rows = {name: pad(x, (0, lacking), value=value.get(name, 0)) for name, x in rows.items()}
    return rows, torch.tensor([0, tokens]) if cu_seqlens is None else cu_seqlens


def _add_labels_and_positions(
    rows: dict[str, Tensor], cu_seqlens: Tensor | None, layout: LayoutName
) -> None:
    """Of the whole sample, where a batch has none: labels are shifted."""
    ids = rows["input_ids"]
    if "shift_labels" not in rows:
        sample = shards_of(_WHO, None, layout, (cu_seqlens, None), True)
        rows["shift_labels"] = labels_of(sample, rows.get("labels", ids), 1)
    if "position_ids" not in rows:
        positions = in_documents(torch.arange(ids.shape[1], device=ids.device), cu_seqlens)
        rows["position_ids"] = positions.expand(ids.shape)


def _digest(rows: Mapping[str, Tensor]) -> str:
    """Tells batches apart."""
    data = b"".join(x.cpu().contiguous().numpy().tobytes() for x in rows.values())
    return blake2b(data, digest_size=8).hexdigest()
