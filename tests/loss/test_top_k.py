"""Probabilities of several classes, a teacher's top k and the KL divergence, against float64.

600 random cases over 1, 2 and 4 tensor-parallel ranks. Guards against a remainder that cancels,
classes named on another rank or in another tile, rows that a rank computes for another one and
sends back to the wrong place, and gradients of ignored tokens or ids.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_burst import class_log_probs, distillation_loss, top_k_kl, top_k_log_probs
from megatron_burst.errors import BurstError, DisagreementError
from megatron_burst.loss import classes, top_k
from megatron_burst.loss.distillation import ClassLogProbs
from megatron_burst.loss.statistics import LossOptions
from tests.attention.failing import NoMemoryError
from tests.loss.oracle import chunks_of, relative_error
from tests.loss.test_failed_loss import failing
from tests.ranks import preload, run_ranks

pytestmark = pytest.mark.numeric
preload("megatron_burst.loss.distillation", "tests.loss.oracle")
_GENERATOR = torch.Generator().manual_seed(5)
H = torch.randn(3, 2, 4, generator=_GENERATOR)
W = torch.randn(8, 4, generator=_GENERATOR)
IDS = torch.arange(2).expand(3, 2, 2)
CASES = 200  # of each number of ranks with --all
MASKS = ("all", "none", "few", "one block", "most of one block")


@dataclass(frozen=True)
class Case:
    """Inputs of one call."""

    hidden: Tensor  # [s, b, h]
    weight: Tensor  # [vocab, h]
    ids: Tensor  # [s, b, k]
    mask: Tensor  # [s, b]
    options: LossOptions
    sequence_parallel: bool
    chunk: int | None
    tied: bool  # whether the weight has another gradient too


def random_case(seed: int, ranks: int) -> Case:
    draw, generator = Random(seed), torch.Generator().manual_seed(seed)
    s, b, width = ranks * draw.randint(1, 3), draw.randint(1, 3), draw.randint(1, 12)
    vocab = ranks * draw.randint(1, 400 // ranks)
    k = draw.randint(1, min(64, vocab))
    dtype = draw.choice((torch.float64, torch.float64, torch.float32, torch.bfloat16))
    hidden = torch.randn(s, b, width, generator=generator, dtype=torch.float64) * 2
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
    ids = torch.rand(s, b, vocab, generator=generator).argsort(-1)[..., :k]
    if draw.random() < 0.3:  # lists of different lengths
        ids[torch.rand(s, b, k, generator=generator) < 0.3] = -100
    kind, mask = draw.choice(MASKS), torch.zeros(s, b)
    block = draw.randrange(ranks)
    mask[block * s // ranks : (block + 1) * s // ranks] = "block" in kind
    chosen = torch.rand(s, b, generator=generator) < 0.2
    if kind in ("few", "most of one block"):
        mask[chosen] = 1 - mask[chosen]
    mask = torch.ones_like(mask) if kind == "all" else mask
    options = LossOptions(logit_scale=draw.choice((1.0, 0.5)), softcap=draw.choice((0.0, 4.0)))
    chunk = draw.choice((None, ranks, 5 * ranks))
    flags = draw.random() < 0.6, chunk, draw.random() < 0.3
    return Case(hidden.to(dtype), weight.to(dtype), ids, mask, options, *flags)


def by_definition(case: Case, hidden: Tensor, weight: Tensor) -> ClassLogProbs:
    """`class_log_probs` with all logits, in the inputs' dtype and then in float64."""
    z = (hidden @ weight.t()).double() * case.options.logit_scale
    if case.options.softcap:
        z = case.options.softcap * (z / case.options.softcap).tanh()
    named, every = case.ids >= 0, z.log_softmax(-1)
    valid = (case.mask != 0) & named.any(-1)
    log_probs = every.gather(-1, case.ids.clamp(0))
    outside = torch.ones_like(every, dtype=torch.int)
    outside = outside.scatter_reduce(-1, case.ids.clamp(0), (~named).int(), "prod") > 0
    others = every.masked_fill(~outside, -torch.inf)
    largest = others.detach().amax(-1, keepdim=True)
    shares = (others - largest.masked_fill(largest.isinf(), 0)).exp().sum(-1)
    rest = largest.squeeze(-1) + shares.where(outside.any(-1), 1).log()
    entropy = -(every.exp() * every).sum(-1)
    return ClassLogProbs(
        case.ids, log_probs.masked_fill(~(named & valid.unsqueeze(-1)), 0),
        rest.masked_fill(~valid, 0), entropy.masked_fill(~valid, 0), valid,
    )  # fmt: skip


def sum_of(found: ClassLogProbs, seed: int) -> Tensor:
    """A number that depends on all that was computed."""
    generator, parts = torch.Generator().manual_seed(seed), []
    for x in (found.log_probs, found.rest, found.entropy):
        weights = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)
        parts.append((x.double().masked_fill(x.detach() == -torch.inf, 0) * weights).sum())
    return sum(parts)


def gradients(case: Case, run, seed: int) -> tuple[ClassLogProbs, Tensor, Tensor]:
    """What `run(hidden, weight)` returns, and gradients of both."""
    hidden, weight = (x.detach().requires_grad_() for x in (case.hidden, case.weight))
    found = run(hidden, weight)
    total = sum_of(found, seed) + (weight.double().sin().sum() if case.tied else 0)
    return found, *torch.autograd.grad(total, (hidden, weight), allow_unused=True)


def moved(case: Case, device: str) -> Case:
    tensors = {name: x.to(device) for name, x in vars(case).items() if isinstance(x, Tensor)}
    return replace(case, **tensors)


def all_ids(case: Case) -> Tensor:
    ids = torch.arange(len(case.weight), device=case.ids.device)
    return ids.expand(*case.mask.shape, -1)


def part_of(case: Case, rank: int, size: int) -> Case:
    sharded = case.hidden.chunk(size)[rank] if case.sequence_parallel else case.hidden
    return replace(case, hidden=sharded, weight=case.weight.chunk(size)[rank].clone())


def error_of(got: Tensor, truth: Tensor, scale: Tensor) -> float:
    """Largest difference over the largest true value or 1; infinite values must be the same."""
    got, truth, scale = (x.detach().double() for x in (got, truth, scale))
    infinite = truth.isinf()
    if not torch.equal(got.isinf(), infinite):
        return float("inf")
    difference = (got - truth).masked_fill(infinite, 0).abs()
    return float(difference.max() / scale.masked_fill(scale.isinf(), 0).abs().max().clamp_min(1))


def excesses(
    rank: int, size: int, device: str = "cpu", cases: int = CASES
) -> list[tuple[int, str, float, float]]:
    """Where a case is wrong: (seed, what, our error, that of the plain computation)."""
    wrong = []
    for seed in range(size * 1000, size * 1000 + cases):
        case = moved(random_case(seed, size), device)
        part = part_of(case, rank, size)
        exact = replace(case, hidden=case.hidden.double(), weight=case.weight.double())
        ours = partial(
            class_log_probs, ids=case.ids, entropy=True, loss_mask=case.mask, options=case.options,
            tp_group=dist.group.WORLD, sequence_parallel=case.sequence_parallel,
        )  # fmt: skip
        with chunks_of(case.chunk):
            found, *grads = gradients(part, ours, seed)
        truth, *true_grads = gradients(exact, partial(by_definition, exact), seed)
        plain, *plain_grads = gradients(case, partial(by_definition, case), seed)
        assert torch.equal(found.mask, truth.mask)
        values = [(x.log_probs, x.rest, x.entropy) for x in (found, plain, truth)]
        shards = [part_of(replace(case, hidden=hidden, weight=weight), rank, size)
                  for hidden, weight in (plain_grads, true_grads)]  # fmt: skip
        of_shards = [(x.hidden, x.weight) for x in shards]
        lines = [(*values[0], *grads), (*values[1], *of_shards[0]), (*values[2], *of_shards[1])]
        wholes = (*values[2], *true_grads)
        names = ("log_probs", "rest", "entropy", "hidden", "weight")
        floor = {torch.float64: 1e-12, torch.float32: 5e-5, torch.bfloat16: 5e-5}[part.hidden.dtype]
        for name, got, other, true, whole in zip(names, *lines, wholes, strict=True):
            error, usual = error_of(got, true, whole), error_of(other, true, whole)
            # ranks' parts of the hidden states' gradient are rounded before they are added up
            parts = name == "hidden" and size > 1 and got.dtype == torch.bfloat16
            if not error <= (8 * usual + 0.02 if parts else 1.5 * usual + floor):
                wrong.append((seed, name, error, usual))
    return wrong


@pytest.mark.parametrize("size", [1, 2, 4])
def test_random_cases_are_those_of_the_definition(size, request):
    """Fewer of more ranks, which take longer, but with --all."""
    cases = CASES if request.config.getoption("--all") else CASES // size
    assert run_ranks(excesses, size, size, "cpu", cases) == [[]] * size


def tops(rank: int, size: int, device: str = "cpu") -> list[tuple[int, str, float]]:
    """Where a teacher's side is wrong: (seed, what, error)."""
    wrong = []
    for seed in range(size * 1000, size * 1000 + 25):
        case = moved(random_case(seed, size), device)
        k = case.ids.shape[-1]
        case = replace(case, hidden=case.hidden.double(), weight=case.weight.double())
        part = part_of(case, rank, size)
        with chunks_of(case.chunk):
            found = top_k_log_probs(
                part.hidden, part.weight, k, loss_mask=case.mask, options=case.options,
                entropy=True, tp_group=dist.group.WORLD,
                sequence_parallel=case.sequence_parallel,
            )  # fmt: skip
        every = replace(case, ids=all_ids(case))
        largest = by_definition(every, case.hidden, case.weight).log_probs.topk(k).values
        # at the ids that were chosen: capped logits may be equal
        truth = by_definition(replace(case, ids=found.ids), case.hidden, case.weight)
        assert torch.equal(found.mask, case.mask != 0)
        assert torch.equal((found.ids < 0).any(-1), case.mask == 0)
        if not (error := error_of(truth.log_probs, largest, largest)) <= 1e-12:
            wrong.append((seed, "largest", error))
        for name in ("log_probs", "rest", "entropy"):
            true = getattr(truth, name).double()
            if not (error := error_of(getattr(found, name), true, true)) <= 1e-12:
                wrong.append((seed, name, error))
    return wrong


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_teachers_top_k_and_the_rest(size):
    assert run_ranks(tops, size, size) == [[]] * size


def test_a_remainder_near_zero_is_exact_in_float32():
    """1 - sum would be off by 6e-8, or below 0."""
    hidden, weight = torch.ones(1, 1), torch.tensor([[30.0], [8.0], [7.0]])
    exact = (weight[1:].double().exp().sum() / weight.double().exp().sum()).log()
    top = top_k_log_probs(hidden, weight, 1)
    named = class_log_probs(hidden, weight, torch.tensor([[0]]))
    assert relative_error(top.rest, exact) < 1e-7 and torch.equal(top.rest, named.rest)


@pytest.mark.parametrize("reverse", [False, True])
def test_kl_is_that_of_the_classes_and_the_rest_with_its_gradient(reverse):
    generator = torch.Generator().manual_seed(0)
    teacher, student = torch.randn(2, 20, 9, generator=generator, dtype=torch.float64)
    student.requires_grad_()
    weight = torch.eye(9, dtype=torch.float64)
    top = top_k_log_probs(teacher, weight, 4)
    ids = top.ids.clone()
    ids[0, 2:] = -100  # the list of a token is shorter
    top = class_log_probs(teacher, weight, ids)
    ours = top_k_kl(class_log_probs(student, weight, ids), top, reverse=reverse)
    logits = class_log_probs(student, weight, ids)
    first = torch.cat((top.log_probs, top.rest.unsqueeze(-1)), -1)
    second = torch.cat((logits.log_probs, logits.rest.unsqueeze(-1)), -1)
    first, second = (second, first) if reverse else (first, second)
    unnamed = torch.cat((ids < 0, torch.zeros(20, 1, dtype=torch.bool)), 1)
    true = torch.where(unnamed, 0, first.exp() * (first - second)).sum(-1)
    assert relative_error(ours, true) < 1e-14 and bool((ours >= 0).all())
    assert torch.allclose(*(torch.autograd.grad(x.sum(), student)[0] for x in (ours, true)))
    alone = top_k_kl(class_log_probs(student, weight, ids), top.log_probs, reverse=reverse)
    assert relative_error(alone, ours) < 1e-12
    same = top_k_kl(class_log_probs(teacher, weight, ids), top, reverse=reverse)
    assert float(same.abs().max()) < 1e-15


def distilled(rank: int, size: int, device: str = "cpu") -> list[tuple[int, float, float, float]]:
    """Where the loss with gradients in forward is not that of two calls: seed and errors."""
    wrong = []
    for seed in range(size * 1000, size * 1000 + 25):
        case = moved(random_case(seed, size), device)
        case = replace(case, hidden=case.hidden.double(), weight=case.weight.double())
        part, reverse = part_of(case, rank, size), bool(seed % 2)
        settings = dict(loss_mask=case.mask / 2, options=case.options, tp_group=dist.group.WORLD,
                        sequence_parallel=case.sequence_parallel)  # fmt: skip
        noise = torch.randn(part.hidden.shape, dtype=torch.float64, device=device)
        teacher = class_log_probs(part.hidden + noise, part.weight, case.ids, **settings)
        leaves = [x.detach().requires_grad_() for x in (part.hidden, part.weight) * 2]
        two = top_k_kl(class_log_probs(*leaves[:2], case.ids, **settings), teacher, reverse=reverse)
        total = (case.mask * teacher.mask).sum()
        expected = (two * case.mask).sum() / total.clamp(min=1)
        with chunks_of(case.chunk):
            loss = distillation_loss(*leaves[2:], teacher, reverse=reverse, **settings)
        for x in (expected, loss):
            (3 * x).backward()
        pairs = (loss, expected), *((leaves[i + 2].grad, leaves[i].grad) for i in (0, 1))
        if not max(off := [error_of(got, true, true) for got, true in pairs]) < 1e-12:
            wrong.append((seed, *off))
    return wrong


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gradients_along_with_the_loss_are_those_of_two_calls(size):
    assert run_ranks(distilled, size, size) == [[]] * size


@pytest.mark.parametrize("reverse", [False, True])
def test_nan_of_a_counted_token_is_not_lost(reverse):
    top = top_k_log_probs(H, W, 2)
    spoilt = H.clone()
    spoilt[0] = torch.nan
    each = top_k_kl(class_log_probs(spoilt, W, top.ids), top, reverse=reverse)
    assert each.isnan().tolist() == [[True] * 2, [False] * 2, [False] * 2]
    loss = distillation_loss(spoilt.requires_grad_(), W, top, reverse=reverse)
    assert loss.isnan()


def test_tokens_that_a_teacher_ignored_do_not_count():
    mask = torch.tensor([[1, 0], [0, 1], [1, 1]])
    teacher = class_log_probs(H, W, IDS, loss_mask=mask)
    assert torch.equal(teacher.ids < 0, mask.unsqueeze(-1).expand_as(IDS) == 0)
    each = top_k_kl(class_log_probs(H * 2, W, IDS), teacher)
    assert torch.equal(each != 0, mask != 0)
    loss = distillation_loss((H * 2).requires_grad_(), W, teacher, reduction="sum")
    assert relative_error(loss, each.sum()) < 1e-6


@pytest.mark.parametrize("where", ["no tokens", "inference", "no gradient", "fp16", "frozen"])
def test_a_loss_without_gradients_in_forward(where):
    top = top_k_log_probs(H[:0] if where == "no tokens" else H, W, 2)
    hidden, weight = H[: len(top.ids)] * 2, W.clone()
    if where == "fp16":
        hidden, weight = hidden.half(), weight.half()
    expected = top_k_kl(class_log_probs(hidden, weight, top.ids), top)
    expected = expected.mean() if expected.numel() else expected.sum()
    hidden.requires_grad_(where != "frozen")
    context = {"inference": torch.inference_mode, "no gradient": torch.no_grad}.get(where)
    with context() if context else nullcontext():
        loss = distillation_loss(hidden, weight, top)
    assert relative_error(loss, expected) < 1e-6
    assert loss.requires_grad == (where in ("no tokens", "fp16"))


def test_a_teachers_log_probabilities_alone_of_all_classes():
    top = top_k_log_probs(H, W, 8)
    student = class_log_probs(H * 2, W, top.ids)
    assert relative_error(top_k_kl(student, top.log_probs), top_k_kl(student, top)) < 1e-6


def test_a_checkpoint_runs_the_loss_once_in_forward():
    calls, top = [], top_k_log_probs(H, W, 2)

    def run(hidden):
        calls.append(1)
        return distillation_loss(hidden, W, top)

    loss = checkpoint(run, H.clone().requires_grad_(), use_reentrant=False)
    assert len(calls) == 1
    loss.backward()
    assert len(calls) == 2


def differing(rank: int) -> list[str]:
    """What each rank is told where rank 1 passes something else."""
    top, sentences = top_k_log_probs(H, W, 2), []
    part, group = W.chunk(2)[rank], dist.group.WORLD
    others = (
        ({"reverse": True}, {}), ({}, {"log_probs": top.log_probs - 1}), ({}, {"rest": None}),
        ({}, {"log_probs": [1]}), ({"hidden": [1]}, {}),
    )  # fmt: skip
    for options, values in others:
        mine, teacher = (options, top._replace(**values)) if rank else ({}, top)
        with pytest.raises(BurstError) as raised:
            distillation_loss(mine.pop("hidden", H), part, teacher, tp_group=group, **mine)
        sentences.append(str(raised.value))
    with pytest.raises(BurstError) as raised:
        top_k_log_probs([1] if rank else H, part, 2, tp_group=group)
    return [*sentences, str(raised.value)]


def test_what_one_rank_passes_alone_is_refused_on_both():
    words = ("reverse", "must be the same on all ranks", "must be dense tensors",
             "must be dense tensors", "hidden must be a dense",
             "hidden must be a dense")  # fmt: skip
    for sentences in run_ranks(differing, 2, timeout_s=60):
        assert len(sentences) == len(words)
        for sentence, word in zip(sentences, words, strict=True):
            assert word in sentence, sentence


def test_all_classes_named_leaves_nothing():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(6, 5, generator=generator).requires_grad_(), torch.eye(5)
    top = top_k_log_probs(hidden, weight, 5)
    assert (top.rest == -torch.inf).all()
    for reverse in (False, True):
        kl = top_k_kl(class_log_probs(hidden, weight, top.ids), top, reverse=reverse)
        (grad,) = torch.autograd.grad(kl.sum(), hidden)
        assert float(kl.detach().abs().max()) < 1e-6 and float(grad.abs().max()) < 1e-6


def test_gradcheck():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(n, 4, generator=generator, dtype=torch.float64).requires_grad_() for n in (3, 7)
    )
    ids = torch.tensor([[0, 6], [3, -100], [2, 5]])

    def run(hidden, weight):
        options = LossOptions(softcap=4.0, logit_scale=0.7)
        return class_log_probs(hidden, weight, ids, options=options, entropy=True)[1:4]

    assert torch.autograd.gradcheck(run, (hidden, weight))


REFUSED = {
    "no axis of classes": (class_log_probs, IDS[..., 0], {}, r"ids must have.*one of classes.*'k'"),
    "a class twice": (class_log_probs, IDS * 0, {}, r"ids must be in \[0, 8\).*each once.*got \[0"),
    "no class": (class_log_probs, IDS + 7, {}, r"ids must be in \[0, 8\) or -100"),
    "reals": (class_log_probs, IDS / 1, {}, "ids must be integers"),
    "mask of ids": (class_log_probs, IDS, {"loss_mask": IDS}, "loss_mask must have the shape"),
    "a word": (class_log_probs, IDS, {"supervised": "some"}, "supervised must be.*'count' or 'al"),
    "no classes": (class_log_probs, IDS[..., :0], {}, "ids must name at least one class"),
    "a class to ignore": (class_log_probs, IDS, {"options": LossOptions(ignore_index=0)},
                          "ignore_index must be negative"),
    "smoothing": (class_log_probs, IDS, {"options": LossOptions(0.1)}, "without label smoothing"),
    "no k": (top_k_log_probs, 0, {}, "k must be an integer from 1.*got 0 of 8"),
    "more than all": (top_k_log_probs, 9, {}, "k must be an integer from 1.*got 9 of 8"),
    "half of one": (top_k_log_probs, 1.5, {}, "k must be an integer from 1.*got 1.5 of 8"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "given", "settings", "message"), REFUSED.values(), ids=REFUSED
)
def test_refuses_in_one_sentence(function, given, settings, message):
    with pytest.raises(BurstError, match=f"^linear cross-entropy: .*{message}"):
        function(H, W, given, **settings)


def teacher_of(case: Case) -> ClassLogProbs:
    return by_definition(case, case.hidden, case.weight)


def failures(rank: int) -> list[tuple[str, str, float]]:
    """By place that fails on rank 1: what a rank got, and the error of the next call."""
    group, got = dist.new_group(), []
    case = replace(random_case(2001, 2), sequence_parallel=True)
    case = replace(case, hidden=case.hidden.double(), weight=case.weight.double())
    part = part_of(case, rank, 2)
    calls = {
        "merge_others": partial(class_log_probs, ids=case.ids),
        "gradient_of_all_": partial(class_log_probs, ids=case.ids),
        "_best_of_chunk": partial(top_k_log_probs, k=3),
        "divergence": partial(distillation_loss, teacher=teacher_of(case)),
    }
    for name, call in calls.items():
        module, error = (top_k if name == "_best_of_chunk" else classes), ""

        def run(call=call):
            hidden = part.hidden.detach().requires_grad_()
            values = call(hidden, part.weight, tp_group=group, sequence_parallel=True)
            value = values if isinstance(values, Tensor) else values.rest
            if value.requires_grad:
                value.sum().backward()
            return value

        expected = run()
        try:
            with failing(module, name, 0) if rank else nullcontext():
                run()
        except (NoMemoryError, DisagreementError) as raised:
            error = type(raised).__name__
        got.append((name, error, relative_error(run(), expected)))
    return got


def test_a_rank_that_fails_keeps_no_other_waiting():
    errors = "DisagreementError", "NoMemoryError"
    for error, found in zip(errors, run_ranks(failures, 2), strict=True):
        assert [(kind, off) for _, kind, off in found] == [(error, 0.0)] * 4, found
