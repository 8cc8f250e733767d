"""Memory: only inputs, their gradients and per-token numbers grow with the tokens."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_burst import linear_cross_entropy, token_log_probs
from megatron_burst.loss import autograd, tiles
from megatron_burst.loss.tiles import SCRATCH_BYTES, Sizes, choose_tiles
from tests.loss.oracle import chunks_of, random_problem

VOCAB, WIDTH = 512, 8


class Largest(TorchDispatchMode):
    """Records the bytes of the largest storage that an operation made."""

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
    """Records the peak bytes of live new storages."""

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
    with Live() as seen, chunks_of(64):
        linear_cross_entropy(
            problem.hidden, problem.weight, problem.labels, grads=grads,
            loss_mask=problem.loss_mask.float(),
        ).backward()  # fmt: skip
    gradient = tokens * width * 4
    assert gradient <= seen.most < 1.3 * gradient, seen.most / gradient


def test_the_test_above_sees_all_logits():
    with Largest() as seen:
        torch.ones(8192, WIDTH) @ torch.ones(WIDTH, VOCAB)
    assert seen.num_bytes == 8192 * VOCAB * 4


@pytest.mark.parametrize("processors", [1, 132, 148])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
@pytest.mark.parametrize("vocab", [32 << 10, 128 << 10, 256 << 10, 151936])
@pytest.mark.parametrize("width", [4096, 8192, 16384])
def test_tiles_fit_the_memory_that_is_promised(width, vocab, blocks, whole, processors):
    for tokens in (8 << 10, 32 << 10, 100_000, 256 << 10, 1 << 20):
        local = -(-vocab // blocks)
        held = local * width * 4 if whole else 0
        for room in {0, held}:
            sizes = Sizes(
                tokens // blocks * blocks, local, width, 2, blocks, blocks, processors, room
            )
            chosen = choose_tiles(sizes, whole)
            copies = 1 + whole if blocks == 1 else 4  # of rows: in flight between ranks
            scratch = 2 * chosen.rows * (chosen.classes + copies * width)
            scratch += 0 if whole else 4 * chosen.rows * width
            scratch += room if room <= 512 << 20 else 0
            assert scratch <= 1 << 30, (tokens, chosen)
        assert chosen.rows % blocks == 0 and 0 < chosen.classes <= local
        assert whole == (chosen.classes == local) or not whole
        assert chosen.rows >= 1024  # the GEMMs stay large
    assert SCRATCH_BYTES < 1 << 30


@pytest.mark.parametrize("width, vocab", [(4096, 128 << 10), (4096, 32 << 10), (8192, 128 << 10)])
def test_chunks_fill_the_multiprocessors(width, vocab):
    """Guards against 2816 rows of width 4096 on an H200: 352 blocks take 3 waves, as 396 would."""
    for tokens in (8 << 10, 32 << 10, 128 << 10):
        rows = choose_tiles(Sizes(tokens, vocab, width, 2, processors=132), whole=True).rows
        turns = -(-rows // 128) * (width // 256) / 132
        assert turns > 0.95 * -(-turns // 1), (tokens, rows, turns)


class Products(TorchDispatchMode):
    """Counts GEMMs."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = getattr(func, "overloadpacket", None)
        if packet in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            a, b = args[-2:]
            self.count += a.shape[0] * a.shape[1] * b.shape[1]
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("tiles_of_logits", [1, 4])
def test_the_last_tile_of_logits_is_not_computed_again(tiles_of_logits, monkeypatch):
    """Nor is it kept if the caller says so; a second backward gives the same gradients."""
    monkeypatch.setattr(tiles, "SCRATCH_BYTES", 1 << 19)
    tokens, vocab = 512 * tiles_of_logits, 128
    problem = random_problem(tokens, 1, WIDTH, vocab, torch.float64, mask=False).leaves()
    problem.labels.clamp_(min=0)  # ignored tokens are not computed
    one, grads = tokens * vocab * WIDTH, []
    for keep in (True, False):
        with Products() as seen, chunks_of(512):
            loss = linear_cross_entropy(
                problem.hidden, problem.weight, problem.labels, grads="recompute", keep_logits=keep
            )
            loss.backward(retain_graph=True)
        assert seen.count == 4 * one - (one // tiles_of_logits if keep else 0), keep
        with Products() as seen:
            loss.backward()
        assert seen.count == 3 * one  # forward's is not repeated, but the kept tile is
        grads.append((problem.hidden.grad.clone(), problem.weight.grad.clone()))
        problem.hidden.grad = problem.weight.grad = None
    for kept, computed in zip(*grads, strict=True):
        assert torch.equal(kept, computed)


def test_calls_that_wait_for_backward_keep_their_logits_only_if_asked_to():
    """As in reinforcement learning: several micro-batches, then one backward for all."""
    problem, calls = random_problem(64, 1, WIDTH, VOCAB, torch.float32, mask=False).leaves(), 5
    problem.labels.clamp_(min=0)
    tile, found, grads = 64 * VOCAB * 4, {}, {}
    for keep in (True, False):
        with Live() as live:
            waiting = [
                token_log_probs(problem.hidden, problem.weight, problem.labels, keep_logits=keep)
                for _ in range(calls)
            ]
            found[keep] = sum(size for _, size in live.sizes.values())
        sum(x.log_probs.sum() + x.entropy.sum() for x in waiting).backward()
        grads[keep], problem.weight.grad = problem.weight.grad, None
        del waiting
    assert found[True] >= calls * tile and found[False] < tile, found
    assert torch.equal(grads[True], grads[False])
