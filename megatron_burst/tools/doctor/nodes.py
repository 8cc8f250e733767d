"""Nodes before a job: asked over ssh, judged, and the lines to start a job on them."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from megatron_burst.errors import BurstError
from megatron_burst.tools.doctor import network
from megatron_burst.tools.doctor.compare import check_alike, hardware_of
from megatron_burst.tools.doctor.machine import check_nvlink, check_room, check_state
from megatron_burst.tools.doctor.report import Check, Report, fail, merged, ok, warn
from megatron_burst.tools.doctor.survey import Answer, Runner, Survey, capability_of, survey_of

Surveys = Mapping[str, Survey]  # by node
_AT_ONCE = 64


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


def check_nodes(nodes: Sequence[str], run: Runner, ssh: str, timeout_s: float) -> Report:
    """Ask all nodes at once, by `ssh`, a node and what is to be run there, and judge what they say;
    each answers in time."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = pool.map(lambda node: survey_of(run, timeout_s, [*shlex.split(ssh), node]), nodes)
        answers = dict(zip(nodes, found, strict=True))
    surveys = {node: one for node, one in answers.items() if isinstance(one, Survey)}
    checks = [_reachable(node, one) for node, one in answers.items()]
    checks += merged({node: _of_node(survey) for node, survey in surveys.items()})
    if not surveys:
        return Report(checks)
    checks += check_alike({node: hardware_of(survey) for node, survey in surveys.items()})
    if shared := network.shared_networks(surveys):
        checks.append(ok("network", f"nodes share {', '.join(sorted(map(str, shared)))}"))
    else:
        what = "no IP network has all nodes in it: they must be routed"
        change = "see that nodes reach each other; below is the interface of the default route"
        checks.append(warn("network", what, change))
    return Report(checks, environment=environment(surveys))


def _reachable(node: str, found: Survey | Answer) -> Check:
    if isinstance(found, Survey):
        return ok("reachable", "it answers", where=node)
    said = (found.error or found.out).splitlines()
    why = said[-1] if said else f"exit status {found.code}"
    change = "see that ssh reaches it without a password, or leave it out"
    return fail("reachable", f"no answer: {why}", change, node)


def _of_node(survey: Survey) -> list[Check]:
    own = check_nvlink(survey), *network.check_network(survey), check_room(survey)[0]
    return [*check_state(survey), *own]  # its limits would be those of ssh


def environment(surveys: Surveys) -> list[str]:
    """Lines to paste: network interfaces, HCAs, connections; where nodes differ, with the nodes."""
    shared = network.shared_networks(surveys)
    nodes_of: dict[str, list[str]] = {}
    for node, survey in surveys.items():
        for line in _lines(survey, shared):
            nodes_of.setdefault(line, []).append(node)
    return [
        line if len(nodes) == len(surveys) else f"{line}  # only on {', '.join(nodes)}"
        for line, nodes in nodes_of.items()
    ]


def _lines(survey: Survey, shared: set) -> Iterator[str]:
    """A node's lines, given the networks that all nodes share."""
    own = network.interfaces_of(survey)
    in_shared = [name for name, address in own.items() if address.network in shared]
    for interface in (*in_shared, *own)[:1]:  # else that of the default route
        # = is NCCL's sign for "this name, not those that begin with it"
        yield f"export NCCL_SOCKET_IFNAME=={interface}"
        yield f"export GLOO_SOCKET_IFNAME={interface}"
    if used := network.used_hcas(survey):
        yield f"export NCCL_IB_HCA=={','.join(hca.name for hca in used)}"
    if 0 < capability_of(survey) < 10:  # Megatron asks for it before Blackwell
        yield "export CUDA_DEVICE_MAX_CONNECTIONS=1"
