"""Capped scores and the largest score of each head, on real processes: exact with every mode,
layout, mask and kind of `keep`.

Guards against a kernel of some mode that is not told the cap, scores of other heads or of keys that
nobody sees, and a recomputation that forgets what the first pass found.
"""

import re
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_burst.attention import burst_attention
from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from megatron_burst.kernels.backends import backends
from megatron_burst.masks import slice_calls
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.spec import Direction
from tests.attention.engine import ByCalls, problem
from tests.attention.failing import failing
from tests.attention.test_processes import inputs
from tests.attention.test_sinks import DIMS, HEADS, MASKS, SCORES, TOKENS, WAYS, WORLD, cases
from tests.checks.test_spot_checks import counted
from tests.faults.acts import told_in
from tests.options import burst_config
from tests.oracle import all_scores, full_attention, largest_of, rows_of, seen_by, seen_by_slices
from tests.ranks import run_ranks

pytestmark = pytest.mark.numeric
CAP, SCALE = 0.4, DIMS[0] ** -0.5


def truth_of(tensors, seen):
    """out, the gradients of q, k and v, and the largest scores."""
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    out = full_attention(*leaves, False, SCALE, seen, softcap=CAP)
    grads = torch.autograd.grad(out, leaves, tensors[3])
    return [out.detach(), *grads, largest_of(*tensors[:2], SCALE, seen, CAP)]


def results_of(tensors, rows, keys=None, **options):
    """The same of this rank's rows, in a checkpoint; the largest scores of its second run too."""
    places = rows, *[rows if keys is None else keys] * 2
    leaves = [x[:, at].clone().requires_grad_() for x, at in zip(tensors, places, strict=False)]
    scores = []

    def attend(q, k, v):
        out, largest = burst_attention(q, k, v, softcap=CAP, return_max_logit=True, **options)
        scores.append(largest.clone())
        return out

    out = checkpoint(attend, *leaves, use_reentrant=False, early_stop=False)
    grads = torch.autograd.grad(out, leaves, tensors[3][:, rows])
    return [out.detach(), *grads, *scores]


def worst(got, truth, rows, keys=None):
    """The largest error of `results_of`; infinite if one is NaN."""
    places = rows, rows, *[rows if keys is None else keys] * 2
    here = [x[:, at] for x, at in zip(truth, places, strict=False)]
    pairs = zip(got, (*here, truth[4], truth[4]), strict=True)
    return max(float((a - b).abs().max().nan_to_num(torch.inf)) for a, b in pairs)


def whole_inputs():
    return [x[:1] for x in inputs(WORLD, TOKENS, HEADS, DIMS, torch.float64)]


def errors(rank, every):
    """By case, the largest error."""
    tensors, truths, by_case = whole_inputs(), {}, {}
    for mask, layout, way, keep in cases(every):
        options, *visible = MASKS[mask]
        if mask not in truths:
            seen = seen_by(*visible[:2], WORLD * TOKENS, visible[2])
            truths[mask] = truth_of(tensors, seen)
        rows = rows_of(layout, rank, WORLD, TOKENS)
        config = burst_config(keep=keep, **WAYS[way])
        got = results_of(tensors, rows, config=config, layout=layout, **options)
        by_case[mask, layout, way, keep] = worst(got, truths[mask], rows)
    return by_case


def test_every_way_is_exact_with_capped_scores_and_has_the_largest_of_all_ranks(request):
    every = request.config.getoption("--all")
    for by_case in run_ranks(errors, WORLD, every, timeout_s=600):
        assert len(by_case) == (6 * 2 * len(WAYS) + 2) * (3 if every else 1)
        assert {case: error for case, error in by_case.items() if not error <= 1e-12} == {}


# Kernels' calls of a tile have rows in common. Nobody sees keys 20 and 21.
SLICES = [(0, 20, 0, 20, 1), (0, 7, 22, 26, 0), (20, 32, 0, 9, 0), (20, 32, 22, 32, 2)]
SLICED_WAYS = ("ring", "gather", "gather on 2 nodes", "a2a")


def errors_of_slices(rank):
    """By layout, way, kernel and how many calls of a tile are many: the largest error."""
    tensors, by_case = whole_inputs(), {}
    tensors[1][:, 20:22] *= 9
    truth = truth_of(tensors, seen_by_slices(SLICES, WORLD * TOKENS))
    backends()["calls"] = ByCalls()
    for layout in ("zigzag", "contiguous"):
        rows = rows_of(layout, rank, WORLD, TOKENS)
        for way in SLICED_WAYS:
            for backend, many in (("calls", 64), ("calls", 0), ("reference", 64)):
                config = burst_config(backend=backend, **WAYS[way])
                options = {"slices": torch.tensor(SLICES), "causal": False, "layout": layout}
                with patch.object(slice_calls, "_MANY", many):
                    got = results_of(tensors, rows, config=config, **options)
                by_case[layout, way, backend, many] = worst(got, truth, rows)
    return by_case


def test_so_is_it_with_slices_in_several_calls_of_a_kernel_or_in_one_of_another():
    for by_case in run_ranks(errors_of_slices, WORLD):
        assert len(by_case) == 2 * len(SLICED_WAYS) * 3
        assert {case: error for case, error in by_case.items() if not error <= 1e-12} == {}


def errors_of_cross_attention(rank):
    """With all keys, and with slices; in one ring and in nested ones."""
    tensors, found = problem(WORLD, 4, HEADS, DIMS, 3, 2, 6), []
    rows, keys = (rows_of("zigzag", rank, WORLD, n) for n in (4, 6))
    some = [(0, 9, 0, 14, 0), (9, 16, 2, 20, 0)]
    for slices in (None, some):
        seen = seen_by_slices(slices or [(0, 16, 0, 24, 0)], 16, 24)
        made, truth = slices and torch.tensor(slices), truth_of(tensors, seen)
        for way in ("ring", "nested rings"):
            config = burst_config(**WAYS[way])
            got = results_of(tensors, rows, keys, causal=False, slices=made, config=config)
            found.append(worst(got, truth, rows, keys))
    return found


def test_so_is_it_in_cross_attention():
    assert all(max(of_rank) <= 1e-12 for of_rank in run_ranks(errors_of_cross_attention, WORLD))


ENDS, PADDED = [0, 5, 13, 20], [0, 8, 16, 32]
OF_DOCUMENTS = [(0, 5, 0, 5, 1), (8, 16, 8, 16, 1), (16, 23, 16, 23, 1)]


def errors_of_padding(rank):
    """By layout and way; scores of padding would be the largest by far."""
    tensors, seen, by_case = whole_inputs(), seen_by_slices(OF_DOCUMENTS, 32), {}
    for x in tensors[:2]:
        x[:, ~seen.any(1)] = 50
    truth = truth_of(tensors, seen)
    edges = {"cu_seqlens": torch.tensor(ENDS), "cu_seqlens_padded": torch.tensor(PADDED)}
    for layout in (Layout.ZIGZAG, Layout.CONTIGUOUS, Layout.DOCUMENTS):
        rows = rows_of(layout, rank, WORLD, TOKENS, PADDED)
        for way in ("ring", "gather", "a2a"):
            config = burst_config(**WAYS[way])
            got = results_of(tensors, rows, config=config, layout=layout.value, **edges)
            by_case[layout, way] = worst(got, truth, rows)
    return by_case


def test_padding_has_no_largest_score():
    for by_case in run_ranks(errors_of_padding, WORLD):
        assert len(by_case) == 9 and max(by_case.values()) <= 1e-12, by_case


def low_precision(rank):
    """Relative errors of out and the gradients in bf16, and the largest difference of the largest
    scores, on two ranks and on one alone."""
    tensors = inputs(2, 64, HEADS, DIMS, torch.bfloat16)
    truth = truth_of([x.double() for x in tensors], torch.ones(128, 128).tril().bool())
    rows, found = rows_of("zigzag", rank, 2, 64), []
    own = dist.new_group([rank], use_local_synchronization=True)
    for here, group in ((rows, None), (slice(None), own)):
        got = results_of(tensors, here, group=group)
        pairs = zip(got[:4], (x[:, here] for x in truth[:4]), strict=True)
        found.append([float((a - b).norm() / b.norm()) for a, b in pairs])
        assert got[4].dtype is torch.float32 and torch.equal(*got[4:])
        found[-1].append(float((got[4] - truth[4]).abs().max()))
    return found


def test_in_bf16_it_is_as_exact_as_on_one_rank():
    for shared, alone in run_ranks(low_precision, 2):
        assert max(shared[4], alone[4]) <= 1e-6 and max(alone) <= 0.01
        assert all(a <= 2 * b + 1e-3 for a, b in zip(shared, alone, strict=True)), (shared, alone)


def other_results(rank):
    """Differences of out, lse and the largest scores by format, with sinks; those scores need no
    gradient, and are all that a call without a cap adds."""
    q, k, v, _ = (x[:1] for x in inputs(2, 4, HEADS, DIMS, torch.float64))
    rows, found, seen = rows_of("contiguous", rank, 2, 4), [], torch.ones(8, 8).bool()
    lse = torch.logaddexp(all_scores(q, k, SCALE, CAP).logsumexp(-1), SCORES.view(1, -1, 1))
    truth = [full_attention(q, k, v, False, SCALE, seen, SCORES, CAP)[:, rows], lse[:, :, rows]]
    truth.append(largest_of(q, k, SCALE, seen, CAP))
    shard = [x[:, rows].clone().requires_grad_() for x in (q, k, v)]
    options = {"causal": False, "sink": SCORES, "return_max_logit": True, "layout": "contiguous"}
    for form in ("bshd", "sbhd", "thd"):
        given = [{"sbhd": x.transpose(0, 1), "thd": x[0]}.get(form, x) for x in shard]
        named = options | {"qkv_format": form}
        out, lse, largest = burst_attention(*given, return_lse=True, softcap=CAP, **named)
        out, lse = {"sbhd": (out.transpose(0, 1), lse), "thd": (out[None], lse[None])}.get(
            form, (out, lse)
        )  # fmt: skip
        pairs = zip((out, lse, largest), truth, strict=True)
        found += [float((a - b).abs().max()) for a, b in pairs]
        assert largest.shape == HEADS[:1] and not largest.requires_grad
    without, largest = burst_attention(*shard, **options)
    found.append(float((largest - largest_of(q, k, SCALE, seen)).abs().max()))
    plain = burst_attention(*shard, **options | {"return_max_logit": False})
    return found, torch.equal(plain, without)


def test_results_come_in_order_and_sinks_are_neither_capped_nor_among_the_largest():
    for differences, same in run_ranks(other_results, 2):
        assert len(differences) == 10 and max(differences) <= 1e-12 and same


def on_one_rank_only(rank, changes):
    """What is said on this rank where rank 1 asks for something else."""
    q, k, v, _ = (x[:, :4] for x in inputs(2, 4, HEADS, DIMS, torch.float32))
    asked = {"softcap": CAP, "return_max_logit": True}
    with pytest.raises(BurstError) as error:
        burst_attention(q, k, v, **asked | (changes if rank else {}))
    burst_attention(q, k, v, **asked)
    return str(error.value)


OTHERS = {"no cap": {"softcap": 0.0}, "another cap": {"softcap": 0.5},
          "no largest": {"return_max_logit": False}}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
def test_another_cap_or_result_on_one_rank_only_is_named_on_all(other):
    (name,) = OTHERS[other]
    for text in run_ranks(on_one_rank_only, 2, OTHERS[other]):
        assert name in text and "on cp rank 1" in text, text


REFUSED = [
    ("softcap", value, "0 or between") for value in (-0.5, float("nan"), True, 1e39, "x")
] + [("return_max_logit", value, "True or False") for value in (1, None)]


def refusals(rank):
    """What is said of each value."""
    qkv, said = [torch.ones(1, 4, 2, 8)] * 3, []
    for name, value, _ in REFUSED:
        with pytest.raises(BurstError) as error:
            burst_attention(*qkv, **{name: value})
        said.append(str(error.value))
    burst_attention(*qkv, softcap=1)
    return said


def test_other_values_are_refused_in_a_sentence():
    for said in run_ranks(refusals, 2):
        for sentence, (name, value, words) in zip(said, REFUSED, strict=True):
            assert re.search(rf"{name} must be {words}.*got {re.escape(repr(value))}", sentence), (
                sentence
            )


def step(sink=None, **options):
    """A call and its backward."""
    leaves = [torch.randn(1, 8, heads, 8, requires_grad=True) for heads in (8, 4, 4)]
    named = {"softcap": CAP, "return_max_logit": True} | options
    burst_attention(*leaves, sink=sink, **named)[0].square().sum().backward()


def of_checked_calls(rank):
    """What is compared of right calls; what is said of a kernel of rank 1 with another cap, in
    forward and in backward, and of the call after each."""
    compared, said = [], []
    for way, options in WAYS.items():
        config, sink = burst_config(check=1, **options), SCORES.float() if way == "ring" else None
        compared.append(counted(partial(step, sink, config=config))[1])
    kernel, config = type(backends()["reference"]), BurstConfig(check=1, timeout_s=60, intra="ring")
    for name in ("forward", "backward"):
        right = getattr(kernel, name)

        def wrong(*args, right=right, **options):
            return right(*args, **options | {"softcap": 1.1 * CAP})

        with patch.object(kernel, name, wrong) if rank else nullcontext():
            said.append(told_in(partial(step, config=config)))
        said.append(told_in(partial(step, config=config)))
    return compared, said


def test_spot_checks_know_the_cap():
    for compared, (forward, good, backward, fine) in run_ranks(of_checked_calls, 2):
        assert compared == [{"out": 1, "lse": 1, "dq": 1, "dk": 1, "dv": 1}] * len(WAYS)
        assert re.search(r"got (out|lse) at .* is off by .* on cp rank 1 ", forward), forward
        assert re.search(r"got d[qk] at .* is off by ", backward), backward
        assert good == fine == ""


def of_failure(rank):
    """What is said where rank 1 fails in forward, alone; and of the next call."""
    call = partial(step, config=BurstConfig(timeout_s=60))
    with failing(Direction.FORWARD, "middle") if rank else nullcontext():
        said = told_in(call)
    return said, told_in(call)


def test_ranks_hear_of_one_that_failed_instead_of_waiting_for_its_largest_scores():
    for rank, (said, again) in enumerate(run_ranks(of_failure, 2)):
        assert rank or re.search("got NoMemoryError: no memory left.* on cp rank 1", said), said
        assert again == ""
