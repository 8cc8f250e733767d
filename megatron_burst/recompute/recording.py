"""One call of a function or module, kept so that recomputation needs its inputs only.

The first pass runs the function with its autograd graph. Of the tensors that the graph saves,
references replace the inputs, which are recomputed, and the outputs, which are kept once; only the
rest is kept besides. With burst attention, or any flash attention, that leaves (out, lse); with a
linear layer its output, as parameters live anyway.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import get_device_states, set_device_states

from megatron_burst.engine.passes import compact_copy
from megatron_burst.errors import BurstError
from megatron_burst.recompute.auto.graph import leaves_of, storages
from megatron_burst.recompute.keeping import WHO, Keeping, Parcel, Tensors, Watch, without_frames
from megatron_burst.transforms import refuse_transforms


class Saved:
    """Placeholder of a tensor that the graph saves: its geometry, and where its data will be."""

    __slots__ = ("_view", "index", "needs", "role", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor.detach()  # the data, until `refer`

    def refer(self, role: str, index: int, base: Tensor) -> None:
        """Refer to a view of `base`, one of the "inputs", "outs", "parameters" or "extras".

        `needs`: how much of base's geometry it relies on: 1 shape, 2 also strides, 3 also its
        offset, because the view extends beyond it (q, k and v in one buffer).
        """
        self.role, self.index = role, index
        shape, stride, offset = geometry(self.tensor)
        same = shape == tuple(base.shape) and stride == base.stride()
        first = offset - base.storage_offset()
        inside = first >= 0 and first + extent(self.tensor) <= extent(base)
        self.needs = 1 if same and not first else 2 if inside else 3
        self._view = None if self.needs == 1 else (shape, stride, first)
        self.tensor = None

    def find(self, bound: dict[str, Tensors]) -> Tensor:
        """The tensor, from those that the backward pass has."""
        base = bound[self.role][self.index]
        if self._view is None:  # parameters have attributes, such as Megatron's main_grad
            return base if self.role == "parameters" else base.detach()
        shape, stride, offset = self._view
        return base.detach().as_strided(shape, stride, base.storage_offset() + offset)


def checksum(x: Tensor) -> bytes:
    """A digest of all bits and their order."""
    flat = x.detach().contiguous().reshape(-1).view(torch.uint8)
    return blake2b(flat.cpu().numpy(), digest_size=16).digest()


def geometry(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Shape, strides and offset of a tensor in its storage, in elements."""
    return tuple(x.shape), x.stride(), x.storage_offset()


def extent(x: Tensor) -> int:
    """Number of elements of memory from a tensor's first to its last."""
    return 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))


def memory(x: Tensor) -> tuple:
    """The memory that a tensor is a view of."""
    return x.untyped_storage().data_ptr(), x.untyped_storage().nbytes(), x.dtype


class _Enter(torch.autograd.Function):
    """Identity that passes gradients to `ends`, so that no leaf of the graph holds an input."""

    @staticmethod
    def forward(ctx, ends: list, _token, *inputs):
        ctx.ends = ends
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in inputs)

    @staticmethod
    def backward(ctx, *grads):
        ctx.ends.extend(grads)
        return None, None, *(None for _ in grads)


class Recording:
    """A kept call, made by the first pass; `play` returns its outputs in recomputation.

    Args:
        function: of tensors; returns tensors, and None, in any nesting. If it draws random
            numbers, `play` leaves torch's default generators as it did.
        inputs: what it is called with.
        keeping: how much, where.
    """

    def __init__(self, function: Callable, inputs: Tensors, keeping: Keeping) -> None:
        self._inputs = [geometry(x) for x in inputs]
        self._floats = [x.is_floating_point() for x in inputs]
        self._needs = [0] * len(inputs)
        self._debug = [checksum(x) for x in inputs] if keeping.debug else None
        self._policy, self._announcer = keeping.policy, keeping.announcer
        self._parameters = keeping.parameters
        self._bound: dict[str, Tensors] = {}
        self._ends: list[Tensor | None] = []  # gradients of the inputs
        self._saved: list[Saved] = []
        outs = self._run(function, inputs)
        self._edges = [get_gradient_edge(x) if x.requires_grad else None for x in outs]
        outs = tuple(x.detach() for x in outs)
        self._reads_outs = [False] * len(outs)
        extras = self._refer(inputs, outs)
        kept = outs if self._policy is None else self._policy.trim(outs)
        # other objects: Megatron frees the data of what a pipeline stage has sent
        self._fresh: tuple[Tensors, Tensors] | None = (tuple(x.detach() for x in outs), extras)
        self._num_kept = len(kept)
        self.num_bytes = sum(storages((*kept, *extras)).values())
        with self._announcer.reporting_errors():
            self._parcel: Parcel | None = keeping.pack((*kept, *extras))

    def _run(self, function: Callable, inputs: Tensors) -> Tensors:
        """Run the function with its graph; what the graph saves goes to `_saved`."""
        # the hooks must not refer to self, which has the graph that has them
        saved, bound, own = self._saved, self._bound, set(map(id, self._parameters))

        def pack(tensor: Tensor) -> Saved | Tensor:
            if id(tensor) in own:  # a grouped GEMM saves hundreds: placeholders take milliseconds
                return tensor
            if not tensor.numel():
                return tensor.detach()
            saved.append(Saved(tensor))
            return saved[-1]

        def unpack(packed: Saved | Tensor) -> Tensor:
            return packed.find(bound) if isinstance(packed, Saved) else packed

        floating = [x.detach() for x in inputs if x.is_floating_point()]
        one_each = {x.device: x for x in inputs}.values()
        cpu, (devices, states) = torch.get_rng_state(), get_device_states(*one_each)
        with without_frames(), torch.enable_grad(), saved_tensors_hooks(pack, unpack):
            self._token = torch.empty(0, requires_grad=True)
            entered = iter(_Enter.apply(self._ends, self._token, *floating))
            outs = function(*(next(entered) if x.is_floating_point() else x for x in inputs))
        after = torch.get_rng_state(), *get_device_states(*one_each)[1]
        self._random = None if all(map(torch.equal, (cpu, *states), after)) else (devices, after)
        leaves, self._tree = tree_flatten(outs)
        self._holes = [index for index, x in enumerate(leaves) if x is None]
        results = tuple(x for x in leaves if x is not None)
        if not results or not all(isinstance(x, Tensor) for x in results):
            raise BurstError(f"{WHO}: what is kept must return only tensors and None, because "
                             "other results cannot be kept; got "
                             f"{[type(x).__name__ for x in leaves]}; wrap it in a function that "
                             "does")  # fmt: skip
        return results

    def _refer(self, inputs: Tensors, outs: Tensors) -> Tensors:
        """Replace inputs and outputs by references; returns what else the graph saves."""
        bases = {memory(x): ("outs", i, x) for i, x in enumerate(outs)}
        bases |= {memory(x): ("inputs", i, x) for i, x in enumerate(inputs)}
        bases |= {(*memory(x), x.storage_offset()): ("inputs", i, x) for i, x in enumerate(inputs)}
        parameters: dict[tuple, tuple] = {}  # looked for last, as there may be hundreds
        extras: list[Tensor] = []
        for saved in self._saved:
            tensor, place = saved.tensor, memory(saved.tensor)
            base = bases.get((*place, tensor.storage_offset())) or bases.get(place)
            if base is None:
                parameters = parameters or {
                    memory(x): ("parameters", i, x) for i, x in enumerate(self._parameters)
                }
                base = parameters.get(place)
            if base is None:
                base = ("extras", len(extras), tensor)
                extras.append(tensor)
            saved.refer(*base)
            if saved.role == "inputs":
                self._needs[saved.index] = max(self._needs[saved.index], saved.needs)
            elif saved.role == "outs":
                self._reads_outs[saved.index] = True
        self._saved.clear()
        return tuple(extras)

    @property
    def is_spent(self) -> bool:
        """Whether a backward inside the first pass has taken what was kept."""
        return self._fresh is None and self._parcel is None

    def compare_no_bits(self) -> None:
        """Let inputs differ by rounding: they depend on attention that was partly recomputed."""
        self._debug = None

    def play(self, inputs: Tensors, last: bool = False) -> Any:
        """What the function returned; with gradients enabled, with a graph over these inputs.

        `last`: whether this is the last call; then what is kept is freed. Refuses inputs whose
        shapes differ from the first pass, their memory layout where that matters, or in debug mode
        any bit; and kept tensors that were written in place since.
        """
        with self._announcer.reporting_errors():
            self._check(inputs)
            kept = () if self._fresh is not None else self._parcel.get()
        if self._fresh is not None:  # in the first pass all of it still exists
            (outs, extras), self._fresh = self._fresh, None
        else:
            if last:
                self._parcel = None
            self._draw_again()
            outs, extras = kept[: self._num_kept], kept[self._num_kept :]
            if self._policy is not None:
                outs = self._policy.restore(outs, inputs)
        if torch.is_grad_enabled():
            read = [x if reads else None for x, reads in zip(outs, self._reads_outs, strict=True)]
            self._watch = Watch([x for x in read if x is not None])
            token = None if any(x.requires_grad for x in inputs) else self._token_of_leaves()
            saved = *self._read(inputs), *read, *extras
            outs = _Played.apply(self, saved, outs, token, *inputs)
        leaves = list(outs)
        for hole in self._holes:
            leaves.insert(hole, None)
        return tree_unflatten(leaves, self._tree)

    def _token_of_leaves(self) -> Tensor | None:
        """A tensor that asks for backward where no input does, if the graph has parameters."""
        nodes = [edge.node for edge in self._edges if edge is not None]
        has_any = any(leaf is not self._token for leaf in leaves_of(nodes))
        return torch.empty(0, requires_grad=True) if has_any else None

    def _read(self, inputs: Tensors) -> list[Tensor | None]:
        """What backward reads of the inputs, with as little memory as possible."""
        read = [x if needs else None for x, needs in zip(inputs, self._needs, strict=True)]
        for index, needs in enumerate(self._needs):
            if needs == 1:  # a copy may have other strides
                read[index] = compact_copy(inputs[index], *inputs[:index], *inputs[index + 1 :])
        return read

    def backward(
        self, inputs: Sequence[Tensor | None], outs: Sequence[Tensor | None], extras: Tensors, grads
    ) -> list:
        """Gradients of the inputs, None for those that have none; only once. Inputs and outputs are
        those of `play`, None where backward does not read them; extras: what else it reads."""
        with self._announcer.reporting_errors():
            self._watch.check()
        self._parcel = None  # its tensors now belong to the caller
        self._bound |= {"inputs": inputs, "outs": outs, "extras": extras,
                        "parameters": self._parameters}  # fmt: skip
        pairs = zip(self._edges, grads, strict=True)
        roots = [(edge, grad) for edge, grad in pairs if edge is not None and grad is not None]
        try:
            if roots:
                torch.autograd.backward(*map(list, zip(*roots, strict=True)))
        finally:
            self._bound.clear()
        input_grads = iter(self._ends[:])
        self._ends.clear()
        return [next(input_grads, None) if floats else None for floats in self._floats]

    def constants(self, outs: Tensors) -> list[Tensor]:
        """The outputs that carry no gradient."""
        return [x for x, edge in zip(outs, self._edges, strict=True) if edge is None]

    def _draw_again(self) -> None:
        """Leave the generators as the function left them: later code may draw from them."""
        if self._random is not None:
            devices, (cpu, *states) = self._random
            torch.set_rng_state(cpu)
            set_device_states(devices, states)

    def _check(self, inputs: Tensors) -> None:
        now = [geometry(x) for x in inputs]
        depths = [max(needs, 1) for needs in self._needs]  # shapes matter for all
        matches = len(now) == len(self._inputs) and all(
            got[:depth] == first[:depth]
            for got, first, depth in zip(now, self._inputs, depths, strict=True)
        )
        if not matches:
            raise BurstError(f"{WHO}: recomputation must make the same calls as the first pass, "
                             "because kept results are matched by call order; got inputs (shape, "
                             f"strides, offset) {now} after {self._inputs}; recompute a function "
                             "that does the same every time")  # fmt: skip
        debug = self._debug or ()
        differing = [i for i, digest in enumerate(debug) if checksum(inputs[i]) != digest]
        if differing:
            raise BurstError(f"{WHO}: recomputation's inputs must equal the first pass's inputs "
                             "bit by bit, because outputs are not recomputed; got other bits in "
                             f"inputs {differing}; look for random numbers or weights that changed "
                             "between the two, or pass --burst-keep none")  # fmt: skip


class _Played(torch.autograd.Function):
    """The outputs of a recording, as if its function had run on these inputs."""

    @staticmethod
    def forward(ctx, recording, saved, outs, _token, *inputs):
        outs = tuple(x.detach() for x in outs)
        ctx.recording, ctx.num_inputs, ctx.num_outs = recording, len(inputs), len(outs)
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*recording.constants(outs))
        ctx.set_materialize_grads(False)
        return outs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        refuse_transforms(WHO, *grads)
        saved, middle = ctx.saved_tensors, ctx.num_inputs + ctx.num_outs
        inputs, outs = saved[: ctx.num_inputs], saved[ctx.num_inputs : middle]
        return None, None, None, None, *ctx.recording.backward(inputs, outs, saved[middle:], grads)
