"""Checks of one machine: GPUs, NVLink, shared memory, limits, variables, and what is installed."""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from megatron_burst.tools.doctor import software
from megatron_burst.tools.doctor.network import check_network, hcas_of
from megatron_burst.tools.doctor.report import Check, Status, fail, ok, skip, warn
from megatron_burst.tools.doctor.survey import Answer, Gpu, Survey, free_gpus, gpus_of, matrix_of

_SHM_GIB = 1.0  # a container's default of 64 MiB is too little for NCCL and data loaders
_FILES = 4096
_BLACKWELL = 10
# nvmlClocksThrottleReasons of nvml.h: those that no healthy GPU has
_THROTTLES = {0x8: "hardware slowdown", 0x20: "heat (software)", 0x40: "heat", 0x80: "power brake"}

_FAULTS: tuple[tuple[str, Callable[[Gpu], object], Status, str, str], ...] = (  # the worst first
    ("ecc", lambda gpu: gpu.ecc_errors, Status.FAIL,
     "GPUs {} had memory errors that ECC could not correct",
     "have these GPUs reset or replaced: results cannot be trusted"),
    ("ecc", lambda gpu: gpu.ecc == "Disabled", Status.WARN, "ECC is off on GPUs {}",
     "have it switched on"),
    ("modes", lambda gpu: gpu.compute_mode == "Prohibited", Status.FAIL,
     "compute mode Prohibited on GPUs {}", "ask for compute mode Default"),
    ("modes", lambda gpu: gpu.mig == "Enabled", Status.FAIL,
     "MIG is on on GPUs {}: no NVLink and no peer access between slices", "ask for whole GPUs"),
)  # fmt: skip


def check_machine(
    survey: Survey | Answer, environ: Mapping[str, str], in_job: bool = False
) -> list[Check]:
    """Everything about this machine, in whose environment a job runs or not."""
    installed, gpus = software.software(), 0
    found = [software.check_versions(installed), *software.check_te_kernels(installed, environ)]
    if isinstance(survey, Answer):
        why = survey.error or f"exit status {survey.code}"
        found.append(skip("survey", f"the machine's state is not known: {why}"))
    else:
        gpus = len(gpus_of(survey))
        # the job's own ranks are no strangers; what takes much memory still is
        found += check_state(Survey(survey.sections | {"processes": ""}) if in_job else survey)
        found += [check_nvlink(survey), *check_network(survey), check_shm(survey)]
        found += [*check_limits(survey), check_connections(survey, environ, in_job)]
    found += [software.check_torch(gpus), software.check_backends(), software.check_hook_points()]
    return found + check_environment(environ)


def check_state(survey: Survey) -> list[Check]:
    """Clocks, heat, ECC, modes and memory of the GPUs."""
    gpus = gpus_of(survey)
    if not gpus:
        said = survey.word("gpus") or "nothing"
        return [skip("gpus", f"nvidia-smi lists no GPU; it says: {said}")]
    kinds = sorted({gpu.name for gpu in gpus})
    memory = (gpus[0].memory_mib or 0) / 1024
    what = f"{len(gpus)} x {', '.join(kinds)}, {memory:.0f} GiB, driver {gpus[0].driver}"
    found = [ok("gpus", what)]
    if len(kinds) > 1:
        found = [warn("gpus", what, "give a job GPUs of one kind: the slowest sets the pace")]
    found += [*_faults(gpus), _clocks(gpus)]
    if taken := [gpu.index for gpu in gpus if gpu.index not in free_gpus(survey)]:
        what = f"GPUs {taken} are in use by other processes"
        return [*found, warn("free", what, "wait for them, or leave these GPUs out")]
    return [*found, ok("free", f"all {len(gpus)} GPUs are free")]


def _faults(gpus: list[Gpu]) -> list[Check]:
    """ECC and modes: the worst fault of each that any GPU has."""
    mode = ok("modes", f"compute mode {gpus[0].compute_mode}")
    found = {"ecc": ok("ecc", "no uncorrected error"), "modes": mode}
    for name, has, status, what, change in reversed(_FAULTS):
        if bad := [gpu.index for gpu in gpus if has(gpu)]:
            found[name] = Check(name, status, what.format(bad), change)
    return list(found.values())


def _clocks(gpus: list[Gpu]) -> Check:
    reasons = {
        gpu.index: ", ".join(why for bit, why in _THROTTLES.items() if gpu.throttles & bit)
        for gpu in gpus
    }
    if slowed := [f"GPU {index}: {why}" for index, why in reasons.items() if why]:
        change = "look at cooling and power: one slow GPU slows all ranks down"
        return warn("clocks", f"slowed down by {'; '.join(slowed)}", change)
    top = sorted({f"{gpu.max_clock_mhz:.0f}" for gpu in gpus if gpu.max_clock_mhz})
    now = [gpu.clock_mhz for gpu in gpus if gpu.clock_mhz]
    hot = max((gpu.heat_c for gpu in gpus if gpu.heat_c), default=0)
    what = f"at {min(now, default=0):.0f} to {max(now, default=0):.0f} MHz now, at most "
    what += f"{'/'.join(top)} MHz, {hot:.0f} C"
    if len(top) > 1:
        change = "set the same application clocks, or leave the slow GPUs out"
        return warn("clocks", f"GPUs differ: {what}", change)
    return ok("clocks", what)


def check_nvlink(survey: Survey) -> Check:
    """NVLink between all GPUs, and as many live links on each."""
    matrix = matrix_of(survey)
    gpus = matrix.labels(gpus=True)
    if len(gpus) < 2:
        return skip("nvlink", "no two GPUs to join")
    pairs = [(a, b) for a in gpus for b in gpus if a < b]
    if without := [pair for pair in pairs if not matrix.cells[pair].startswith("NV")]:
        a, b = without[0]
        what = f"{len(without)} of {len(pairs)} pairs of GPUs have no NVLink; {a} and {b} are"
        change = "keep context parallelism to GPUs that NVLink joins, or pass --burst-intra ring"
        return warn("nvlink", f"{what} joined by {matrix.cells[a, b]}", change)
    live = _live_links(survey)
    if len(set(live.values())) > 1:
        most = max(live.values())
        fewer = ", ".join(f"GPU {gpu}: {n}" for gpu, n in live.items() if n < most)
        what = f"some GPUs have fewer than {most} live links: {fewer}"
        return warn("nvlink", what, "have these GPUs looked at: their rings are slow")
    kinds = sorted({matrix.cells[pair] for pair in pairs})
    return ok("nvlink", f"{'/'.join(kinds)} between all {len(gpus)} GPUs")


def _live_links(survey: Survey) -> dict[str, int]:
    """Links that are up, by GPU."""
    live: dict[str, int] = {}
    for line in survey.lines("nvlink"):
        if gpu := re.match(r"GPU (\d+):", line):
            live[gpu[1]] = 0
        elif live and re.search(r"Link \d+: [\d.]+ GB/s", line):
            live[next(reversed(live))] += 1
    return live


def check_shm(survey: Survey) -> Check:
    """Room in /dev/shm, through which processes of a node meet."""
    words = survey.word("shm").split()
    if len(words) < 4 or not words[3].isdigit():
        return skip("shm", "df says nothing of /dev/shm")
    free_gib = int(words[3]) / 2**20
    what = f"{free_gib:.3g} GiB free in /dev/shm"
    if free_gib < _SHM_GIB:
        change = f"give it {_SHM_GIB:g} GiB or more, with docker: --ipc=host or --shm-size=16g"
        return warn("shm", what, change)
    return ok("shm", what)


def check_limits(survey: Survey) -> list[Check]:
    """Locked memory, which RDMA and pinned buffers need, and open files."""
    memlock, nofile = survey.word("memlock"), survey.word("nofile")
    unit = " KiB" if memlock.isdigit() else ""
    locked = ok("memlock", f"locked memory: {memlock or 'unknown'}{unit}")
    if memlock.isdigit() and hcas_of(survey):
        what = f"locked memory is limited to {memlock} KiB, and RDMA locks its buffers"
        locked = fail("memlock", what, "raise ulimit -l to unlimited (docker: --ulimit memlock=-1)")
    files = ok("nofile", f"open files: {nofile or 'unknown'}")
    if nofile.isdigit() and int(nofile) < _FILES:
        change = f"raise ulimit -n to {_FILES} or more: each rank opens sockets to many others"
        files = warn("nofile", f"open files are limited to {nofile}", change)
    return [locked, files]


class Variable(NamedTuple):
    """An environment variable, what tells a value that spoils a run, and what it does then."""

    name: str
    bad: Callable[[str], bool]
    effect: str
    change: str = "unset it"
    status: Status = Status.WARN


def _is(*values: str) -> Callable[[str], bool]:
    return lambda value: value in values


_ON, _OFF = _is("1", "true", "True", "Y", "y"), _is("0", "false", "False")
_LO = "other nodes cannot be reached by lo", "name the interface that nodes share"
VARIABLES = (
    Variable("NCCL_P2P_DISABLE", _ON, "GPUs of a node then meet in host memory"),
    Variable("NCCL_SHM_DISABLE", _ON, "GPUs without peer access then meet by TCP"),
    Variable("NCCL_IB_DISABLE", _ON, "nodes then talk over TCP instead of RDMA"),
    Variable("NCCL_NET", _is("Socket"), "nodes then talk over TCP instead of RDMA"),
    Variable("NCCL_NET_GDR_LEVEL", _is("0", "LOC"), "data then pass through host memory"),
    Variable("NCCL_ALGO", bool, "it overrides NCCL's choice for every collective"),
    Variable("NCCL_PROTO", bool, "it overrides NCCL's choice for every collective"),
    Variable("NCCL_DEBUG", _is("TRACE"), "every call is logged", "use INFO or WARN"),
    Variable("NCCL_SOCKET_IFNAME", lambda value: value.lstrip("=") == "lo", *_LO),
    Variable("GLOO_SOCKET_IFNAME", _is("lo"), *_LO),
    Variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", _OFF, "a rank whose peer died then waits for ever"),
    Variable("TORCH_NCCL_BLOCKING_WAIT", _ON,
             "the CPU then waits for each transfer, and nothing is hidden"),
    Variable("CUDA_LAUNCH_BLOCKING", _ON, "each kernel is then waited for, and nothing is hidden"),
    Variable("NCCL_LAUNCH_MODE", _is("GROUP"), "transfers then wait for each other"),
    Variable("CUDA_VISIBLE_DEVICES", lambda value: not value.strip(), "no GPU can be seen",
             "unset it, or list GPUs", Status.FAIL),
)  # fmt: skip


def check_environment(environ: Mapping[str, str]) -> list[Check]:
    """Variables of NCCL, torch and CUDA that spoil a run."""
    spoiling = [v for v in VARIABLES if v.name in environ and v.bad(environ[v.name])]
    return [
        Check("environment", v.status, f"{v.name}={environ[v.name]!r}: {v.effect}", v.change)
        for v in spoiling
    ] or [ok("environment", "no variable of NCCL or torch spoils a run")]


def check_connections(survey: Survey, environ: Mapping[str, str], in_job: bool) -> Check:
    """CUDA_DEVICE_MAX_CONNECTIONS, which Megatron demands to be 1 before Blackwell, and more than 1
    under FSDP.

    Without it a training job would fail; outside of one its variables are yet to be set.
    """
    caps = [gpu.compute_cap for gpu in gpus_of(survey) if gpu.compute_cap]
    given = environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset")
    what = f"CUDA_DEVICE_MAX_CONNECTIONS is {given}"
    if not caps:
        return skip("connections", f"{what}; no GPU needs it")
    if min(caps) >= _BLACKWELL or given == "1":
        return ok("connections", what)
    what += ", and Megatron refuses tensor or context parallelism without 1 on GPUs like these, "
    what += "but for FSDP, which needs more"
    change = "export CUDA_DEVICE_MAX_CONNECTIONS=1, or 8 with FSDP"
    return (fail if in_job and given == "unset" else warn)("connections", what, change)
