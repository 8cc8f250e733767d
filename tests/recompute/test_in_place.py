"""What happens to kept results that are modified in place.

Guards against silently wrong gradients: autograd's own check does not see what is kept.
"""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_burst import burst_attention, keep
from megatron_burst.errors import BurstError
from megatron_burst.mcore import patches
from megatron_burst.recompute.keep import run_kept
from megatron_burst.recompute.keeping import Frame, Keeping, Resident, Watch
from megatron_burst.recompute.offload import HostMemory
from tests.options import burst_config
from tests.ranks import run_ranks
from tests.recompute.layers import DIM, HEADS, REENTRANT, flash, inputs, plain

SHAPE = (2, 6, HEADS, DIM)
WRITTEN = rf"burst keep: .*not be modified in place.*got a write to shape \(2, 6, {HEADS}, {DIM}\);"


@pytest.fixture(autouse=True)
def frames():
    patches.apply("checkpoints")


class Split:
    """A policy whose outputs are rebuilt in recomputation, like those of a kept half."""

    rounds = False

    def trim(self, outs):
        return tuple(x.clone() for x in outs)

    def restore(self, kept, inputs):
        return tuple(x.clone() for x in kept)


def host(tensors):
    return HostMemory(torch.device("cpu"), 1 << 20).pack(tensors)


def step(attend, write, reentrant, x):
    """Loss of a layer whose attention output is modified in place."""

    def layer(x):
        heads = x.unflatten(-1, (HEADS, DIM))
        out = attend(heads * 1, heads * 2, heads * 3)
        write(out, heads)
        return out.square()

    if reentrant is None:
        return layer(x).sum()
    return checkpoint(layer, x, use_reentrant=reentrant).sum()


def add(out, heads):
    out += heads


def scale_a_view(out, heads):
    out.transpose(0, 1)[1:].mul_(2.0)


@REENTRANT
@pytest.mark.parametrize("write", [add, scale_a_view])
@pytest.mark.parametrize("attention", [flash, plain])
@pytest.mark.parametrize("pack", [Resident, host])
def test_a_write_to_what_is_kept_is_refused(reentrant, write, attention, pack):
    def attend(*heads):
        return run_kept(attention, heads, Keeping(pack=pack))

    with pytest.raises(BurstError, match=WRITTEN):
        step(attend, write, reentrant, inputs()).backward()


@REENTRANT
@pytest.mark.parametrize("write", [add, scale_a_view])
def test_so_is_one_after_the_checkpoint_that_ran_attention(reentrant, write):
    attend, x = keep(plain), inputs()
    heads = x.unflatten(-1, (HEADS, DIM))
    out = checkpoint(attend, heads * 1, heads * 2, heads * 3, use_reentrant=reentrant)
    with torch.no_grad():
        write(out, heads)
    with pytest.raises(BurstError, match=WRITTEN):
        out.sum().backward()


@REENTRANT
def test_writes_to_what_is_recomputed_are_refused_only_where_backward_reads_it(reentrant):
    """Where it does, autograd itself checks a reentrant checkpoint's graph."""

    def gradient(attention, reentrant):
        x = inputs()

        def attend(*heads):
            return run_kept(attention, heads, Keeping(Split()))

        step(attend, add, reentrant, x).backward()
        return x.grad

    assert torch.equal(gradient(plain, reentrant), gradient(plain, None))
    error, words = (RuntimeError, "modified by an inplace") if reentrant else (BurstError, WRITTEN)
    with pytest.raises(error, match=words):
        gradient(flash, reentrant)


def test_a_write_in_recomputation_alone_is_right_where_backward_does_not_read_the_output():
    def gradient(reentrant):
        x, runs = inputs(), []

        def write(out, heads):
            runs.append(1)
            if len(runs) == 2 or not reentrant:
                out *= 2

        step(keep(plain), write, reentrant, x).backward()
        return x.grad

    assert torch.equal(gradient(True), gradient(None))


def test_an_outer_recomputation_must_not_write_either():
    """It passes the same tensor to the inner checkpoint's first pass."""
    runs, attend = [], keep(plain)

    def layer(x):
        heads = x.unflatten(-1, (HEADS, DIM))
        out = attend(heads * 1, heads * 2, heads * 3)
        runs.append(1)
        if len(runs) == 2:
            with torch.no_grad():
                out += heads
        return out.square()

    def outer(x):
        return checkpoint(layer, x, use_reentrant=True)

    with pytest.raises(BurstError, match=WRITTEN):
        checkpoint(outer, inputs(), use_reentrant=True).sum().backward()


def test_a_watch_holds_no_memory():
    x = torch.ones(SHAPE)
    watch, storage = Watch([x[0], x]), weakref.ref(x.untyped_storage())
    x.view(-1)[3:].sin()
    watch.check()
    x.view(-1)[3:].sin_()
    with pytest.raises(BurstError, match=r"shape \(6, 4, 8\), \(2, 6, 4, 8\);"):
        watch.check()
    del x
    gc.collect()
    assert storage() is None


def test_a_parcel_on_a_host_that_is_full_watches_too():
    x, memory = torch.ones(SHAPE), HostMemory(torch.device("cpu"), 0)
    with Frame():
        parcel = memory.pack((x,))
    assert isinstance(parcel, Resident) and parcel.get()[0] is x
    x.zero_()
    with pytest.raises(BurstError, match=WRITTEN):
        parcel.get()


def burst_written(rank: int) -> dict:
    """By mode and kind of checkpoint, the outcome of a write to burst attention's output."""
    found = {}
    patches.apply("checkpoints")
    for name, options in (("all", {}), ("all", dict(keep_offload="results")), ("half", {})):
        config = burst_config(keep=name, **options)
        for reentrant in (True, False):
            shard = torch.ones(1, 8, 2, 4, dtype=torch.float64).requires_grad_()

            def layer(x, config=config):
                out = burst_attention(x * 1, x * 2, x * 3, config=config)
                out *= 2
                return out.square()

            try:
                checkpoint(layer, shard, use_reentrant=reentrant).sum().backward()
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)
                found[name, *options, reentrant] = "torch"
            except BurstError as error:
                assert "got a write to shape (1, 8, 2, 4);" in str(error)
                found[name, *options, reentrant] = "burst"
    return found


def test_a_write_to_burst_attentions_output_is_refused_however_it_is_kept():
    """Half's tail is stored elsewhere; all rows are rebuilt, and are what backward reads."""
    for found in run_ranks(burst_written, 2):
        assert found.pop(("half", True)) == "torch"
        assert len(found) == 5 and set(found.values()) == {"burst"}
