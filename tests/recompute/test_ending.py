"""The last call of a checkpoint is not made again; all gradients are those of full recomputation.

Guards against results without values where backward reads them, places of kept calls that shift,
and a call that is skipped because another checkpoint's was.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from megatron_burst import keep
from megatron_burst.errors import BurstError
from megatron_burst.recompute.checkpoints import patch_checkpoints
from megatron_burst.recompute.ending import Ending

SIZES, STEPS = (6, 10), 3


class Linear(torch.autograd.Function):
    """A linear layer that saves its input after it ran, as TransformerEngine's do."""

    @staticmethod
    def forward(ctx, x, weight):
        out = x @ weight.T
        ctx.save_for_backward(x, weight)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2)


class Block(torch.nn.Module):
    """x + fc2(silu(attend(fc1(x)))), and what `tail` makes of it.

    `ends`: whether fc2 may be the last call of a checkpoint.
    """

    def __init__(self, ends, tail=lambda out: out, kept=False, frozen=False):
        super().__init__()
        torch.manual_seed(2)
        self.fc1 = torch.nn.Parameter(torch.randn(SIZES[1], SIZES[0], dtype=torch.double))
        self.fc2 = torch.nn.Parameter(torch.randn(SIZES[0], SIZES[1], dtype=torch.double))
        self.fc2.requires_grad_(not frozen)
        self.calls, self.tail = 0, tail
        self.last = Ending(self.linear, lambda: (self.fc2,)) if ends else self.linear
        self.attend = keep(torch.cumsum) if kept else torch.cumsum

    def linear(self, x):
        self.calls += 1
        return Linear.apply(x, self.fc2), None

    def forward(self, x):
        y = self.attend(Linear.apply(x, self.fc1), dim=1)
        out, bias = self.last(torch.nn.functional.silu(y))
        assert bias is None
        return self.tail(x + out)


def steps(blocks, region, reentrant, micro_batches=2):
    """Gradients of some steps; `region` runs the blocks on x in checkpoints."""
    found = []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        outs, leaves = [], []
        for _ in range(micro_batches):  # all first passes come before the first backward
            x = torch.randn(2, 4, SIZES[0], generator=draw, dtype=torch.double).requires_grad_()
            leaves.append(x)
            outs.append(region(blocks, x, reentrant))
        for out in outs:
            out.square().sum().backward()
        found += [x.grad for x in leaves]
        for block in blocks:
            for weight in block.parameters():
                found.append(weight.grad)
                weight.grad = None
    return found


def each_alone(blocks, x, reentrant):
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=reentrant)
    return x


def together(blocks, x, reentrant):
    def run(x):
        for block in blocks:
            x = block(x)
        return x

    return checkpoint(run, x, use_reentrant=reentrant)


def compare(region, reentrant, **options):
    """Calls of the last linear layers per block, as (with, without)."""
    patch_checkpoints()
    plain, ending = ([Block(ends, **options) for _ in range(2)] for ends in (False, True))
    truth, got = (steps(blocks, region, reentrant) for blocks in (plain, ending))
    for one, true in zip(got, truth, strict=True):
        assert (one is None and true is None) or torch.equal(one, true)
    return [block.calls for block in ending], [block.calls for block in plain]


FIRSTS, ALL = 2 * STEPS, 4 * STEPS  # calls of first passes, and with recomputations
# the first recomputation makes it, and in non-reentrant ones of micro-batches in flight
MADE = {True: FIRSTS + 2, False: FIRSTS + 2}


@pytest.mark.parametrize("kept", [False, True], ids=["", "with a kept call"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
class TestCheckpoints:
    def test_the_last_call_is_not_made_again(self, reentrant, kept):
        got, plain = compare(each_alone, reentrant, kept=kept)
        assert plain == [ALL, ALL]
        assert got == [MADE[reentrant]] * 2

    def test_another_blocks_reads_it_in_a_checkpoint_of_two(self, reentrant, kept):
        got, plain = compare(together, reentrant, kept=kept)
        assert plain == [ALL, ALL]
        assert got == [ALL, MADE[reentrant]]

    @pytest.mark.parametrize("tail", [torch.sin, lambda x: x * x, lambda x: x.softmax(-1)])
    def test_nor_what_something_reads_behind_it(self, reentrant, kept, tail):
        got, _ = compare(each_alone, reentrant, kept=kept, tail=tail)
        assert got == [ALL, ALL]

    def test_it_is_where_what_is_behind_reads_no_values(self, reentrant, kept):
        def tail(out):
            return torch.nn.functional.dropout(2 * out.transpose(0, 1), p=0.0) - 1

        got, _ = compare(each_alone, reentrant, kept=kept, tail=tail)
        assert got == [MADE[reentrant]] * 2


def test_a_frozen_layer_is_left_out_too():
    got, _ = compare(each_alone, True, frozen=True)
    assert got == [MADE[True]] * 2


def test_all_is_made_again_where_torch_does_not_stop_early():
    with set_checkpoint_early_stop(False):
        got, _ = compare(each_alone, False)
    assert got == [ALL, ALL]


def test_nothing_is_left_out_in_checkpoints_inside_others():
    def nested(blocks, x, reentrant):
        return checkpoint(lambda x: each_alone(blocks, x, reentrant), x, use_reentrant=reentrant)

    got, plain = compare(nested, True)
    assert got == plain


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_reader_that_comes_later_is_refused(reentrant):
    """Not given results without values."""
    patch_checkpoints()
    (block,) = blocks = [Block(True)]
    steps(blocks, each_alone, reentrant)
    block.tail = torch.sin
    with pytest.raises(BurstError, match="must not change between steps"):
        steps(blocks, each_alone, reentrant)
