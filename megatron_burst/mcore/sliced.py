"""Masks of slices for Megatron's models, and positions of their tokens for Megatron's rotary
embedding, which counts through the sample."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_burst import slices as masks
from megatron_burst.comm.announce import reporting_errors
from megatron_burst.comm.transport import Placement
from megatron_burst.errors import Need, require
from megatron_burst.integers import integer
from megatron_burst.masks.sample import holds_whole, kind_of
from megatron_burst.mcore import packed, patches

WHO = "SlicedSeqParams"


@dataclass
class SlicedSeqParams(PackedSeqParams):
    """A micro-batch whose mask is made of slices, for a model's `packed_seq_params`. Megatron hands
    it to every layer, also in pipeline stages and in recomputation.

        params = SlicedSeqParams.of(slices.prefix_lm(prefix, tokens), tokens)
        model(tokens, position_ids, attention_mask=None, labels=labels, packed_seq_params=params)

    All sequences of the micro-batch have the same mask. All layers must run burst. For packed
    samples, pass Megatron's fields too: they say where rows are, also to the rotary embedding.

    Attributes:
        slices: see `burst_attention`; the same on all ranks.
        positions: of the whole sample's tokens, for RoPE and YaRN: int32 or int64 [tokens], on the
            CPU, the same on all ranks. None: as Megatron counts them, through the sample, or
            through each document of a packed one.
    """

    slices: Tensor | None = None
    positions: Tensor | None = None

    def __post_init__(self) -> None:
        if hasattr(super(), "__post_init__"):  # 0.16 has none
            super().__post_init__()
        self.__setstate__({})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also of one that another process made: a data loader's, or a rank that broadcasts it."""
        vars(self).update(state)
        self.are_placed = False  # whether a rotary embedding has used the positions
        patches.apply("positions")

    @classmethod
    def of(cls, slices: Tensor, tokens: int, positions: Tensor | None = None) -> "SlicedSeqParams":
        """Of a micro-batch that is not packed.

        Args:
            slices: on the CPU.
            tokens: of a whole sequence.
            positions: see the attribute.
        """
        tokens = integer(WHO, "tokens", tokens, 1)
        return cls(qkv_format="sbhd", max_seqlen_q=tokens, max_seqlen_kv=tokens, slices=slices,
                   positions=positions)  # fmt: skip

    @classmethod
    def of_tree(
        cls, lengths: Sequence[int], parents: Sequence[int], tokens: int | None = None
    ) -> "SlicedSeqParams":
        """Of a micro-batch of prefix trees that is not packed, with the positions of their tokens:
        all answers to one prompt begin at the same one.

        Args:
            lengths: of the segments, in tokens, in the order of the sample.
            parents: of each segment, -1 for none.
            tokens: of a whole sequence; those after the last segment see nothing. None: as many as
                the segments have.

        Raises:
            BurstError: if the parents are no tree, or the segments longer than the sequence.
        """
        slices, own = masks.tree(lengths, parents), masks.tree_positions(lengths, parents)
        tokens = len(own) if tokens is None else integer(WHO, "tokens", tokens, 1)
        must = "a sequence must hold all segments of its tree, because each segment is a part of it"
        got = f"{len(own)} tokens of segments in {tokens}"
        require(WHO, [(len(own) <= tokens, must, got, "pass the tokens of the whole sequence")])
        return cls.of(slices, tokens, torch.cat((own, own.new_zeros(tokens - len(own)))))


def check_placed(params: PackedSeqParams | None) -> None:
    """Refuse positions that no rotary embedding of the model has used."""
    require(WHO, [(
        getattr(params, "positions", None) is None or params.are_placed,
        "positions must go to a model with Megatron's RoPE or YaRN, because learned positions and "
        "mrope come from the model's position_ids",
        "a model that made no table of positions",
        "pass SlicedSeqParams.of(slices, tokens) without positions, and the positions as "
        "position_ids",
    )])  # fmt: skip


# ---- what a function of Megatron is replaced by: see patches.py ------------------------------


class _Length(int):
    """The tokens of a sample whose rows have positions of their own.

    Megatron's caches of tables hold it, so it does not hold the sample.
    """

    params: ReferenceType[SlicedSeqParams]


def length_with_positions(length_of, /, self, inference_context, transformer, transformer_input,
                          transformer_config, packed_seq_params=None, **options):  # fmt: skip
    """`RotaryEmbedding.get_rotary_seq_len`, which models and MLA's layers call before they ask for
    the table; it is the first to see the parameters."""
    tensors, params = (transformer, transformer_input, transformer_config), packed_seq_params
    if isinstance(params, SlicedSeqParams):
        cp_group = _group_of(self)
        with reporting_errors(cp_group):  # others would wait in their first layer
            tokens = length_of(self, None, *tensors) // transformer_config.context_parallel_size
            tokens *= packed.group_of(params, cp_group).size()
            require(WHO, _needs(params, type(self), transformer_config, tokens))
    length = length_of(self, inference_context, *tensors, params, **options)
    if getattr(params, "positions", None) is None:
        return length
    if _place not in self._forward_hooks.values():
        self.register_forward_hook(_place, with_kwargs=True)
    length = _Length(length)
    length.params = ref(params)
    return length


def _needs(params: SlicedSeqParams, rotary: type, config: Any, tokens: int) -> Iterator[Need]:
    """What a sample of so many tokens needs."""
    is_packed, places = packed.is_packed(params), params.positions
    yield (is_packed or params.max_seqlen_q == params.max_seqlen_kv == tokens,
           "tokens must be the whole sequence's length, because Megatron's RoPE has a row for each",
           f"{params.max_seqlen_q} for a sequence of {tokens}",
           "pass the length over all ranks")  # fmt: skip
    if places is None:
        return
    fits = holds_whole(places) and places.shape == (tokens,)
    yield (fits and not packed.cached(lambda: bool((places < 0).any()), "negative", places),
           f"positions must be int32 or int64 [{tokens}] from 0 on, because each token of the "
           "sample has a position", "negative ones" if fits else kind_of(places),
           "pass the positions of the whole sample")  # fmt: skip
    yield (rotary.forward in (RotaryEmbedding.forward, YarnRotaryEmbedding.forward),
           "positions must go to Megatron's own RotaryEmbedding or YarnRotaryEmbedding, because "
           "other classes make their tables themselves", rotary.__name__,
           "leave positions out, or train this model without trees")  # fmt: skip
    whole = is_packed or config.multi_latent_attention
    yield (not (whole and config.apply_rope_fusion), "in MLA and in packed samples, positions must "
           "come without fused RoPE, because its kernels count in each document themselves",
           "apply_rope_fusion", "pass --no-rope-fusion")  # fmt: skip


def _place(rotary: RotaryEmbedding, args: tuple, options: dict[str, Any], table: Any) -> Any:
    """A forward hook of a rotary embedding: its table with the positions' rows, which are this
    rank's, or all of a packed sample, from which Megatron takes those of each document."""
    params = getattr(args[0] if args else None, "params", lambda: None)()
    if params is None:
        return None
    where = Placement.of(table[0] if isinstance(table, tuple) else table)
    places, longest = _places(params, packed.group_of(params, _group_of(rotary)), where)
    longer = rotary.get_emb(longest)  # not kept: the next sample has other positions
    params.are_placed = True
    return (longer[0][places], *longer[1:]) if isinstance(longer, tuple) else longer[places]


def _places(
    params: SlicedSeqParams, group: dist.ProcessGroup, where: Placement
) -> tuple[Tensor, int]:
    """Rows of the table, and how many it must have."""
    positions, is_packed = params.positions, packed.is_packed(params)

    def compute() -> tuple[Tensor, int]:
        rows = positions
        if not is_packed:
            rows = rows[packed.places_in_zigzag(len(rows) // group.size(), group)]
        return rows.to(where.device, torch.int64), int(positions.max()) + 1

    name = "placed", is_packed, group.rank(), group.size(), where
    return packed.cached(compute, name, positions)


def _group_of(rotary: RotaryEmbedding) -> dist.ProcessGroup:
    return rotary.cp_group or parallel_state.get_context_parallel_group()
