"""Checks of one machine: GPUs, NVLink, shared memory, limits, variables, and what is installed."""

from collections.abc import Callable, Mapping
from math import inf

from megatron_burst.tools.doctor import software
from megatron_burst.tools.doctor.network import check_network, hcas_of
from megatron_burst.tools.doctor.report import Check, Status, ok, skip, warn
from megatron_burst.tools.doctor.survey import (
    Answer,
    Survey,
    free_gpus,
    gpus_of,
    links_of,
    number,
)

_THROTTLED = 0x8 | 0x20 | 0x40 | 0x80  # of nvml.h: what no healthy GPU has (heat, power brake)

_Faults = tuple[tuple[str, Callable[[str], object], Status, str, str], ...]
_FAULTS: _Faults = (  # fields of GPUs: what is wrong with a value, and what to do
    ("ecc.errors.uncorrected.volatile.total", number, Status.FAIL,
     "memory errors that ECC could not correct",
     "have these GPUs reset or replaced: results cannot be trusted"),
    ("ecc.mode.current", "Disabled".__eq__, Status.WARN, "ECC is off", "have it switched on"),
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
    ("memlock", inf, Status.FAIL, "locked memory in KiB (RDMA locks its buffers)",
     "raise ulimit -l to unlimited (docker: --ulimit memlock=-1)"),
    ("nofile", 4096, Status.WARN, "open files",
     "raise ulimit -n to 4096 or more: each rank opens sockets to many others"),
)  # fmt: skip


def check_machine(
    survey: Survey | Answer, environ: Mapping[str, str], in_job: bool = False
) -> list[Check]:
    """Everything about this machine, in whose environment a job runs or not."""
    found, gpus = [software.check_versions(software.software())], 0
    if isinstance(survey, Answer):
        why = survey.error or f"exit status {survey.code}"
        found.append(skip("survey", f"the machine's state is not known: {why}"))
    else:
        gpus = len(gpus_of(survey))
        # the job's own ranks are no strangers; what takes much memory still is
        found += check_state(Survey(survey | {"processes": ""}) if in_job else survey)
        found += [check_nvlink(survey), *check_network(survey), *check_room(survey)]
    found += [software.check_torch(gpus), software.check_backends(), software.check_hook_points()]
    return found + check_environment(environ)


def check_state(survey: Survey) -> list[Check]:
    """Kinds, faults and users of the GPUs."""
    gpus, free = gpus_of(survey), free_gpus(survey)
    if not gpus:
        said = survey.word("gpus") or "nothing"
        return [skip("gpus", f"nvidia-smi lists no GPU; it says: {said}")]
    kinds = sorted({f"{gpu['name']} of {gpu['clocks.max.sm']} MHz" for gpu in gpus})
    memory, driver = number(gpus[0]["memory.total"]) / 1024, gpus[0]["driver_version"]
    what = f"{len(gpus)} x {', '.join(kinds)}, {memory:.0f} GiB, driver {driver}"
    found = [ok("gpus", what)]
    if len(kinds) > 1:
        found = [warn("gpus", what, "give a job GPUs of one kind: the slowest sets the pace")]
    for field, is_bad, status, fault, change in _FAULTS:
        if bad := [int(gpu["index"]) for gpu in gpus if is_bad(gpu[field])]:
            found.append(Check(status, "state", f"GPUs {bad}: {fault}", change))
    what = f"{len(free)} of {len(gpus)} GPUs are free"
    if len(free) == len(gpus):
        return [*found, ok("free", what)]
    return [*found, warn("free", f"{what}: {free}", "wait for the others, or leave them out")]


def check_nvlink(survey: Survey) -> Check:
    """NVLink between all GPUs."""
    links = {(a, b): link for (a, b), link in links_of(survey).items()
             if b.startswith("GPU") and a < b}  # fmt: skip
    if not links:
        return skip("nvlink", "no two GPUs to join")
    if without := [pair for pair, link in links.items() if not link.startswith("NV")]:
        a, b = without[0]
        what = f"{len(without)} of {len(links)} pairs of GPUs have no NVLink; {a} and {b} are"
        change = "keep context parallelism to GPUs that NVLink joins, or pass --burst-intra ring"
        return warn("nvlink", f"{what} joined by {links[a, b]}", change)
    return ok("nvlink", f"{'/'.join(sorted(set(links.values())))} between all GPUs")


def check_room(survey: Survey) -> list[Check]:
    """Room in /dev/shm, through which processes of a node meet; locked memory; open files."""
    found = []
    for name, least, status, what, change in _ROOM:
        word = survey.word(name)
        is_needed = name != "memlock" or hcas_of(survey)
        is_low = is_needed and word.isdigit() and int(word) < least
        what = f"{what}: {word or 'unknown'}"
        found.append(Check(status, name, what, change) if is_low else ok(name, what))
    return found


_ON, _OFF = ("1", "true", "True", "Y", "y"), ("0", "false", "False")
VARIABLES: tuple[tuple[str, tuple[str, ...], str], ...] = (  # values that spoil a run (): any
    ("NCCL_P2P_DISABLE", _ON, "GPUs of a node then meet in host memory"),
    ("NCCL_SHM_DISABLE", _ON, "GPUs without peer access then meet by TCP"),
    ("NCCL_IB_DISABLE", _ON, "nodes then talk over TCP instead of RDMA"),
    ("NCCL_NET", ("Socket",), "nodes then talk over TCP instead of RDMA"),
    ("NCCL_NET_GDR_LEVEL", ("0", "LOC"), "data then pass through host memory"),
    ("NCCL_ALGO", (), "it overrides NCCL's choice for every collective"),
    ("NCCL_PROTO", (), "it overrides NCCL's choice for every collective"),
    ("NCCL_DEBUG", ("TRACE",), "every call is logged"),
    ("NCCL_SOCKET_IFNAME", ("lo", "=lo"), "other nodes cannot be reached by lo"),
    ("GLOO_SOCKET_IFNAME", ("lo",), "other nodes cannot be reached by lo"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", _OFF, "a rank whose peer died then waits for ever"),
    ("TORCH_NCCL_BLOCKING_WAIT", _ON, "the CPU waits for each transfer, and nothing is hidden"),
    ("CUDA_LAUNCH_BLOCKING", _ON, "each kernel is waited for, and nothing is hidden"),
    ("NCCL_LAUNCH_MODE", ("GROUP",), "transfers then wait for each other"),
    ("NVTE_FUSED_ATTN", ("0",), "with flash-attn-4, TransformerEngine's own context parallelism "
     "computes wrong results"),
)  # fmt: skip


def check_environment(environ: Mapping[str, str]) -> list[Check]:
    """Variables of NCCL, torch and CUDA that spoil a run."""
    return [
        warn("environment", f"{name}={environ[name]!r}: {effect}", f"unset {name}, or correct it")
        for name, bad, effect in VARIABLES
        if name in environ and (not bad or environ[name] in bad)
    ] or [ok("environment", "no variable of NCCL or torch spoils a run")]
