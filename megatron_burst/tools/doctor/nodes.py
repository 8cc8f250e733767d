"""Nodes before a job: asked over ssh, judged, and the lines to start a job on them."""

import re
import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from megatron_burst.errors import BurstError
from megatron_burst.tools.doctor import network
from megatron_burst.tools.doctor.compare import odd
from megatron_burst.tools.doctor.machine import check_nvlink, check_shm, check_state
from megatron_burst.tools.doctor.report import Check, Merged, Report, Status, fail, ok, warn
from megatron_burst.tools.doctor.survey import (
    SCRIPT,
    Answer,
    Runner,
    Survey,
    free_gpus,
    gpus_of,
    parse_survey,
)

_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Reach:
    """How nodes are asked: by `ssh`, a node and what is to be run there; each answers in time."""

    run: Runner
    ssh: str
    timeout_s: float

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
        checks += [_free(node, survey) for node, survey in surveys.items()]
        checks += [_alike(surveys), _network(surveys)]
    return Report(tuple(checks), environment=tuple(_block(surveys)) if surveys else ())


def _reachable(node: str, found: Survey | Answer) -> Check:
    if isinstance(found, Survey):
        return ok("reachable", "it answers", node)
    said = (found.error or found.out).splitlines()
    why = said[-1] if said else f"exit status {found.code}"
    change = "see that ssh reaches it without a password, or leave it out"
    return fail("reachable", f"no answer: {why}", change, node)


def _of_node(survey: Survey) -> list[Check]:
    state = [check for check in check_state(survey) if check.name != "free"]
    return [*state, check_nvlink(survey), *network.check_network(survey), check_shm(survey)]


def _free(node: str, survey: Survey) -> Check:
    """Free GPUs of a node."""
    free, all_ = free_gpus(survey), len(gpus_of(survey))
    what = f"{len(free)} of {all_} GPUs are free"
    if free and len(free) == all_:
        return ok("free", what, node)
    return warn("free", f"{what}: {free}", "wait for the others, or leave the node out", node)


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
