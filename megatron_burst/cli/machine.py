"""`bench`, `calibrate` and `doctor`: options in, calls out. Heavy imports wait for a run."""

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from megatron_burst.cli.options import Device, Hosts
from megatron_burst.cli.progress import Progress, shown
from megatron_burst.cli.sentence import check_writable, in_one_sentence
from megatron_burst.errors import BurstError

_WIDTH = 160  # where no terminal says

if TYPE_CHECKING:
    from megatron_burst.cli.doctor.launched import Launch
    from megatron_burst.cli.doctor.record import Report


def bench(
    seq: Annotated[str, Option(help="tokens of the whole sequence, e.g. 64K or 1M")] = "64K",
    heads: Annotated[str, Option(help="query heads / KV heads")] = "32/8",
    head_dim: Annotated[int, Option(min=1, help="width of a head")] = 128,
    reps: Annotated[int, Option(min=1, help="repetitions, in turns")] = 10,
    hosts: Hosts = None,
    device: Device = None,
) -> None:
    """Burst's attention beside TransformerEngine's and the kernel alone; alone or under torchrun.

    bf16 on GPUs, float32 on CPU, where small sizes are for trying it out.
    """
    from rich.console import Console

    from megatron_burst.cli.bench import Problem, measure, table
    from megatron_burst.cli.world import started
    from megatron_burst.plan.units import whole_number

    with in_one_sentence():
        tokens, pair = whole_number(seq, "--seq", "bench"), _heads(heads)
        with started("bench", device, hosts) as world:
            problem = Problem(tokens, pair, head_dim)
            found = measure(problem, world, reps)
            if world.rank == 0:
                width = None if Console().is_terminal else _WIDTH
                Console(width=width, markup=False).print(table(problem, found, world.size))


def _heads(text: str) -> tuple[int, int]:
    """Query and KV heads."""
    from megatron_burst.plan.units import whole_numbers

    pair = whole_numbers(text.replace("/", ","), "--heads", "bench")
    if len(pair) != 2 or pair[0] % pair[1]:
        raise BurstError(
            "bench: --heads must be query heads / KV heads, because each KV head serves equally "
            f"many query heads; got {text!r}; write for example 32/8"
        )
    return pair


def calibrate(
    out: Annotated[Path, Option(help="TOML to write")] = Path("calibration.toml"),
    name: Annotated[str | None, Option(help="of the machine; default: its GPU's")] = None,
    budget_s: Annotated[float, Option(min=0, help="start nothing new after so many s")] = 150.0,
    hosts: Hosts = None,
    device: Device = None,
) -> None:
    """Measure this machine's kernels and links; alone or under torchrun, on all hosts together."""
    from megatron_burst.cli.calibrate import calibrate as measure
    from megatron_burst.cli.world import started
    from megatron_burst.plan.calibration import to_toml, write_calibration

    with in_one_sentence(), started("calibrate", device, hosts) as world:
        world.refuse_together(lambda: check_writable("calibrate", "--out", out))
        found = measure(world, name, budget_s, world.progress.say)
        if world.rank == 0:
            write_calibration(found, out)
            typer.echo(to_toml(found), nl=False)
            typer.echo(f"written to {out}", err=True)


def doctor(
    hosts: Annotated[
        str | None, Option(help="before a job: ask these hosts over ssh, a,b,c")
    ] = None,
    ssh: Annotated[str, Option(help="how a host is reached; host and command follow")] = "",
    timeout_s: Annotated[float, Option(min=0.1, help="how long to wait, in each step")] = 60.0,
    tp: Annotated[
        int | None, Option(min=1, help="in a job: tensor parallel size to be used")
    ] = None,
    cp: Annotated[
        int | None, Option(min=1, help="in a job: context parallel size to be used")
    ] = None,
    pp: Annotated[
        int | None, Option(min=1, help="in a job: pipeline parallel size to be used")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="print JSON")] = False,
) -> None:
    """Check this machine; under torchrun or srun the whole job; with --hosts before any job.

    Exits with 1 if something would break a run, with 2 for options that are refused. Never stops,
    starts or changes anything.
    """
    from megatron_burst.cli.doctor.launched import launch_of
    from megatron_burst.cli.doctor.report import print_report

    sizes = {"--tp": tp, "--cp": cp, "--pp": pp}
    try:
        launch = None if hosts is not None else launch_of(os.environ)
        _check_doctor(hosts, ssh, launch is not None, sizes)
        with shown(0 if launch is None else launch.rank) as progress:

            def say(report: "Report") -> None:
                progress.end()
                print_report(report, as_json)

            if hosts is not None:
                breaks = _hosts_break(hosts, ssh, timeout_s, say, progress)
            elif launch:
                breaks = _job_breaks(launch, sizes, timeout_s, say, progress)
            else:
                breaks = _machine_breaks(timeout_s, say, progress)
    except BurstError as error:  # by every rank: each may see something else
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(int(breaks))


def _check_doctor(hosts: str | None, ssh: str, in_job: bool, sizes: dict[str, int | None]) -> None:
    """Refuse options that would be ignored, and an ssh command that cannot be split."""
    given = [option for option, size in sizes.items() if size is not None]
    if given and not in_job:
        raise BurstError(
            f"doctor: {given[0]} must come in a job, because groups are laid on the ranks that are "
            f"there; got {' '.join(given)} outside torchrun and srun; start doctor with one of "
            "them, or leave it out"
        )
    if ssh and hosts is None:
        raise BurstError(
            "doctor: --ssh must come with --hosts, because only those are reached by it; got "
            f"{ssh!r} alone; pass --hosts a,b,c, or leave it out"
        )
    try:
        shlex.split(ssh)
    except ValueError as error:
        raise BurstError(
            "doctor: --ssh must be a command that a shell could read, because hosts are reached by "
            f"it; got {ssh!r}: {error}; close the quotes"
        ) from None


def _hosts_break(
    hosts: str, ssh: str, timeout_s: float, say: Callable[["Report"], None], progress: Progress
) -> bool:
    """Check hosts over ssh; whether a run on them would break."""
    from megatron_burst.cli.doctor.hosts import SSH, Reach, check_hosts, hosts_in
    from megatron_burst.cli.doctor.survey import run_command

    names = hosts_in(hosts)
    progress.now(f"asking {len(names)} hosts")
    report = check_hosts(names, Reach(run_command, ssh or SSH, timeout_s))
    say(report)
    return report.breaks


def _job_breaks(
    launch: "Launch",
    sizes: dict[str, int | None],
    timeout_s: float,
    say: Callable[["Report"], None],
    progress: Progress,
) -> bool:
    """Check the job that this process is a rank of; whether a run would break."""
    from megatron_burst.cli.doctor.job import Job, check_job
    from megatron_burst.cli.doctor.survey import run_command
    from megatron_burst.plan.cluster import Sizes

    asked = Sizes(*(size or 1 for size in sizes.values())) if any(sizes.values()) else None
    return check_job(launch, Job(run_command, os.environ, timeout_s, asked, say, progress))


def _machine_breaks(timeout_s: float, say: Callable[["Report"], None], progress: Progress) -> bool:
    """Check this machine alone; whether a run would break."""
    from megatron_burst.cli.doctor.local import check_machine
    from megatron_burst.cli.doctor.record import Report
    from megatron_burst.cli.doctor.survey import run_command, survey_here

    progress.now("asking this machine")
    survey = survey_here(run_command, timeout_s)
    progress.now("kernels, and what of Megatron's burst attaches to", 0.5)
    report = Report(tuple(check_machine(survey, os.environ)))
    say(report)
    return report.breaks
