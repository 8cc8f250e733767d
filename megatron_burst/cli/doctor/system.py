"""The machine around the GPUs: shared memory, limits, variables; all checks of one machine."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from megatron_burst.cli.doctor import software
from megatron_burst.cli.doctor.gpus import check_nvlink, check_state, gpus_of
from megatron_burst.cli.doctor.network import check_network, hcas_of
from megatron_burst.cli.doctor.report import Check, Status, fail, ok, skip, warn
from megatron_burst.cli.doctor.survey import Answer, Survey

_SHM_GIB = 1.0  # a container's default of 64 MiB is too little for NCCL and data loaders
_FILES = 4096
_BLACKWELL = 10


def check_machine(
    survey: Survey | Answer, environ: Mapping[str, str], in_job: bool = False
) -> list[Check]:
    """Everything about this machine.

    Args:
        survey: of this machine, or why there is none.
        environ: environment variables.
        in_job: whether they are those of a training job.
    """
    installed, gpus = software.software(), []
    found = [software.check_versions(installed), *software.check_te_kernels(installed, environ)]
    if isinstance(survey, Answer):
        why = survey.error or f"exit status {survey.code}"
        found.append(skip("survey", f"the machine's state is not known: {why}"))
    else:
        gpus = gpus_of(survey)
        # the job's own ranks are no strangers; what takes much memory still is
        found += check_state(survey.without("processes") if in_job else survey)
        found += [check_nvlink(survey), *check_network(survey), check_shm(survey)]
        found += [*check_limits(survey), check_connections(survey, environ, in_job)]
    found += [software.check_torch(len(gpus)), software.check_backends(), software.check_seams()]
    return found + check_environment(environ)


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
    """Variables of NCCL, torch and CUDA that spoil a run, time-outs among them."""
    spoiling = [v for v in VARIABLES if v.name in environ and v.bad(environ[v.name])]
    return [
        Check("environment", v.status, f"{v.name}={environ[v.name]!r}: {v.effect}", v.change)
        for v in spoiling
    ] or [ok("environment", "no variable of NCCL or torch spoils a run")]


def check_connections(survey: Survey, environ: Mapping[str, str], in_job: bool) -> Check:
    """CUDA_DEVICE_MAX_CONNECTIONS, which Megatron demands to be 1 before Blackwell.

    Without it a training job would fail; outside of one its variables are yet to be set.
    """
    caps = [gpu.compute_cap for gpu in gpus_of(survey) if gpu.compute_cap]
    given = environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    what = f"CUDA_DEVICE_MAX_CONNECTIONS={given}" if given else "no CUDA_DEVICE_MAX_CONNECTIONS"
    if not caps:
        return skip("connections", f"{what}; no GPU needs it")
    if min(caps) >= _BLACKWELL or given == "1":
        return ok("connections", what)
    what += (
        ", but Megatron refuses tensor or context parallelism without 1 on GPUs before Blackwell"
    )
    return (fail if in_job else warn)("connections", what, "export CUDA_DEVICE_MAX_CONNECTIONS=1")
