"""The original's functions equal dense attention in the original's layouts; arguments, refusals.

Shards are cut here as the original's users cut them, not by the package's own layouts.
"""

import inspect

import pytest
import torch
import torch.distributed as dist

from megatron_burst import compat
from megatron_burst.compat import (
    OpBurstAttn,
    OpBurstAttnStrip,
    burst_attn_func,
    burst_attn_func_striped,
)
from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from tests.oracle import full_attention
from tests.ranks import preload, run_ranks

preload("megatron_burst.compat")

TOKENS, HEADS, DIM = 24, (4, 2), 6
BOUND = 1e-12  # in float64


def zigzag(x, rank, size):
    chunks = x.chunk(2 * size, dim=1)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=1)


def striped(x, rank, size):
    return x[:, rank::size]


def contiguous(x, rank, size):
    return x.chunk(size, dim=1)[rank]


def heads_first(x):
    return x.transpose(1, 2)


def problem(tokens, causal, scale):
    """Whole q, k, v and dout, and (out, dq, dk, dv) of dense attention."""
    generator = torch.Generator().manual_seed(tokens)
    tensors = [
        torch.randn(2, tokens, heads, DIM, generator=generator, dtype=torch.float64)
        for heads in (HEADS[0], HEADS[1], HEADS[1], HEADS[0])
    ]
    leaves = [x.requires_grad_() for x in tensors[:3]]
    out = full_attention(*leaves, causal, scale or DIM**-0.5)
    truth = [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]
    return [x.detach() for x in tensors], truth


def error(function, cut, causal, tokens=TOKENS, scale=None, turn=lambda x: x, **options):
    """The largest error of out, dq, dk and dv on this rank; turn is its own inverse."""
    group = options.get("process_group")
    place = dist.get_rank(group), dist.get_world_size(group)
    tensors, truth = problem(tokens, causal, scale)
    q, k, v, dout = (turn(cut(x, *place)).contiguous() for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    options = {"flash": "cuda"} | options
    out = function(*leaves, scale, options.pop("flash"), causal, True, True, **options)
    got = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    assert out.is_contiguous()
    mine = (cut(x, *place) for x in truth)
    return max(float((turn(a) - b).abs().max()) for a, b in zip(got, mine, strict=True))


def errors(rank):
    """Errors by case, on four ranks."""
    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    intra, inter = rows[rank // 2], columns[rank % 2]
    pairs = [(intra, intra), (inter, inter)]
    nested = {"double_group": [intra, inter], "process_group": dist.group.WORLD}
    func, strip, apply = burst_attn_func, burst_attn_func_striped, OpBurstAttnStrip.apply
    return {
        "zigzag": error(func, zigzag, True),
        "scale": error(OpBurstAttn.apply, zigzag, True, scale=0.3),
        "striped": error(strip, striped, True),
        "no mask": error(func, contiguous, False, tokens=20),  # five rows per rank
        "no mask, striped": error(strip, striped, False, tokens=20),
        "heads first": error(func, zigzag, True, turn=heads_first, flash=None),
        "heads first, none": error(apply, striped, True, turn=heads_first, flash="none"),
        "a group of the ranks": error(func, zigzag, True, process_group=columns[rank % 2]),
        "double group": error(func, zigzag, True, **nested),
        "double group, striped": error(strip, striped, True, **nested),
        "double group in pairs": error(func, zigzag, True, **nested | {"double_group": pairs}),
    }


def test_they_equal_dense_attention_in_the_originals_layouts():
    for found in run_ranks(errors, 4):
        assert {case: bad for case, bad in found.items() if bad > BOUND} == {}
        assert len(found) == 11


def test_the_check_above_can_fail():
    """A layout other than the function's means another mask."""
    (found, _) = run_ranks(wrong_layouts, 2)
    assert min(found) > 1e-3


def wrong_layouts(rank):
    return [
        error(burst_attn_func, striped, True),
        error(burst_attn_func_striped, zigzag, True),
        error(burst_attn_func, contiguous, True),
    ]


@pytest.fixture
def called(monkeypatch):
    """The arguments that burst_attention is called with."""
    calls = []

    def record(q, k, v, **options):
        calls.append(options | {"shape": tuple(q.shape)})
        return q

    monkeypatch.setattr(compat, "burst_attention", record)
    return calls


Q = torch.zeros(1, 4, 2, 8)
DEFAULTS = {
    "group": None, "causal": False, "softmax_scale": None, "layout": "contiguous",
    "config": BurstConfig(), "shape": (1, 4, 2, 8),
}  # fmt: skip
MAPPED = {
    (): {},
    (0.5, "cuda", True, False, True): {
        "softmax_scale": 0.5, "causal": True, "layout": "zigzag",
        "config": BurstConfig(deterministic=True),
    },
    (None, "triton"): {"config": BurstConfig(backend="triton")},
    (None, None): {"shape": (1, 2, 4, 8)},
    (None, "cuda", False, True): {},
    (None, "cuda", False, False, False, None, (None, None)): {},
    (None, "cuda", False, False, False, None, None): {},
}  # fmt: skip


@pytest.mark.parametrize("arguments", MAPPED, ids=str)
def test_arguments_of_the_original_become_burst_attentions(arguments, called):
    for function in (burst_attn_func, OpBurstAttn.apply):
        function(Q, Q, Q, *arguments)
        assert called.pop() == DEFAULTS | MAPPED[arguments]
    for function in (burst_attn_func_striped, OpBurstAttnStrip.apply):
        function(Q, Q, Q, *arguments)
        changed = DEFAULTS | MAPPED[arguments]
        layout = "striped" if changed["causal"] else "contiguous"
        assert called.pop() == changed | {"layout": layout}


def test_the_functions_have_the_originals_arguments_in_its_order():
    names = "q k v softmax_scale flash causal optimize_bwd_comm deterministic process_group"
    for function in (burst_attn_func, burst_attn_func_striped):
        assert [*inspect.signature(function).parameters] == [*names.split(), "double_group"]


class NCCLCommunicator:
    """Called like BMTrain's."""


REFUSED = {
    "kernel": ({"flash": "fa2"}, "flash must be.*got 'fa2'"),
    "communicator": ({"process_group": NCCLCommunicator()}, "got a NCCLComm.*bmtrain_group.py"),
    "sub-group": ({"double_group": [NCCLCommunicator(), None]}, "got a NCCLCommunicator"),
    "pairs": (
        {"double_group": [(NCCLCommunicator(), None), (None, None)]}, "got a NCCLCommunicator",
    ),
    "three groups": ({"double_group": [None] * 3}, r"\[intra, inter\].*got \[None, None, None\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("function", [burst_attn_func, burst_attn_func_striped])
def test_what_burst_cannot_take_is_refused_in_one_sentence(function, case, called):
    options, words = REFUSED[case]
    with pytest.raises(BurstError, match=f"^{function.__name__}: .*{words}") as refusal:
        function(Q, Q, Q, **options)
    assert "\n" not in str(refusal.value) and not called


def refusals(rank):
    """Messages of refusals with real groups and shapes."""
    world, alone = dist.group.WORLD, dist.new_group([rank], use_local_synchronization=True)
    q = torch.zeros(1, 4, 2, 8)
    calls = {
        "one group": {"double_group": [world, None]},
        "no grid": {"double_group": [world, world]},
        "odd rows": {"causal": True, "shorter": 1},
        "shape": {"flash": None, "axes": 3},
        "scale": {"softmax_scale": -1.0},
        "other keys": {"longer": 2},
    }
    said = {}
    for name, options in calls.items():
        given = q[:, options.pop("shorter", 0) :]
        given = given[0] if options.pop("axes", 4) == 3 else given
        keys = torch.cat([given] * options.pop("longer", 1), dim=1)
        with pytest.raises(BurstError) as refusal:
            burst_attn_func(given, keys, keys, **options)
        said[name] = str(refusal.value)
    out = burst_attn_func(q, q, q, process_group=alone, causal=True)
    return said, tuple(out.shape)


def test_what_the_engine_refuses_is_refused_on_all_ranks():
    words = {
        "one group": "got [[0, 1], None]", "no grid": "a row and a column",
        "odd rows": "multiple of 2", "shape": "(4, 2, 8)", "scale": "got -1.0",
        "other keys": "k (1, 8, 2, 8)",
    }  # fmt: skip
    for said, shape in run_ranks(refusals, 2):
        assert {name for name in words if words[name] not in said[name]} == set(), said
        assert shape == (1, 4, 2, 8)
