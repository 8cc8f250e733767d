"""Ranks that are out of step: all report it, with ranks and terms, and none computes on."""

import re
from functools import partial

import torch
import torch.distributed as dist

from megatron_burst.attention import burst_attention
from megatron_burst.comm.detector import DesyncDetector
from megatron_burst.comm.group import check_in_step
from megatron_burst.config import BurstConfig, Force
from megatron_burst.errors import BurstError, DisagreementError
from tests.options import burst_config
from tests.ranks import run_ranks

WAYS = {
    "ring": {},
    "gather": {"intra": "gather", "heads_per_round": 1},
    "a2a": {"intra": "a2a"},
    "two nodes, rings": {"nodes": 2},
    "two nodes, gather": {"nodes": 2, "intra": "gather"},
    "two nodes, a2a": {"nodes": 2, "intra": "a2a"},
}
ODD = 2  # the rank that is out of step
A = {"shape": (2, 8), "causal": True}
# what the odd rank calls instead of A, and what the message says of it and of the others
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


def called(config, group, **options):
    return forward(config, **A | options, group=group)


def raised(function) -> str:
    """The message that a function raises; empty if it returns."""
    try:
        function()
    except DisagreementError as error:
        return str(error)
    return ""


def who(sentence, words):
    """The ranks of which a message says this."""
    return re.search(rf"{words}[^;]*? on cp ranks (\[[\d, ]+\])", sentence)[1]


def other_calls(rank):
    """By mode and change: what a rank is told that calls A while the odd one does not, or vice
    versa; then whether the next call is right."""
    found = {}
    for number, (name, way) in enumerate(WAYS.items()):
        DesyncDetector.max_all_to_all_ranks = (
            number % 2 * 4
        )  # by turns around the ring, and each to each
        config = burst_config(timeout_s=60, **way)
        once(config, **A)
        for change, (options, *_) in INSTEAD.items():
            other = A | options
            once(config, **other)  # agreed upon by all
            mine = other if rank == ODD else A
            found[name, change] = raised(partial(once, config, **mine))
        once(config, **A)  # the group still works
    return found


def test_a_rank_that_makes_another_call_is_named_on_all_ranks():
    for found in run_ranks(other_calls, 4):
        assert found.keys() == {(name, change) for name in WAYS for change in INSTEAD}
        for (_, change), sentence in found.items():
            _, odd, others = INSTEAD[change]
            assert who(sentence, odd) == "[2]" and who(sentence, others) == "[0, 1, 3]", sentence


def backward_twice(rank, attend, end):
    out = attend()
    out.sum().backward(retain_graph=rank == ODD)
    if rank == ODD:
        out.sum().backward()
    attend()


def no_backward(rank, attend, end):
    out = attend()
    if rank != ODD:
        out.sum().backward()
    attend()


def skipped_between_layers(rank, attend, end):
    with torch.no_grad():
        for layer in (1, 2, 3):
            if (rank, layer) != (ODD, 2):
                attend(layer=layer)


def skipped_before_backward(rank, attend, end):
    outs = [attend() for call in range(3) if (rank, call) != (ODD, 1)]
    sum(out.sum() for out in outs).backward()


def skipped_before_the_end(rank, attend, end):
    for call in range(3):
        if (rank, call) != (ODD, 1):
            attend().sum().backward()
    end()


def backward_of_another(rank, attend, end):
    outs = [attend(), attend()]
    for out in outs[::-1] if rank == ODD else outs:
        out.sum().backward()


def first_of_a_kind(rank, attend, end):
    attend()
    attend(causal=rank != ODD)


# what the odd rank begins, and what the others do
ASTRAY = {
    backward_twice: ("the backward of pass", "a forward"),
    no_backward: ("a forward", "the backward of pass"),
    skipped_between_layers: ("a forward in layer 3", "a forward in layer 2"),
    skipped_before_backward: ("the backward of pass", "a forward"),
    skipped_before_the_end: ("the end of a step", "a forward"),
    backward_of_another: ("the backward of pass 2", "the backward of pass 1"),
    first_of_a_kind: ("the first call of its kind.* causal=False", "a forward.* causal=True"),
}


def calls_astray(rank):
    """What a rank is told, by mode and by how the calls differ; and what it is told of the next
    call, which is the same on all ranks."""
    found = {}
    for number, way in enumerate(("ring", "gather", "a2a", "two nodes, rings")):
        DesyncDetector.max_all_to_all_ranks = number % 2 * 4
        for calls in ASTRAY:
            group = dist.new_group()
            config = burst_config(timeout_s=60, **WAYS[way])
            attend = partial(called, config, group)
            function = partial(calls, rank, attend, partial(check_in_step, group))
            found[way, calls.__name__] = raised(function), raised(attend)
    return found


def test_a_rank_that_makes_a_call_or_a_backward_too_many_or_too_few_is_named_on_all_ranks():
    for found in run_ranks(calls_astray, 4):
        assert len(found) == 4 * len(ASTRAY)
        for calls, (odd, others) in ASTRAY.items():
            for (_, name), (sentence, later) in found.items():
                if name == calls.__name__:
                    assert who(sentence, odd) == "[2]", (name, sentence)
                    assert who(sentence, others) == "[0, 1, 3]", (name, sentence)
                    # one call apart, later calls would be wrong without a word
                    assert later == ("" if calls is first_of_a_kind else sentence)
                    assert ("in a new group" in sentence) == bool(later)


def ended(calls, group):
    """What calls of these keys, configurations and masks end with."""
    q, endings = torch.ones(1, 4, 4, 8), []
    for kv, config, causal in calls:
        try:
            burst_attention(q, kv, kv, group=group, config=config, causal=causal)
            endings.append("ok")
        except BurstError as error:
            endings.append(f"{type(error).__name__}: {error}")
    return endings


def with_unlike_agreements(rank):
    """What calls end with after one that no rank can run: another on one rank, that again on all,
    and one that is right."""
    kv = torch.ones(1, 4, 4, 8)
    pulls = BurstConfig(
        force=Force(transfer="pull"), intra="gather", timeout_s=5
    )  # refused: these are CPUs
    rings = BurstConfig(intra="ring", timeout_s=5)
    options = (pulls, True), (pulls, rank == 0), (pulls, True), (rings, True)
    of_communicator = ended([(kv, *each) for each in options], dist.new_group())
    uneven = torch.ones(1, 4, 3, 8)  # refused before there is a communicator
    calls = uneven, uneven if rank == 0 else kv, uneven, kv
    of_call = ended([(each, rings, True) for each in calls], dist.new_group())
    return of_communicator, of_call


def test_agreements_on_a_call_and_on_a_communicator_are_told_apart():
    """Guards against ranks that read each other's words of something else."""
    for found in run_ranks(with_unlike_agreements, 2):
        for words, (first, other, again, right) in zip(
            ("the ranks must use GPUs", "KV heads must divide"), found, strict=True
        ):
            assert first == again and words in first
            assert other.startswith("DisagreementError") and right == "ok"
