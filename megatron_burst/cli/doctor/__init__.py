"""`megatron-burst doctor`: options in, checks out. Nothing here changes anything on a node.

`survey` asks a machine what it has, here or over ssh, by one read-only script; `machine`, `network`
and `software` judge that; `job` checks a whole job from inside; `nodes` does so before one is
started; `report` prints. Heavy imports wait for a run.
"""

import os
import shlex
from typing import Annotated

import typer
from typer import Option

from megatron_burst.cli.terminal import shown
from megatron_burst.errors import BurstError, require

Size = Annotated[int | None, Option(min=1, help="in a job: parallel size to be used")]
_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=5"


def doctor(
    nodes: Annotated[
        str | None, Option(help="before a job: ask these nodes over ssh, a,b,c")
    ] = None,
    ssh: Annotated[str, Option(help="how a node is reached; node and command follow")] = _SSH,
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
    from megatron_burst.cli.doctor.meeting import launch_of
    from megatron_burst.cli.doctor.report import Report, print_report

    try:
        launch = None if nodes is not None else launch_of(os.environ)
        asked = {"--tp": tp, "--cp": cp, "--pp": pp}
        _check(ssh, nodes, [option for option, size in asked.items() if size], launch)
        with shown(0 if launch is None else launch.rank) as progress:

            def say(report: Report) -> None:
                progress.end()
                print_report(report, as_json)

            if launch:
                from megatron_burst.cli.doctor.compare import Sizes
                from megatron_burst.cli.doctor.job import Job, check_job
                from megatron_burst.cli.doctor.survey import run_command

                sizes = Sizes(tp or 1, cp or 1, pp or 1) if tp or cp or pp else None
                job = Job(run_command, os.environ, timeout_s, sizes, say, progress)
                breaks = check_job(launch, job)
            else:
                progress.now("asking what machines have")
                report = _outside_a_job(nodes, ssh, timeout_s)
                say(report)
                breaks = report.breaks
    except BurstError as error:  # by every rank: each may see something else
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(int(breaks))


def _check(ssh: str, nodes: str | None, sizes: list[str], launch: object) -> None:
    """Refuse a command that cannot be split, and what would be ignored."""
    try:
        shlex.split(ssh)
        unread = ""
    except ValueError as error:
        unread = f"{ssh!r}: {error}"
    in_job = "must come in a job, because groups are laid on the ranks that are there"
    needs = [
        (nodes is not None or ssh == _SSH, "--ssh must come with --nodes, because only those are "
         "reached by it", repr(ssh), "pass --nodes a,b,c, or leave it out"),
        (not unread, "--ssh must be a command that a shell could read, because nodes are reached "
         "by it", unread, "close the quotes"),
        (launch or not sizes, f"{' '.join(sizes)} {in_job}", "none",
         "start doctor with torchrun or srun, or leave it out"),
    ]  # fmt: skip
    require("doctor", needs)


def _outside_a_job(nodes: str | None, ssh: str, timeout_s: float):
    """The report of nodes over ssh, or of this machine alone."""
    from megatron_burst.cli.doctor.machine import check_machine
    from megatron_burst.cli.doctor.nodes import Reach, check_nodes, nodes_in
    from megatron_burst.cli.doctor.report import Report
    from megatron_burst.cli.doctor.survey import run_command, survey_here

    if nodes is not None:
        return check_nodes(nodes_in(nodes), Reach(run_command, ssh, timeout_s))
    return Report(tuple(check_machine(survey_here(run_command, timeout_s), os.environ)))
