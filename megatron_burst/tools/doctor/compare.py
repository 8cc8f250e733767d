"""What ranks and nodes have in common, and the odd ones among them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

from megatron_burst.schedule.topology import Link
from megatron_burst.tools.doctor.network import used_hcas
from megatron_burst.tools.doctor.report import Check, LinkRate, Status, fail, few, ok, skip, warn
from megatron_burst.tools.doctor.survey import Survey, gpus_of

_SLOW = 0.7  # of the median
_MAY_DIFFER = {"NCCL_HOSTID", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "NCCL_TOPO_FILE"}
_SLOWEST = "the slowest sets the pace: take nodes of one kind"
_HARDWARE = {  # what should be the same on all nodes, and what to do where it is not
    "gpu": _SLOWEST, "clock": _SLOWEST,
    "gpus": "take nodes with equally many GPUs",
    "ranks": "start equally many ranks on each node: uneven ones get a flat ring",
    "driver": "install the same driver on all nodes",
    "hcas": "have ports that are down looked at, or take nodes of one kind",
}  # fmt: skip


def hardware_of(survey: Survey) -> dict[str, str]:
    """What should be the same on all nodes."""
    gpus, hcas = gpus_of(survey), used_hcas(survey)
    have = {name: "/".join(sorted({gpu[field] for gpu in gpus})) or "none" for name, field in (
        ("gpu", "name"), ("clock", "clocks.max.sm"), ("driver", "driver_version"))}  # fmt: skip
    ports = f"{len(hcas)} x {hcas[0].network}" if hcas else "none"
    return {**have, "gpus": str(len(gpus)), "hcas": ports}


def check_alike(nodes: Mapping[str, Mapping[str, str]]) -> list[Check]:
    """Nodes that differ from most in what should be the same: hardware, versions, variables."""
    if len(nodes) < 2:
        return [skip("alike", "one node")]
    found, names = [], sorted({name for have in nodes.values() for name in have} - _MAY_DIFFER)
    for name in names:
        status, change, absent = Status.FAIL, f"install the same {name} on all nodes", "none"
        if name in _HARDWARE:
            status, change = Status.WARN, _HARDWARE[name]
        elif name.isupper():
            status, change, absent = Status.WARN, "export the same value on all nodes", "unset"
        values = {node: have.get(name, absent) for node, have in nodes.items()}
        (common, _), *others = Counter(values.values()).most_common()
        if others:
            odd = {node: value for node, value in values.items() if value != common}
            named = few([f"{node} has {value}" for node, value in odd.items()])
            what = f"{name} differs: {named}; the others {common}"
            found.append(Check(status, "alike", what, change, ", ".join(odd)))
    return found or [ok("alike", f"{len(nodes)} nodes have the same {', '.join(names)}")]


def check_seats(gpu_ids: Mapping[int, str]) -> Check:
    """That each rank has a GPU of its own; `gpu_ids`: "" of a rank without one."""
    counts = Counter(gpu_ids.values())
    if not any(counts):
        return skip("seats", "no rank has a GPU: the job runs on the CPU")
    if without := [rank for rank, gpu in gpu_ids.items() if not gpu or counts[gpu] > 1]:
        change = "start no more ranks on a node than it has GPUs"
        what = f"ranks {without} have no GPU of their own"
        return fail("seats", what, change, f"ranks {without}")
    return ok("seats", f"each of {len(gpu_ids)} ranks has a GPU of its own")


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
    change = "look at NVLink and clocks" if kind is Link.INTRA else "look at its HCA and cable"
    if shared := sorted(rank for rank, count in ends.items() if count > 1):
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
