"""`megatron-burst doctor`: options in, checks out. Nothing here changes anything on a node.

`survey` asks a machine what it has, here or over ssh, by one read-only script; `gpus`, `network`,
`system` and `software` judge that; `job` checks a whole job from inside; `nodes` does so before one
is started; `report` prints. Heavy imports wait for a run.
"""

import os
import shlex
from typing import Annotated

import typer
from typer import Option

from megatron_burst.cli.terminal import shown
from megatron_burst.errors import BurstError

Size = Annotated[int | None, Option(min=1, help="in a job: parallel size to be used")]


def doctor(
    nodes: Annotated[
        str | None, Option(help="before a job: ask these nodes over ssh, a,b,c")
    ] = None,
    ssh: Annotated[str, Option(help="how a node is reached; node and command follow")] = "",
    timeout_s: Annotated[float, Option(min=0.1, help="how long to wait, in each step")] = 60.0,
    tp: Size = None,
    cp: Size = None,
    pp: Size = None,
    as_json: Annotated[bool, Option("--json", help="print JSON")] = False,
) -> None:
    """Check this machine; under torchrun or srun the whole job; with --nodes before any job.

    Exits with 1 if something would break a run, with 2 for options that are refused. Never stops,
    starts or changes anything.
    """
    from megatron_burst.cli.doctor.launched import launch_of
    from megatron_burst.cli.doctor.report import Report, print_report

    try:
        launch = None if nodes is not None else launch_of(os.environ)
        sizes = _sizes({"--tp": tp, "--cp": cp, "--pp": pp}, launch is not None)
        _check_ssh(ssh, nodes)
        with shown(0 if launch is None else launch.rank) as progress:

            def say(report: Report) -> None:
                progress.end()
                print_report(report, as_json)

            if launch:
                from megatron_burst.cli.doctor.job import Job, check_job
                from megatron_burst.cli.doctor.survey import run_command

                job = Job(run_command, os.environ, timeout_s, sizes, say, progress)
                breaks = check_job(launch, job)
            else:
                report = _outside_a_job(nodes, ssh, timeout_s, progress.now)
                say(report)
                breaks = report.breaks
    except BurstError as error:  # by every rank: each may see something else
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(int(breaks))


def _sizes(given: dict[str, int | None], in_job: bool):
    """Sizes of Megatron's parallelism; None if none is asked for."""
    from megatron_burst.plan.cluster import Sizes

    asked = [option for option, size in given.items() if size is not None]
    if asked and not in_job:
        raise BurstError(
            f"doctor: {asked[0]} must come in a job, because groups are laid on the ranks that are "
            f"there; got {' '.join(asked)} outside torchrun and srun; start doctor with one of "
            "them, or leave it out"
        )
    return Sizes(*(size or 1 for size in given.values())) if asked else None


def _check_ssh(ssh: str, nodes: str | None) -> None:
    """Refuse a command that would be ignored, or cannot be split."""
    if ssh and nodes is None:
        raise BurstError(
            "doctor: --ssh must come with --nodes, because only those are reached by it; got "
            f"{ssh!r} alone; pass --nodes a,b,c, or leave it out"
        )
    try:
        shlex.split(ssh)
    except ValueError as error:
        raise BurstError(
            "doctor: --ssh must be a command that a shell could read, because nodes are reached by "
            f"it; got {ssh!r}: {error}; close the quotes"
        ) from None


def _outside_a_job(nodes: str | None, ssh: str, timeout_s: float, now):
    """The report of nodes over ssh, or of this machine alone; `now` is told what is done."""
    from megatron_burst.cli.doctor.nodes import SSH, Reach, check_nodes, nodes_in
    from megatron_burst.cli.doctor.report import Report
    from megatron_burst.cli.doctor.survey import run_command, survey_here
    from megatron_burst.cli.doctor.system import check_machine

    if nodes is not None:
        names = nodes_in(nodes)
        now(f"asking {len(names)} nodes")
        return check_nodes(names, Reach(run_command, ssh or SSH, timeout_s))
    now("asking this machine")
    survey = survey_here(run_command, timeout_s)
    now("kernels, and what of Megatron's burst attaches to", 0.5)
    return Report(tuple(check_machine(survey, os.environ)))
