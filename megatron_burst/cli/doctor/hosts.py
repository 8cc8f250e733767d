"""Hosts before a job: reachable, free GPUs, and an environment to paste."""

import re
import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from megatron_burst.cli.doctor.gpus import check_nvlink, check_state, free_gpus, gpus_of
from megatron_burst.cli.doctor.network import check_network, environment, interfaces_of
from megatron_burst.cli.doctor.record import Check, Merged, Report, Status
from megatron_burst.cli.doctor.survey import SCRIPT, Answer, Runner, Survey, parse_survey
from megatron_burst.cli.doctor.system import check_shm
from megatron_burst.errors import BurstError

_AT_ONCE = 64
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=5"


@dataclass(frozen=True, slots=True)
class Reach:
    """How hosts are asked.

    Attributes:
        run: runs commands here.
        ssh: the command that reaches a host; the host and what is to be run there follow.
        timeout_s: for each host's answer.
    """

    run: Runner
    ssh: str = SSH
    timeout_s: float = 20.0

    def ask(self, host: str) -> Survey | Answer:
        """A host's survey, or what went wrong."""
        command = [*shlex.split(self.ssh), host, f"sh -c {shlex.quote(SCRIPT)}"]
        answer = self.run(command, self.timeout_s)
        return parse_survey(answer.out) or answer


def hosts_in(text: str) -> tuple[str, ...]:
    """Host names of "a,b,c".

    Raises:
        BurstError: for an empty or doubled name, or one that ssh would take for an option.
    """
    names = tuple(name.strip() for name in text.split(","))
    if len(set(names)) < len(names) or not all(re.fullmatch(r"[\w.@:][\w.@:-]*", n) for n in names):
        raise BurstError(
            "doctor: --hosts must list host names, each once, because each is asked; got "
            f"{text!r}; write --hosts a,b,c"
        )
    return names


def check_hosts(hosts: Sequence[str], reach: Reach) -> Report:
    """Ask all hosts at once, and judge what they say.

    Args:
        hosts: names or addresses.
        reach: how to ask.
    """
    with ThreadPoolExecutor(min(_AT_ONCE, len(hosts))) as pool:
        answers = dict(zip(hosts, pool.map(reach.ask, hosts), strict=True))
    surveys = {host: found for host, found in answers.items() if isinstance(found, Survey)}
    checks = [_reachable(host, found) for host, found in answers.items()]
    merged = Merged(len(surveys))
    for host, survey in surveys.items():
        merged.add(host, _of_host(survey))
    checks += merged.checks()
    if surveys:
        checks += [*_free(surveys), _alike(surveys), _network(surveys)]
    return Report(tuple(checks), environment=tuple(_block(surveys)) if surveys else ())


def _reachable(host: str, found: Survey | Answer) -> Check:
    if isinstance(found, Survey):
        return Check("reachable", Status.OK, "it answers", where=host)
    said = (found.error or found.out).splitlines()
    why = said[-1] if said else f"exit status {found.code}"
    change = "see that ssh reaches it without a password, or leave it out"
    return Check("reachable", Status.FAIL, f"no answer: {why}", change, host)


def _of_host(survey: Survey) -> list[Check]:
    found = [*check_state(survey), check_nvlink(survey), *check_network(survey), check_shm(survey)]
    return [check for check in found if check.name != "free"]


def _free(surveys: dict[str, Survey]) -> list[Check]:
    """Free GPUs of each host."""
    found = []
    for host, survey in surveys.items():
        free, all_ = free_gpus(survey), len(gpus_of(survey))
        named = f": {free}" if 0 < len(free) < all_ else ""
        what = f"{len(free)} of {all_} GPUs are free{named}"
        status = Status.OK if free and len(free) == all_ else Status.WARN
        change = "" if status is Status.OK else "wait for the others, or leave the host out"
        found.append(Check("free", status, what, change, host))
    return found


def _alike(surveys: dict[str, Survey]) -> Check:
    """That all hosts have the same GPUs and driver."""
    kinds: dict[str, list[str]] = {}
    for host, survey in surveys.items():
        gpus = gpus_of(survey)
        names = "/".join(sorted({gpu.name for gpu in gpus})) or "none"
        clock = max((gpu.max_clock_mhz or 0 for gpu in gpus), default=0)
        driver = gpus[0].driver if gpus else "none"
        kind = f"{len(gpus)} x {names}, at most {clock:.0f} MHz, driver {driver}"
        kinds.setdefault(kind, []).append(host)
    if len(kinds) == 1:
        return Check("alike", Status.OK, f"all hosts have {next(iter(kinds))}")
    common = max(kinds, key=lambda kind: len(kinds[kind]))
    odd = "; ".join(f"{', '.join(at)}: {kind}" for kind, at in kinds.items() if kind != common)
    change = "take hosts of one kind: the slowest sets the pace, and uneven ones get a flat ring"
    return Check("alike", Status.WARN, f"{odd}; the others: {common}", change)


def _network(surveys: dict[str, Survey]) -> Check:
    """That hosts share an IP network."""
    networks = [{i.network for i in interfaces_of(s).values()} for s in surveys.values()]
    shared = set.intersection(*networks)
    if shared:
        return Check("network", Status.OK, f"hosts share {', '.join(sorted(map(str, shared)))}")
    return Check(
        "network", Status.WARN, "no IP network has all hosts in it: they must be routed",
        "see that the hosts reach each other; the interface below is that of the default route",
    )  # fmt: skip


def _block(surveys: dict[str, Survey]) -> list[str]:
    """Lines to paste: the environment, then how to start."""
    first, *_ = surveys
    usable = [len(free_gpus(survey)) for survey in surveys.values()]
    addresses = interfaces_of(surveys[first])
    address = str(next(iter(addresses.values())).ip) if addresses else first
    start = (
        f"# torchrun --nnodes {len(surveys)} --nproc-per-node {min(usable)} --node-rank N "
        f"--master-addr {address} --master-port 29500 -m megatron_burst pretrain_gpt.py ..."
    )
    return [*environment(surveys), start]
