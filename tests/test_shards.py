"""Shards of whole samples, against plain Python; a group remembers the layout of the last one.

Guards against rows of another rank or order, positions of another document, a gradient that reaches
the wrong rows, calls in another layout than that of the rows or without their documents, and lines
of the pages that train another loss than one rank does.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_burst import (
    BurstConfig,
    BurstError,
    burst_attention,
    next_tokens,
    position_ids,
    shard,
    unshard,
)
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
    state = SimpleNamespace(sharded=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "announce", lambda *arguments, **options: None)
        patch.setattr(module, "group_or_default", lambda group, who: group)
        patch.setattr(module, "state_of", lambda group: state)
        for rank in range(size):
            group = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: size)
            how = dict(group=group, layout=layout, **packed.boundaries)
            got = shard(whole, dim=dim, **how)
            assert got.shape[dim] == tokens // size
            assert got.flatten().tolist() == packed.places(rank)
            assert torch.equal(position_ids(tokens, **how), true[packed.places(rank)])
    assert state.sharded == ((layout, bool(packed.spans), tokens) if size > 1 else None)


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
    ids, alone = torch.arange(16)[None], dist.new_group([rank], use_local_synchronization=True)
    labels = next_tokens(ids, dim=1, **how | {"group": alone})
    assert torch.equal(next_tokens(ids, whole_sample=True, dim=1, **how), shard(labels, **how))
    assert torch.equal(next_tokens(shard(ids, **how), dim=1, **how), shard(labels, **how))
    pairs = zip((got, *grads), (true, *wanted), strict=True)
    return [float((x - y).abs().max()) for x, y in pairs]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_of_shards_is_that_of_the_sample(layout):
    for errors in run_ranks(errors_of, 2, layout):
        assert max(errors) < 1e-14, errors


def refused(calls) -> list[str]:
    """What a rank is told of each call."""
    said = []
    for call in calls:
        with pytest.raises(BurstError) as raised:
            call()
        said.append(str(raised.value))
    return said


def other_layouts(rank: int) -> list[str]:
    """What ranks are told of calls in another layout, of other rows, and of other arguments."""
    x, ids = torch.randn(1, 8, 2, 8), torch.arange(4)
    rows = shard(x, layout="contiguous")
    burst_attention(rows, rows, rows, causal=False)  # no mask: no layout
    burst_attention(rows, rows, rows, layout="contiguous")
    calls = (
        lambda: burst_attention(rows, rows, rows),
        lambda: position_ids(8),
        lambda: next_tokens(ids),
        lambda: next_tokens(torch.arange(8), whole_sample=True, layout="striped"),
        lambda: unshard(rows, layout="striped"),
        lambda: next_tokens(torch.arange(8), layout="contiguous"),
        lambda: shard(x, layout="zigzag" if rank else "striped"),
        lambda: shard(x[:, : 8 - 4 * rank]),
        lambda: shard(x[:, :6]),
        lambda: shard(x, dim=4),
        lambda: shard(x, group=dist.init_device_mesh("cpu", (1, 2))),
        lambda: unshard(x, layout="contiguous", cu_seqlens=torch.tensor([0, 9 + rank])),
        lambda: shard(x, layout="zigzag-documents"),
    )
    said = refused(calls)
    rows = shard(x)
    burst_attention(rows, rows, rows)
    return said


def test_another_layout_than_the_last_shards_is_refused_on_all_ranks():
    for said in run_ranks(other_layouts, 2):
        *others, whole, layouts, lengths, odd, axis, mesh, boundaries, documents = said
        for who, text in zip(FOLLOW, others, strict=True):
            assert text.startswith(f"{who}: layout must be the layout of the group's last shard")
            used = "striped" if "striped" in text else "zigzag"
            assert f'got layout "{used}" after shard(..., layout="contiguous")' in text
        assert "got the 8 tokens of the whole sample; pass whole_sample=True" in whole
        assert "layout=striped" in layouts and "layout=zigzag" in layouts
        assert "(1, 8, 2, 8)" in lengths and "(1, 4, 2, 8)" in lengths
        assert "must be a multiple of 4 tokens" in odd
        assert "dim=4 and shape (1, 8, 2, 8)" in axis
        assert "got a DeviceMesh; pass a process group, or a DeviceMesh of one dimension" in mesh
        assert "cu_seqlens" in boundaries
        assert "cu_seqlens must be given for the layout zigzag-documents" in documents


FOLLOW = "burst attention", "position ids", "next tokens", "next tokens", "unshard"


def packed_calls(rank: int) -> tuple[list[str], list[str]]:
    """What ranks are told of calls that forget the boundaries of a packed sample, and of q, k and v
    in another order; the calls that are right do not raise."""
    x, ids, ends = torch.randn(1, 16, 4, 8), torch.arange(16), torch.tensor([0, 4, 16])
    rows, apart = shard(x, cu_seqlens=ends), torch.randn(1, 2, 4, 8)
    mine = shard(ids, cu_seqlens=ends, dim=0)
    said = refused((
        lambda: burst_attention(rows, rows, rows),
        lambda: burst_attention(rows, rows, rows, causal=False),
        lambda: position_ids(16),
        lambda: next_tokens(mine),
    ))  # fmt: skip
    one = torch.tensor([0, 16])
    burst_attention(rows, rows, rows, cu_seqlens=ends)
    unshard(rows)  # boundaries make no difference to it in zigzag
    burst_attention(rows, apart, apart, causal=False)  # keys of another sequence
    everything = torch.tensor([[0, 16, 0, 16, 1]])
    told = dict(cu_seqlens=one), dict(slices=everything)
    rings = BurstConfig(intra="ring")  # one mode, so one order of sums
    texts = [burst_attention(rows, rows, rows, config=rings, **how) for how in told]
    leaf = rows.clone().requires_grad_()
    run = torch.utils.checkpoint.checkpoint
    rows = shard(x)  # a sample that is not packed
    out = run(lambda y: burst_attention(y, y, y, config=rings), leaf, use_reentrant=False)
    assert torch.allclose(out, texts[0]) and torch.allclose(out, texts[1])
    labels = next_tokens(mine, cu_seqlens=ends), next_tokens(ids, whole_sample=True)
    assert int((labels[0] != labels[1]).sum()) == (rank == 0)  # 4 follows 3 in one document only
    shard(x, cu_seqlens=ends)
    out.sum().backward()  # recomputes a call that was checked when it was made
    turned = [y.transpose(1, 2) for y in (rows, rows[:, :, :2], rows[:, :, :2])]
    how = dict(cu_seqlens=ends)
    with_shard = refused((
        lambda: burst_attention(*turned, **how),
        lambda: burst_attention(turned[0], turned[0], turned[0], **how),
        lambda: next_tokens(ids, **how),
    ))  # fmt: skip
    return said, with_shard


def test_boundaries_that_are_forgotten_after_a_packed_shard_are_refused_on_all_ranks():
    for said, turned in run_ranks(packed_calls, 2):
        for who, text in zip(("burst attention", *FOLLOW[:3]), said, strict=True):
            assert text.startswith(f"{who}: cu_seqlens must be given after a shard of a packed")
            assert "pass torch.tensor([0, tokens])" in text
        assert "q (1, 4, 8, 8)" in turned[0] and "x.transpose(1, 2) of [b, h, s, d]" in turned[0]
        assert "q, k and v must be [b, s, h, d]" in turned[1] and "into 8 rows" in turned[1]
        assert "next tokens: " in turned[2] and "pass whole_sample=True" in turned[2]


PAGES = {"README.md": "**Plain PyTorch**", "docs/how-to/without-megatron.md": "## Plain"}
ROOT = Path(__file__).parents[1]


def lines_of(page: str) -> str:
    """The first Python block of a page after the words of its section."""
    _, _, text = (ROOT / page).read_text().partition(PAGES[page])
    return text.partition("```python\n")[2].partition("```")[0]


def trained(rank: int, page: str, ends: list[int] | None) -> tuple:
    """The page's lines as they stand: labels of this rank, mean loss and mean gradients; and what
    plain torch computes of the whole sample."""
    generator = torch.Generator().manual_seed(3)
    shapes = (40, 16), (16, 16), (40, 16)
    weights = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    tokens = torch.randint(40, (1, 16), generator=generator)
    found = [x.clone().requires_grad_() for x in weights]

    def model(ids, places, attend, words=found[0], at=found[1]):
        x = (words[ids] + at[places]).unflatten(-1, (2, 8))
        return attend(x, 2 * x, 3 * x).flatten(2)

    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    names = dict(mesh=mesh, cp_group=mesh.get_group(), tokens=tokens, model=model, weight=found[2],
                 boundaries=None if ends is None else torch.tensor(ends))  # fmt: skip
    exec(lines_of(page), names)
    for x in (mean := [names["loss"].detach(), *(x.grad for x in found)]):
        dist.all_reduce(x)
    starts = [0, 16] if ends is None else ends
    true = [x.clone().requires_grad_() for x in weights]
    document = torch.searchsorted(torch.tensor(starts), torch.arange(16), right=True) - 1
    places = torch.arange(16) - torch.tensor(starts)[document]
    hidden = model(tokens, places, lambda *qkv: full(qkv, tuple(starts[:-1])), *true[:2])
    labels = tokens.roll(-1).masked_fill(places.roll(-1) == 0, -100)
    loss = F.cross_entropy((hidden @ true[2].T)[0], labels[0])
    wanted = [loss.detach(), *torch.autograd.grad(loss, true)]
    errors = [float((x / 2 - y).abs().max()) for x, y in zip(mean, wanted, strict=True)]
    return int((names["labels"] >= 0).sum()), errors


@pytest.mark.parametrize("ends", [None, [0, 3, 5, 6, 7, 16]], ids=["one document", "packed"])
@pytest.mark.parametrize("page", PAGES)
def test_lines_of_the_pages_train_as_one_rank_does(page, ends):
    (few, errors), (more, others) = run_ranks(trained, 2, page, ends)
    assert few != more  # so that a mean of the ranks' means would be wrong
    assert max(errors + others) < 1e-12


def test_one_process_has_the_whole_sample():
    x = torch.arange(6.0)[None]
    assert torch.equal(shard(x), x) and torch.equal(unshard(x), x)
    assert position_ids(6, cu_seqlens=torch.tensor([0, 2, 5])).tolist() == [0, 1, 0, 1, 2, 0]
