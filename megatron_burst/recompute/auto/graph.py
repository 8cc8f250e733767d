"""Autograd's graph: who reads results in backward, and what the graph of a call holds for it."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves


def graph_bytes(results: Any, living: Iterable[Tensor]) -> int:
    """Bytes of what the graph of a call's results, tensors in any nesting, holds for backward on
    their device, besides these, leaves such as parameters, and tensors that live on anyway: the
    call's inputs, where the graph ends, and frozen parameters."""
    living, saved = list(living), {}
    elsewhere = {*storages(results), *_addresses(living)}
    devices = {x.device for x in tree_leaves(results) if isinstance(x, Tensor)}
    for node in _behind(makers_of(results), {x.grad_fn for x in living}):
        if hasattr(node, "variable"):  # of a leaf
            elsewhere |= _addresses([node.variable])
        else:
            saved |= storages([x for x in _saved_by(node) if getattr(x, "device", None) in devices])
    return sum(size for address, size in saved.items() if address not in elsewhere)


def _behind(nodes: Iterable[Node], seen: set[Node | None]) -> Iterator[Node]:
    """Nodes and all behind them, once each; not those in `seen`, nor what only they lead to."""
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack += [before for before, _ in node.next_functions if before is not None]


def storages(tensors: Any) -> dict[int, int]:
    """Sizes in bytes of the memory that tensors, in any nesting, are views of, by its address."""
    memory = (x.untyped_storage() for x in tree_leaves(tensors) if isinstance(x, Tensor))
    return {storage.data_ptr(): storage.nbytes() for storage in memory}


def readers(results: Any, nodes: list[Node]) -> Iterable[Node]:
    """The graph's nodes that save a floating-point tensor, between `results`, tensors in any
    nesting, and `nodes`, which made what may be read."""
    users = defaultdict(list)
    for node in _behind(makers_of(results), set(nodes)):  # behind them nothing of theirs is read
        for before, _ in node.next_functions:
            users[before].append(node)
    between, stack = set(), list(nodes)
    while stack:
        new = {*users[stack.pop()]} - between
        between |= new
        stack += new
    saved = ((node, x) for node in between for x in _saved_by(node))
    return (node for node, x in saved if isinstance(x, Tensor) and x.is_floating_point())


def leaves_of(nodes: Iterable[Node]) -> Iterable[Tensor]:
    """The leaves of the graph behind some nodes, as parameters are."""
    return (node.variable for node in _behind(nodes, set()) if hasattr(node, "variable"))


def _addresses(tensors: list[Tensor]) -> set[int]:
    """Where tensors are, and Megatron's buffers of their gradients, which fused products save."""
    return set(storages([tensors, [getattr(x, "main_grad", None) for x in tensors]]))


def makers_of(results: Any) -> list[Node]:
    """The graph's nodes that made results: tensors in any nesting."""
    return [x.grad_fn for x in tree_leaves(results) if isinstance(x, Tensor) and x.grad_fn]


def _saved_by(node: Node) -> list[Any]:
    """What a node of the graph saves: of a Function's also its own attributes."""
    if hasattr(node, "saved_tensors"):
        return tree_leaves([node.saved_tensors, vars(node)])
    return tree_leaves([getattr(node, name) for name in _names_of_saved(type(node))])


@cache
def _names_of_saved(kind: type[Node]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_saved_"))
