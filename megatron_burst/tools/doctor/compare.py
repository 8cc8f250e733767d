"""What ranks and nodes have in common, and the odd ones among them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from megatron_burst.errors import BurstError
from megatron_burst.schedule.topology import Link, Topology, topology_of
from megatron_burst.tools.doctor.report import Check, LinkRate, Status, fail, few, ok, skip, warn

SLOW = 0.7  # of the median


@dataclass(frozen=True, slots=True)
class Facts:
    """What a rank says of itself, its node and its GPU."""

    node: str
    gpu: str  # its name; "CPU" without one
    gpu_id: str  # tells GPUs apart; "" without one
    gpus: int  # of the node
    clock_mhz: float  # the most that its GPU may run at; 0 if unknown
    driver: str
    local_rank: int
    local_size: int
    versions: Mapping[str, str]  # of software, by name
    variables: Mapping[str, str]  # of NCCL and CUDA that are set


def check_alike(facts: Sequence[Facts]) -> list[Check]:
    """Nodes that differ from most in what should be the same."""
    nodes = {fact.node: fact for fact in reversed(facts)}
    if len(nodes) < 2:
        return [skip("alike", "one node")]
    found = [
        odd(name, Status.WARN, change, {node: value(fact) for node, fact in nodes.items()})
        for name, change, value in _ALIKE
    ]
    for name in sorted({name for fact in nodes.values() for name in fact.versions}):
        have = {node: fact.versions.get(name, "none") for node, fact in nodes.items()}
        found.append(odd(name, Status.FAIL, f"install the same {name} on all nodes", have))
    for name in sorted({n for fact in nodes.values() for n in fact.variables} - _MAY_DIFFER):
        have = {node: fact.variables.get(name, "unset") for node, fact in nodes.items()}
        found.append(odd(name, Status.WARN, "export the same value on all nodes", have))
    same = ok("alike", f"{len(nodes)} nodes have the same hardware, versions and variables")
    return [check for check in found if check] or [same]


_MAY_DIFFER = {"NCCL_HOSTID", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "NCCL_TOPO_FILE"}
_SLOWEST = "the slowest sets the pace: take nodes of one kind"
_ALIKE = (  # name, what to change, value
    ("gpu", _SLOWEST, lambda fact: fact.gpu),
    ("gpus", "take nodes with equally many GPUs", lambda fact: str(fact.gpus)),
    ("ranks", "start equally many ranks on each node: uneven ones get a flat ring",
     lambda fact: str(fact.local_size)),
    ("clock", _SLOWEST, lambda fact: f"{fact.clock_mhz:.0f} MHz"),
    ("driver", "install the same driver on all nodes", lambda fact: fact.driver),
)  # fmt: skip


def odd(name: str, status: Status, change: str, values: Mapping[str, str]) -> Check | None:
    """The nodes whose value is not that of most; None if all have the same."""
    (common, most), *_ = Counter(values.values()).most_common(1)
    if most == len(values):
        return None
    others = {node: value for node, value in values.items() if value != common}
    named = few([f"{node} has {value}" for node, value in others.items()])
    what = f"{name} differs: {named}; the others {common}"
    return Check("alike", status, what, change, ", ".join(others))


def check_seats(facts: Mapping[int, Facts]) -> Check:
    """That each rank has a GPU of its own."""
    ranks_of: dict[str, list[int]] = {}
    for rank, fact in facts.items():
        ranks_of.setdefault(fact.gpu_id, []).append(rank)
    without = ranks_of.pop("", [])
    shared = next((ranks for ranks in ranks_of.values() if len(ranks) > 1), None)
    change = "start no more ranks on a node than it has GPUs"
    if shared:
        return fail("seats", f"ranks {shared} share a GPU", change, f"ranks {shared}")
    if without and ranks_of:
        what = f"ranks {without} have no GPU, the others have"
        return fail("seats", what, change, f"ranks {without}")
    if without:
        return skip("seats", "no rank has a GPU: the job runs on the CPU")
    return ok("seats", f"each of {len(facts)} ranks has a GPU of its own")


def link_rates(
    kind: Link, rings: Sequence[Sequence[int]], ms: Mapping[int, float], num_bytes: int,
    nodes: Mapping[int, str],
) -> list[LinkRate]:  # fmt: skip
    """The rate of each link of some rings, from the time that a shift took each rank.

    A slow link makes both its ends late, and a rank that is late for another reason both its links:
    so a link took what the earlier of its ends took. In a ring each rank sends `num_bytes` to the
    next; times and nodes' names are by rank.
    """
    pairs = [(a, b) for ring in rings for a, b in zip(ring, (*ring[1:], ring[0]), strict=True)]
    rates = [num_bytes / min(ms[a], ms[b]) / 1e6 for a, b in pairs]
    middle = median(rates) if rates else 0.0
    return [
        LinkRate(kind.value, a, b, (nodes[a], nodes[b]), rate, rate / middle)
        for (a, b), rate in zip(pairs, rates, strict=True)
    ]


def check_links(kind: Link, links: Sequence[LinkRate]) -> Check:
    """Links that are slow beside the median of their kind; names the rank that they share."""
    name = f"{kind} links"
    if not links:
        return skip(name, "no two ranks to join")
    rates = sorted(link.gb_per_s for link in links)
    what = f"{len(links)} links: {rates[0]:.3g} to {rates[-1]:.3g} GB/s, median {median(rates):.3g}"
    slow = sorted((link for link in links if link.ratio < SLOW), key=lambda link: link.ratio)
    if not slow:
        return ok(name, what)
    named = [
        f"rank {link.source} on {link.nodes[0]} -> rank {link.dest} on {link.nodes[1]}: "
        f"{link.gb_per_s:.3g} GB/s ({link.ratio:.0%})"
        for link in slow
    ]
    ends = Counter(rank for link in slow for rank in {link.source, link.dest})
    shared = sorted(rank for rank, count in ends.items() if count > 1)
    change = "look at NVLink and clocks" if kind is Link.INTRA else "look at its HCA and cable"
    if shared:
        change += f" of ranks {shared}, which slow links have in common"
    where = ", ".join(sorted({node for link in slow for node in link.nodes}))
    return warn(name, f"{len(slow)} slow: {few(named)}; of {what}", change, where)


def check_compute(tflops: Mapping[int, float], nodes: Mapping[int, str]) -> Check:
    """Ranks that compute slowly beside the median; rates and node names by rank."""
    middle = median(tflops.values())
    what = f"{min(tflops.values()):.3g} to {max(tflops.values()):.3g} TFLOP/s in a matrix product"
    slow = {rank: rate for rank, rate in tflops.items() if rate < SLOW * middle}
    if not slow:
        return ok("compute", what)
    named = [f"rank {r} on {nodes[r]}: {t:.3g} ({t / middle:.0%})" for r, t in slow.items()]
    change = "look at clocks, power and other processes there: the slowest sets the pace"
    where = ", ".join(sorted({nodes[rank] for rank in slow}))
    return warn("compute", f"slow: {few(named)}; {what}", change, where)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of Megatron's model parallelism; what is left is data parallel."""

    tp: int = 1
    cp: int = 1
    pp: int = 1


def cp_groups(
    nodes: Sequence, sizes: Sizes, places: Sequence | None = None
) -> dict[tuple[int, ...], Topology]:
    """Topologies of all context-parallel groups, by global ranks, in Megatron's order tp-cp-dp-pp;
    nodes, and places on them, are those of each global rank.

    Raises:
        BurstError: if the sizes do not divide the number of ranks.
    """
    world, model = len(nodes), sizes.tp * sizes.cp * sizes.pp
    if min(sizes.tp, sizes.cp, sizes.pp) < 1 or world % model:
        raise BurstError(
            "doctor: tensor, context and pipeline parallel sizes must be positive and their "
            "product must divide the number of ranks, because the rest is data parallel; got "
            f"{sizes.tp} x {sizes.cp} x {sizes.pp} and {world} ranks; change one of them"
        )
    groups, span = {}, sizes.tp * sizes.cp  # ranks of one data-parallel place of a stage
    for first in (start + tp for start in range(0, world, span) for tp in range(sizes.tp)):
        ranks = tuple(range(first, first - first % span + span, sizes.tp))
        own = None if places is None else [places[rank] for rank in ranks]
        groups[ranks] = topology_of([nodes[rank] for rank in ranks], own)
    return groups


def check_groups(topologies: Mapping[tuple[int, ...], Topology]) -> Check:
    """How context-parallel groups lie on the nodes, by their ranks."""
    found = {ranks: str(topology) for ranks, topology in topologies.items()}
    flat = [f"ranks {list(ranks)}" for ranks, text in found.items() if text.startswith("flat")]
    what = "; ".join(f"{count} x {text}" for text, count in Counter(found.values()).items())
    if flat:
        change = "place equally many ranks of each group on each node"
        return warn("groups", f"{what}; flat: {few(flat)}", change)
    return ok("groups", what)
