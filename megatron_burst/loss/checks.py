"""What the loss refuses, on all ranks together, before anything is computed."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.arguments import is_dense, short_repr
from megatron_burst.comm.announce import announce, reporting_errors
from megatron_burst.comm.store import TP
from megatron_burst.errors import BurstError, DisagreementError, Need, unmet_needs
from megatron_burst.loss.attempt import failed_elsewhere
from megatron_burst.loss.autograd import held_bytes
from megatron_burst.loss.rows import Rows, wrong_classes, wrong_ids
from megatron_burst.loss.statistics import WHO, LossOptions
from megatron_burst.loss.supervised import (
    Supervised,
    SupervisedCount,
    valid_counts,
    valid_tokens,
)
from megatron_burst.loss.tensor_parallel import TensorParallel, processors_of
from megatron_burst.transforms import refuse_transforms

_TOKENS_AT_ONCE, _NUMBERS_AT_ONCE = 1 << 16, 1 << 22  # that are compared
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_ODD = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64)  # splitmix64's, signed


class LossInputs(NamedTuple):
    """Arguments of `linear_cross_entropy` that have data."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor  # [...], or [..., k] if each token has several classes
    loss_mask: Tensor | None
    supervised: Supervised = "all"
    several: bool = False  # whether each token has several classes
    teacher: tuple[Tensor, ...] = ()  # values that the loss compares with

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        tensors = {"hidden": self.hidden, "weight": self.weight, self.name: self.labels}
        return tensors | ({} if self.loss_mask is None else {"loss_mask": self.loss_mask})

    @property
    def name(self) -> str:
        """What callers know labels by."""
        return "ids" if self.several else "labels"

    @property
    def shape(self) -> torch.Size:
        """The axes of tokens."""
        return self.labels.shape[:-1] if self.several else self.labels.shape


def checked_rows(
    inputs: LossInputs, tp: TensorParallel, options: LossOptions, settings: Mapping[str, object],
    needs: Iterable[Need] = (),
) -> Rows:  # fmt: skip
    """The tokens of a call; refuses one that cannot be computed correctly, by `needs` too.

    Ranks compare shapes, options and refusals: through the store once per new combination, then in
    the stamp of each call. Labels, masks and counts are checked on the CPU only: on a GPU that
    would synchronize, and what is wrong makes the loss NaN.

    Raises:
        BurstError: on all ranks; DisagreementError if they call differently; inside of torch.func's
            transforms, vmap and forward-mode AD.
    """
    problem = unmet_needs(WHO, chain(needs, _needs_of_types(inputs, tp, options, settings),
                                     _needs_of_values(inputs, tp, options, settings)))  # fmt: skip
    try:
        refuse_transforms(WHO, inputs.hidden, inputs.weight)
    except BurstError as error:
        problem = problem or str(error)
    if tp.group is not None:
        terms = {} if problem else _terms(inputs, options, settings)
        announce(tp.group, terms, WHO, problem, TP)
    if problem:
        raise BurstError(problem)
    valid, counts, sound = _compared(inputs, tp, options)
    tokens = valid.numel() // tp.blocks
    shape = tp.blocks, tokens, *inputs.labels.shape[valid.dim() :]
    try:
        labels = inputs.labels.reshape(shape).long()
        return Rows.of(labels, valid.view(tp.blocks, tokens), tp.block, counts, sound)
    except Exception as error:
        if tp.group is None:
            raise
        return Rows.lacking(shape, tp.block, counts, error)  # others begin the pass: it does too


def _needs_of_types(
    inputs: LossInputs, tp: TensorParallel, options: LossOptions, settings: Mapping[str, object]
) -> Iterator[Need]:
    for name, x in inputs.tensors.items():
        yield (is_dense(x),
               f"{name} must be a dense tensor with data, because nothing is converted silently",
               short_repr(x), "pass a dense tensor; of a DTensor full_tensor(), or compute the "
               "loss where FSDP2 has gathered the weights, in the model's forward")  # fmt: skip
    is_count = isinstance(inputs.supervised, SupervisedCount)
    yield (is_count or inputs.supervised in ("count", "all"),
           "supervised must be what count_supervised returns, 'count' or 'all', because it says "
           "which tokens are computed", short_repr(inputs.supervised),
           "call count_supervised and pass its result")  # fmt: skip
    yield (isinstance(options, LossOptions), "options must be LossOptions, because other types "
           "would be ignored", short_repr(options), "pass LossOptions(...)")  # fmt: skip
    yield from options.needs()
    switches = settings.keys() & {"return_lse", "entropy", "invariant"}
    values = {name: settings[name] for name in sorted(switches)}
    for name, value in {"sequence_parallel": tp.sequence_parallel, **values}.items():
        yield (isinstance(value, bool), f"{name} must be True or False, because it is a switch",
               repr(value), "pass a bool")  # fmt: skip


def _needs_of_values(
    inputs: LossInputs, tp: TensorParallel, options: LossOptions, settings: Mapping
) -> Iterator[Need]:
    hidden, weight, labels, loss_mask, supervised, several, _ = inputs
    name, count = inputs.name, supervised if isinstance(supervised, SupervisedCount) else None
    shapes = f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}"
    dtypes = f"{hidden.dtype} and {weight.dtype}"
    first, *trailing = hidden.shape[:-1] or (0,)
    expected = (first * tp.blocks, *trailing)
    vocab = weight.shape[0] * tp.size if weight.dim() else 0
    masks = () if loss_mask is None else (loss_mask,)
    devices = {str(x.device) for x in inputs.tensors.values()}
    parts = tp.blocks if count is None else count.blocks
    yield from (  # whether it holds, what must hold and why, what was got, what to change
        (hidden.dim() >= 2 and weight.dim() == 2 and hidden.shape[-1] == weight.shape[-1],
         "hidden [..., h] and weight [vocab / tp, h] must have the same width, because logits are "
         "their products", shapes, "pass the weight of the output layer, not transposed"),
        (hidden.dtype in _DTYPES and weight.dtype == hidden.dtype,
         "hidden and weight must have one dtype among float64, float32, bfloat16 and float16, "
         "because nothing is converted silently", dtypes, "cast one of them"),
        (weight.shape[0] > 0, "the vocabulary must not be empty, because a label names a class",
         shapes, "pass the weight of the output layer"),
        (tuple(inputs.shape) == expected and (not several or labels.dim() > len(expected)),
         f"{name} must have the leading axes of hidden (the first times tp with sequence "
         f"parallelism){', then one of classes' * several}, because each token has a label",
         f"{name} {tuple(labels.shape)} instead of {(*expected, 'k') if several else expected}",
         "transpose or gather them; if labels are of the whole sample and hidden is a shard, pass "
         "whole_sample=True to next_tokens"),
        (not (labels.dtype.is_floating_point or labels.dtype == torch.bool),
         f"{name} must be integers, because they name classes", str(labels.dtype), "cast them"),
        (not any(mask.is_complex() for mask in masks), "loss_mask must not be complex, because it "
         "weights the losses", f"{[str(m.dtype) for m in masks]}", "pass real weights"),
        (all(mask.shape == inputs.shape for mask in masks), "loss_mask must have the shape of "
         "labels, because each token has a weight", f"{[tuple(m.shape) for m in masks]}",
         "reshape it"),
        (len(devices) == 1, f"hidden, weight, {name} and loss_mask must be on one device, because "
         "one kernel reads them", ", ".join(sorted(devices)), "move them"),
        (settings.get("reduction", "none") in ("none", "sum", "mean"), "reduction must be none, "
         "sum or mean, because a misspelt value would be ignored", repr(settings.get("reduction")),
         "choose one of these"),
        (settings.get("grads", "auto") in ("auto", "forward", "recompute"), "grads must be auto, "
         "forward or recompute, because a misspelt value would be ignored",
         repr(settings.get("grads")), "choose one of these"),
        (not several or labels.shape[-1:] != (0,), "ids must name at least one class, because "
         "nothing else is computed", str(tuple(labels.shape)), "leave the call out"),
        (not (several or "k" in settings) or options.ignore_index < 0, "ignore_index must be "
         "negative, because ids that are not ignored are classes", options.ignore_index,
         "leave it out"),
        (type(k := settings.get("k", 1)) is int and 1 <= k <= vocab, "k must be an integer "
         "from 1 to the number of classes, because so many of them are kept", f"{k!r} of {vocab}",
         "choose another k"),
        (not (settings.get("return_lse") and settings.get("grads") == "forward"),
         "return_lse needs grads='recompute', because its gradient is not known in forward",
         "grads='forward'", "leave grads out"),
        (parts == tp.blocks, "supervised tokens must be counted with the sharding that the loss "
         "uses, because each rank's shard has its own count", f"{parts} parts instead of "
         f"{tp.blocks}", "pass the same tp_group and sequence_parallel to count_supervised"),
        (not (settings.get("entropy") is not None and (options.label_smoothing or options.z_loss)),
         "log-probabilities must be asked for without label smoothing and z-loss, because these "
         "change the loss only", options, "leave them out"),
    )  # fmt: skip


def _terms(inputs: LossInputs, options: LossOptions, settings: Mapping) -> dict[str, str]:
    """What must be the same on all ranks, in words."""
    hidden, weight, _, loss_mask, supervised, *_ = inputs
    is_count = isinstance(supervised, SupervisedCount)
    return {
        **{name: str(tuple(x.shape)) for name, x in inputs.tensors.items() if name != "loss_mask"},
        "dtype": f"{hidden.dtype}, {weight.dtype}",
        "device": f"{hidden.device.type}, {processors_of(hidden.device)} multiprocessors",
        "loss_mask": str(loss_mask is not None),
        "supervised": "a count" if is_count else str(supervised),
        "gradients": f"{torch.is_grad_enabled()}, {hidden.requires_grad}, {weight.requires_grad}, "
        f"{held_bytes(weight)}",
        "options": f"{options} {dict(settings)}",
    }


def _compared(
    inputs: LossInputs, tp: TensorParallel, options: LossOptions
) -> tuple[Tensor, Sequence[int] | None, Tensor | None]:
    """Compare labels, masks and numbers of tokens by one collective, on CPUs also of a rank that
    fails before it.

    Returns:
        which tokens count; how many are computed of each block, None for all; and on a GPU 1, or
        NaN if something differs.
    """
    labels, supervised, failure = inputs.labels, inputs.supervised, None
    on_gpu = _stays_on_gpu(labels)
    try:
        bounds = supervised.wait() if isinstance(supervised, SupervisedCount) else None
        valid = valid_tokens(labels, inputs.loss_mask, options.ignore_index, inputs.several)
        if on_gpu and supervised == "all" and tp.group is None:
            return valid, None, None
        numbers, wrong = _numbers(inputs, valid, bounds, tp, options)
    except Exception as error:
        if tp.group is None:
            raise
        if on_gpu:  # nothing can be raised on the others, who go on with the pass
            with reporting_errors(tp.group):
                raise
        failure = error
        numbers = torch.tensor([0] * (tp.blocks + 4) + [tp.rank + 1], device=labels.device)
    if tp.group is not None:
        dist.all_reduce(numbers, dist.ReduceOp.MAX, tp.group)
    if failure is not None:
        try:
            raise failure
        finally:
            failure = None  # its frames hold this one, and so tensors
    counts, others = numbers.split((tp.blocks, 5))
    if on_gpu:
        fail = (others[1] > 0) | (others[2] != ~others[3])
        bounds = counts.tolist() if supervised == "count" else bounds  # the CPU waits here
        return valid, bounds, torch.where(fail, torch.nan, 1.0)
    got = labels[wrong][:3].tolist() or "some on another rank"
    _refuse_differences(others.tolist(), got, inputs, tp, options)
    return valid, counts.tolist(), None


def _numbers(
    inputs: LossInputs, valid: Tensor, bounds: Sequence[int] | None, tp: TensorParallel,
    options: LossOptions,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What is compared: the tokens of each block, how many labels are wrong, whether there are more
    tokens than were counted, a hash and its complement, and a rank that failed; which are wrong."""
    loss_mask, vocab, parts = inputs.loss_mask, inputs.weight.shape[0] * tp.size, []

    def numbers() -> Iterator[Tensor]:
        labels = inputs.labels.flatten(0, valid.dim() - 1).split(_TOKENS_AT_ONCE)
        for some, is_named in zip(labels, valid.flatten().split(_TOKENS_AT_ONCE), strict=True):
            if inputs.several:
                is_named = is_named.unsqueeze(-1) & (some != options.ignore_index)
                wrong = wrong_ids(some, vocab, options.ignore_index)
            else:
                wrong = wrong_classes(some, vocab)
            parts.append(wrong & is_named)
            yield some.where(is_named, 0)
        yield (valid if loss_mask is None else loss_mask.where(valid, 0)).double()
        yield from inputs.teacher

    hashed = digest(numbers())
    wrong = torch.cat(parts).view(inputs.labels.shape)
    counts = valid_counts(valid, tp.blocks)
    more = torch.zeros_like(hashed)
    if bounds is not None:
        pairs = zip(counts, bounds, strict=True)  # numbers, as a tensor would be copied to a GPU
        more = torch.stack([count > number for count, number in pairs]).any().long()
    rest = torch.stack((wrong.sum(), more, hashed, ~hashed, torch.zeros_like(hashed)))
    return torch.cat((counts, rest)), wrong


def _refuse_differences(
    others: list[int], got: object, inputs: LossInputs, tp: TensorParallel, options: LossOptions
) -> None:
    wrong, more, largest, smallest, failed = others
    vocab, name = inputs.weight.shape[0] * tp.size, inputs.name
    if failed:
        raise failed_elsewhere([failed - 1])
    if wrong:
        raise BurstError(f"{WHO}: {name} must be in [0, {vocab}) or {options.ignore_index}"
                         + ", each once for a token" * inputs.several
                         + f", because they name classes of the vocabulary; got {got}; check the "
                         "tokenizer, or mask them")  # fmt: skip
    if largest != ~smallest:
        raise DisagreementError(f"{WHO}: {name} and loss_mask must be the same on all ranks of a "
                                "tensor-parallel group, because each computes its part of every "
                                "token's logits; got different ones on another rank; broadcast the "
                                "batch within the group")  # fmt: skip
    if more:
        raise BurstError(f"{WHO}: supervised must count at least the tokens of the loss, because "
                         "the rest would be dropped; got fewer, as from another batch; pass the "
                         "same labels and loss_mask to count_supervised")  # fmt: skip


def _stays_on_gpu(x: Tensor) -> bool:
    """Whether reading a tensor would synchronize with a GPU."""
    return x.is_cuda


def digest(tensors: Iterable[Tensor]) -> Tensor:
    """A hash of numbers and their order, on their device: integers, or the bits of float64."""
    sums, first = [], 0
    for x in tensors:
        for some in x.flatten().split(_NUMBERS_AT_ONCE):
            bits = some.double().view(torch.int64) if some.is_floating_point() else some.long()
            places = torch.arange(first, first + len(bits), device=bits.device)
            bits = (bits + places * _ODD[0]) * _ODD[1]
            sums.append(((bits ^ (bits >> 29)) * _ODD[0]).sum())
            first += len(bits)
    return torch.stack(sums).sum()
