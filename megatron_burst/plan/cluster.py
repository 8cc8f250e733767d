"""Which global ranks form the context-parallel groups of a run, and the topology of each."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from megatron_burst.errors import BurstError
from megatron_burst.schedule.flat import topology_of
from megatron_burst.schedule.topology import Topology


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of Megatron's model parallelism; what is left is data parallel."""

    # tensor parallel size; neighbours of a context-parallel group are so many ranks apart
    tp: int = 1
    cp: int = 1  # context parallel size
    pp: int = 1  # pipeline parallel size


@dataclass(frozen=True, slots=True)
class CpGroup:
    """A context-parallel group."""

    ranks: tuple[int, ...]  # its global ranks; cp rank i is the i-th
    topology: Topology  # their arrangement, in cp ranks


def cp_groups(
    nodes: Sequence[Hashable], sizes: Sizes, places: Sequence | None = None
) -> list[CpGroup]:
    """All context-parallel groups of a run, in Megatron's default order tp-cp-dp-pp.

    Args:
        nodes: of each global rank.
        sizes: of the run.
        places: of each global rank on its node.

    Raises:
        BurstError: if the sizes do not divide the number of ranks.
    """
    world, model = len(nodes), sizes.tp * sizes.cp * sizes.pp
    if min(sizes.tp, sizes.cp, sizes.pp) < 1 or world % model:
        raise BurstError(
            "cluster: tensor, context and pipeline parallel sizes must be positive and their "
            "product must divide the number of ranks, because the rest is data parallel; got "
            f"{sizes.tp} x {sizes.cp} x {sizes.pp} and {world} ranks; change one of them"
        )
    groups = []
    span = sizes.tp * sizes.cp  # ranks of one data-parallel place of one pipeline stage
    for first in range(0, world, span):
        for tp_rank in range(sizes.tp):
            ranks = tuple(range(first + tp_rank, first + span, sizes.tp))
            own = None if places is None else [places[rank] for rank in ranks]
            groups.append(CpGroup(ranks, topology_of([nodes[rank] for rank in ranks], own)))
    return groups
