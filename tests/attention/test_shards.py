"""Shards of whole samples, against plain Python; a group remembers the layout of the last one.

Guards against rows of another rank or order, positions of another document, a gradient that reaches
the wrong rows, and attention in another layout than that of its rows.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_burst import BurstError, burst_attention, next_tokens, position_ids, shard, unshard
from megatron_burst import shards as module
from megatron_burst.schedule.layout import Layout
from tests.loss.packed import random_packed
from tests.ranks import preload, run_ranks

preload("megatron_burst.loss.next_tokens", "tests.loss.packed")
LAYOUTS = [str(layout) for layout in Layout]


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6), size=st.integers(1, 8), layout=st.sampled_from(LAYOUTS),
    dim=st.integers(0, 2),
)  # fmt: skip
def test_rows_and_positions_are_those_of_the_layout(seed, size, layout, dim):
    packed = random_packed(seed, size, layout)
    tokens = len(packed.ids)
    whole = torch.arange(tokens).view([tokens if axis == dim else 1 for axis in range(3)])
    true = torch.arange(tokens)
    for start, _, end in packed.spans:
        true[start:end] -= start
    if packed.spans:
        true[packed.spans[-1][2] :] -= packed.spans[-1][2]
    state = SimpleNamespace(layout="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "announce", lambda *arguments, **options: None)
        patch.setattr(module, "given_or_default", lambda group, who: group)
        patch.setattr(module, "state_of", lambda group: state)
        for rank in range(size):
            group = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: size)
            how = dict(group=group, layout=layout, **packed.boundaries)
            got = shard(whole, dim=dim, **how)
            assert got.shape[dim] == tokens // size
            assert got.flatten().tolist() == packed.places(rank)
            assert torch.equal(position_ids(tokens, **how), true[packed.places(rank)])
    assert state.layout == (layout if size > 1 else "")


def full(whole, starts=(0, 4)):
    """Causal attention of one packed sample, in one process."""
    q, k, v = (x.transpose(1, 2) for x in whole)
    rows = torch.arange(q.shape[2])
    document = torch.searchsorted(torch.tensor(starts), rows, right=True)
    seen = (rows[:, None] >= rows) & (document[:, None] == document)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2)


def errors_of(rank: int, layout: str) -> list[float]:
    """Errors of attention between `shard` and `unshard`, and of gradients; a mesh is a group."""
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    group = dist.group.WORLD if layout == "zigzag" else mesh["cp"]
    torch.manual_seed(0)
    whole = [torch.randn(1, 16, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    weight = torch.randn(1, 16, 2, 8, dtype=torch.float64)
    packed = layout != "striped"  # which has no documents
    true = full(whole, (0, 4) if packed else (0,))
    wanted = torch.autograd.grad((true * weight).sum(), whole)
    how = dict(group=group, layout=layout, cu_seqlens=torch.tensor([0, 4, 16]) if packed else None)
    got = unshard(burst_attention(*(shard(x, **how) for x in whole), **how), **how)
    grads = torch.autograd.grad((got * weight).sum(), whole)
    for grad in grads:
        dist.all_reduce(grad)
        grad /= 2  # the mean over ranks, as DDP and FSDP have it
    options = dict(cp_group=group, whole_sample=True, dim=1)
    how.pop("group")
    labels = next_tokens(torch.arange(16)[None], **options, **how)
    assert torch.equal(labels, shard(next_tokens(torch.arange(16)[None], dim=1, **how), group=group,
                                     **how))  # fmt: skip
    pairs = zip((got, *grads), (true, *wanted), strict=True)
    return [float((x - y).abs().max()) for x, y in pairs]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_of_shards_is_that_of_the_sample(layout):
    for errors in run_ranks(errors_of, 2, layout):
        assert max(errors) < 1e-14, errors


def other_layouts(rank: int) -> list[str]:
    """What ranks are told of calls in another layout, of other rows, and of other arguments."""
    x, said = torch.randn(1, 8, 2, 8), []
    rows = shard(x, layout="contiguous")
    burst_attention(rows, rows, rows, causal=False)  # no mask: no layout
    burst_attention(rows, rows, rows, layout="contiguous")
    calls = (
        lambda: burst_attention(rows, rows, rows),
        lambda: shard(x, layout="zigzag" if rank else "striped"),
        lambda: shard(x[:, : 8 - 4 * rank]),
        lambda: shard(x[:, :6]),
        lambda: shard(x, dim=4),
        lambda: shard(x, group=dist.init_device_mesh("cpu", (1, 2))),
        lambda: unshard(x, cu_seqlens=torch.tensor([0, 9 if rank else 8])),
        lambda: position_ids(8, layout="zigzag-documents"),
    )
    for call in calls:
        with pytest.raises(BurstError) as raised:
            call()
        said.append(str(raised.value))
    rows = shard(x)
    burst_attention(rows, rows, rows)
    return said


def test_another_layout_than_the_last_shards_is_refused_on_all_ranks():
    for said in run_ranks(other_layouts, 2):
        layout, layouts, lengths, odd, axis, mesh, boundaries, documents = said
        assert 'got layout "zigzag" after shard(..., layout="contiguous")' in layout
        assert "layout=striped" in layouts and "layout=zigzag" in layouts
        assert "(1, 8, 2, 8)" in lengths and "(1, 4, 2, 8)" in lengths
        assert "must be a multiple of 4 tokens" in odd
        assert "dim=4 and shape (1, 8, 2, 8)" in axis
        assert "got a DeviceMesh; pass one, or a DeviceMesh of one dimension" in mesh
        assert "cu_seqlens" in boundaries
        assert "cu_seqlens must be given for the layout zigzag-documents" in documents


def test_one_process_has_the_whole_sample():
    x = torch.arange(6.0)[None]
    assert torch.equal(shard(x), x) and torch.equal(unshard(x), x)
    assert position_ids(6, cu_seqlens=torch.tensor([0, 2, 5])).tolist() == [0, 1, 0, 1, 2, 0]
