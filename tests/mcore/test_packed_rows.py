"""Which rows of a packed sample a rank has, without TransformerEngine to ask.

Guards against a row order other than that of TransformerEngine's kernel (tests/gpu compares with
the kernel itself), and a stand-in that stays, or replaces the real one.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core import utils

from megatron_burst.errors import BurstError
from megatron_burst.mcore.packed import format_of, keys_are_alike, partitioned_indices
from megatron_burst.patching import undo_all
from megatron_burst.schedule.layout import positions_in_documents
from tests.mcore.gpt import sharded
from tests.mcore.lacking import needs

SAMPLES = {
    "one": (48,),
    "several": (16, 48, 16, 96),
    "empty ones": (0, 16, 0, 0, 32, 0),
    "a tail": (16, 48, -32),
}


def kernel(cu_seqlens: list[int], total_tokens: int, world_size: int, rank: int) -> list[int]:
    """What each thread of TransformerEngine's kernel does, in its words (C's division rounds toward
    zero: the same for nonnegative numbers)."""
    starts, rows = [start // world_size for start in cu_seqlens], []
    for token in range(total_tokens // world_size):
        left, right = 1, len(starts) - 1
        while left < right:
            middle = (left + right) // 2
            left, right = (middle + 1, right) if starts[middle] <= token else (left, middle)
        length = starts[left] - starts[left - 1]
        index = token - starts[left - 1]
        offset = rank if index < length // 2 else (world_size - 1) * 2 - rank
        rows.append(index + starts[left - 1] * world_size + length // 2 * offset)
    return rows


def sample_of(lengths: tuple[int, ...]) -> tuple[torch.Tensor, int]:
    """Boundaries and tokens; a negative length is a tail."""
    boundaries = torch.tensor((0, *(n for n in lengths if n >= 0))).cumsum(0).int()
    return boundaries, sum(map(abs, lengths))


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", SAMPLES)
def test_rows_are_those_of_transformer_engines_kernel(name, world_size):
    boundaries, tokens = sample_of(SAMPLES[name])
    for rank in range(world_size):
        got = partitioned_indices(boundaries, tokens, world_size, rank)
        assert got.dtype == torch.int32 and got.shape == (tokens // world_size,)
        assert got.tolist() == kernel(boundaries.tolist(), tokens, world_size, rank)
        if name != "a tail":  # which rows burst assumes
            places = positions_in_documents(boundaries.tolist(), rank, world_size)
            assert got.tolist() == [row for span in places for row in span]


def test_a_document_that_cannot_be_cut_is_refused():
    boundaries = torch.tensor([0, 16, 28, 32], dtype=torch.int32)
    message = r"multiple of 8 tokens.*4 ranks.*got boundaries \[0, 16, 28, 32\] of 32 tokens"
    with pytest.raises(BurstError, match=message):
        partitioned_indices(boundaries, 32, 4, 0)


@pytest.fixture
def patched(monkeypatch):
    from megatron_burst.mcore import patches

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 1)
    patches.apply("packed")
    yield
    undo_all()


def tokens_of_a_rank() -> list[int]:
    batch = {
        "tokens": torch.arange(24)[None], "labels": None, "cu_seqlens_padded": None,
        "cu_seqlens": torch.tensor([[0, 8, 24]], dtype=torch.int32),
    }  # fmt: skip
    batch = sharded(batch, "ours")
    return batch["tokens"][0].tolist()


@needs("documents without TransformerEngine")
def test_megatron_shards_by_them_where_there_is_no_transformer_engine(patched, monkeypatch):
    monkeypatch.setattr(utils, "tex", None)
    assert tokens_of_a_rank() == [2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 18, 19]
    assert utils.tex is None


@needs("documents without TransformerEngine")
def test_transformer_engine_is_asked_where_it_is(patched, monkeypatch):
    stand_in = SimpleNamespace(thd_get_partitioned_indices=lambda *_: torch.tensor([23, 0]))
    monkeypatch.setattr(utils, "tex", stand_in)
    assert tokens_of_a_rank() == [23, 0]
    assert utils.tex is stand_in


def test_what_is_derived_from_boundaries_follows_them_when_their_memory_is_written_again():
    """As of a static buffer, which torch's counter of writes misses."""
    ends = np.array([0, 8, 16], dtype=np.int32)
    starts, others = torch.from_numpy(ends), torch.tensor([0, 8, 16], dtype=torch.int32)
    params = SimpleNamespace(
        qkv_format="sbhd", cu_seqlens_q=starts, cu_seqlens_kv=others,
        cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None,
    )  # fmt: skip
    assert keys_are_alike(params) and format_of(params, 8, 2) is None
    ends[1] = 5
    assert not keys_are_alike(params) and format_of(params, 8, 2) == "sbhd"
