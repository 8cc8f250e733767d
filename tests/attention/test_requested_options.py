"""Options across the modes that calls resolve to: honoured, or refused on all ranks.

Guards against an option that is dropped or refused needlessly, and an `auto` that picks a mode
without a requested option where another mode has it.
"""

import re
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_burst.attention import burst_attention
from megatron_burst.errors import BurstError
from megatron_burst.recompute.checkpoints import patch_checkpoints
from megatron_burst.resolve import reuses_remote
from megatron_burst.schedule.spec import AttentionShape
from megatron_burst.schedule.topology import Topology, pretend_nodes
from tests.options import burst_config
from tests.ranks import run_ranks
from tests.tools.simulate.calls import call_of

SHAPE = AttentionShape(1, 1 << 15, 32, 8, 128, 128, 2, 4, 4)
MANY = AttentionShape(1, 1 << 15, 32, 32, 128, 128, 2, 4, 4)  # all-to-all over all ranks
UNEVEN = Topology(((0, 1, 2),), (0, 0, 1))
WAYS = {  # name: topology, options
    "one rank": (pretend_nodes(1, 1), {}),
    "gather": (pretend_nodes(4, 1), {"intra": "gather"}),
    "ring": (pretend_nodes(4, 1), {"intra": "ring"}),
    "a2a": (pretend_nodes(4, 1), {"intra": "a2a"}),
    "2 nodes, gather": (pretend_nodes(4, 2), {"intra": "gather"}),
    "2 nodes, q": (pretend_nodes(4, 2), {"intra": "gather", "circulate": "q"}),
    "2 nodes, ring": (pretend_nodes(4, 2), {"intra": "ring"}),
    "2 nodes, a2a": (pretend_nodes(4, 2), {"intra": "a2a"}),
    "2 nodes, over all": (pretend_nodes(4, 2), {"inter": "a2a"}),
    "2 nodes, flat": (pretend_nodes(4, 2), {"inter": "flat"}),
    "uneven nodes": (UNEVEN, {}),
}
RINGS = {"ring", "2 nodes, ring", "2 nodes, flat", "uneven nodes"}
REFUSED = {  # option: the modes that do not have it
    ("resend", "never"): RINGS - {"ring"} | {"2 nodes, q"},
    ("resend", "always"): set(),
    ("heads_per_round", 1): RINGS,
    ("heads_per_round", 3): RINGS | {"a2a", "2 nodes, a2a", "2 nodes, over all"},
    ("heads_per_round", 9): WAYS.keys() - {"one rank"},
    ("circulate", "kv"): {"2 nodes, a2a", "2 nodes, over all"},
    ("transfer", "pull"): RINGS,
    ("transfer", "send"): set(),
    ("pieces", False): set(),
    ("overlap", False): set(),
}  # fmt: skip


def refusal(*call, **options):
    """Why a call cannot run as asked for; "" if it can."""
    try:
        call_of(*call, **options)
    except BurstError as error:
        return str(error).removeprefix("burst attention: ")
    return ""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("option", REFUSED, ids=str)
def test_an_option_is_refused_where_the_way_does_not_have_it(way, option):
    topology, options = WAYS[way]
    reason = refusal(SHAPE, topology, **dict([option]) | options)
    assert bool(reason) == (way in REFUSED[option])
    if reason:
        assert reason.startswith(option[0]) and " must " in reason and ", because " in reason
        assert reason.count("; got ") == 1 and "\n" not in reason


def test_what_is_kept_for_recomputation_follows_no_forward_directly():
    call = call_of(SHAPE, pretend_nodes(4, 2), intra="gather", resend="never", resends=True)
    assert not reuses_remote(call)


@pytest.mark.parametrize(
    "asked, between",
    [
        ({}, "a2a"), ({"circulate": "q"}, "ring"), ({"transfer": "pull"}, "ring"),
        ({"transfer": "send"}, "a2a"), ({"heads_per_round": 1}, "a2a"),
        ({"heads_per_round": 9}, "ring"), ({"intra": "gather"}, "ring"),
        ({"resend": "never"}, "a2a"),
    ],
)  # fmt: skip
def test_auto_between_nodes_has_what_was_asked_for(asked, between):
    call = call_of(MANY, pretend_nodes(4, 2), **asked)
    assert call.inter == between
    assert call.heads_per_round == asked.get("heads_per_round", call.heads_per_round)


CALLS = {  # nodes, options of a call on the CPU, words of its refusal
    "never, rings": (2, {"intra": "ring", "resend": "never"}, "never must.*got ring inside nodes"),
    "never, Q": (
        2, {"intra": "gather", "circulate": "q", "resend": "never"}, "never must.*got circulate=q;",
    ),
    "a2a in a ring": (2, {"intra": "a2a", "inter": "ring"}, "all-to-all must run over all ranks"),
    "never, flat": (2, {"flat": True, "resend": "never"}, "never must.*got ring over all"),
    "a ring's heads": (
        1, {"intra": "ring", "heads_per_round": 1}, "heads_per_round must come with.*got heads_per",
    ),
    "heads": (1, {"intra": "gather", "heads_per_round": 9}, "gathers, because.*got 9 of 8; leave"),
    "a rank's heads": (1, {"intra": "a2a", "heads_per_round": 3}, "computes.*got 3 of 2; leave it"),
    "of all ranks": (2, {"inter": "a2a", "heads_per_round": 3}, "computes.*got 3 of 2; leave it"),
    "what does not": (2, {"inter": "a2a", "circulate": "kv"}, "circulate must come with a ring"),
    "inputs of layers": (1, {"keep_offload": "inputs"}, "keep_offload must be resolved by"),
    "half": (2, {"intra": "ring", "keep": "half", "resend": "never"}, "resend=never must come"),
}  # fmt: skip


def inputs(dtype=torch.float32):
    torch.manual_seed(dist.get_rank())
    shapes = ((1, 8, heads, 8) for heads in (16, 8, 8))
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def sentences(rank):
    found = {}
    for name, (nodes, options, _) in CALLS.items():
        with pytest.raises(BurstError) as refusal:
            burst_attention(*inputs(), config=burst_config(nodes=nodes, **options))
        found[name] = str(refusal.value)
    return found


def test_calls_are_refused_in_the_same_sentence_on_all_ranks():
    first, *others = run_ranks(sentences, 4)
    assert all(other == first for other in others)
    for name, (*_, words) in CALLS.items():
        assert re.search(words, first[name]), (name, first[name])


def bytes_of(options, run=None) -> list[int]:
    """Bytes sent in forward and in backward of a call in bf16."""
    sent, post = Counter(), dist.batch_isend_irecv

    def counted(ops):
        for op in ops:
            if op.op is dist.isend:
                sent["bytes"] += op.tensor.numel() * op.tensor.itemsize
        return post(ops)

    dist.batch_isend_irecv = counted
    try:
        config = burst_config(**options)
        tensors = inputs(torch.bfloat16)
        out = (run or (lambda attend, *qkv: attend(*qkv)))(
            lambda q, k, v: burst_attention(q, k, v, config=config), *tensors
        )
        forward = sent.pop("bytes")
        out.sum().backward()
        return [forward, sent["bytes"]]
    finally:
        dist.batch_isend_irecv = post


def sent_with(rank, changes):
    return [bytes_of(options) for options in changes]


def test_gradients_of_an_exchange_are_as_wide_as_asked_for():
    """dQ, dK, dV are returned in bf16 or in fp32; nothing else changes."""
    ways = [{"intra": "a2a", "grad_wire": wire} for wire in ("input", "accumulate", "auto")]
    for narrow, wide, auto in run_ranks(sent_with, 2, ways):
        assert narrow[0] == wide[0] and narrow == auto
        assert wide[1] - narrow[1] == 8 * 8 * (16 + 8 + 8) * 2 // 2  # half of the heads


def test_keys_stay_with_resend_never_whatever_is_kept_without_recomputation():
    way = {"nodes": 2, "intra": "gather", "grad_wire": "input"}
    ways = [way | {"resend": "always"}, way | {"resend": "never"}]
    ways.append(way | {"resend": "never", "keep": "all"})
    for again, stay, kept in run_ranks(sent_with, 2, ways):
        assert stay == kept and stay[0] == again[0]
        assert again[1] - stay[1] == 8 * 8 * (8 + 8) * 2  # K and V


def kept_and_recomputed(rank):
    patch_checkpoints()

    def run(attend, *qkv):
        return checkpoint(attend, *qkv, use_reentrant=True)

    way = {"nodes": 2, "intra": "gather", "keep": "all"}
    return [bytes_of(way | {"resend": resend}, run) for resend in ("always", "never")]


def test_results_that_are_kept_for_recomputation_keep_no_keys_of_other_nodes():
    for always, never in run_ranks(kept_and_recomputed, 2):
        assert always == never
