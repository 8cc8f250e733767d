"""By which angles Megatron's RoPE turns rows under --dataloader-inter-document-masking.

python conformance/upstream/inter_document_rope.py

Needs megatron-core 0.19 and no GPU: it asks Megatron's own functions which rows two
context-parallel ranks hold, and by which position each row is turned, and counts the rows where
that is not the row's position in its document. For comparison it does the same with the rows that
TransformerEngine expects, document by document.
"""

from itertools import pairwise
from unittest import mock

import torch

ANYWHERE = [0, 100, 407, 512]  # documents that start at any token
PADDED = [0, 100, 408, 512]  # their lengths are multiples of 2 * CP
RANKS = 2


class Group:
    """What Megatron's functions ask of a context-parallel group."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return RANKS


def positions(boundaries: list[int]) -> torch.Tensor:
    """Of all rows of the sample, in their documents."""
    return torch.cat([torch.arange(stop - start) for start, stop in pairwise(boundaries)])


def rows_of_the_sample(rank: int, boundaries: list[int]) -> torch.Tensor:
    """The rows that Megatron's data loader gives a rank: two chunks of the whole sample."""
    from megatron.core.utils import _get_batch_on_this_cp_rank_per_sequence_balancing as shard

    batch = {"tokens": torch.arange(boundaries[-1])[None], "cu_seqlens": None}
    known = {"get_rank": Group.rank, "get_world_size": Group.size}
    with mock.patch.multiple("torch.distributed", **known):
        return shard(batch, cp_group=Group(rank))["tokens"][0]


def rows_of_documents(rank: int, boundaries: list[int]) -> torch.Tensor:
    """The rows that TransformerEngine expects: two chunks of every document."""
    rows = []
    for start, stop in pairwise(boundaries):
        chunks = torch.arange(start, stop).chunk(2 * RANKS)
        rows += [chunks[rank], chunks[-1 - rank]]
    return torch.cat(rows)


def turned_by(rank: int, boundaries: list[int], held: int) -> torch.Tensor:
    """The position by which Megatron turns each row that a rank holds."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd as turn

    longest = int(positions(boundaries).max()) + 1
    angles = torch.arange(longest) / 1000  # of one pair of values, small enough to be unique
    x = torch.tensor([1.0, 0.0]).repeat(held, 1, 1)  # (1, 0) is turned to (cos, sin)
    freqs = angles[:, None, None, None].repeat(1, 1, 1, 2)
    found = turn(x, torch.tensor(boundaries, dtype=torch.int32), freqs, cp_group=Group(rank))
    return (torch.atan2(found[..., 1], found[..., 0])[:, 0] * 1000).round().long()


def wrong(rows_of, boundaries: list[int]) -> int:
    """Rows of all ranks that are turned by another position than theirs; all, if Megatron fails."""
    count = 0
    for rank in range(RANKS):
        rows = rows_of(rank, boundaries)
        try:
            found = turned_by(rank, boundaries, len(rows))
        except RuntimeError as error:
            print(f"rank {rank}: {error}")
            count += len(rows)
            continue
        count += int((found != positions(boundaries)[rows]).sum())
    return count


CASES = {
    "document by document, lengths of multiples of 4": (rows_of_documents, PADDED),
    "as a whole, lengths of multiples of 4": (rows_of_the_sample, PADDED),
    "as a whole, any lengths": (rows_of_the_sample, ANYWHERE),
}

if __name__ == "__main__":
    for name, case in CASES.items():
        print(f"sharded {name}: {wrong(*case)} of 512 rows are turned by a wrong position")
