"""What is shown of a plan, and the flags to copy."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from megatron_burst.files import harmless
from megatron_burst.tools.job.candidate import Candidate
from megatron_burst.tools.job.flags import as_words, flag_values
from megatron_burst.tools.job.frameworks import MEGATRON, words_of
from megatron_burst.tools.job.model_flags import model_flags
from megatron_burst.tools.job.script import Script
from megatron_burst.tools.job.strategy import Job
from megatron_burst.tools.terminal import say

_WIDTH = 100  # of lines of flags, at most


@dataclass(frozen=True, slots=True)
class Shown:
    """What is shown of a search."""

    job: Job
    candidates: Sequence[Candidate]  # the best first
    script: Script  # what a file of Megatron's arguments says of the job
    arguments: Mapping[str, Any]  # that it has; {} if the model is not from such a file
    warnings: Sequence[str]  # sentences
    no_room: str  # what would be enough for a job that does not fit, which is shown; "" if it does
    others: bool  # whether to show them; else a line on how the best was chosen
    verbose: bool  # whether to show ranks, transfers and small parts
    repeated: str  # how a file's documents fill a sample
    with_keep: str  # what more kept results come to, in a line
    usual_batch: bool  # whether the batch is the default
    framework: str | None  # in whose words decisions are shown; None: a Megatron command, whole


def show_flags(console: Console, shown: Shown) -> None:
    """Flags to copy of a plan that fits: the model's, if no file has them, and the strategy's."""
    job, best = shown.job, shown.candidates[0]
    flags = flag_values(job, best.strategy, best.memory.node, shown.script.flags)
    if shown.framework not in (None, MEGATRON):
        words = words_of(shown.framework, job, best.strategy, flags)
        _copy(console, f"For {shown.framework}, which builds the model itself:", words)
        return
    if shown.framework == MEGATRON:
        _show_words(console, "Flags of the run, beside the model's:", as_words(flags))
        return
    if not shown.arguments:
        if job.model.unknown:
            say(console, _no_model_flags(job.model.unknown), "no model flags: ", "yellow")
        else:
            script = ", of Megatron-LM 0.19's pretrain_hybrid.py" if job.model.pattern else ""
            _show_words(console, f"Flags of the model{script}:", as_words(model_flags(job.model)))
        _show_words(console, "Flags of the run:", as_words(flags))
        return
    old = {flag: x for flag, x in flags.items() if _is_there(shown.arguments, flag, x)}
    new = {flag: x for flag, x in flags.items() if flag not in old}
    head = "Flags to add or change, started with -m megatron_burst:"
    _show_words(console, head, as_words(new) or ["none"])
    _show_words(console, "Flags that the script has already:", as_words(old) or ["none"])


def _no_model_flags(unknown: Sequence[str]) -> str:
    return (
        "the planner knows no flags of Megatron-LM for these entries of the model's config: "
        f"{', '.join(unknown)}. Flags of the other entries alone would train another model, so "
        "build this one with Megatron Bridge, or write its flags yourself. Time and memory above "
        "count this config's sizes and kinds of layers, but none of these entries"
    )


def _is_there(arguments: Mapping[str, Any], flag: str, value: object) -> bool:
    """Whether arguments have a flag with this value."""
    got = arguments.get(flag.lstrip("-").replace("-", "_"))
    if type(value) in (int, float):
        with suppress(TypeError, ValueError):  # dropout of 0.0 is 0
            return float(got) == value
    return got == value or str(got) == (" ".join(value) if isinstance(value, list) else str(value))


def _show_words(console: Console, head: str, words: Sequence[str]) -> None:
    """As many words on a line as fit, which a shell reads as one."""
    lines, width = [words[0]], min(console.width, _WIDTH) - len(" \\")
    for word in words[1:]:
        longer = f"{lines[-1]} {word}"
        lines = [*lines[:-1], longer] if len(longer) <= width else [*lines, f"  {word}"]
    _copy(console, head, " \\\n".join(lines))


def _copy(console: Console, head: str, text: str) -> None:
    """Print lines that nothing may break."""
    console.print(f"[bold]{head}[/bold]", highlight=False)
    console.print(harmless(text), soft_wrap=True, highlight=False, markup=False)
