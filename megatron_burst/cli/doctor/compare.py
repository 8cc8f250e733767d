"""What ranks and nodes have in common, and the odd ones among them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from megatron_burst.cli.doctor.report import Check, LinkRate, Status, fail, few, ok, skip, warn
from megatron_burst.schedule.topology import Link, Topology

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
    nodes = list({fact.node: fact for fact in reversed(facts)}.values())[::-1]
    if len(nodes) < 2:
        return [skip("alike", "one node")]
    asked = list(_ALIKE)
    for name in sorted({name for fact in nodes for name in fact.versions}):
        change = f"install the same {name} on all nodes"
        asked.append((name, Status.FAIL, change, lambda fact, n=name: fact.versions.get(n, "none")))
    for name in sorted({name for fact in nodes for name in fact.variables} - _MAY_DIFFER):
        change = "export the same value on all nodes"
        value = lambda fact, n=name: fact.variables.get(n, "unset")  # noqa: E731
        asked.append((name, Status.WARN, change, value))
    found = [odd(*what, {fact.node: value(fact) for fact in nodes}) for *what, value in asked]
    same = ok("alike", f"{len(nodes)} nodes have the same hardware, versions and variables")
    return [check for check in found if check] or [same]


_MAY_DIFFER = {"NCCL_HOSTID", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "NCCL_TOPO_FILE"}
_SLOWEST = "the slowest sets the pace: take nodes of one kind"
_ALIKE = (  # name, how bad a difference is, what to change, value
    ("gpu", Status.WARN, _SLOWEST, lambda fact: fact.gpu),
    ("gpus", Status.WARN, "take nodes with equally many GPUs", lambda fact: str(fact.gpus)),
    ("ranks", Status.WARN, "start equally many ranks on each node: uneven ones get a flat ring",
     lambda fact: str(fact.local_size)),
    ("clock", Status.WARN, _SLOWEST, lambda fact: f"{fact.clock_mhz:.0f} MHz"),
    ("driver", Status.WARN, "install the same driver on all nodes", lambda fact: fact.driver),
)  # fmt: skip


def odd(name: str, status: Status, change: str, values: Mapping[str, str]) -> Check | None:
    """The nodes whose value is not that of most; None if all have the same."""
    counts = Counter(values.values())
    if len(counts) < 2:
        return None
    common, _ = counts.most_common(1)[0]
    others = {node: value for node, value in values.items() if value != common}
    named = few([f"{node} has {value}" for node, value in others.items()])
    what = f"{name} differs: {named}; the others {common}"
    return Check("alike", status, what, change, ", ".join(others))


def check_seats(facts: Mapping[int, Facts]) -> Check:
    """That each rank has a GPU of its own."""
    ranks_of: dict[str, list[int]] = {}
    for rank, fact in facts.items():
        if fact.gpu_id:
            ranks_of.setdefault(fact.gpu_id, []).append(rank)
    doubled = {gpu: ranks for gpu, ranks in ranks_of.items() if len(ranks) > 1}
    without = [rank for rank, fact in facts.items() if not fact.gpu_id]
    change = "start no more ranks on a node than it has GPUs"
    if doubled:
        ranks = next(iter(doubled.values()))
        return fail("seats", f"ranks {ranks} share a GPU", change, f"ranks {ranks}")
    if without and len(without) < len(facts):
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
    slow = [rank for rank, rate in tflops.items() if rate < SLOW * middle]
    if not slow:
        return ok("compute", what)
    named = [
        f"rank {rank} on {nodes[rank]}: {tflops[rank]:.3g} ({tflops[rank] / middle:.0%})"
        for rank in slow
    ]
    change = "look at clocks, power and other processes there: the slowest sets the pace"
    where = ", ".join(sorted({nodes[rank] for rank in slow}))
    return warn("compute", f"slow: {few(named)}; {what}", change, where)


def check_groups(topologies: Mapping[str, Topology]) -> Check:
    """How context-parallel groups lie on the nodes, by what each is called."""
    found = {name: str(topology) for name, topology in topologies.items()}
    flat = [name for name, text in found.items() if text.startswith("flat")]
    counts = Counter(found.values())
    what = "; ".join(f"{count} x {text}" for text, count in counts.items())
    if flat:
        change = "place equally many ranks of each group on each node"
        return warn("groups", f"{what}; flat: {few(flat)}", change)
    return ok("groups", what)
