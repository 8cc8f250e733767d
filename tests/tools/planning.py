"""`megatron-burst plan` in this process."""

from typer.testing import CliRunner

from megatron_burst.tools.main import app


def run(*options: object, code: int = 0, **environment: str) -> str:
    """What it prints, 400 columns wide; it must end with this exit code."""
    command = ["plan", *map(str, options)]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "400"} | environment)
    assert done.exit_code == code, done.output
    return done.output
