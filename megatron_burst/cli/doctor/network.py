"""Network devices: which interfaces and HCAs a job should use, and the lines that say so."""

import ipaddress
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_burst.cli.doctor.gpus import gpus_of, matrix_of
from megatron_burst.cli.doctor.record import Check, Status
from megatron_burst.cli.doctor.survey import Survey

_DISTANCE = {"PIX": 0, "PXB": 1, "PHB": 2, "NODE": 3, "SYS": 4}
_NEAR = 1  # PIX and PXB: GPU and HCA meet below the CPU
_VIRTUAL = re.compile(r"(lo|docker|veth|virbr|br-|cni|cali|flannel|kube|nerdctl|podman|tun|tap)")


@dataclass(frozen=True, slots=True)
class Hca:
    """A port of a host channel adapter."""

    name: str
    port: int
    active: bool
    layer: str  # InfiniBand or Ethernet
    gbit_per_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """Which HCAs a job should use.

    Attributes:
        used: in order of name.
        near: names of the used ones nearest to each GPU, by GPU label.
        left_out: why, by name.
    """

    used: tuple[Hca, ...]
    near: Mapping[str, tuple[str, ...]]
    left_out: Mapping[str, str]


def hcas_of(survey: Survey) -> list[Hca]:
    """The ports of /sys/class/infiniband."""
    found = []
    for line in survey.lines("hcas"):
        name, port, state, layer, rate = (*line.split("|"), "", "", "", "")[:5]
        speed = re.match(r"[\d.]+", rate)
        active = "ACTIVE" in state
        number = float(speed[0]) if speed else 0.0
        found.append(Hca(name, int(port or 1), active, layer.strip(), number))
    return found


def choose_hcas(survey: Survey) -> Choice:
    """HCAs near GPUs, all of one network: those of storage and management are left out.

    Of the ports that are up those count that are among the nearest of some GPU, below the same CPU;
    where no GPU has such a one (virtual machines hide it) all do. Of these the kind (link layer and
    rate) with the highest total rate is used.
    """
    left_out = {hca.name: "its port is down" for hca in hcas_of(survey) if not hca.active}
    up = [hca for hca in hcas_of(survey) if hca.active]
    nearest = _nearest(survey, up)
    near_any = {name for names in nearest.values() for name in names}
    if near_any:
        left_out |= {
            hca.name: "no GPU is near it: storage or management"
            for hca in up
            if hca.name not in near_any
        }
    able = [hca for hca in up if not near_any or hca.name in near_any]
    totals = Counter()
    for hca in able:
        totals[hca.layer, hca.gbit_per_s] += hca.gbit_per_s
    kind = totals.most_common(1)[0][0] if totals else None
    for hca in able:
        if (hca.layer, hca.gbit_per_s) != kind:
            left_out[hca.name] = (
                f"{hca.layer} at {hca.gbit_per_s:g} Gbit/s beside {kind[0]} at {kind[1]:g}"
            )
    used = tuple(hca for hca in able if (hca.layer, hca.gbit_per_s) == kind)
    names = {hca.name for hca in used}
    near = {gpu: tuple(n for n in found if n in names) for gpu, found in nearest.items()}
    return Choice(used, near, left_out)


def _nearest(survey: Survey, hcas: Sequence[Hca]) -> dict[str, tuple[str, ...]]:
    """The nearest HCAs of each GPU, if they are near at all."""
    matrix, names = matrix_of(survey), {hca.name for hca in hcas}
    labels = {nic: matrix.names.get(nic, nic) for nic in matrix.nics}
    nearest = {}
    for gpu in matrix.gpus:
        distances = {
            name: _DISTANCE.get(matrix.cells[gpu, nic], len(_DISTANCE))
            for nic, name in labels.items()
            if name in names
        }
        least = min(distances.values(), default=len(_DISTANCE))
        close = [name for name, distance in distances.items() if distance == least <= _NEAR]
        nearest[gpu] = tuple(close)
    return nearest


def interfaces_of(survey: Survey) -> dict[str, ipaddress.IPv4Interface]:
    """Address of each interface that may reach other hosts; that of the default route first."""
    found = {}
    for line in survey.lines("addresses"):
        match = re.match(r"\d+:\s+(\S+)\s+inet\s+(\S+)", line)
        if match and not _VIRTUAL.match(match[1]):
            found.setdefault(match[1].partition("@")[0], ipaddress.IPv4Interface(match[2]))
    route = re.search(r"\bdev (\S+)", survey.word("route"))
    first = route[1] if route else ""
    return dict(sorted(found.items(), key=lambda item: item[0] != first))


def check_network(survey: Survey) -> list[Check]:
    """HCAs that are down or left out, and whether they reach GPU memory."""
    hcas = hcas_of(survey)
    if not hcas:
        what = "no InfiniBand or RoCE device in /sys/class/infiniband"
        return [Check("hcas", Status.SKIP, f"{what}: hosts talk over TCP, if at all")]
    choice = choose_hcas(survey)
    down = [hca.name for hca in hcas if not hca.active]
    used = ", ".join(f"{hca.name}:{hca.port}" for hca in choice.used) or "none"
    others = "; ".join(f"{name}: {why}" for name, why in choice.left_out.items())
    what = f"use {used}" + (f"; leave out {others}" if others else "")
    if not choice.used:
        return [Check("hcas", Status.FAIL, what, "have a port brought up")]
    far = [gpu for gpu, names in choice.near.items() if not names]
    found = [Check("hcas", Status.OK, what)]
    if any(choice.near.values()) and far:
        what = f"{', '.join(far)} have no HCA near them"
        change = f"have those that are down looked at: {', '.join(down)}" if down else ""
        found.append(Check("hcas", Status.WARN, what, change))
    if gpus_of(survey) and not survey.lines("modules"):
        what = "nvidia_peermem is not loaded"
        change = "have it loaded, unless the driver uses DMA-BUF: else data pass through the host"
        found.append(Check("gpudirect", Status.WARN, what, change))
    return found


def environment(surveys: Mapping[str, Survey]) -> list[str]:
    """Lines to paste: network interfaces, HCAs, connections; those of all hosts in common first.

    Args:
        surveys: by host.
    """
    lines = {host: _lines(survey, surveys) for host, survey in surveys.items()}
    first = next(iter(lines.values()), [])
    common = [line for line in first if all(line in other for other in lines.values())]
    block = list(common)
    for host, own in lines.items():
        rest = [line for line in own if line not in common]
        block += [f"# on {host} only", *rest] if rest else []
    return block


def _lines(survey: Survey, surveys: Mapping[str, Survey]) -> list[str]:
    lines = []
    interface = common_interface(survey, surveys)
    if interface:
        # = is NCCL's sign for "this name, not those that begin with it"
        lines += [
            f"export NCCL_SOCKET_IFNAME=={interface}",
            f"export GLOO_SOCKET_IFNAME={interface}",
        ]
    choice = choose_hcas(survey)
    if choice.used:
        names = ",".join(f"{hca.name}:{hca.port}" for hca in choice.used)
        lines.append(f"export NCCL_IB_HCA=={names}")
    near = [f"{gpu} {'/'.join(names)}" for gpu, names in choice.near.items() if names]
    lines += [f"# near {', '.join(near)}"] if near else []
    caps = [gpu.compute_cap for gpu in gpus_of(survey) if gpu.compute_cap]
    if caps and min(caps) < 10:  # Megatron asks for it before Blackwell
        lines.append("export CUDA_DEVICE_MAX_CONNECTIONS=1")
    return lines


def common_interface(survey: Survey, surveys: Mapping[str, Survey]) -> str | None:
    """This host's interface in a network that all hosts share; else that of the default route."""
    networks = [{i.network for i in interfaces_of(other).values()} for other in surveys.values()]
    shared = set.intersection(*networks)
    own = interfaces_of(survey)
    return next((name for name, address in own.items() if address.network in shared), None) or next(
        iter(own), None
    )
