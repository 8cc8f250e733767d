"""`megatron-burst doctor`: options in, checks out. Nothing here changes anything on a node.

`survey` asks a machine what it has, here or over ssh; `machine` and `software` judge that; `nodes`
compares machines; `job` checks a job from inside, whose ranks talk by `meeting`; `explain` reads
what ranks wrote when a job broke; `report` prints. Heavy imports wait for a run.
"""

import os
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from megatron_burst.files import harmless
from megatron_burst.tools.terminal import in_one_sentence, shown, without_warnings

_NOTHING = (
    "no rank wrote anything in {}: either none met another rank's error, or the launcher ended "
    "them first because a rank on their node had ended; torchrun's output then names that rank"
)


def doctor(
    nodes: Annotated[
        str | None, Option(metavar="A,B,C", help="before a job: its nodes, checked over ssh")
    ] = None,
    timeout_s: Annotated[float, Option(min=0.1, metavar="S", help="seconds for each step")] = 60.0,
    explain: Annotated[
        Path | None,
        Option(metavar="DIR", help="after a job: which rank stopped it, by MEGATRON_BURST_FAULTS"),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="print the report as JSON")] = False,
) -> None:
    """Check this machine, a whole job, or nodes before a job.

    Started alone, it checks this machine; under torchrun or srun, the whole job; with --nodes,
    nodes without a job; with --explain, what ranks wrote when a job broke. Exit status: 1 if
    something would break a run, or did, 2 for refused options. It never starts, stops or changes
    anything.
    """
    with in_one_sentence(on_all_ranks=True), without_warnings():  # each may see something else
        breaks = _explain(explain, as_json) if explain else _examine(nodes, timeout_s, as_json)
    raise typer.Exit(int(breaks))


def _explain(folder: Path, as_json: bool) -> bool:
    """Print what broke a job, in one sentence; whether anything did."""
    from megatron_burst.tools.doctor.explain import explained
    from megatron_burst.tools.doctor.report import fail, print_report

    sentence = explained(folder)
    if as_json:
        print_report([fail("job", sentence)] if sentence else [], as_json)
    else:
        typer.echo(harmless(sentence or _NOTHING.format(folder)))
    return bool(sentence)


def _examine(nodes: str | None, timeout_s: float, as_json: bool) -> bool:
    """Print a report; whether a run would break. Ends a rank's process: a transfer may be stuck."""
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    with shown(int(rank != "0" and nodes is None), "loading torch") as progress:
        from megatron_burst.tools.doctor.meeting import launch_of
        from megatron_burst.tools.doctor.report import Check, breaks, print_report

        launch = None if nodes is not None else launch_of(os.environ)

        def say(checks: list[Check]) -> None:
            progress.end()
            print_report(checks, as_json)

        progress.now("waiting for all ranks" if launch else "looking at GPUs, networks and kernels")
        if launch:
            from megatron_burst.tools.doctor.job import check_job

            os._exit(int(breaks(check_job(launch, timeout_s, say))))
        from megatron_burst.tools.doctor import machine, survey
        from megatron_burst.tools.doctor.nodes import check_nodes, nodes_in

        if nodes is not None:
            checks = check_nodes(nodes_in(nodes), timeout_s)
        else:
            checks = machine.check_machine(survey.survey_of(timeout_s))
        say(checks)
    return breaks(checks)
