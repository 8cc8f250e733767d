"""What forward saves for backward of other ranks' data: how much, how long, and when nothing.

Guards against memory held after backward, all-to-all results that are kept for recomputation, and a
second backward that finds corrupted ones. Bytes sent are in `test_sent_bytes.py`.
"""

import gc
import weakref

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megatron_burst import BurstConfig, Force, burst_attention, keep
from megatron_burst.schedule.layout import Layout
from tests.attention.test_processes import inputs, truth_of, worst
from tests.oracle import rows_of
from tests.ranks import run_ranks

WORLD, TOKENS = 4, 6
HEADS, DIMS = (16, 8), (6, 4)
WAYS = {
    "one node": BurstConfig(intra="a2a", force=Force(heads_per_round=1)),
    "over all ranks": BurstConfig(inter="a2a", nodes=2, force=Force(heads_per_round=1)),
}
GATHERED = {
    f"gathered on {nodes} nodes": BurstConfig(
        intra="gather", nodes=nodes, force=Force(heads_per_round=3, resend="never")
    )
    for nodes in (2, 4)
}
ROUNDS = {"one node": 2, "over all ranks": 2}
OUT = 2 * TOKENS * HEADS[0] * DIMS[1] * 8
INPUTS = 2 * TOKENS * (HEADS[0] * DIMS[0] + HEADS[1] * sum(DIMS)) * 8
LSE = 2 * TOKENS * HEADS[0] * 8


def shards(rank):
    tensors = inputs(WORLD, TOKENS, HEADS, DIMS, torch.float64)
    truth = truth_of(tensors, True, DIMS[0] ** -0.5)
    rows = rows_of(Layout.ZIGZAG, rank, WORLD, TOKENS)
    return tensors, truth, rows


class Saved:
    """What autograd saves: how much, and what of it is still alive."""

    def __init__(self):
        self.tensors, self.num_bytes = [], 0

    def pack(self, x):
        self.num_bytes += x.nbytes
        self.tensors.append(weakref.ref(x))
        return x

    def alive(self):
        return sum(x() is not None for x in self.tensors)


def saved_and_let_go(rank):
    """By mode: bytes and tensors saved; those alive before and after backward; errors of two
    passes."""
    tensors, truth, rows = shards(rank)
    found = {}
    gc.collect()
    gc.disable()  # memory must be freed without it
    for way, config in WAYS.items():
        leaves = [x[:, rows].detach().clone().requires_grad_() for x in tensors[:3]]
        saved = Saved()
        with saved_tensors_hooks(saved.pack, lambda x: x):
            out = burst_attention(*leaves, config=config)
        before = saved.alive()
        dout = tensors[3][:, rows].detach()
        errors = []
        for again in (True, False):
            grads = torch.autograd.grad(out, leaves, dout, retain_graph=again)
            errors.append(worst([out.detach(), *grads], truth, rows))
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(out, leaves, dout)
        del out, grads
        found[way] = saved.num_bytes, len(saved.tensors), before, saved.alive(), errors
    gc.enable()
    return found


def test_what_is_saved_is_as_large_as_the_inputs_serves_twice_and_is_let_go():
    for found in run_ranks(saved_and_let_go, WORLD):
        for way, (num_bytes, count, before, after, errors) in found.items():
            assert num_bytes == OUT + INPUTS + LSE, way
            assert count == before == 1 + 2 * ROUNDS[way]
            assert after == 0, way
            assert max(errors) <= 1e-12


def gathered(rank):
    """By mode: bytes saved besides q, k, v, out and lse; errors of two backward passes."""
    tensors, truth, rows = shards(rank)
    found = []
    for config in GATHERED.values():
        leaves = [x[:, rows].detach().clone().requires_grad_() for x in tensors[:3]]
        saved = Saved()
        with saved_tensors_hooks(saved.pack, lambda x: x):
            out = burst_attention(*leaves, config=config)
        dout, errors = tensors[3][:, rows].detach(), []
        for again in (True, False):
            grads = torch.autograd.grad(out, leaves, dout, retain_graph=again)
            errors.append(worst([out.detach(), *grads], truth, rows))
        found.append((saved.num_bytes - INPUTS - OUT - LSE, errors))
    return found


def test_keys_of_other_nodes_stay_and_serve_twice():
    keys = 2 * TOKENS * HEADS[1] * sum(DIMS) * 8
    for found in run_ranks(gathered, WORLD):
        for nodes, (num_bytes, errors) in zip((2, 4), found, strict=True):
            assert num_bytes == (nodes - 1) * keys and max(errors) <= 1e-12


def without_backward(rank):
    """Bytes saved where no backward follows, or not for this forward."""
    tensors, _, rows = shards(rank)
    leaves = [x[:, rows].detach().clone() for x in tensors[:3]]
    saved = Saved()
    with saved_tensors_hooks(saved.pack, lambda x: x):
        burst_attention(*leaves, config=WAYS["one node"])
        with torch.no_grad():
            burst_attention(*(x.requires_grad_() for x in leaves), config=WAYS["one node"])
    return saved.num_bytes


def test_nothing_is_saved_where_no_backward_follows():
    assert run_ranks(without_backward, WORLD) == [0] * WORLD


def attend_kept(config):
    """A function of tensors whose results a checkpoint keeps, as `keep` says."""
    return keep(lambda q, k, v: burst_attention(q, k, v, config=config))


def under_checkpoints(rank):
    """Errors, and bytes that recordings hold between the passes."""
    tensors, truth, rows = shards(rank)
    found = {}
    for way, config in (WAYS | GATHERED).items():
        plain = lambda q, k, v, config=config: burst_attention(q, k, v, config=config)  # noqa: E731
        functions = {"none": plain, "keep": attend_kept(config)}
        for name, function in functions.items():
            for reentrant in (False, True):
                leaves = [x[:, rows].detach().clone().requires_grad_() for x in tensors[:3]]
                scaled = lambda q, k, v, f=function: f(q * 1, k * 1, v * 1)  # noqa: E731
                out = checkpoint(scaled, *leaves, use_reentrant=reentrant)
                kept = kept_bytes()
                out.backward(tensors[3][:, rows])
                grads = [x.grad for x in leaves]
                error = worst([out.detach(), *grads], truth, rows)
                found[way, name, reentrant] = error, kept
    return found


def kept_bytes():
    from megatron_burst.recompute.recording import Recording

    gc.collect()
    return sum(each.num_bytes for each in gc.get_objects() if type(each) is Recording)


def test_recordings_hold_out_and_lse_and_recomputation_is_exact():
    for found in run_ranks(under_checkpoints, WORLD):
        for (way, name, reentrant), (error, kept) in found.items():
            assert error <= 1e-12, (way, name, reentrant)
            assert kept == (OUT + LSE if name == "keep" else 0), (way, name, reentrant)


def on_the_node(rank):
    """The error where saved tensors are packed into others."""
    tensors, truth, rows = shards(rank)
    errors = []
    for config in (WAYS | GATHERED).values():
        leaves = [x[:, rows].detach().clone().requires_grad_() for x in tensors[:3]]
        with save_on_cpu():
            out = burst_attention(*leaves, config=config)
        grads = torch.autograd.grad(out, leaves, tensors[3][:, rows])
        errors.append(worst([out.detach(), *grads], truth, rows))
    return max(errors)


def test_hooks_may_put_what_is_saved_elsewhere():
    assert max(run_ranks(on_the_node, WORLD)) <= 1e-12
