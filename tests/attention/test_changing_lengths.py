"""Calls of changing lengths: ranks agree only once on what does not depend on the length.

Guards against store posts, keys, log lines or memory for each new length, and choices that follow
from a difference between the ranks' machines.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_burst import attention
from megatron_burst import call as facts
from megatron_burst.arguments import CallArgs
from megatron_burst.attention import burst_attention
from megatron_burst.call import call_of
from megatron_burst.comm.detector import PassAnnouncer
from megatron_burst.comm.group import state_of
from megatron_burst.comm.store import StoreConsensus
from megatron_burst.config import BurstConfig
from megatron_burst.errors import DisagreementError
from megatron_burst.logs import Decision
from megatron_burst.schedule.layout import Layout
from tests.attention.test_processes import inputs, truth_of, worst
from tests.options import burst_config
from tests.oracle import rows_of
from tests.ranks import run_ranks
from tests.said import hearing

LENGTHS = range(2, 302, 2)


def call(tokens, batch=1, heads=2, **options):
    return burst_attention(*(torch.ones(batch, tokens, heads, 4) for _ in range(3)), **options)


def many_lengths(rank):
    """Store keys, posts, log lines and resolved calls over many lengths; errors of some."""
    store = dist.group.WORLD.get_group_store()
    call(2)
    dist.barrier()
    before, errors = store.num_keys(), []
    with (
        hearing() as lines,
        mock.patch.object(StoreConsensus, "all_gather", autospec=True) as share,
    ):
        for tokens in LENGTHS:
            call(tokens, batch=1 + tokens % 3)
        for tokens in (14, 302):
            tensors = inputs(2, tokens, (2, 2), (4, 4), torch.float32)
            rows = rows_of(Layout.ZIGZAG, rank, 2, tokens)
            got = burst_attention(*(x[:, rows] for x in tensors[:3]))
            errors.append(worst([got], truth_of(tensors, True, 4**-0.5)[:1], rows))
    dist.barrier()
    resolved = state_of(dist.group.WORLD, None).resolved
    return store.num_keys() - before, share.call_count, lines, len(resolved), max(errors)


def test_new_lengths_of_a_configuration_cost_no_post_no_key_and_no_line():
    for keys, posts, lines, resolved, error in run_ranks(many_lengths, 2):
        assert keys == posts == 0 and lines == [] and resolved == 128
        assert error < 1e-5


def lines_of_calls(rank):
    """What is logged of calls whose choices change with the length."""
    choose = attention._choose

    def choose_by_length(call, *others):
        passes, choices = choose(call, *others)
        tokens = call.shape.tokens
        return passes, [*choices, Decision("many" if tokens > 8 else "few", f"{tokens} tokens")]

    with hearing() as lines, mock.patch.object(attention, "_choose", choose_by_length):
        for tokens in (2, 4, 6, 10, 4, 12):
            call(tokens)
        call(4, causal=False)
    return [line.rpartition("; ")[2] for line in lines]


def test_a_line_is_said_once_for_a_configuration_and_when_a_choice_changes():
    first, other = run_ranks(lines_of_calls, 2)
    assert first == ["few (2 tokens)", "many (10 tokens)", "few (4 tokens)"] and other == []


def other_machine(rank):
    """By what differs on rank 1: the message on this rank, or that the call succeeded."""
    found = {}
    cases = {
        "multiprocessors": {"intra": "gather"},
        "backend": {},
        "none": {"intra": "gather", "heads_per_round": 1},
    }
    choose = facts.choose_backend
    with mock.patch.object(facts, "multiprocessors", return_value=132 - 18 * rank):
        for name, options in cases.items():
            able = ("auto", "reference")[rank] if name == "backend" else "auto"
            with mock.patch.object(facts, "choose_backend", lambda p, _, a=able: choose(p, a)):
                try:
                    call(4, config=burst_config(timeout_s=20, **options))
                except DisagreementError as error:
                    found[name] = str(error)
                else:
                    found[name] = "well"
    return found


def test_facts_that_differ_between_machines_are_told_on_all_ranks():
    for found in run_ranks(other_machine, 2):
        assert found["none"] == "well"
        assert "=132 on cp rank 0" in found["multiprocessors"] or "=114" in found["multiprocessors"]
        assert "heads_per_round" in found["multiprocessors"]
        assert "backend=torch-cpu" in found["backend"] and "reference" in found["backend"]


def terms(tokens=4, batch=1, heads=2, **changes):
    tensors = [torch.ones(batch, tokens, heads, 4) for _ in range(3)]
    return call_of(tensors, CallArgs(**{"softmax_scale": 0.5} | changes))


OTHERS = [
    {"heads": 1}, {"causal": False}, {"softmax_scale": 0.25}, {"layout": "striped"},
    {"window": (3, 0)}, {"sample_args": ("cu_seqlens",)},
    {"sample_args": ("cu_seqlens", "prefix_tree")},
    {"qkv_format": "sbhd"}, {"config": BurstConfig(nodes=2)},
]  # fmt: skip


def digest(one):
    return PassAnnouncer.of(None, one.describe()).digest


def test_a_configuration_is_all_terms_but_batch_and_tokens_and_the_digest_all_of_them():
    one = terms()
    for same in (terms(tokens=8), terms(batch=3)):
        assert same.configuration() == one.configuration() and digest(same) != digest(one)
    for changes in OTHERS:
        other = terms(**changes)
        assert other.configuration() != one.configuration() and digest(other) != digest(one)
    assert digest(terms()) == digest(one)


def test_shapes_that_do_not_fit_together_are_a_configuration_of_their_own():
    q, k = torch.ones(1, 4, 2, 4), torch.ones(1, 6, 2, 4)
    odd, flat = call_of((q, k, q), CallArgs()), call_of((q[0], q[0], q[0]), CallArgs())
    assert odd.configuration() == odd and flat.configuration() == flat
    cross, one = call_of((q, k, k), CallArgs()), call_of((q, q, q), CallArgs())
    assert cross.configuration() == one.configuration() and digest(cross) != digest(one)


@pytest.mark.parametrize("given, seconds", [(None, 180.0), (5.0, 5.0)])
def test_calls_wait_as_long_as_their_group_unless_told(given, seconds):
    assert run_ranks(waits, 1, given) == [seconds]


def waits(rank, given):
    call(4, config=BurstConfig(timeout_s=given))
    return state_of(dist.group.WORLD, given).consensus.timeout_s
