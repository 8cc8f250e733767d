"""Masks of slices: which keys each query sees, given at run time as parts of the score matrix.

A slice is queries [q_start, q_stop), keys [k_start, k_stop) and a kind, as in MagiAttention
(arXiv 2505.13211): full; causal, in which the last query is level with the last key; inverse
causal, in which the first query is level with the first key and sees all keys from there on; or
both. So each query sees an interval of a slice's keys.
"""

from functools import cached_property
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from megatron_burst.comm.alone import is_first
from megatron_burst.comm.group import Group
from megatron_burst.comm.transport import Placement
from megatron_burst.engine.sample_mask import SampleMask
from megatron_burst.errors import require
from megatron_burst.kernels.interface import Backend
from megatron_burst.kernels.masks.parts import Parts
from megatron_burst.kernels.visible import Visible
from megatron_burst.logs import log_message
from megatron_burst.masks.captured import CapturedDocuments
from megatron_burst.masks.documents import Documents, documents_of
from megatron_burst.masks.sample import Sample, identity, in_rows
from megatron_burst.masks.slice_calls import Calls
from megatron_burst.masks.slice_checks import need_of_pairs, need_of_tensor, work_of_ranks
from megatron_burst.masks.slice_parts import Bands
from megatron_burst.masks.tree import slices_of_tree
from megatron_burst.schedule.chunks import NeededBy
from megatron_burst.schedule.layout import ChunkSegments, Layout, chunks_held
from megatron_burst.schedule.mask import SLICES, Band, TilePositions
from megatron_burst.transforms import is_captured

_WHO = "burst attention"
_FEW = 10  # slices that are named in errors


def mask_of(group: Group, values: tuple, causal: bool, sizes: tuple[int, int, int], layout: str,
            like: Tensor) -> SampleMask:  # fmt: skip
    """What a sample says of the mask: its documents, or its slices; `values`: fields of `Sample`,
    other arguments and errors as of `slices_of`."""
    sample = Sample(*values)
    in_graph = is_captured(like)
    if sample.slices is sample.parents is None:
        if in_graph:  # for each call, as a later replay has other boundaries
            return CapturedDocuments(sample, sizes[:2], Layout(layout), like.device)
        return documents_of(group.samples, sample, sizes[:2], layout, like)
    require(_WHO, [
        (not in_graph, "slices and prefix_tree must not be captured in a CUDA graph, "
         "because kernels read tables that are made from them on the CPU", "a capture with one",
         "pass cu_seqlens alone, or capture what comes before and after attention"),
    ])  # fmt: skip
    return slices_of(group, sample, causal, sizes, layout, like)


def slices_of(group: Group, sample: Sample, causal: bool, sizes: tuple[int, int, int], layout: str,
              like: Tensor) -> "Slices":  # fmt: skip
    """The slices of a sample, or of its tree, built once for all layers, which pass the same ones;
    arguments and errors as of `Slices`, and of `documents_of`. Tells the user how even the first
    sample is."""
    cache, documents = group.samples, None
    if sample.cu_seqlens is not None:  # where rows are, or segments of a tree
        documents = documents_of(cache, sample._replace(slices=None), sizes[:2], layout, like)
    shape = *sizes[:2], like.shape[0], sizes[2]
    key = identity(sample.slices), id(documents), causal, shape, layout, Placement.of(like)
    slices = cache.recent(key)
    if slices is None:
        how = causal, shape, Layout(layout), like.device, documents
        slices = cache[key] = Slices(sample.slices, *how)
        if "slices" not in group.logged and is_first():
            log_message(f"{_WHO}: slices of the first sample: {slices.balance}")
        group.logged["slices"] = None
    return slices


class Slices:
    """The slices of one sample, and what every kernel call sees, once per sample. Nothing here
    waits for the device, except for boundaries of documents that are on a GPU.

    Args:
        tensor: from the caller; None: the slices of the documents' tree.
        causal: whether the caller says that no query sees a later key.
        sizes: tokens on a rank, ranks, sequences of the batch, and keys on a rank.
        layout: how tokens are sharded.
        device: where kernels run.
        documents: says where rows are, in the layout of documents; or what the segments of a tree
            are.

    Attributes:
        text: what ranks compare, by name.
        slices: int64 [slices, 5], as numpy's.
        documents: as given.

    Raises:
        BurstError: if slices are invalid.
    """

    def __init__(self, tensor: Tensor | None, causal: bool, sizes: tuple[int, int, int, int],
                 layout: Layout, device: torch.device,
                 documents: Documents | None = None) -> None:  # fmt: skip
        rows, cp_size, self._batch, key_rows = sizes
        self._tokens, self._keys = rows * cp_size, key_rows * cp_size
        self._shards = cp_size, layout
        if tensor is None:
            tensor = slices_of_tree(documents.starts, documents.parents)
            terms = documents.checked_text()
        else:
            require(_WHO, need_of_tensor(tensor))
            terms = {"slices": _shown(tensor.numpy())} | dict((documents and documents.text) or {})
        slices = tensor.numpy().astype(np.int64)
        if "slices" in terms:
            require(_WHO, need_of_pairs(slices, (self._tokens, self._keys), causal, cp_size))
        self.text, self.slices, self._device, self.documents = terms, slices, device, documents
        self._bands = Bands(slices)
        self._visible: dict[tuple, Visible | Calls] = {}
        self._is_needed: dict[NeededBy, bool] = {}
        if documents is not None:
            self.arrange_index = documents.arrange_index
            self.restore_index = documents.restore_index

    @property
    def balance(self) -> str:
        """How evenly ranks share the work of a sample sharded as a whole, and how many of the other
        ranks' keys a rank needs, in words."""
        cp_size, layout = self._shards
        whole = layout in (Layout.ZIGZAG, Layout.CONTIGUOUS) and len(self.slices)
        if not whole or cp_size == 1:
            return "each rank computes its own rows"
        work = work_of_ranks(torch.from_numpy(self.slices), cp_size, layout, self._tokens)
        ratio = max(work) * len(work) / sum(work)
        chunks_by_rank = [list(chunks_held(layout, rank, cp_size)) for rank in range(cp_size)]
        needed = [np.delete(self._chunks[own].any(0), own) for own in chunks_by_rank]
        return (f"the slowest rank computes {ratio:.2f} times the mean of (query, key) pairs, and "
                "with an all-to-all (--burst-intra a2a) all ranks compute equally many; a rank "
                f"needs {np.mean(needed):.0%} of the other ranks' keys, and a gather sends no "
                "others")  # fmt: skip

    def checked_text(self) -> dict[str, str]:
        """What ranks compare; what came on a GPU is checked now."""
        return self.text | dict(self.documents.checked_text() if self.documents else {})

    def is_seen(self, between: NeededBy) -> bool:
        """Whether any query of some chunks sees any key of some."""
        if between not in self._is_needed:
            pairs = self._chunks[list(between.queries)][:, list(between.keys)]
            self._is_needed[between] = bool(pairs.any())
        return self._is_needed[between]

    @cached_property
    def _chunks(self) -> np.ndarray:
        """Which chunks of the sample, or of every document, meet: bool [of queries, of keys]."""
        cp_size, layout = self._shards
        count = len(chunks_held(layout, 0, cp_size)) * cp_size
        by_document = self.documents is not None and layout == Layout.DOCUMENTS
        whole = [[0, self._tokens], [0, self._keys]]
        sides = []
        for starts in [self.documents.starts] * 2 if by_document else whole:
            edges = np.array(starts, dtype=np.int64)
            within = edges[:-1, None] + np.diff(edges)[:, None] // count * np.arange(count)
            sides.append(np.append(within, edges[-1]))
        return self._bands.chunks(*sides, count)

    def visible(
        self, band: Band, places: TilePositions, unit: int, run: Backend
    ) -> Visible | Calls:
        """What a kernel call sees whose queries and keys are at these positions, in units of rows;
        or the calls, for a backend that takes no parts. The slices say more than the band."""
        native = SLICES in run.capability.masks
        key = (places if isinstance(places, ChunkSegments) else (*places, unit)), native
        if key not in self._visible:
            if isinstance(places, ChunkSegments):
                (sides,) = places.pairs  # without a causal band all chunks form one segment
                q, keys = map(self.documents.places_of, sides)
            else:
                q, keys = (in_rows(side, unit) for side in places)
            parts = Parts(self._bands.parts(q, keys))
            calls = Calls(parts, self._device, together=self._batch == 1)
            self._visible[key] = Visible(parts=parts) if native else calls
        return self._visible[key]


def _shown(slices: np.ndarray) -> str:
    """A few slices, and a digest of all."""
    first = f"{slices[:_FEW].tolist()}"[:-1] + (", ...]" if len(slices) > _FEW else "]")
    digest = blake2b(slices.tobytes(), digest_size=8).hexdigest()
    return f"{first} of {len(slices)} ({digest})"
