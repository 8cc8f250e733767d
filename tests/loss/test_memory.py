"""Memory: no tensor grows with the tokens but inputs, their gradients and numbers per token."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_burst import linear_cross_entropy
from megatron_burst.loss import autograd, tiles
from megatron_burst.loss.tiles import SCRATCH_BYTES, choose_tiles
from tests.loss.oracle import random_problem

VOCAB, WIDTH = 512, 8


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest storage that an operation made."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.num_bytes = max(self.num_bytes, x.untyped_storage().nbytes())
        return out


def largest(tokens, grads):
    problem = random_problem(tokens, 1, WIDTH, VOCAB, torch.float32, mask=False).leaves()
    with Largest() as seen:
        loss = linear_cross_entropy(problem.hidden, problem.weight, problem.labels, grads=grads)
        loss.backward()
    return seen.num_bytes


@pytest.mark.parametrize("grads", ["recompute", "forward"])
def test_the_largest_tensor_does_not_grow_with_the_tokens(grads, monkeypatch):
    monkeypatch.setattr(tiles, "SCRATCH_BYTES", 1 << 20)
    few, many = largest(1024, grads), largest(8192, grads)
    assert few <= 1 << 20 and many <= 1 << 20
    assert many < 8192 * VOCAB * 4 / 10  # of all logits


class Live(TorchDispatchMode):
    """Notes the most bytes of new storages that were alive at once."""

    def __init__(self):
        super().__init__()
        self.sizes, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.sizes[storage._cdata] = storage._weak_ref(), storage.nbytes()
        self.sizes = {
            key: (weak, size)
            for key, (weak, size) in self.sizes.items()
            if not torch.UntypedStorage._expired(weak)
        }
        self.most = max(self.most, sum(size for _, size in self.sizes.values()))
        return out


@pytest.mark.parametrize("grads", ["recompute", "forward"])
def test_masked_tokens_take_no_second_gradient_of_the_hidden_states(grads, monkeypatch):
    monkeypatch.setattr(tiles, "SCRATCH_BYTES", 1 << 18)
    monkeypatch.setattr(autograd, "_ROWS_AT_ONCE", 64)
    width, tokens = 256, 2048
    problem = random_problem(tokens, 1, width, 64, torch.float32).leaves()
    with Live() as seen:
        linear_cross_entropy(
            problem.hidden, problem.weight, problem.labels, grads=grads,
            loss_mask=problem.loss_mask.float(), chunk_tokens=64,
        ).backward()  # fmt: skip
    gradient = tokens * width * 4
    assert gradient <= seen.most < 1.3 * gradient, seen.most / gradient


def test_the_test_above_sees_all_logits():
    with Largest() as seen:
        torch.ones(8192, WIDTH) @ torch.ones(WIDTH, VOCAB)
    assert seen.num_bytes == 8192 * VOCAB * 4


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
@pytest.mark.parametrize("vocab", [32 << 10, 128 << 10, 256 << 10, 151936])
@pytest.mark.parametrize("width", [4096, 8192, 16384])
def test_tiles_fit_the_memory_that_is_promised(width, vocab, blocks, whole):
    for tokens in (8 << 10, 32 << 10, 100_000, 256 << 10, 1 << 20):
        local = -(-vocab // blocks)
        chosen = choose_tiles((tokens // blocks * blocks, local, width), 2, blocks, whole, None)
        scratch = 2 * chosen.rows * (chosen.classes + 4 * width) + 4 * chosen.rows * width
        assert scratch <= 1 << 30, (tokens, chosen)
        assert chosen.rows % blocks == 0 and 0 < chosen.classes <= local
        assert whole == (chosen.classes == local) or not whole
        assert chosen.rows >= 1024  # the GEMMs stay large
    assert SCRATCH_BYTES < 1 << 30
