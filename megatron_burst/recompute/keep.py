"""Calls functions so that checkpoints around them do not recompute them."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatron_burst.errors import BurstError
from megatron_burst.recompute.checkpoints import patch_checkpoints
from megatron_burst.recompute.inputs import all_go_to_host, saved_inputs
from megatron_burst.recompute.keeping import WHO, Frame, Keeping, Tensors, framed, running
from megatron_burst.recompute.recording import Recording
from megatron_burst.transforms import uncompiled


def keep(function: Callable[..., Any], debug: bool = False) -> Callable[..., Any]:
    """Wrap a function or module so that `torch.utils.checkpoint` does not recompute its results.

    In the first pass of a checkpoint, reentrant or not, everything that the function saves for its
    backward is kept, except its inputs and a module's parameters; with any flash attention that is
    (out, lse), of a linear layer its output. Recomputation reuses it: it runs no kernel and sends
    nothing. Outside checkpoints nothing changes. Kept results serve one backward: with
    `retain_graph`, a reentrant checkpoint recomputes them in the second one, and torch refuses a
    second one through a non-reentrant checkpoint. For torch.compile it is one graph break.

        attend = keep(partial(F.scaled_dot_product_attention, is_causal=True))
        checkpoint(lambda x: layer(x, attend), x, use_reentrant=False)

    Args:
        function: takes tensors (by position, by name, or inside lists, tuples and dicts) and any
            other arguments; returns tensors, and None, in any nesting. Tensors that need a gradient
            and are created inside the checkpoint must be arguments, not part of its closure.
        debug: compare the inputs of recomputation with those of the first pass, bit by bit.

    Raises:
        BurstError: when called, if the function returns anything else, or if recomputation does
            not call it with tensors of the same shapes in the same order; in backward, if its
            result was modified in place (`out += x`), because the kept result is that tensor.
    """
    patch_checkpoints()
    parameters = function.parameters if isinstance(function, torch.nn.Module) else tuple

    @functools.wraps(function, updated=())
    @uncompiled
    def call(*args, **options):
        keeping = Keeping(debug=debug, parameters=tuple(parameters()))
        return call_kept(function, args, options, keeping)

    return call


@uncompiled
def call_kept(function: Callable[..., Any], args: tuple, options: dict, keeping: Keeping) -> Any:
    """`function(*args, **options)`, kept as `keeping` says if a checkpoint runs it."""
    if not running():
        return function(*args, **options)
    leaves, tree = tree_flatten((args, options))

    def of_tensors(*tensors: Tensor) -> Any:
        inputs = iter(tensors)
        arguments = [next(inputs) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        positional, named = tree_unflatten(arguments, tree)
        return function(*positional, **named)

    return run_kept(of_tensors, tuple(x for x in leaves if isinstance(x, Tensor)), keeping)


def run_kept(function: Callable[..., Any], inputs: Tensors, keeping: Keeping) -> Any:
    """A function's outputs, from the running frames, or computed and kept in them."""
    runs = running()
    if not runs or torch.is_inference_mode_enabled():
        return function(*inputs)
    recordings = [recording for recording in _take_all() if not recording.is_spent]
    recording = recordings[0] if recordings else Recording(function, inputs, keeping)
    if any(run.rounds for run in runs):
        recording.compare_no_bits()
    for run in runs:
        if not run.recomputes:
            run.put(recording)
        elif recordings:
            run.rounds |= keeping.policy is not None and keeping.policy.rounds
    return recording.play(inputs, last=all(run.recomputes for run in runs))


def _take_all() -> list[Any]:
    """What first passes kept of the call that begins now, for the frames that recompute it."""
    for run in running():
        run.place += 1
    results = (run.take() for run in running() if run.recomputes)
    return [result for result in results if result is not None]


def once[T](make: Callable[[], T]) -> T:
    """What `make` returns, which runs in a checkpoint's first pass alone: recomputation gets the
    same object, once. Nothing in it may need a gradient."""
    if torch.is_inference_mode_enabled():
        return make()
    results = _take_all()
    result = results[0] if results else make()
    for run in running():
        if not run.recomputes:
            run.put(result)
    return result


def in_frames(forward, /, ctx, run_function, *args):
    """A reentrant checkpoint's forward: each call runs in a new frame, or in the one that its
    function is bound to. In none if no input needs a gradient: it is never recomputed, and what is
    kept would run with gradients, by which routers count tokens.

    Raises:
        BurstError: if checkpoints offload their inputs.
    """
    if all_go_to_host():
        raise BurstError(f"{WHO}: checkpoints that offload their inputs must not be reentrant, "
                         "because a reentrant one saves them where nothing sees it; got "
                         "use_reentrant=True; pass use_reentrant=False")  # fmt: skip
    return forward(ctx, framed(run_function) if any(ctx.needs_input_grad) else run_function, *args)


def with_contexts(generator, /, *args, **options):
    """The generator of other checkpoints: each call runs in a new frame."""
    by_name = "context_fn" in options  # since torch 2.15
    context_fn = options["context_fn"] if by_name else args[2]
    frame = Frame(stops_early=True)

    def contexts():
        return tuple(_InFrame(context, frame) for context in context_fn())

    if by_name:
        options["context_fn"] = contexts
    else:
        args = (*args[:2], contexts, *args[3:])
    with saved_inputs(frame):  # around the checkpoint's own hooks, which begin later
        yield from generator(*args, **options)


class _InFrame:
    """A context with a frame inside of it; reusable."""

    def __init__(self, context, frame: Frame) -> None:
        self._context, self._frame = context, frame

    def __enter__(self) -> None:
        self._context.__enter__()
        self._frame.__enter__()

    def __exit__(self, *error) -> None:
        self._frame.__exit__(*error)
        self._context.__exit__(*error)
