"""Autograd's graph: who reads results in backward, and what the graph of a call holds for it."""

from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves


def graph_bytes(results: Any, x: Tensor) -> int:
    """Bytes of what the graph between a call's input and its results holds for backward, besides
    that input and leaves, such as parameters.

    Args:
        results: tensors in any nesting.
        x: the input.
    """
    known, found = {x.untyped_storage().data_ptr()}, {}
    stack, seen = _nodes(results), {x.grad_fn}
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # of a leaf
            known.add(node.variable.untyped_storage().data_ptr())
            continue
        for tensor in filter(_is_tensor, _saved_by(node)):
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        stack += [before for before, _ in node.next_functions if before is not None]
    return sum(size for address, size in found.items() if address not in known)


def readers(results: Any, nodes: list[Node]) -> Iterable[Node]:
    """The graph's nodes between results and some nodes that save a floating-point tensor.

    Args:
        results: tensors in any nesting.
        nodes: that made what may be read.
    """
    users, seen = defaultdict(list), set(nodes)  # what lies behind them reads nothing of theirs
    stack = _nodes(results)
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


def _nodes(results: Any) -> list[Node]:
    """That made the results."""
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
