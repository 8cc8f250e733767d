"""The host around the GPUs: shared memory, limits, environment variables."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_burst.cli.doctor.gpus import gpus_of
from megatron_burst.cli.doctor.network import hcas_of
from megatron_burst.cli.doctor.record import Check, Status
from megatron_burst.cli.doctor.survey import Survey

_SHM_GIB = 1.0  # a container's default of 64 MiB is too little for NCCL and data loaders
_FILES = 4096
_BLACKWELL = 10


def check_shm(survey: Survey) -> Check:
    """Room in /dev/shm, through which processes of a host meet."""
    words = survey.word("shm").split()
    if len(words) < 4 or not words[3].isdigit():
        return Check("shm", Status.SKIP, "df says nothing of /dev/shm")
    free_gib = int(words[3]) / 2**20
    what = f"{free_gib:.3g} GiB free in /dev/shm"
    if free_gib < _SHM_GIB:
        change = f"give it {_SHM_GIB:g} GiB or more, with docker: --ipc=host or --shm-size=16g"
        return Check("shm", Status.WARN, what, change)
    return Check("shm", Status.OK, what)


def check_limits(survey: Survey) -> list[Check]:
    """Locked memory, which RDMA and pinned buffers need, and open files."""
    memlock, nofile = survey.word("memlock"), survey.word("nofile")
    needs_pinning, unit = bool(hcas_of(survey)), " KiB" if memlock.isdigit() else ""
    found = [Check("memlock", Status.OK, f"locked memory: {memlock or 'unknown'}{unit}")]
    if memlock.isdigit() and needs_pinning:
        what = f"locked memory is limited to {memlock} KiB, and RDMA locks its buffers"
        change = "raise ulimit -l to unlimited (docker: --ulimit memlock=-1)"
        found = [Check("memlock", Status.FAIL, what, change)]
    files = Check("nofile", Status.OK, f"open files: {nofile or 'unknown'}")
    if nofile.isdigit() and int(nofile) < _FILES:
        change = f"raise ulimit -n to {_FILES} or more: each rank opens sockets to many others"
        files = Check("nofile", Status.WARN, f"open files are limited to {nofile}", change)
    return [*found, files]


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable that can spoil a run.

    Attributes:
        name: of the variable.
        bad: tells a value that spoils it.
        status: how bad that is.
        effect: what it does then.
        change: what to do.
    """

    name: str
    bad: Callable[[str], bool]
    status: Status
    effect: str
    change: str = "unset it"


def _is(*values: str) -> Callable[[str], bool]:
    return lambda value: value in values


_ON, _OFF = _is("1", "true", "True", "Y", "y"), _is("0", "false", "False")
VARIABLES = (
    Variable("NCCL_P2P_DISABLE", _ON, Status.WARN, "GPUs of a host then meet in host memory"),
    Variable("NCCL_SHM_DISABLE", _ON, Status.WARN, "GPUs without peer access then meet by TCP"),
    Variable("NCCL_IB_DISABLE", _ON, Status.WARN, "hosts then talk over TCP instead of RDMA"),
    Variable("NCCL_NET", _is("Socket"), Status.WARN, "hosts then talk over TCP instead of RDMA"),
    Variable("NCCL_NET_GDR_LEVEL", _is("0", "LOC"), Status.WARN, "data then pass through the host"),
    Variable("NCCL_ALGO", bool, Status.WARN, "it overrides NCCL's choice for every collective"),
    Variable("NCCL_PROTO", bool, Status.WARN, "it overrides NCCL's choice for every collective"),
    Variable("NCCL_DEBUG", _is("TRACE"), Status.WARN, "every call is logged", "use INFO or WARN"),
    Variable("NCCL_SOCKET_IFNAME", lambda value: value.lstrip("=") == "lo", Status.WARN,
             "other hosts cannot be reached by lo", "name the interface that hosts share"),
    Variable("GLOO_SOCKET_IFNAME", _is("lo"), Status.WARN,
             "other hosts cannot be reached by lo", "name the interface that hosts share"),
    Variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", _OFF, Status.WARN,
             "a rank whose peer died then waits for ever"),
    Variable("TORCH_NCCL_BLOCKING_WAIT", _ON, Status.WARN,
             "the CPU then waits for each transfer, and nothing is hidden"),
    Variable("CUDA_LAUNCH_BLOCKING", _ON, Status.WARN,
             "each kernel is then waited for, and nothing is hidden"),
    Variable("NCCL_LAUNCH_MODE", _is("GROUP"), Status.WARN, "transfers then wait for each other"),
    Variable("CUDA_VISIBLE_DEVICES", lambda value: not value.strip(), Status.FAIL,
             "no GPU can be seen", "unset it, or list GPUs"),
)  # fmt: skip


def check_environment(environ: Mapping[str, str]) -> list[Check]:
    """Variables of NCCL, torch and CUDA that spoil a run, time-outs among them."""
    spoiling = [v for v in VARIABLES if v.name in environ and v.bad(environ[v.name])]
    if not spoiling:
        return [Check("environment", Status.OK, "no variable of NCCL or torch spoils a run")]
    return [
        Check("environment", v.status, f"{v.name}={environ[v.name]!r}: {v.effect}", v.change)
        for v in spoiling
    ]


def check_connections(survey: Survey, environ: Mapping[str, str], in_job: bool) -> Check:
    """CUDA_DEVICE_MAX_CONNECTIONS, which Megatron demands to be 1 before Blackwell.

    Args:
        survey: of the machine.
        environ: environment variables.
        in_job: whether they are those of a training job, which would then fail.
    """
    caps = [gpu.compute_cap for gpu in gpus_of(survey) if gpu.compute_cap]
    given = environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    what = f"CUDA_DEVICE_MAX_CONNECTIONS={given}" if given else "no CUDA_DEVICE_MAX_CONNECTIONS"
    if not caps:
        return Check("connections", Status.SKIP, f"{what}; no GPU needs it")
    if min(caps) < _BLACKWELL and given != "1":
        return Check(
            "connections", Status.FAIL if in_job else Status.WARN,
            f"{what}, but Megatron refuses tensor or context parallelism without 1 on GPUs before "
            "Blackwell", "export CUDA_DEVICE_MAX_CONNECTIONS=1",
        )  # fmt: skip
    return Check("connections", Status.OK, what)
