"""`megatron-burst doctor`: options in, checks out. Nothing here changes anything on a node.

`survey` asks a machine what it has, here or over ssh, by one read-only script; `machine`, `network`
and `software` judge that; `job` checks a whole job from inside; `nodes` does so before one is
started; `explain` reads what ranks wrote when one broke; `report` prints. Heavy imports wait for a
run.
"""

import os
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from megatron_burst.errors import BurstError, require
from megatron_burst.files import harmless
from megatron_burst.tools.terminal import shown, without_warnings

_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=5"


def doctor(
    nodes: Annotated[
        str | None,
        Option(
            metavar="A,B,C", help="before a job: names of its nodes, which are checked over ssh"
        ),
    ] = None,
    ssh: Annotated[
        str,
        Option(
            metavar="COMMAND",
            help="command that reaches a node; the node's name and a script are appended",
        ),
    ] = _SSH,
    timeout_s: Annotated[
        float, Option(min=0.1, metavar="S", help="seconds to wait in each step")
    ] = 60.0,
    explain: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="after a job: the folder of MEGATRON_BURST_FAULTS; says which rank stopped it",
        ),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="print the report as JSON")] = False,
    verbose: Annotated[
        bool, Option("--verbose", "-v", help="also show warnings of torch and Megatron")
    ] = False,
) -> None:
    """Check this machine, a whole job, or nodes before a job.

    Started alone, it checks this machine; under torchrun or srun, the whole job; with --nodes,
    nodes without a job; with --explain, what ranks wrote when a job broke. Exit status: 1 if
    something would break a run, or did, 2 for refused options. It never starts, stops or changes
    anything.
    """
    try:
        with nullcontext() if verbose else without_warnings():
            if explain:
                breaks = _explain(explain, as_json)
            else:
                _check(ssh, nodes)
                breaks = _examine(nodes, ssh, timeout_s, as_json)
    except BurstError as error:  # by every rank: each may see something else
        typer.echo(f"error: {harmless(str(error))}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(int(breaks))


def _explain(folder: Path, as_json: bool) -> bool:
    """Print what broke a job, in one sentence; whether anything did."""
    from megatron_burst.tools.doctor.explain import explained
    from megatron_burst.tools.doctor.report import Report, fail, print_report

    sentence = explained(folder)
    if as_json:
        print_report(Report((fail("job", sentence),) if sentence else ()), as_json)
        return bool(sentence)
    nothing = (
        f"no rank wrote anything in {folder}: none met an error of another rank, or their launcher "
        "ended them first, as torchrun does where a rank of their node has ended; torchrun's "
        "output names that rank"
    )
    typer.echo(harmless(sentence or nothing))
    return bool(sentence)


def _examine(nodes: str | None, ssh: str, timeout_s: float, as_json: bool) -> bool:
    """Check what there is, and print the report; whether a run would break."""
    from megatron_burst.tools.doctor.meeting import launch_of
    from megatron_burst.tools.doctor.report import Report, print_report
    from megatron_burst.tools.doctor.survey import run_command, survey_of

    launch = None if nodes is not None else launch_of(os.environ)
    with shown(launch.rank if launch else 0) as progress:

        def say(report: Report) -> bool:
            progress.end()
            print_report(report, as_json)
            return report.breaks

        if launch:
            from megatron_burst.tools.doctor.job import Job, check_job

            return check_job(launch, Job(run_command, os.environ, timeout_s, say, progress))
        progress.now("asking what machines have")
        if nodes is not None:
            from megatron_burst.tools.doctor.nodes import check_nodes, nodes_in

            return say(check_nodes(nodes_in(nodes), run_command, ssh, timeout_s))
        from megatron_burst.tools.doctor.machine import check_machine

        return say(Report(check_machine(survey_of(run_command, timeout_s), os.environ)))


def _check(ssh: str, nodes: str | None) -> None:
    """Refuse a command that cannot be split, and one that would be ignored."""
    unread = ""
    try:
        shlex.split(ssh)
    except ValueError as error:
        unread = f"{ssh!r}: {error}"
    needs = [
        (nodes is not None or ssh == _SSH, "--ssh must come with --nodes, because it is only "
         "used for them", repr(ssh), "pass --nodes a,b,c, or leave it out"),
        (not unread, "--ssh must be a valid shell command, because it is used to reach nodes",
         unread, "close the quotes"),
    ]  # fmt: skip
    require("doctor", needs)
