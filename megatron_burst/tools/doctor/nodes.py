"""Nodes before a job: asked over ssh, judged, and the lines to start a job on them."""

import re
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from megatron_burst.errors import BurstError
from megatron_burst.tools.doctor import network
from megatron_burst.tools.doctor.machine import check_nvlink, check_shm, check_state
from megatron_burst.tools.doctor.report import Check, Report, Status, fail, merged, odd, ok, warn
from megatron_burst.tools.doctor.survey import Answer, Runner, Survey, free_gpus, gpus_of, survey_of

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
    with ThreadPoolExecutor(min(_AT_ONCE, len(nodes))) as pool:
        found = pool.map(lambda node: survey_of(run, timeout_s, [*shlex.split(ssh), node]), nodes)
        answers = dict(zip(nodes, found, strict=True))
    surveys = {node: one for node, one in answers.items() if isinstance(one, Survey)}
    checks = [_reachable(node, one) for node, one in answers.items()]
    checks += merged({node: _of_node(survey) for node, survey in surveys.items()})
    if not surveys:
        return Report(tuple(checks))
    checks += [_free(node, survey) for node, survey in surveys.items()]
    checks += [_alike(surveys), _network(surveys)]
    return Report(tuple(checks), environment=(*environment(surveys), _start(surveys)))


def _reachable(node: str, found: Survey | Answer) -> Check:
    if isinstance(found, Survey):
        return ok("reachable", "it answers", where=node)
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
        return ok("free", what, where=node)
    return warn("free", f"{what}: {free}", "wait for the others, or leave the node out", node)


def _alike(surveys: Surveys) -> Check:
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


def _network(surveys: Surveys) -> Check:
    """That nodes share an IP network."""
    if shared := network.shared_networks(surveys):
        return ok("network", f"nodes share {', '.join(sorted(map(str, shared)))}")
    what = "no IP network has all nodes in it: they must be routed"
    change = "see that the nodes reach each other; below is the interface of the default route"
    return warn("network", what, change)


def environment(surveys: Surveys) -> list[str]:
    """Lines to paste, by node: network interfaces, HCAs, connections; common ones first."""
    shared = network.shared_networks(surveys)
    lines = {node: _lines(survey, shared) for node, survey in surveys.items()}
    first, *others = lines.values()
    block = common = [line for line in first if all(line in other for other in others)]
    for node, own in lines.items():
        rest = [line for line in own if line not in common]
        block = [*block, f"# on {node} only", *rest] if rest else block
    return block


def _lines(survey: Survey, shared: set) -> list[str]:
    """A node's lines, given the networks that all nodes share."""
    lines, own = [], network.interfaces_of(survey)
    in_shared = [name for name, address in own.items() if address.network in shared]
    for interface in (*in_shared, *own)[:1]:  # else that of the default route
        # = is NCCL's sign for "this name, not those that begin with it"
        lines.append(f"export NCCL_SOCKET_IFNAME=={interface}")
        lines.append(f"export GLOO_SOCKET_IFNAME={interface}")
    choice = network.choose_hcas(survey)
    if choice.used:
        names = ",".join(f"{hca.name}:{hca.port}" for hca in choice.used)
        lines.append(f"export NCCL_IB_HCA=={names}")
    near = [f"{gpu} {'/'.join(names)}" for gpu, names in choice.near.items() if names]
    lines += [f"# near {', '.join(near)}"] if near else []
    caps = [gpu.compute_cap for gpu in gpus_of(survey) if gpu.compute_cap]
    if caps and min(caps) < 10:  # Megatron asks for it before Blackwell
        lines.append("export CUDA_DEVICE_MAX_CONNECTIONS=1")
    return lines


def _start(surveys: Surveys) -> str:
    """How to start a job on the GPUs that are free on every node."""
    (first, survey), *_ = surveys.items()
    addresses = network.interfaces_of(survey)
    address = str(next(iter(addresses.values())).ip) if addresses else first
    usable = min(len(free_gpus(survey)) for survey in surveys.values())
    return (
        f"# torchrun --nnodes {len(surveys)} --nproc-per-node {usable} --node-rank N "
        f"--master-addr {address} --master-port 29500 -m megatron_burst pretrain_gpt.py ..."
    )
