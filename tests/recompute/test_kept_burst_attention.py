"""`burst_attention` with `keep` under torch.utils.checkpoint, on processes; what is refused.

Guards against modes that change gradients, keep what they should not, or are not logged.
"""

import contextlib
import gc
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_burst import BurstConfig, Force, burst_attention
from megatron_burst.comm.communicator import Communicator
from megatron_burst.errors import BurstError
from megatron_burst.mcore import patches
from megatron_burst.schedule.layout import Layout
from tests.options import burst_config
from tests.oracle import full_attention, rows_of
from tests.ranks import run_ranks
from tests.said import hearing

pytestmark = pytest.mark.numeric
SIZE, TOKENS = 2, 8
CASES = {
    "none": (BurstConfig(), {}),
    "all": (BurstConfig(keep="all"), {}),
    "all, gather": (BurstConfig(keep="all", intra="gather"), {}),
    "all, a2a": (BurstConfig(keep="all", intra="a2a", force=Force(heads_per_round=1)), {}),
    "none, a2a": (BurstConfig(intra="a2a"), {}),
    "half": (BurstConfig(keep="half"), {}),
    "half, a2a": (BurstConfig(keep="half", intra="a2a"), {}),
    "half, gather": (BurstConfig(keep="half", intra="gather"), {}),
    "half, two nodes": (BurstConfig(keep="half", nodes=2), {}),
    "half, two nodes, a2a": (BurstConfig(keep="half", nodes=2, inter="a2a"), {}),
    "half, striped": (BurstConfig(keep="half"), dict(layout="striped")),
    "half, contiguous": (BurstConfig(keep="half"), dict(layout="contiguous")),
    "half, no mask": (BurstConfig(keep="half"), dict(causal=False)),
    "half, offload": (BurstConfig(keep="half", keep_offload="results", keep_debug=True), {}),
}
SAID = {
    "half": "keep half: resharded (the early rows are resharded, 0.25 of a forward on each rank)",
    "half, two nodes": "keep half: plain (not resharded: rows would go between nodes)",
    "half, striped": "keep half: plain (the early rows are spread evenly)",
    "half, a2a": "keep half: plain (the early rows are spread evenly)",
    "half, contiguous": "keep half: none (in the contiguous layout later ranks would keep all of",
    "half, no mask": "keep half: none (only for a single causal document does recomputing",
}


def problem():
    generator = torch.Generator().manual_seed(5)
    shapes = [(4, 6), (2, 6), (2, 3)]
    return [
        torch.randn(2, SIZE * TOKENS, *shape, generator=generator, dtype=torch.float64)
        for shape in shapes
    ]


def run(rank: int) -> dict:
    """By case: error of gradients, hops of recomputation, bytes kept, log lines."""
    by_case = {}
    for name, (config, options) in CASES.items():
        layout, causal = Layout(options.get("layout", "zigzag")), options.get("causal", True)
        rows = rows_of(layout, rank, SIZE, TOKENS)
        full = [x.requires_grad_() for x in problem()]
        full_attention(*full, causal, 6**-0.5).square().sum().backward()
        leaves = [x.detach()[:, rows].requires_grad_() for x in full]
        hops = []

        def attend(q, k, v, config=config, options=options, hops=hops):
            before = len(hops)
            with hearing() as lines:
                out = burst_attention(q * 1, k * 1, v * 1, config=config, **options)
            if torch.is_grad_enabled():
                hops.append(("recomputation", len(hops) - before))
            return out, lines

        log = []

        def layer(q, k, v, attend=attend, log=log):
            out, lines = attend(q, k, v)
            log.extend(lines)
            return out

        with watched(hops):
            patches.apply("checkpoints")  # else the first has no frame
            loss = checkpoint(layer, *leaves, use_reentrant=True).square().sum()
            kept = kept_bytes()
            loss.backward()
        recomputed = [x[1] for x in hops if x[0] == "recomputation"]
        errors = [
            float((x.grad - y.grad[:, rows]).abs().max()) for x, y in zip(leaves, full, strict=True)
        ]
        by_case[name] = max(errors), recomputed, kept, "".join(log)
    return by_case


@contextlib.contextmanager
def watched(hops):
    """Records each message between ranks in `hops`."""

    def noting(method):
        def call(*args, **options):
            hops.append(("hop", 1))
            return method(*args, **options)

        return call

    with mock.patch.object(Communicator, "send", noting(Communicator.send)):
        yield


def kept_bytes():
    from megatron_burst.recompute.recording import Recording

    gc.collect()
    return sum(each.num_bytes for each in gc.get_objects() if type(each) is Recording)


@pytest.fixture(scope="module")
def results():
    return run_ranks(run, SIZE)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_full_attention(results, name):
    for by_case in results:
        assert by_case[name][0] <= 1e-12


@pytest.mark.parametrize("name", CASES)
def test_what_is_kept_and_whether_recomputation_communicates(results, name):
    all_bytes = 2 * TOKENS * 4 * (3 + 1) * 8  # out and lse
    falls_back = name in ("none", "none, a2a", "half, no mask", "half, contiguous")
    for by_case in results:
        _, (recomputed,), kept, _ = by_case[name]
        if name.startswith("all"):
            assert (kept, recomputed) == (all_bytes, 0)
        else:
            assert kept == (0 if falls_back else all_bytes / 2) and recomputed > 0


def sent_by_steps(rank: int) -> dict:
    """By mode: bytes that forward and backward send without recomputation, and with all kept."""
    inner, sent, by_mode = dist.batch_isend_irecv, [], {}

    def counting(operations):
        sent.extend(op.tensor.nbytes for op in operations if op.op is dist.isend)
        return inner(operations)

    patches.apply("checkpoints")
    with mock.patch.object(dist, "batch_isend_irecv", counting):
        for intra in ("ring", "gather", "a2a"):
            for keep in ("none", "all"):
                attend = partial(burst_attention, config=BurstConfig(intra=intra, keep=keep))
                run = attend if keep == "none" else partial(checkpoint, attend, use_reentrant=True)
                leaves = [
                    x[:, rows_of(Layout.ZIGZAG, rank, SIZE, TOKENS)].requires_grad_()
                    for x in problem()
                ]
                sent.clear()
                run(*leaves).square().sum().backward()
                by_mode[intra, keep] = sum(sent)
    return by_mode


def test_recomputation_sends_nothing_more_but_what_backward_of_exchanged_heads_needs():
    inputs = sum(x.nbytes for x in problem()) // SIZE  # a rank's q, k and v
    lse = 2 * TOKENS * 4 * 8
    for by_mode in run_ranks(sent_by_steps, SIZE):
        for intra in ("ring", "gather"):
            assert by_mode[intra, "all"] == by_mode[intra, "none"] > 0
        more = by_mode["a2a", "all"] - by_mode["a2a", "none"]
        padding = more - (inputs + lse) * (SIZE - 1) // SIZE
        assert 0 <= padding < 2 * 128  # of two rounds


@pytest.mark.parametrize("name", SAID)
def test_what_half_comes_to_is_said_once(results, name):
    assert results[0][name][3].count(SAID[name]) >= 1
    assert results[1][name][3] == ""


REFUSED = [
    (dict(keep="most"), "option keep must be one of none, half, all, auto.*'most'; choose one"),
    *(
        (dict(keep=number), f"keep must be one of none, half, all, auto.*got {number}; pass half$")
        for number in (0.75, 0.5, 1)
    ),
    (dict(keep="all", keep_layers=-1), "keep_layers must not be negative.*got -1; leave it out"),
    (dict(keep="all", keep_host_gib=0.0), "keep_host_gib must be positive.*got 0.0; leave it"),
    (
        dict(keep="all", keep_budget_gib=1.0),
        "keep_budget_gib must come with keep=auto.*got keep=all, keep_budget_gib=1",
    ),
    (dict(keep_layers=2), "keep_layers must come with keep.*got keep=none, keep_layers=2; pass"),
    (
        dict(keep_offload="both"),
        "keep_offload must come with keep.*keep_offload=both; pass --burst-k",
    ),
    (dict(keep_debug=True), "keep_debug must come with keep.*keep_debug=True; pass --burst-keep"),
    (
        dict(keep="auto", keep_budget_gib=1.0, keep_layers=2),
        "must not be combined with keep_layers.*got .*keep_layers=2, keep_offload=none; leave",
    ),
    (
        dict(keep="auto", keep_budget_gib=1.0, keep_offload="results"),
        "combined.*got .*keep_layers=None, keep_offload=results;",
    ),
    (dict(keep="all", keep_host_gib=1.0), "must come with keep_offload.*keep_host_gib=1.0"),
]


@pytest.mark.parametrize("options, message", REFUSED)
def test_refuses_options_that_contradict_each_other(options, message):
    with pytest.raises(BurstError, match=message):
        burst_config(**options)


def refused_calls(rank: int) -> list[str]:
    sentences = []
    for options in (dict(keep="auto", keep_budget_gib=1.0), dict(keep="all", keep_layers=1)):
        try:
            burst_attention(*problem(), config=burst_config(**options))
        except BurstError as error:
            sentences.append(str(error))
    return sentences


def test_refuses_in_a_single_call_what_needs_to_know_of_layers():
    for auto, layers in run_ranks(refused_calls, 2):
        assert "burst attention: keep must be resolved by Megatron's layers" in auto
        assert "got keep_layers=1; pass keep none, half or all to each call" in layers
