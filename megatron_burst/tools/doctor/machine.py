"""Checks of one machine: GPUs, networks, limits, variables, and what is installed."""

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from math import inf
from typing import NamedTuple

from megatron_burst.tools.doctor import software
from megatron_burst.tools.doctor.report import Check, Status, fail, ok, skip, warn
from megatron_burst.tools.doctor.survey import Survey, gpus_of, links_of, number

_BUSY_SHARE = 0.05  # of memory: what drivers and idle contexts take stays below
_THROTTLED = 0x8 | 0x20 | 0x40 | 0x80  # of nvml.h: what no healthy GPU has (heat, power brake)
# fields of GPUs: what is wrong with a value, and what to do
_FAULTS: tuple[tuple[str, Callable[[str], object], Status, str, str], ...] = (
    ("ecc.errors.uncorrected.volatile.total", number, Status.FAIL,
     "memory errors that ECC could not correct",
     "have these GPUs reset or replaced: results cannot be trusted"),
    ("compute_mode", "Prohibited".__eq__, Status.FAIL, "compute mode Prohibited",
     "ask for compute mode Default"),
    ("mig.mode.current", "Enabled".__eq__, Status.FAIL,
     "MIG is on: no NVLink and no peer access between slices", "ask for whole GPUs"),
    ("clocks_throttle_reasons.active", lambda value: int(number(value)) & _THROTTLED, Status.WARN,
     "slowed down by heat or power", "look at cooling and power: one slow GPU slows all ranks"),
)  # fmt: skip

_ROOM = (  # sections of a survey: the least that is enough, what is counted, and what to do
    ("shm", 1 << 20, Status.WARN, "KiB free in /dev/shm",  # a container's default is 64 MiB
     "give it 1 GiB or more, with docker: --ipc=host or --shm-size=16g"),
    ("memlock", inf, Status.FAIL, "KiB of memory that may be locked, as RDMA does",
     "raise ulimit -l to unlimited (docker: --ulimit memlock=-1)"),
    ("nofile", 4096, Status.WARN, "files that may be open",
     "raise ulimit -n to 4096 or more: each rank opens sockets to many others"),
)  # fmt: skip


def check_machine(survey: Survey) -> list[Check]:
    """Everything about this machine."""
    versions = ", ".join(f"{name} {number}" for name, number in software.software().items())
    checks = [ok("versions", versions)]
    if why := survey.get("error"):
        checks.append(skip("survey", f"the machine's state is not known: {why}"))
    else:
        checks += [*check_state(survey), check_nvlink(survey), *check_network(survey)]
        checks += check_room(survey)
    checks += [software.check_torch(len(gpus_of(survey))), software.check_backends()]
    return [*checks, software.check_hook_points(), *check_environment(os.environ)]


def check_state(survey: Survey) -> list[Check]:
    """Kinds and faults of the GPUs, and those whose memory somebody uses."""
    gpus = gpus_of(survey)
    if not gpus:
        answer = survey.word("gpus") or "nothing"
        return [skip("gpus", f"nvidia-smi lists no GPU ({answer})")]
    kinds = sorted({f"{gpu['name']} of {gpu['clocks.max.sm']} MHz" for gpu in gpus})
    memory, driver = number(gpus[0]["memory.total"]) / 1024, gpus[0]["driver_version"]
    what = f"{len(gpus)} x {', '.join(kinds)}, {memory:.0f} GiB, driver {driver}"
    mixed = "give a job GPUs of one kind: the slowest sets the pace"
    checks = [ok("gpus", what) if len(kinds) == 1 else warn("gpus", what, mixed)]
    for field, is_bad, status, fault, change in _FAULTS:
        if bad := [int(gpu["index"]) for gpu in gpus if is_bad(gpu[field])]:
            checks.append(Check(status, "state", f"GPUs {bad}: {fault}", change))
    free = [int(gpu["index"]) for gpu in gpus if number(gpu["memory.used"])
            <= _BUSY_SHARE * (number(gpu["memory.total"]) or 1e9)]  # fmt: skip
    what = f"{len(free)} of {len(gpus)} GPUs are free"
    if len(free) == len(gpus):
        return [*checks, ok("free", what)]
    return [*checks, warn("free", f"{what}: {free}", "wait for the others, or leave them out")]


def check_nvlink(survey: Survey) -> Check:
    """NVLink between all GPUs."""
    links = {(a, b): link for (a, b), link in links_of(survey).items()
             if b.startswith("GPU") and a < b}  # fmt: skip
    if not links:
        return skip("nvlink", "fewer than two GPUs")
    if without := [pair for pair, link in links.items() if not link.startswith("NV")]:
        a, b = without[0]
        what = f"{len(without)} of {len(links)} pairs of GPUs have no NVLink, but {links[a, b]}"
        change = "keep context parallelism to GPUs that NVLink joins, or pass --burst-intra ring"
        return warn("nvlink", f"{what} between {a} and {b}", change)
    return ok("nvlink", f"{'/'.join(sorted(set(links.values())))} between all GPUs")


def check_room(survey: Survey) -> list[Check]:
    """Room in /dev/shm, locked memory, open files."""
    checks = []
    for name, least, status, what, change in _ROOM:
        word = survey.word(name)
        is_low = word.isdigit() and int(word) < least and (name != "memlock" or hcas_of(survey))
        what = f"{what}: {word or 'unknown'}"
        checks.append(Check(status, name, what, change) if is_low else ok(name, what))
    return checks


class Hca(NamedTuple):
    """A port of a host channel adapter."""

    name: str  # with the port's number
    is_up: bool
    network: str  # link layer and rate
    gbit_per_s: float


def hcas_of(survey: Survey) -> list[Hca]:
    """The ports of /sys/class/infiniband."""
    ports = []
    for line in survey.lines("hcas"):
        name, port, state, layer, rate = (*line.split("|"), "", "", "", "")[:5]
        gbit_per_s = number(rate.partition(" ")[0])
        network = f"{layer.strip()} at {gbit_per_s:g} Gbit/s"
        ports.append(Hca(f"{name}:{port}", "ACTIVE" in state, network, gbit_per_s))
    return ports


def used_hcas(survey: Survey) -> list[Hca]:
    """The ports that are up and near a GPU, below the same CPU, as those of storage are not; where
    no port is (virtual machines hide it), all. Of these the network with the highest total rate."""
    near = {name for (_, name), link in links_of(survey).items() if link in ("PIX", "PXB")}
    up = [hca for hca in hcas_of(survey) if hca.is_up]
    up = [hca for hca in up if hca.name.partition(":")[0] in near] or up
    rates = {hca.network: hca.gbit_per_s for hca in up}  # equal within a network
    ports = Counter(hca.network for hca in up)
    fastest = max(rates, key=lambda network: rates[network] * ports[network], default="")
    return [hca for hca in up if hca.network == fastest]


def check_network(survey: Survey) -> list[Check]:
    """HCAs to use, those that are down or left out, and the interface of the default route."""
    hcas, used, checks = hcas_of(survey), used_hcas(survey), []
    if route := re.search(r"\bdev (\S+)", survey.word("route")):
        # = is NCCL's sign for "this name, not those that begin with it"
        names = f"NCCL_SOCKET_IFNAME=={route[1]} and GLOO_SOCKET_IFNAME={route[1]}"
        checks = [ok("interface", f"use {names}, as the default route does")]
    if not hcas:
        return [*checks, skip("hcas", "no InfiniBand or RoCE: several nodes would use TCP")]
    what = f"use NCCL_IB_HCA=={','.join(hca.name for hca in used)}" if used else "use none"
    fastest = {hca.network for hca in used}
    for hca in (hca for hca in hcas if hca not in used):
        why = "no GPU is near" if hca.network in fastest else hca.network
        what += f"; leave out {hca.name}: {why if hca.is_up else 'down'}"
    return [*checks, ok("hcas", what) if used else fail("hcas", what, "have a port brought up")]


_ON, _OFF = ("1", "true", "True", "Y", "y"), ("0", "false", "False")
VARIABLES: tuple[tuple[str, tuple[str, ...], str], ...] = (  # values that spoil a run
    ("NCCL_P2P_DISABLE", _ON, "GPUs of a node then copy through host memory"),
    ("NCCL_IB_DISABLE", _ON, "nodes then use TCP instead of RDMA"),
    ("NCCL_NET", ("Socket",), "nodes then use TCP instead of RDMA"),
    ("NCCL_SOCKET_IFNAME", ("lo", "=lo"), "lo reaches no other node"),
    ("GLOO_SOCKET_IFNAME", ("lo",), "lo reaches no other node"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", _OFF, "ranks then wait forever for one that died"),
    ("TORCH_NCCL_BLOCKING_WAIT", _ON, "the CPU then waits for each transfer"),
    ("CUDA_LAUNCH_BLOCKING", _ON, "the CPU then waits for each kernel"),
    ("NVTE_FUSED_ATTN", ("0",), "with flash-attn-4, TransformerEngine's own context parallelism "
     "computes wrong results"),
)  # fmt: skip


def check_environment(environ: Mapping[str, str]) -> list[Check]:
    """Variables of NCCL, torch and CUDA that spoil a run."""
    return [
        warn("environment", f"{name}={environ[name]!r}: {effect}", f"unset {name}, or correct it")
        for name, bad, effect in VARIABLES
        if environ.get(name) in bad
    ] or [ok("environment", "no harmful NCCL or torch variable is set")]
