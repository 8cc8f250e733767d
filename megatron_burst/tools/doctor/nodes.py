"""Nodes before a job: asked over ssh and judged; and what all nodes should have in common."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from megatron_burst.errors import require
from megatron_burst.tools.doctor import machine
from megatron_burst.tools.doctor.report import Check, Status, fail, few, merged, ok, skip
from megatron_burst.tools.doctor.survey import Survey, gpus_of, survey_of

_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
_BY_SSH = "make sure that ssh reaches the node without a password, or leave it out"
_MAY_DIFFER = {"NCCL_HOSTID", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "NCCL_TOPO_FILE"}
_HARDWARE = {"gpu", "clock", "gpus", "ranks", "driver", "hcas"}
_OF_A_KIND = "use nodes of one kind with equally many ranks: the slowest node sets the pace"


def nodes_in(text: str) -> tuple[str, ...]:
    """Node names of "a,b,c".

    Raises:
        BurstError: for an empty or doubled name, or one that ssh would take for an option.
    """
    names = tuple(name.strip() for name in text.split(","))
    valid = len({*names}) == len(names) and all(re.fullmatch(r"(?!-)[\w.@:-]+", n) for n in names)
    require("doctor", [(valid, "--nodes must list node names, each once, because doctor asks each",
                        repr(text), "write --nodes a,b,c")])  # fmt: skip
    return names


def check_nodes(nodes: Sequence[str], timeout_s: float) -> list[Check]:
    """Ask all nodes at once, each of which answers in time, and judge what they say."""
    with ThreadPoolExecutor(64) as pool:
        replies = pool.map(lambda node: survey_of(timeout_s, [*_SSH, node]), nodes)
        answers = dict(zip(nodes, replies, strict=True))
    surveys = {node: survey for node, survey in answers.items() if "end" in survey}
    checks = [
        ok("reachable", "it answers", where=node) if node in surveys
        else fail("reachable", f"no answer: {survey['error']}", _BY_SSH, node)
        for node, survey in answers.items()
    ]  # fmt: skip
    checks += merged({node: _of_node(survey) for node, survey in surveys.items()})
    if surveys:
        checks += check_alike({node: hardware_of(survey) for node, survey in surveys.items()})
    return checks


def _of_node(survey: Survey) -> list[Check]:
    shm = machine.check_room(survey)[0]  # its limits would be those of ssh
    links = machine.check_nvlink(survey), *machine.check_network(survey)
    return [*machine.check_state(survey), *links, shm]


def hardware_of(survey: Survey) -> dict[str, str]:
    """What should be the same on all nodes."""
    gpus, hcas = gpus_of(survey), machine.used_hcas(survey)
    have = {name: "/".join(sorted({gpu[field] for gpu in gpus})) or "none" for name, field in (
        ("gpu", "name"), ("clock", "clocks.max.sm"), ("driver", "driver_version"))}  # fmt: skip
    ports = f"{len(hcas)} x {hcas[0].network}" if hcas else "none"
    return {**have, "gpus": str(len(gpus)), "hcas": ports}


def check_alike(nodes: Mapping[str, Mapping[str, str]]) -> list[Check]:
    """Nodes that differ from most in what should be the same: hardware, versions, variables."""
    if len(nodes) < 2:
        return [skip("alike", "one node")]
    checks, names = [], sorted({name for have in nodes.values() for name in have} - _MAY_DIFFER)
    for name in names:
        values = {node: have.get(name, "none") for node, have in nodes.items()}
        (common, _), *others = Counter(values.values()).most_common()
        if not others:
            continue
        status, change = Status.FAIL, f"install the same {name} on all nodes"
        if name in _HARDWARE or name.isupper():
            status = Status.WARN
            change = _OF_A_KIND if name in _HARDWARE else "export the same value on all nodes"
        odd = {node: value for node, value in values.items() if value != common}
        named = few([f"{node} has {value}" for node, value in odd.items()])
        what = f"{name} differs: {named}; the others have {common}"
        checks.append(Check(status, "alike", what, change, ", ".join(odd)))
    return checks or [ok("alike", f"{len(nodes)} nodes have the same {', '.join(names)}")]
