"""`megatron-burst plan` in this process."""

from typer.testing import CliRunner

from megatron_burst.tools.main import app


def run(*options: object, code: int | None = 0, **environment: str) -> str:
    """What it prints, 400 columns wide; it must end with this exit code, if there is one."""
    command = ["plan", *map(str, options)]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "400"} | environment)
    assert code in (None, done.exit_code), done.output
    return done.output
