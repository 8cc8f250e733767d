"""Nodes: asked over ssh before a job, and whether those of a job reach each other by TCP."""

import fcntl
import re
import shlex
import socket
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from megatron_burst.cli.doctor import network, report
from megatron_burst.cli.doctor.compare import odd
from megatron_burst.cli.doctor.gpus import check_nvlink, check_state, free_gpus, gpus_of
from megatron_burst.cli.doctor.report import Check, Merged, Report, Status, fail, ok, skip, warn
from megatron_burst.cli.doctor.survey import SCRIPT, Answer, Runner, Survey, parse_survey
from megatron_burst.cli.doctor.system import check_shm
from megatron_burst.errors import BurstError

_AT_ONCE = 64
_SIOCGIFADDR = 0x8915
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=5"


@dataclass(frozen=True, slots=True)
class Reach:
    """How nodes are asked: by `ssh`, a node and what is to be run there; each answers in time."""

    run: Runner
    ssh: str = SSH
    timeout_s: float = 20.0

    def ask(self, node: str) -> Survey | Answer:
        """A node's survey, or what went wrong."""
        command = [*shlex.split(self.ssh), node, f"sh -c {shlex.quote(SCRIPT)}"]
        answer = self.run(command, self.timeout_s)
        return parse_survey(answer.out) or answer


def nodes_in(text: str) -> tuple[str, ...]:
    """Node names of "a,b,c".

    Raises:
        BurstError: for an empty or doubled name, or one that ssh would take for an option.
    """
    names = tuple(name.strip() for name in text.split(","))
    if len(set(names)) < len(names) or not all(re.fullmatch(r"[\w.@:][\w.@:-]*", n) for n in names):
        raise BurstError(
            "doctor: --nodes must list node names, each once, because each is asked; got "
            f"{text!r}; write --nodes a,b,c"
        )
    return names


def check_nodes(nodes: Sequence[str], reach: Reach) -> Report:
    """Ask all nodes at once, and judge what they say."""
    with ThreadPoolExecutor(min(_AT_ONCE, len(nodes))) as pool:
        answers = dict(zip(nodes, pool.map(reach.ask, nodes), strict=True))
    surveys = {node: found for node, found in answers.items() if isinstance(found, Survey)}
    checks = [_reachable(node, found) for node, found in answers.items()]
    merged = Merged(len(surveys))
    for node, survey in surveys.items():
        merged.add(node, _of_node(survey))
    checks += merged.checks()
    if surveys:
        checks += [*_free(surveys), _alike(surveys), _network(surveys)]
    return Report(tuple(checks), environment=tuple(_block(surveys)) if surveys else ())


def _reachable(node: str, found: Survey | Answer) -> Check:
    if isinstance(found, Survey):
        return ok("reachable", "it answers", node)
    said = (found.error or found.out).splitlines()
    why = said[-1] if said else f"exit status {found.code}"
    change = "see that ssh reaches it without a password, or leave it out"
    return fail("reachable", f"no answer: {why}", change, node)


def _of_node(survey: Survey) -> list[Check]:
    found = [
        *check_state(survey),
        check_nvlink(survey),
        *network.check_network(survey),
        check_shm(survey),
    ]
    return [check for check in found if check.name != "free"]


def _free(surveys: dict[str, Survey]) -> list[Check]:
    """Free GPUs of each node."""
    found = []
    for node, survey in surveys.items():
        free, all_ = free_gpus(survey), len(gpus_of(survey))
        named = f": {free}" if 0 < len(free) < all_ else ""
        what = f"{len(free)} of {all_} GPUs are free{named}"
        busy = warn("free", what, "wait for the others, or leave the node out", node)
        found.append(ok("free", what, node) if free and len(free) == all_ else busy)
    return found


def _alike(surveys: dict[str, Survey]) -> Check:
    """That all nodes have the same GPUs and driver."""
    kinds = {}
    for node, survey in surveys.items():
        gpus = gpus_of(survey)
        names = "/".join(sorted({gpu.name for gpu in gpus})) or "none"
        clock = max((gpu.max_clock_mhz or 0 for gpu in gpus), default=0)
        driver = gpus[0].driver if gpus else "none"
        kinds[node] = f"{len(gpus)} x {names}, at most {clock:.0f} MHz, driver {driver}"
    change = "take nodes of one kind: the slowest sets the pace, and uneven ones get a flat ring"
    differing = odd("hardware", Status.WARN, change, kinds)
    return differing or ok("alike", f"all nodes have {next(iter(kinds.values()))}")


def _network(surveys: dict[str, Survey]) -> Check:
    """That nodes share an IP network."""
    if shared := network.shared_networks(surveys):
        return ok("network", f"nodes share {', '.join(sorted(map(str, shared)))}")
    what = "no IP network has all nodes in it: they must be routed"
    change = "see that the nodes reach each other; below is the interface of the default route"
    return warn("network", what, change)


def _block(surveys: dict[str, Survey]) -> list[str]:
    """Lines to paste: the environment, then how to start."""
    first, *_ = surveys
    usable = [len(free_gpus(survey)) for survey in surveys.values()]
    addresses = network.interfaces_of(surveys[first])
    address = str(next(iter(addresses.values())).ip) if addresses else first
    start = (
        f"# torchrun --nnodes {len(surveys)} --nproc-per-node {min(usable)} --node-rank N "
        f"--master-addr {address} --master-port 29500 -m megatron_burst pretrain_gpt.py ..."
    )
    return [*network.environment(surveys), start]


def open_door(address: str) -> socket.socket:
    """A socket on which other nodes can reach this one; connections to it are left waiting."""
    return socket.create_server((address, 0), backlog=1024)


def own_address(towards: str, environ: Mapping[str, str]) -> str:
    """The IPv4 address by which other nodes reach this one.

    That of the interface in NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME, else the one from which the
    route to `towards` begins.
    """
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        found = _address_of(environ.get(variable, ""))
        if found:
            return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))  # sends nothing: it only asks for the route
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


def _address_of(wanted: str) -> str | None:
    """Address of the first interface that NCCL's pattern names; "^" patterns name none."""
    if not wanted or wanted.startswith("^"):
        return None
    exact, patterns = wanted.startswith("="), wanted.lstrip("=").split(",")
    for _, name in socket.if_nameindex():
        if name in patterns if exact else name.startswith(tuple(patterns)):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                try:
                    request = struct.pack("256s", name.encode()[:15])
                    answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                except OSError:  # it has no IPv4 address
                    continue
                return socket.inet_ntoa(answer[20:24])
    return None


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
    named = report.few([f"{a} -> {b} ({why})" for a, b, why in closed])
    what = f"{len(closed)} of {nodes * (nodes - 1)} ways between nodes are closed: {named}"
    change = "see to routes and firewalls, or name the right interface in NCCL_SOCKET_IFNAME and "
    where = ", ".join(sorted({b for _, b, _ in closed}))
    return fail("reachable", what, f"{change}GLOO_SOCKET_IFNAME", where)
