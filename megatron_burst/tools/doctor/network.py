"""Networks: the interfaces and HCAs that a job should use, and whether nodes reach each other."""

import fcntl
import re
import socket
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ipaddress import IPv4Interface, IPv4Network
from typing import NamedTuple

from megatron_burst.tools.doctor.report import Check, fail, few, ok, skip, warn
from megatron_burst.tools.doctor.survey import Survey, gpus_of, links_of, number

_SIOCGIFADDR = 0x8915  # asks for an interface's IPv4 address
_AT_ONCE = 64
_VIRTUAL = re.compile(r"(lo|docker|veth|virbr|br-|cni|cali|flannel|kube|nerdctl|podman|tun|tap)")


class Hca(NamedTuple):
    """A port of a host channel adapter."""

    name: str  # with the port's number
    is_up: bool
    network: str  # link layer and rate
    gbit_per_s: float


def hcas_of(survey: Survey) -> list[Hca]:
    """The ports of /sys/class/infiniband."""
    found = []
    for line in survey.lines("hcas"):
        name, port, state, layer, rate = (*line.split("|"), "", "", "", "")[:5]
        gbit_per_s = number(rate.partition(" ")[0])
        network = f"{layer.strip()} at {gbit_per_s:g} Gbit/s"
        found.append(Hca(f"{name}:{port}", "ACTIVE" in state, network, gbit_per_s))
    return found


def used_hcas(survey: Survey) -> list[Hca]:
    """The ports that are up and near a GPU, below the same CPU, as those of storage are not; where
    no port is (virtual machines hide it), all. Of these the network with the highest total rate."""
    near = {name for (_, name), link in links_of(survey).items() if link in ("PIX", "PXB")}
    up = [hca for hca in hcas_of(survey) if hca.is_up]
    up = [hca for hca in up if hca.name.partition(":")[0] in near] or up
    totals: Counter[str] = Counter()
    for hca in up:
        totals[hca.network] += hca.gbit_per_s
    fastest = max(totals, key=totals.__getitem__, default="")
    return [hca for hca in up if hca.network == fastest]


def check_network(survey: Survey) -> list[Check]:
    """HCAs to use, those that are down or left out, and whether they reach GPU memory."""
    hcas, used = hcas_of(survey), used_hcas(survey)
    if not hcas:
        what = "no InfiniBand or RoCE device in /sys/class/infiniband"
        return [skip("hcas", f"{what}: nodes talk over TCP, if at all")]
    what = f"use {', '.join(hca.name for hca in used) or 'none'}"
    fastest = {hca.network for hca in used}
    for hca in (hca for hca in hcas if hca not in used):
        why = "no GPU is near" if hca.network in fastest else hca.network
        what += f"; leave out {hca.name}: {why if hca.is_up else 'down'}"
    if not used:
        return [fail("hcas", what, "have a port brought up")]
    if gpus_of(survey) and not survey.lines("modules"):
        change = "have it loaded, unless the driver uses DMA-BUF: data would pass through the host"
        return [ok("hcas", what), warn("gpudirect", "nvidia_peermem is not loaded", change)]
    return [ok("hcas", what)]


def interfaces_of(survey: Survey) -> dict[str, IPv4Interface]:
    """Address of each interface that may reach other nodes; that of the default route first."""
    found = {}
    for line in survey.lines("addresses"):
        match = re.match(r"\d+:\s+(\S+)\s+inet\s+(\S+)", line)
        if match and not _VIRTUAL.match(match[1]):
            found.setdefault(match[1].partition("@")[0], IPv4Interface(match[2]))
    route = re.search(r"\bdev (\S+)", survey.word("route"))
    return dict(sorted(found.items(), key=lambda item: not route or item[0] != route[1]))


def shared_networks(surveys: Mapping[str, Survey]) -> set[IPv4Network]:
    """IP networks that have all nodes in them."""
    own = ({address.network for address in interfaces_of(s).values()} for s in surveys.values())
    return set.intersection(*own)


def own_address(towards: str, environ: Mapping[str, str]) -> str:
    """The IPv4 address by which other nodes reach this one: of the first interface that
    NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names, else where the route to `towards` begins."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in _named(environ):
            with suppress(OSError):  # it has no IPv4 address
                request = struct.pack("256s", name.encode()[:15])
                return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        with suppress(OSError):
            probe.connect((towards, 9))  # sends nothing: it only asks for the route
            return probe.getsockname()[0]
    return "127.0.0.1"


def _named(environ: Mapping[str, str]) -> Iterator[str]:
    """Interfaces that NCCL's pattern names, or Gloo's; patterns with "^" name none."""
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = environ.get(variable, "")
        patterns = tuple(wanted.lstrip("=").split(","))
        for _, name in socket.if_nameindex() if wanted and wanted[0] != "^" else ():
            if name in patterns if wanted[0] == "=" else name.startswith(patterns):
                yield name


def knock(doors: Mapping[str, tuple[str, int]], timeout_s: float) -> dict[str, str]:
    """Try to connect to each node; why not, by node, for those that cannot be reached."""

    def attempt(door: tuple[str, int]) -> str:
        try:
            socket.create_connection(tuple(door), timeout_s).close()
        except OSError as error:
            return f"{door[0]}:{door[1]}: {error.strerror or error}"
        return ""

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        said = zip(doors, pool.map(attempt, doors.values()), strict=True)
        return {node: why for node, why in said if why}


def check_pairs(unreached: Mapping[str, Mapping[str, str]]) -> Check:
    """The pairs of nodes that do not reach each other: why, by node that tried and was tried."""
    nodes = len(unreached)
    if nodes < 2:
        return skip("reachable", "one node")
    closed = [(a, b, why) for a, others in unreached.items() for b, why in others.items()]
    if not closed:
        return ok("reachable", f"all {nodes} nodes reach each other by TCP")
    named = few([f"{a} -> {b} ({why})" for a, b, why in closed])
    what = f"{len(closed)} of {nodes * (nodes - 1)} ways between nodes are closed: {named}"
    change = "see to routes and firewalls, or name the right interface in NCCL_SOCKET_IFNAME and "
    where = ", ".join(sorted({b for _, b, _ in closed}))
    return fail("reachable", what, f"{change}GLOO_SOCKET_IFNAME", where)
