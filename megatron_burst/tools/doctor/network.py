"""Networks: the interfaces and HCAs that a job should use, and whether nodes reach each other."""

import fcntl
import re
import socket
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv4Network

from megatron_burst.tools.doctor.report import Check, fail, few, ok, skip, warn
from megatron_burst.tools.doctor.survey import Survey, gpus_of, matrix_of

_DISTANCE = {"PIX": 0, "PXB": 1, "PHB": 2, "NODE": 3, "SYS": 4}
_NEAR = 1  # PIX and PXB: GPU and HCA meet below the CPU
_SIOCGIFADDR = 0x8915  # asks for an interface's IPv4 address
_AT_ONCE = 64
_VIRTUAL = re.compile(r"(lo|docker|veth|virbr|br-|cni|cali|flannel|kube|nerdctl|podman|tun|tap)")


@dataclass(frozen=True, slots=True)
class Hca:
    """A port of a host channel adapter; its layer is InfiniBand or Ethernet."""

    name: str
    port: int
    active: bool
    layer: str
    gbit_per_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """Which HCAs a job should use: those used, in order of name; of these the names of the nearest
    to each GPU, by GPU label; why others are left out, by name."""

    used: tuple[Hca, ...]
    near: Mapping[str, tuple[str, ...]]
    left_out: Mapping[str, str]


def hcas_of(survey: Survey) -> list[Hca]:
    """The ports of /sys/class/infiniband."""
    found = []
    for line in survey.lines("hcas"):
        name, port, state, layer, rate = (*line.split("|"), "", "", "", "")[:5]
        speed = re.match(r"[\d.]+", rate)
        active, gbit_per_s = "ACTIVE" in state, float(speed[0]) if speed else 0.0
        found.append(Hca(name, int(port or 1), active, layer.strip(), gbit_per_s))
    return found


def choose_hcas(survey: Survey) -> Choice:
    """HCAs near GPUs, all of one network: those of storage and management are left out.

    Of the ports that are up those count that are among the nearest of some GPU, below the same CPU;
    where no GPU has such a one (virtual machines hide it) all do. Of these the kind (link layer and
    rate) with the highest total rate is used.
    """
    hcas = hcas_of(survey)
    up = [hca for hca in hcas if hca.active]
    nearest = _nearest(survey, up)
    near_any = {name for names in nearest.values() for name in names}
    close = [hca for hca in up if hca.name in near_any] or up
    totals: Counter[tuple[str, float]] = Counter()
    for hca in close:
        totals[hca.layer, hca.gbit_per_s] += hca.gbit_per_s
    layer, rate = max(totals, key=totals.__getitem__, default=("", 0.0))
    used = tuple(hca for hca in close if (hca.layer, hca.gbit_per_s) == (layer, rate))
    names = {hca.name for hca in used}
    left_out = {hca.name: "its port is down" for hca in hcas if not hca.active}
    left_out |= {h.name: "no GPU is near it: storage or management" for h in up if h not in close}
    left_out |= {
        hca.name: f"{hca.layer} at {hca.gbit_per_s:g} Gbit/s beside {layer} at {rate:g}"
        for hca in close
        if hca not in used
    }
    near = {gpu: tuple(n for n in found if n in names) for gpu, found in nearest.items()}
    return Choice(used, near, left_out)


def _nearest(survey: Survey, hcas: Sequence[Hca]) -> dict[str, tuple[str, ...]]:
    """The nearest HCAs of each GPU, if they are near at all."""
    matrix, names = matrix_of(survey), {hca.name for hca in hcas}
    labels = {nic: matrix.names.get(nic, nic) for nic in matrix.labels(gpus=False)}
    nearest = {}
    for gpu in matrix.labels(gpus=True):
        distances = {
            name: _DISTANCE.get(matrix.cells[gpu, nic], len(_DISTANCE))
            for nic, name in labels.items()
            if name in names
        }
        least = min(distances.values(), default=len(_DISTANCE))
        nearest[gpu] = tuple(n for n, distance in distances.items() if distance == least <= _NEAR)
    return nearest


def interfaces_of(survey: Survey) -> dict[str, IPv4Interface]:
    """Address of each interface that may reach other nodes; that of the default route first."""
    found = {}
    for line in survey.lines("addresses"):
        match = re.match(r"\d+:\s+(\S+)\s+inet\s+(\S+)", line)
        if match and not _VIRTUAL.match(match[1]):
            found.setdefault(match[1].partition("@")[0], IPv4Interface(match[2]))
    route = re.search(r"\bdev (\S+)", survey.word("route"))
    first = route[1] if route else ""
    return dict(sorted(found.items(), key=lambda item: item[0] != first))


def shared_networks(surveys: Mapping[str, Survey]) -> set[IPv4Network]:
    """IP networks that have all nodes in them."""
    own = ({address.network for address in interfaces_of(s).values()} for s in surveys.values())
    return set.intersection(*own)


def check_network(survey: Survey) -> list[Check]:
    """HCAs that are down or left out, and whether they reach GPU memory."""
    hcas = hcas_of(survey)
    if not hcas:
        what = "no InfiniBand or RoCE device in /sys/class/infiniband"
        return [skip("hcas", f"{what}: nodes talk over TCP, if at all")]
    choice = choose_hcas(survey)
    down = [hca.name for hca in hcas if not hca.active]
    used = ", ".join(f"{hca.name}:{hca.port}" for hca in choice.used) or "none"
    others = "; ".join(f"{name}: {why}" for name, why in choice.left_out.items())
    what = f"use {used}" + (f"; leave out {others}" if others else "")
    if not choice.used:
        return [fail("hcas", what, "have a port brought up")]
    far = [gpu for gpu, names in choice.near.items() if not names]
    found = [ok("hcas", what)]
    if any(choice.near.values()) and far:
        change = f"have those that are down looked at: {', '.join(down)}" if down else ""
        found.append(warn("hcas", f"{', '.join(far)} have no HCA near them", change))
    if gpus_of(survey) and not survey.lines("modules"):
        change = "have it loaded, unless the driver uses DMA-BUF: data would pass through the host"
        found.append(warn("gpudirect", "nvidia_peermem is not loaded", change))
    return found


def open_door(address: str) -> socket.socket:
    """A socket on which other nodes can reach this one; connections to it are left waiting."""
    return socket.create_server((address, 0), backlog=1024)


def own_address(towards: str, environ: Mapping[str, str]) -> str:
    """The IPv4 address by which other nodes reach this one.

    That of the first interface that NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names, else the one
    from which the route to `towards` begins.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            for name in _named(environ.get(variable, "")):
                try:
                    request = struct.pack("256s", name.encode()[:15])
                    answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                    return socket.inet_ntoa(answer[20:24])
                except OSError:  # it has no IPv4 address
                    continue
        try:
            probe.connect((towards, 9))  # sends nothing: it only asks for the route
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


def _named(wanted: str) -> list[str]:
    """Interfaces that NCCL's pattern names; "^" patterns name none."""
    exact, patterns = wanted.startswith("="), tuple(wanted.lstrip("=").split(","))
    if not wanted or wanted.startswith("^"):
        return []
    names = [name for _, name in socket.if_nameindex()]
    return [name for name in names if (name in patterns if exact else name.startswith(patterns))]


def knock(doors: Mapping[str, tuple[str, int]], timeout_s: float) -> dict[str, str]:
    """Try to connect to each node; why not, by node, for those that cannot be reached."""

    def attempt(door: tuple[str, int]) -> str:
        try:
            socket.create_connection(tuple(door), timeout_s).close()
        except OSError as error:
            said = re.sub(r"^\[Errno -?\d+\] ", "", str(error))
            return f"{door[0]}:{door[1]}: {said}"
        return ""

    if not doors:
        return {}
    with ThreadPoolExecutor(min(_AT_ONCE, len(doors))) as pool:
        said = dict(zip(doors, pool.map(attempt, doors.values()), strict=True))
    return {node: why for node, why in said.items() if why}


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
