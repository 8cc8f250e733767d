"""A packed sample as passed to `burst_attention`, and the checks on it."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_burst.arguments import is_strided, short_repr
from megatron_burst.comm.group import Sharded
from megatron_burst.errors import Need, require
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Positions


class Sample(NamedTuple):
    """Documents or slices, as passed to `burst_attention`; nothing for a whole sequence."""

    cu_seqlens: Tensor | None
    padded: Tensor | None
    longest: int | None
    parents: Tensor | Sequence[int] | None = None
    slices: Tensor | None = None


def in_rows(places: Positions, unit: int) -> Positions:
    """Positions in rows, from positions in units of rows; with unit 1, ranges may have gaps."""
    return places if unit == 1 else tuple(range(p.start * unit, p.stop * unit) for p in places)


def of_last_shard(last: Sharded | None, layout: str, packed: bool) -> Iterator[Need]:
    """Checks of a call on rows against its group's last `shard`; layout "" and packed True: they
    make no difference to the call."""
    if last is None:
        return
    sharded, documents, _ = last
    yield (layout in ("", sharded), "layout must be the layout of the group's last shard, because "
           "the same rows have other positions in another layout",
           f'layout "{layout}" after shard(..., layout="{sharded}")', "pass the same")  # fmt: skip
    yield (packed or not documents, "cu_seqlens must be given after a shard of a packed sample, "
           "because otherwise its documents would be treated as one",
           "no cu_seqlens after shard(..., cu_seqlens=...)", "pass cu_seqlens; to treat the whole "
           "sample as one document, pass torch.tensor([0, tokens])")  # fmt: skip


def check_rows(last: Sharded, mask: tuple[str, bool, tuple[str, ...]],
               tensors: tuple[Tensor, Tensor], cp_size: int) -> None:  # fmt: skip
    """Check attention against its group's last `shard`.

    Args:
        last: that `shard`.
        mask: the layout; whether there is a mask besides what the next names say; and which
            arguments say something of the sample.
        tensors: q and k, "bshd". Keys of another length are of another sequence.
        cp_size: ranks.

    Raises:
        BurstError: if they do not fit; never in recomputation, whose first pass was checked.
    """
    if torch._C._current_graph_task_id() != -1:  # in backward
        return
    (layout, masked, arguments), (q, k), rows = mask, tensors, last[2] // cp_size
    packed = bool(arguments) or q.shape[1] != k.shape[1]
    swapped = q.shape[2] == rows != q.shape[1]
    require("burst attention", chain(
        of_last_shard(last, layout if masked or arguments else "", packed),
        [(not swapped, "q, k and v must be [b, s, h, d], because the sequence is the second axis",
          f"q {tuple(q.shape)} after a shard into {rows} rows, as if for "
          "scaled_dot_product_attention", "pass x.transpose(1, 2)")],
    ))  # fmt: skip


def identity(x: object) -> Hashable:
    """Equal for equal boundaries, parents or numbers: a key of what is derived from them.

    Version counters miss writes through numpy, DLPack or `.data`. So tensors on the CPU, which are
    small, are known by their contents. A tensor on a GPU is known by its version, because reading
    it would synchronize; if it has none, as in inference mode, it is new in each call.
    """
    if not isinstance(x, Tensor):
        return repr(list(x) if isinstance(x, Sequence) else x)
    if x.device.type == "cpu" and holds_whole(x):
        return x.dtype, x.shape, x.numpy().tobytes()
    return object() if x.is_inference() else (id(x), x._version)


def indices_of(places: Iterable[range], device: torch.device | None = None) -> Tensor:
    """Positions, as the layouts give them, in one tensor: int64 [rows]."""
    return torch.cat([torch.arange(at.start, at.stop, at.step, device=device) for at in places])


def holds_whole(x: object) -> bool:
    """Whether it is a tensor of int32 or int64 in rows."""
    return is_strided(x) and x.dtype in (torch.int32, torch.int64)


def kind_of(x: object) -> str:
    """What it is, where a tensor of whole numbers is needed."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    return f"{x.dtype} of shape {tuple(x.shape)}" if is_strided(x) else short_repr(x)


def of_tensors(sample: Sample, device: torch.device) -> Iterator[Need]:
    """Checks of tensors that kernels on a device will read, and of the longest document."""
    yield (sample.longest is None or isinstance(sample.longest, Integral),
           "max_seqlen must be a whole number, because it counts tokens", repr(sample.longest),
           "pass an int, or leave it out")  # fmt: skip
    for name, x in (("cu_seqlens", sample.cu_seqlens), ("cu_seqlens_padded", sample.padded)):
        if x is None:
            continue
        yield (holds_whole(x) and x.dim() == 1,
               f"{name} must be a tensor of int32 or int64 with one axis, because it counts tokens",
               kind_of(x), "pass such a tensor")  # fmt: skip
        yield from (
            (len(x) >= 2 and len(x) == len(sample.cu_seqlens),
             f"{name} must say where each document begins and where the last one ends, so its "
             "length must be the number of documents plus one, with and without padding",
             f"{len(x)} boundaries for {len(sample.cu_seqlens) - 1} documents",
             "pass cu_seqlens and cu_seqlens_padded of the same length"),
            (x.device in (device, torch.device("cpu")),
             f"{name} must be on the CPU or on q's device, because kernels on that device read it",
             f"{x.device}", f"move it to {device}"),
        )  # fmt: skip


def of_values(
    starts: Tensor, padded: Tensor | None, layout: Layout, sizes: tuple[int, int, int | None]
) -> Iterator[Need]:
    """Checks of boundaries that are on the CPU.

    Args:
        starts: where documents begin, and where the last one ends.
        padded: the same with padding, if they have any.
        layout: how tokens are sharded.
        sizes: tokens of the sample, ranks, and the length given for the longest document.
    """
    (tokens, cp_size, longest), padded_starts = sizes, starts if padded is None else padded
    lengths, room, end = starts.diff(), padded_starts.diff(), int(padded_starts[-1])
    cut = not bool((room % (2 * cp_size)).any())
    yield from (
        (starts[0] == 0 == padded_starts[0] and not bool((lengths < 0).any() or (room < 0).any()),
         "cu_seqlens must begin with 0 and not decrease, because each document begins where the "
         "one before it ends", _some(starts if lengths.min() < 0 or starts[0] else padded_starts),
         "pass the running sum of lengths"),
        (end <= tokens, f"documents must end within the sample of {tokens} tokens (of all ranks "
         "together), because the sample has no more", f"an end at {end}",
         "pass boundaries of the whole sample, not of a rank's shard"),
        (bool((lengths <= room).all()), "a document must not be longer than with its padding, "
                                        "because padding only adds tokens",
         f"{_some(lengths - room)} tokens more",
         "pass cu_seqlens without padding and cu_seqlens_padded with it"),
        (longest is None or int(room.max()) <= longest,
         "max_seqlen must be at least the longest document's number of tokens, because kernels "
         "are launched for that many", f"{longest} and a document of {int(room.max())}",
         "pass the longest document's length, including padding"),
        (not ends_in_one_rank(end, tokens, cp_size),
         "cu_seqlens must have the boundaries of the whole sample, because all ranks pass the "
         "same, and rows after the last document attend to nothing",
         f"an end at {end}, within the {tokens // cp_size} rows of one of {cp_size} ranks",
         "pass the boundaries of the whole sample; if its other rows are padding, end "
         f"cu_seqlens_padded at {tokens}, or make them a document"),
        (layout is not Layout.DOCUMENTS or cp_size == 1 or (end == tokens and cut),
         "in the layout zigzag-documents each document must be padded to a multiple of "
         f"{2 * cp_size} tokens and the last one must end at {tokens}, because each rank has two "
         "chunks of each document", f"lengths {_some(room)} and an end at {end}",
         "pad them (cu_seqlens_padded), or pass another layout"),
    )  # fmt: skip


def ends_in_one_rank(end: int, tokens: int, cp_size: int) -> bool:
    """Whether boundaries end within the rows of one of several ranks, as those of a shard do; not
    if there are none, or the rows after them are so few that they pad it to equal chunks."""
    return cp_size > 1 and 0 < end * cp_size <= tokens and tokens - end >= 2 * cp_size


def _some(x: Tensor) -> str:
    values = x[:8].tolist()
    return ", ".join(map(str, values)) + (", ..." if len(x) > 8 else "")


def of_parents(sample: Sample) -> Iterator[Need]:
    """Checks of the segments' parents, if there are any."""
    if sample.parents is None:
        return
    parents, segments = sample.parents, len(sample.cu_seqlens) - 1
    kind = "prefix_tree must be a list or tensor of integers on the CPU with one axis"
    named = f"{kind}, because it names each segment's parent"
    yield isinstance(parents, Sequence | Tensor), named, type(parents).__name__, "pass one"
    if isinstance(parents, Tensor):
        yield holds_whole(parents) and parents.dim() == 1, named, kind_of(parents), "pass one"
        yield (parents.device.type == "cpu",
               f"{kind}, because its depth decides the number of kernel calls", f"{parents.device}",
               "pass prefix_tree.cpu(), once per sample")  # fmt: skip
    listed = listed_of(parents)
    yield from (
        (all(isinstance(parent, Integral) and not isinstance(parent, bool) for parent in listed),
         named, ", ".join(sorted({type(parent).__name__ for parent in listed})),
         "pass a list of int"),
        (len(listed) == segments,
         "prefix_tree must have a parent for each segment, -1 for none, because cu_seqlens says "
         "where segments begin", f"{len(listed)} parents for {segments} segments",
         "pass one parent fewer than cu_seqlens has boundaries"),
        (sample.padded is None, "a prefix tree must have no padding between segments, because a "
         "segment's descendants must be contiguous rows", "cu_seqlens_padded",
         "pass cu_seqlens alone, with padding only after the last segment"),
    )  # fmt: skip
    wrong = [s for s, parent in enumerate(listed) if not -1 <= parent < s]
    yield (
        not wrong,
        "a segment's parent in prefix_tree must be -1 or an earlier segment, because a query "
        "attends to earlier keys only",
        "".join(f"parent {listed[s]} of segment {s}" for s in wrong[:1]),
        "number segments from 0 in the order of cu_seqlens, parents before children",
    )
    wrong = _misplaced(listed)
    yield (
        not wrong,
        "segments of a prefix tree must be stored depth first, because a segment's descendants "
        "must directly follow it",
        "".join(f"segment {s} not directly after segment {listed[s]} and its descendants"
                for s in wrong[:1]),
        "put each segment directly after its parent, or after the last descendant of its "
        "previous sibling",
    )  # fmt: skip


def listed_of(parents: Tensor | Sequence[int] | None) -> list[int]:
    """Parents as a list."""
    return parents.tolist() if isinstance(parents, Tensor) else list(parents or ())


def _misplaced(parents: Sequence[int]) -> list[int]:
    """Segments that do not directly follow their parent and its descendants."""
    path: list[int] = []  # from a root to the previous segment
    misplaced = []
    for segment, parent in enumerate(parents):
        while path and path[-1] != parent:
            path.pop()
        if parent != -1 and not path:
            misplaced.append(segment)
        path.append(segment)
    return misplaced
