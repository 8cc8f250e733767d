"""Whether every host reaches every other by TCP, both ways."""

import fcntl
import re
import socket
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from megatron_burst.cli.doctor.record import Check, Status

_AT_ONCE = 64
_SIOCGIFADDR = 0x8915
_NAMED = 4  # pairs that are named


class Door:
    """A socket on which this host can be reached; connections to it are left waiting.

    Args:
        address: of the interface that other hosts should use.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.create_server((address, 0), backlog=1024)

    @property
    def at(self) -> tuple[str, int]:
        """Address and port."""
        return self._socket.getsockname()[:2]

    def close(self) -> None:
        """Let nobody in any more."""
        self._socket.close()


def own_address(towards: str, environ: Mapping[str, str]) -> str:
    """The IPv4 address by which other hosts reach this one.

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
        fits = name in patterns if exact else any(name.startswith(p) for p in patterns)
        if fits:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                try:
                    request = struct.pack("256s", name.encode()[:15])
                    answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                except OSError:  # it has no IPv4 address
                    continue
                return socket.inet_ntoa(answer[20:24])
    return None


def knock(doors: Mapping[str, tuple[str, int]], timeout_s: float) -> dict[str, str]:
    """Try to connect to each host; why not, by host, for those that cannot be reached."""

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
    return {host: why for host, why in said.items() if why}


def check_pairs(unreached: Mapping[str, Mapping[str, str]]) -> Check:
    """The pairs of hosts that do not reach each other.

    Args:
        unreached: why not, by host that tried and host that was tried.
    """
    hosts = len(unreached)
    if hosts < 2:
        return Check("reachable", Status.SKIP, "one host")
    failed = [(a, b, why) for a, others in unreached.items() for b, why in others.items()]
    if not failed:
        return Check("reachable", Status.OK, f"all {hosts} hosts reach each other by TCP")
    named = "; ".join(f"{a} -> {b} ({why})" for a, b, why in failed[:_NAMED])
    more = f"; {len(failed) - _NAMED} more" if len(failed) > _NAMED else ""
    return Check(
        "reachable", Status.FAIL,
        f"{len(failed)} of {hosts * (hosts - 1)} ways between hosts are closed: {named}{more}",
        "see to routes and firewalls, or name the right interface in NCCL_SOCKET_IFNAME and "
        "GLOO_SOCKET_IFNAME", ", ".join(sorted({b for _, b, _ in failed})),
    )  # fmt: skip
