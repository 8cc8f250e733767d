"""What `megatron-burst plan` refuses before it computes anything; files that it cannot write."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from megatron_burst.cli.terminal import check_writable, unwritable
from megatron_burst.errors import BurstError


def check_policy(given: dict[str, object]) -> None:
    """Refuse options that contradict each other; what is missing is left to the search."""
    recompute, keep = given.get("recompute", "full"), given.get("keep")
    if recompute != "full" and keep not in (None, "none"):
        raise BurstError(
            "plan: --keep must come with --recompute full, because without replays nothing needs "
            f"to be kept; got --recompute {recompute} --keep {keep}; leave one out"
        )
    if recompute != "full" and (given.get("offload") or given.get("offload_inputs")):
        option = "--offload" if given.get("offload") else "--offload-inputs"
        raise BurstError(
            f"plan: {option} must come with --recompute full, because only what replays start "
            f"from waits on the host; got --recompute {recompute}; leave one out"
        )
    if given.get("offload") and keep == "none":
        raise BurstError(
            "plan: --offload must come with --keep half or all, because nothing is kept without "
            "it; got --keep none; pass --keep all, or leave it out"
        )


def check_outputs(json: Path | None, picture: Path | None) -> None:
    """Refuse files that could not be written, before anything is computed."""
    for option, path in (("--json", json), ("--picture", picture)):
        if path:
            check_writable("plan", option, path)
    if json and picture and json.resolve() == picture.resolve():
        raise BurstError(
            "plan: --json and --picture must name two files, because one would overwrite the "
            f"other; got {json} twice; rename one"
        )
    if picture and picture.suffix not in (".png", ".svg", ".pdf"):
        raise BurstError(
            "plan: --picture must end in .png, .svg or .pdf, because the suffix is the format; got "
            f"{picture}; rename it"
        )
    if picture and find_spec("matplotlib") is None:
        raise BurstError(
            "plan: --picture needs matplotlib, because it draws; got none installed; pip "
            "install matplotlib, or leave --picture out"
        )


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """A file that the system will not write is refused in one sentence."""
    try:
        yield
    except OSError as error:
        raise unwritable("plan", option, path, error.strerror or str(error)) from None
