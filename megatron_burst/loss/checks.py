"""What the loss refuses, on all ranks together, before anything is computed."""

import json
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.comm.state import state_of
from megatron_burst.errors import BurstError, DisagreementError, unmet
from megatron_burst.loss.main_grad import held_bytes
from megatron_burst.loss.rows import TensorParallel, processors_of
from megatron_burst.loss.statistics import WHO, LossOptions
from megatron_burst.transforms import refuse_transforms

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_call(
    hidden: Tensor, weight: Tensor, labels: Tensor, loss_mask: Tensor | None, tp: TensorParallel,
    options: LossOptions, settings: Mapping[str, object],
) -> None:  # fmt: skip
    """Refuse a call that cannot be computed correctly.

    Ranks tell each other their shapes, options and refusals through the store, once per new
    combination. Labels are checked on the CPU only: on a GPU that would synchronize.

    Raises:
        BurstError: on all ranks; DisagreementError if they call differently; inside of torch.func's
            transforms, vmap and forward-mode AD.
    """
    refuse_transforms(WHO, hidden, weight)
    problem = _problem(hidden, weight, labels, loss_mask, tp, settings)
    if tp.group is not None:
        _agree(tp.group, _terms(hidden, weight, labels, loss_mask, options, settings, problem))
    if problem:
        raise BurstError(problem)
    if not hidden.is_cuda:
        _check_labels(labels, loss_mask, weight.shape[0] * tp.size, options, tp)


def _problem(hidden, weight, labels, loss_mask, tp: TensorParallel, settings: Mapping) -> str:
    """One sentence on what is wrong with this rank's arguments; empty if nothing is."""
    shapes = f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}"
    dtypes = f"{hidden.dtype} and {weight.dtype}"
    first, *others = hidden.shape[:-1] or (0,)
    expected = (first * tp.blocks, *others)
    masks = () if loss_mask is None else (loss_mask,)
    devices = {str(x.device) for x in (hidden, weight, labels, *masks)}
    needs = (  # whether it holds, what must hold and why, what was got, what to change
        (hidden.dim() >= 2 and weight.dim() == 2 and hidden.shape[-1] == weight.shape[-1],
         "hidden [..., h] and weight [vocab / tp, h] must have the same width, because logits are "
         "their products", shapes, "pass the weight of the output layer, not transposed"),
        (hidden.dtype in _DTYPES and weight.dtype == hidden.dtype,
         "hidden and weight must have one dtype among float64, float32, bfloat16 and float16, "
         "because nothing is converted silently", dtypes, "cast one of them"),
        (weight.shape[0] > 0, "the vocabulary must not be empty, because a label names a class",
         shapes, "pass the weight of the output layer"),
        (tuple(labels.shape) == expected, "labels must have the leading axes of hidden, the first "
         "times tp with sequence parallelism, because each token has one", f"labels "
         f"{tuple(labels.shape)} instead of {expected}", "transpose or gather them"),
        (not (labels.dtype.is_floating_point or labels.dtype == torch.bool),
         "labels must be integers, because they name classes", str(labels.dtype), "cast them"),
        (all(mask.shape == labels.shape for mask in masks), "loss_mask must have the shape of "
         "labels, because each token has a weight", f"{[tuple(m.shape) for m in masks]}",
         "reshape it"),
        (len(devices) == 1, "hidden, weight, labels and loss_mask must be on one device, because "
         "one kernel reads them", ", ".join(sorted(devices)), "move them"),
        (settings.get("reduction", "none") in ("none", "sum", "mean"), "reduction must be none, "
         "sum or mean, because a misspelt one would be ignored", repr(settings.get("reduction")),
         "choose one of these"),
        (settings.get("grads", "auto") in ("auto", "forward", "recompute"), "grads must be auto, "
         "forward or recompute, because a misspelt one would be ignored",
         repr(settings.get("grads")), "choose one of these"),
        (not (settings.get("return_lse") and settings.get("grads") == "forward"),
         "return_lse needs grads='recompute', because its gradient is not known in forward",
         "grads='forward'", "leave grads out"),
    )  # fmt: skip
    return unmet(WHO, needs)


def _terms(hidden, weight, labels, loss_mask, options, settings, problem) -> dict[str, str]:
    """What must be the same on all ranks, in words; any problem first."""
    return {
        "problem": problem,
        "hidden": str(tuple(hidden.shape)),
        "weight": str(tuple(weight.shape)),
        "labels": str(tuple(labels.shape)),
        "dtype": f"{hidden.dtype}, {weight.dtype}",
        "device": f"{hidden.device.type}, {processors_of(hidden.device)} multiprocessors",
        "loss_mask": str(loss_mask is not None),
        "gradients": f"{torch.is_grad_enabled()}, {hidden.requires_grad}, {weight.requires_grad}, "
        f"{held_bytes(weight)}",
        "options": f"{options} {dict(settings)}",
    }


def _agree(group: dist.ProcessGroup, terms: dict[str, str]) -> None:
    """Check that all ranks of a group have the same terms."""
    text, board = json.dumps(terms), state_of(group).board
    if board.knows(text):
        return
    everyones = [json.loads(other) for other in board.share(text, WHO)]
    for rank, theirs in enumerate(everyones):
        if theirs["problem"]:
            raise BurstError(f"{theirs['problem']} (tp rank {rank})")
    for rank, theirs in enumerate(everyones):
        for term, value in terms.items():
            if theirs[term] != value:
                change = "give all ranks the same"
                if term == "weight":
                    change = "pad the vocabulary until tp divides it"
                    change += " (--make-vocab-size-divisible-by)"
                raise DisagreementError(
                    f"{WHO}: all ranks of a tensor-parallel group must call with the same shapes "
                    "and options, because each computes its part of every token's logits; got "
                    f"{term}={value} on tp rank {group.rank()} and {term}={theirs[term]} on tp "
                    f"rank {rank}; {change}"
                )
    board.note(text)


def _check_labels(labels, loss_mask, vocab: int, options: LossOptions, tp: TensorParallel) -> None:
    """Refuse labels out of range, even if only one rank has them."""
    wrong = (labels != options.ignore_index) & ((labels < 0) | (labels >= vocab))
    if loss_mask is not None:
        wrong &= loss_mask != 0
    count = wrong.sum()
    mine = int(count)
    if tp.group is not None:
        dist.all_reduce(count, group=tp.group)
    if count:
        got = labels[wrong].flatten()[:3].tolist() if mine else "some on another rank"
        raise BurstError(
            f"{WHO}: labels must be in [0, {vocab}) or {options.ignore_index}, because they name "
            f"classes of the vocabulary; got {got}; check the tokenizer, or mask them"
        )
