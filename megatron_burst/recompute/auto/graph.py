"""Autograd's graph: who reads results in backward, and what the graph of a call holds for it."""

from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves


def graph_bytes(results: Any, others: Iterable[Tensor]) -> int:
    """Bytes of what the graph of a call's results holds for backward on their device, besides
    these, other tensors, and leaves, such as parameters.

    Args:
        results: tensors in any nesting.
        others: tensors that live on anyway: the call's inputs, where the graph ends, parameters
            that are frozen.
    """
    known, found = set(storages(results)), {}
    others = list(others)
    known |= _homes(others)
    stack, seen = makers_of(results), {x.grad_fn for x in others}
    devices = {x.device for x in tree_leaves(results) if _is_tensor(x)}
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # of a leaf
            known |= _homes([node.variable])
            continue
        found |= storages([x for x in _saved_by(node) if _is_tensor(x) and x.device in devices])
        stack += [before for before, _ in node.next_functions if before is not None]
    return sum(size for address, size in found.items() if address not in known)


def storages(tensors: Any) -> dict[int, int]:
    """Sizes in bytes of the memory that tensors, in any nesting, are views of, by its address."""
    every = (x.untyped_storage() for x in tree_leaves(tensors) if _is_tensor(x))
    return {storage.data_ptr(): storage.nbytes() for storage in every}


def readers(results: Any, nodes: list[Node]) -> Iterable[Node]:
    """The graph's nodes between results and some nodes that save a floating-point tensor.

    Args:
        results: tensors in any nesting.
        nodes: that made what may be read.
    """
    users, seen = defaultdict(list), set(nodes)  # what lies behind them reads nothing of theirs
    stack = makers_of(results)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for before, _ in node.next_functions:
            if before is not None:
                users[before].append(node)
                stack.append(before)
    found, stack = set(), list(nodes)
    while stack:
        for user in users[stack.pop()]:
            if user not in found:
                found.add(user)
                stack.append(user)
    return (node for node in found if any(map(_is_float, _saved_by(node))))


def leaves_of(nodes: Iterable[Node]) -> Iterable[Tensor]:
    """The leaves of the graph behind some nodes, as parameters are."""
    stack, seen = list(nodes), set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        stack += [before for before, _ in node.next_functions if before is not None]


def _homes(others: list[Tensor]) -> set[int]:
    """Where tensors are that live on anyway, and Megatron's buffers of their gradients, to which
    fused products refer."""
    return set(storages([others, [getattr(x, "main_grad", None) for x in others]]))


def makers_of(results: Any) -> list[Node]:
    """The graph's nodes that made results: tensors in any nesting."""
    return [x.grad_fn for x in tree_leaves(results) if _is_tensor(x) and x.grad_fn]


def _saved_by(node: Node) -> list[Any]:
    """What a node of the graph saves: of a Function's also its own attributes."""
    if hasattr(node, "saved_tensors"):
        return tree_leaves([node.saved_tensors, vars(node)])
    return tree_leaves([getattr(node, name) for name in _names_of_saved(type(node))])


@cache
def _names_of_saved(kind: type[Node]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_saved_"))


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def _is_float(x: Any) -> bool:
    return _is_tensor(x) and x.is_floating_point()
