"""Ranks that are out of step: all of them say so, with ranks and terms, and none computes on."""

import re
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_burst.attention import burst_attention
from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError, DisagreementError
from tests.ranks import run_ranks

WAYS = {
    "ring": {},
    "gather": {"intra": "gather", "heads_per_round": 1},
    "a2a": {"intra": "a2a"},
    "two nodes, rings": {"hosts": 2},
    "two nodes, gather": {"hosts": 2, "intra": "gather"},
    "two nodes, a2a": {"hosts": 2, "intra": "a2a"},
}
ODD = 2  # the rank that is out of step
A = {"shape": (2, 8), "causal": True}
# what the odd rank calls in place of A, and what the sentence says of it and of the others
INSTEAD = {
    "causal": ({"causal": False}, "causal=False", "causal=True"),
    "layout": ({"layout": "contiguous"}, "layout=contiguous", "layout=zigzag"),
    "batch x length": ({"shape": (4, 4)}, r"q=\(4, 4, 8, 8\)", r"q=\(2, 8, 8, 8\)"),
    "size": ({"shape": (2, 12)}, r"q=\(2, 12, 8, 8\)", r"q=\(2, 8, 8, 8\)"),
}


def forward(config, shape, **options):
    q, k, v = (torch.randn(*shape, h, 8, requires_grad=True) for h in (8, 4, 4))
    return burst_attention(q, k, v, config=config, **options)


def once(config, shape, **options):
    forward(config, shape, **options).sum().backward()


def raised(function) -> str:
    """The sentence that a function ends in; empty if it does not."""
    try:
        function()
    except DisagreementError as error:
        return str(error)
    return ""


def who(sentence, words):
    """The ranks of which a sentence says this."""
    return re.search(rf"{words}[^;]*? on cp ranks (\[[\d, ]+\])", sentence)[1]


def other_calls(rank):
    """By way and change: what a rank is told that calls A while the odd one does not, or inversely;
    then whether the next call is right."""
    found = {}
    for name, way in WAYS.items():
        config = BurstConfig(timeout_s=60, **way)
        once(config, **A)
        for change, (options, *_) in INSTEAD.items():
            other = A | options
            once(config, **other)  # agreed upon by all
            mine = other if rank == ODD else A
            found[name, change] = raised(partial(once, config, **mine))
        once(config, **A)  # nothing is left broken
    return found


def test_a_rank_that_makes_another_call_is_named_on_all_ranks():
    begun = time.monotonic()
    for found in run_ranks(other_calls, 4):
        assert found.keys() == {(name, change) for name in WAYS for change in INSTEAD}
        for (_, change), sentence in found.items():
            _, odd, others = INSTEAD[change]
            assert who(sentence, odd) == "[2]" and who(sentence, others) == "[0, 1, 3]", sentence
    print(time.monotonic() - begun)
