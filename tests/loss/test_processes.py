"""The loss over tensor-parallel processes (gloo) against its definition on one.

Guards against a vocabulary or sequence split differently than the ranks hold it, maxima combined
wrongly, collectives in a different order across ranks, and errors that only one rank sees.
"""

import re
import time
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch.distributed as dist
from torch import ones
from torch.distributed.distributed_c10d import _set_pg_timeout

from megatron_burst.errors import BurstError
from megatron_burst.loss.statistics import LossOptions
from tests.loss.oracle import PLAIN, Problem, chunks_of, oracle, random_problem, relative_error
from tests.ranks import preload, run_ranks

pytestmark = pytest.mark.numeric
preload("megatron_burst.loss.linear", "tests.loss.oracle")
ALL = LossOptions(label_smoothing=0.1, z_loss=1e-2, softcap=5.0, logit_scale=0.7)


def shard(problem: Problem, rank: int, size: int, sequence_parallel: bool) -> Problem:
    """A rank's part, as leaf tensors."""
    mine = problem.hidden.chunk(size)[rank] if sequence_parallel else problem.hidden
    part = replace(problem, hidden=mine, weight=problem.weight.chunk(size)[rank].clone())
    return part.leaves()


def errors(rank: int, size: int, sequence_parallel: bool, options, chunk=None, **settings) -> dict:
    """Errors of the loss and this rank's gradients."""
    from megatron_burst import linear_cross_entropy

    problem = random_problem(s=12, vocab=40)
    problem.weight[:20] += 30  # maxima of the parts are far apart
    truth, ours = problem.leaves(), shard(problem, rank, size, sequence_parallel)
    reduction = settings.get("reduction", "mean")
    weights = problem.loss_mask * 3 if reduction == "none" else 1.5
    (oracle(truth, options, reduction)[0] * weights).sum().backward()
    with chunks_of(chunk):
        loss = linear_cross_entropy(
            ours.hidden, ours.weight, ours.labels, loss_mask=ours.loss_mask,
            tp_group=dist.group.WORLD, sequence_parallel=sequence_parallel, **asdict(options),
            **settings,
        )  # fmt: skip
    (loss * weights).sum().backward()
    grad = truth.hidden.grad.chunk(size)[rank] if sequence_parallel else truth.hidden.grad
    return {
        "loss": relative_error(loss, oracle(problem, options, reduction)[0]),
        "hidden": relative_error(ours.hidden.grad, grad),
        "weight": relative_error(ours.weight.grad, truth.weight.grad.chunk(size)[rank]),
    }


def all_errors(rank, size):
    found = {}
    for sequence_parallel in (False, True):
        for options in (PLAIN, ALL):
            for grads in ("recompute", "forward"):
                for chunk in (size, 5 * size, None):
                    case = f"{sequence_parallel=} {options=} {grads=} {chunk=}"
                    reduction = "none" if options is ALL else "mean"
                    found[case] = errors(
                        rank, size, sequence_parallel, options, chunk, grads=grads,
                        reduction=reduction,
                    )  # fmt: skip
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_loss_and_gradients_are_those_of_one_rank(size):
    for results in run_ranks(all_errors, size, size):
        assert len(results) == 24
        for case, found in results.items():
            assert max(found.values()) < 1e-12, (case, found)


def collectives(rank):
    """Calls of each collective in forward, by how gradients are computed."""
    from megatron_burst import linear_cross_entropy

    found = {}
    for grads in ("recompute", "forward"):
        ours = shard(random_problem(s=12, mask=False), rank, 2, False)
        gathers = mock.patch.object(
            dist, "all_gather_into_tensor", wraps=dist.all_gather_into_tensor
        )
        with gathers as gathered, chunks_of(6):
            linear_cross_entropy(
                ours.hidden, ours.weight, ours.labels, tp_group=dist.group.WORLD, grads=grads
            )
        found[grads] = gathered.call_count
    return found


def test_statistics_of_all_tokens_are_combined_in_one_collective():
    assert run_ranks(collectives, 2) == [{"recompute": 1, "forward": 4}] * 2


def lone_passes(rank):
    """What ranks are told where rank 0 runs a backward, or counts tokens, and rank 1 makes the next
    call; and where rank 1 makes none."""
    from megatron_burst import count_supervised, linear_cross_entropy, unshard

    ours, x = shard(random_problem(mask=False), rank, 2, False), ones(4, requires_grad=True)
    told, groups = {}, [dist.new_group() for _ in range(5)]

    def loss(group, grads):
        given = ours.hidden, ours.weight, ours.labels
        return linear_cross_entropy(*given, tp_group=group, grads=grads, return_lse=False)

    for name, call in {
        "recompute": partial(loss, grads="recompute"), "forward": partial(loss, grads="forward"),
        "unshard": lambda group: unshard(x, group=group, dim=0).sum(),
    }.items():  # fmt: skip
        for comes in (True, False)[: 1 + (name == "recompute")]:
            group = groups.pop()
            out = call(group)
            _set_pg_timeout(timedelta(seconds=3), group)
            try:
                if rank == 0:
                    out.backward()
                elif comes:
                    call(group)
            except BurstError as error:
                told[name, comes] = str(error)
    _set_pg_timeout(timedelta(seconds=3), groups[0])
    if rank == 0:
        with pytest.raises(BurstError) as error:
            count_supervised(ours.labels, tp_group=groups[0])
        told["count", False] = str(error.value)
    return told


def test_a_rank_that_runs_a_backward_alone_is_told_which_rank_did_not_come():
    first, second = run_ranks(lone_passes, 2)
    assert len(first) == 5 and len(second) == 3
    for (name, comes), sentence in first.items():
        words = rf"{'cp' if name == 'unshard' else 'tp'} ranks \[1\]"
        assert re.search(f"a forward on {words}" if comes else f"no word from {words}", sentence)


def refusals(rank):
    """What each rank is told, and whether it continues to work afterwards."""
    from megatron_burst import linear_cross_entropy
    from megatron_burst.errors import BurstError

    said = []

    def ask(change, **settings):
        ours = change(shard(random_problem(mask=False), rank, 2, False))
        with pytest.raises(BurstError) as raised:
            linear_cross_entropy(
                ours.hidden, ours.weight, ours.labels, tp_group=dist.group.WORLD, **settings
            )
        said.append(str(raised.value))

    def spoil_labels(ours):
        ours.labels[0, 0] = 40 if rank == 1 else 0
        return ours

    ask(spoil_labels)
    ask(lambda ours: replace(ours, weight=ours.weight.bfloat16()) if rank else ours)
    # options that no rank has used yet are compared with all others' in words
    bad_dtype = dict(logit_scale=0.5)
    ask(lambda ours: replace(ours, weight=ours.weight.bfloat16()) if rank else ours, **bad_dtype)
    ask(lambda ours: replace(ours, weight=ours.weight[: 20 - rank]), logit_scale=0.25)
    ask(lambda ours: ours, z_loss=0.1 * (rank + 1))
    found = errors(rank, 2, True, PLAIN)
    return said, max(found.values())


def test_what_is_wrong_on_one_rank_alone_is_refused_on_all():
    for rank, (said, error) in enumerate(run_ranks(refusals, 2)):
        assert error < 1e-12
        labels, known, dtype, vocab, options = said
        assert f"got {['some on another rank', [40]][rank]}" in labels
        assert "all ranks of a tensor-parallel group must make the same calls" in known
        assert "first call of its kind" in known and "cast one of them) on tp ranks [1]" in known
        assert "float64 and torch.bfloat16; cast one of them (tp rank 1)" in dtype
        assert "weight=(20, 16)" in vocab and "weight=(19, 16)" in vocab
        assert "--make-vocab-size-divisible-by" in vocab
        assert (
            "z_loss=0.1" in options
            and "z_loss=0.2" in options
            and "give all ranks the same" in options
        )


def poison(rank):
    """A label out of range on all ranks, or on rank 1 only, as on a GPU: which losses are NaN."""
    from megatron_burst import linear_cross_entropy
    from megatron_burst.loss import checks

    checks._stays_on_gpu = lambda x: True
    found = []
    for grads, alone in product(("recompute", "forward"), (False, True)):
        ours = shard(random_problem(mask=False), rank, 2, False)
        ours.labels[3, 1] = 5 if alone and rank == 0 else 40
        losses = linear_cross_entropy(
            ours.hidden, ours.weight, ours.labels, tp_group=dist.group.WORLD, reduction="none",
            grads=grads,
        )  # fmt: skip
        losses.sum().backward()
        found.append((losses.isnan().nonzero().tolist(), bool(ours.weight.grad.isnan().all())))
    return found


def test_a_wrong_label_on_one_rank_makes_the_loss_nan_on_all():
    every = [[s, b] for s in range(12) for b in range(2)]
    assert run_ranks(poison, 2) == [[([[3, 1]], True), (every, True)] * 2] * 2


def differing(rank):
    """What a rank gets if labels or masks differ in one token: on a CPU, and as on a GPU; then the
    error of a call in which they do not, or only where they do not count."""
    from megatron_burst import linear_cross_entropy
    from megatron_burst.loss import checks

    def call(change, **settings):
        ours = shard(random_problem(), rank, 2, False)
        ours.labels[:2], ours.loss_mask[:2], ours.loss_mask[2] = 5, 1, 0
        change(ours)
        return linear_cross_entropy(
            ours.hidden, ours.weight, ours.labels, loss_mask=ours.loss_mask,
            tp_group=dist.group.WORLD, **settings,
        )  # fmt: skip

    def label(ours):
        ours.labels[0, 0] += rank

    def mask(ours):
        ours.loss_mask[0, 0] += rank

    def all_of_the_mask(ours):
        ours.loss_mask.mul_(rank)

    def ignored(ours):
        ours.labels[2] = 7 + rank

    changes, said, nan = (label, mask, all_of_the_mask), [], []
    for change in changes:
        with pytest.raises(BurstError) as raised:
            call(change)
        said.append(str(raised.value))
    losses = [call(lambda ours: None), call(ignored)]
    checks._stays_on_gpu = lambda x: True
    for grads in ("recompute", "forward"):
        for reduction in ("mean", "none"):
            settings = {"grads": grads, "reduction": reduction}
            nan += [bool(call(change, **settings).isnan().all()) for change in changes]
            losses.append(call(ignored, **settings).sum())
    return said, nan, [float(loss) for loss in losses]


def test_labels_or_masks_that_differ_between_ranks_give_no_loss():
    (said, nan, losses), other = run_ranks(differing, 2)
    assert other == (said, nan, losses) and losses[0] == losses[1] and all(map(bool, losses))
    assert all("must be the same on all ranks of a tensor-parallel group" in one for one in said)
    assert len(said) == 3 and nan == [True] * 12


def refused_alone(rank):
    """What each rank is told when rank 1 alone passes something that no tensor's shape shows."""
    from megatron_burst import count_supervised, linear_cross_entropy, token_log_probs

    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=60), dist.group.WORLD)
    said, began = [], time.monotonic()
    ours = shard(random_problem(mask=False), rank, 2, False)
    counts = [count_supervised(ours.labels) for _ in range(2)]
    counts[1] = replace(counts[1], counts=counts[1].counts.repeat(2))
    first = [
        {"label_smoothing": 1.0}, {"z_loss": float("inf")}, {"supervised": counts[1]},
        {"labels": [1, 2]}, {"weight": None}, {"ignore_index": 1.5},
        {"labels": ours.labels.to_sparse()}, {"hidden": ours.hidden.to("meta")},
    ]  # fmt: skip
    for change in first:
        usual = {"hidden": ours.hidden, "weight": ours.weight, "labels": ours.labels,
                 "tp_group": dist.group.WORLD}  # fmt: skip
        if "supervised" in change:
            usual["supervised"] = counts[0]
        with pytest.raises(BurstError) as raised:
            linear_cross_entropy(**(usual | change if rank else usual))
        said.append(str(raised.value))
        assert linear_cross_entropy(**usual) > 0
        with pytest.raises(BurstError) as raised:  # the others know this call now
            linear_cross_entropy(**(usual | change if rank else usual))
        said.append(str(raised.value))
    for smoothing in (0.1, LossOptions(z_loss=-1.0).z_loss):
        options = LossOptions(z_loss=smoothing if rank else 0.0)
        with pytest.raises(BurstError) as raised:
            token_log_probs(
                ours.hidden, ours.weight, ours.labels, tp_group=dist.group.WORLD, options=options
            )
        said.append(str(raised.value))
    return said, time.monotonic() - began


def test_what_one_rank_refuses_reaches_the_others_at_once():
    words = ["label_smoothing must be", "z_loss must not", "supervised tokens must be counted",
             "labels must be a dense", "weight must be a dense", "ignore_index must",
             "labels must be a dense", "hidden must be a dense"]  # fmt: skip
    expected = [word for word in words for _ in range(2)]
    expected += ["without label smoothing and z-loss", "z_loss must not"]
    for said, took in run_ranks(refused_alone, 2):
        assert len(said) == len(expected) and took < 30
        for sentence, word in zip(said, expected, strict=True):
            assert word in sentence and "tp rank" in sentence, sentence


def log_probs(rank):
    from megatron_burst import token_log_probs

    problem = random_problem()
    truth, ours = problem.leaves(), shard(problem, rank, 2, True)
    loss, _, entropy = oracle(truth, PLAIN, "none")
    got = token_log_probs(
        ours.hidden, ours.weight, ours.labels, loss_mask=ours.loss_mask,
        tp_group=dist.group.WORLD, sequence_parallel=True,
    )  # fmt: skip
    (2 * entropy - loss).sum().backward()
    (2 * got.entropy + got.log_probs).sum().backward()
    return [
        relative_error(got.log_probs, -loss),
        relative_error(got.entropy, entropy),
        relative_error(ours.hidden.grad, truth.hidden.grad.chunk(2)[rank]),
        relative_error(ours.weight.grad, truth.weight.grad.chunk(2)[rank]),
    ]


def test_log_probabilities_and_entropy_over_two_ranks():
    for found in run_ranks(log_probs, 2):
        assert max(found) < 1e-12, found
