"""What ranks and nodes have in common, and the odd ones among them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from megatron_burst.comm.nodes import RankHome
from megatron_burst.schedule.topology import Link
from megatron_burst.tools.doctor.report import (
    Check,
    LinkRate,
    Status,
    fail,
    few,
    odd,
    ok,
    skip,
    warn,
)

_SLOW = 0.7  # of the median
_MAY_DIFFER = {"NCCL_HOSTID", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "NCCL_TOPO_FILE"}
_SLOWEST = "the slowest sets the pace: take nodes of one kind"
HARDWARE = {  # what should be the same on all nodes, and what to do where it is not
    "gpu": _SLOWEST,
    "gpus": "take nodes with equally many GPUs",
    "ranks": "start equally many ranks on each node: uneven ones get a flat ring",
    "clock": _SLOWEST,
    "driver": "install the same driver on all nodes",
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What a rank says of itself, its node and its GPU."""

    node: str
    gpu_id: str  # tells GPUs apart; "" without one
    hardware: Mapping[str, str]  # by the names of `HARDWARE`
    versions: Mapping[str, str]  # of software, by name
    variables: Mapping[str, str]  # of NCCL and CUDA that are set
    home: RankHome | None = None  # as the trainer sees it
    door: tuple[str, int] = ("", 0)  # address and port where other nodes can knock


def facts_of(fields: Mapping) -> Facts:
    """What a rank said, from the fields that it sent (`dataclasses.asdict`)."""
    home = fields["home"] and RankHome(**fields["home"])
    return Facts(**{**fields, "home": home, "door": tuple(fields["door"])})


def check_alike(facts: Sequence[Facts]) -> list[Check]:
    """Nodes that differ from most in what should be the same."""
    nodes = {fact.node: fact for fact in reversed(facts)}
    if len(nodes) < 2:
        return [skip("alike", "one node")]

    def check(kind: str, name: str, status: Status, change: str, absent: str) -> Check | None:
        have = {node: getattr(fact, kind).get(name, absent) for node, fact in nodes.items()}
        return odd(name, status, change, have)

    found = [
        check("hardware", name, Status.WARN, change, "none") for name, change in HARDWARE.items()
    ]
    for name in sorted({name for fact in facts for name in fact.versions}):
        change = f"install the same {name} on all nodes"
        found.append(check("versions", name, Status.FAIL, change, "none"))
    for name in sorted({name for fact in facts for name in fact.variables} - _MAY_DIFFER):
        change = "export the same value on all nodes"
        found.append(check("variables", name, Status.WARN, change, "unset"))
    same = ok("alike", f"{len(nodes)} nodes have the same hardware, versions and variables")
    return [one for one in found if one] or [same]


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
    slow = sorted((link for link in links if link.ratio < _SLOW), key=lambda link: link.ratio)
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
    slow = {rank: rate for rank, rate in tflops.items() if rate < _SLOW * middle}
    if not slow:
        return ok("compute", what)
    named = [f"rank {r} on {nodes[r]}: {t:.3g} ({t / middle:.0%})" for r, t in slow.items()]
    change = "look at clocks, power and other processes there: the slowest sets the pace"
    where = ", ".join(sorted({nodes[rank] for rank in slow}))
    return warn("compute", f"slow: {few(named)}; {what}", change, where)
