"""`megatron-burst plan`: options become a job and a strategy; results become tables and files."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Annotated, Literal

from typer import Exit, Option

from megatron_burst.cli.plan_table import show
from megatron_burst.cli.sentence import check_writable, in_one_sentence, unwritable
from megatron_burst.errors import BurstError
from megatron_burst.plan.attention_time import attention_time
from megatron_burst.plan.draw_times import MOST_RANKS, Panel, save_timelines
from megatron_burst.plan.hardware import preset_names
from megatron_burst.plan.hardware_file import hardware as hardware_of
from megatron_burst.plan.model import PRESETS
from megatron_burst.plan.model_file import megatron_arguments, model_of, text_of
from megatron_burst.plan.report import as_json
from megatron_burst.plan.schedule import Direction
from megatron_burst.plan.search import SIZES, Candidate, search
from megatron_burst.plan.strategy import Job, attention_call, even_share
from megatron_burst.plan.units import in_units, whole_number

_STEP_TOKENS = 4 << 20  # of a small job
_GPU_TOKENS = 1 << 10  # a GPU and step in a large one: 16M at 16K GPUs, as Llama 3 had
_IN_FILE = {  # Megatron's names, and where they go
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user fixed of a strategy; None: left open."""

    tp: int | None = None
    cp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: int | None = None
    recompute: str | None = None
    keep: str | None = None
    offload: bool | None = None
    offload_inputs: bool | None = None

    def given(self) -> dict[str, object]:
        """Only what is not open."""
        names = (*SIZES, "recompute", "keep", "offload", "offload_inputs")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


Size = Annotated[int | None, Option(min=1)]


def plan(
    model: Annotated[
        str, Option(help=f"{', '.join(PRESETS)}, a config.json, or a file of Megatron's arguments")
    ],
    gpus: Annotated[str, Option(help="GPUs of the job, e.g. 64 or 16k")],
    seq_length: Annotated[str, Option(help="tokens of a sequence, e.g. 1M, 128k, 1048576")] = "",
    gpus_per_node: Annotated[
        int | None, Option(min=1, help="of an NVLink domain; default: the hardware's")
    ] = None,
    hardware: Annotated[
        str, Option(help=f"{', '.join(preset_names())}, or a TOML file of calibrate's")
    ] = "h200",
    global_batch_size: Annotated[
        str, Option(help="sequences of a step; default: 4M tokens, or 1K a GPU if that is more")
    ] = "",
    tp: Size = None,
    cp: Size = None,
    pp: Size = None,
    dp: Size = None,
    ep: Size = None,
    recompute: Annotated[Literal["none", "selective", "full"] | None, Option()] = None,
    keep: Annotated[Literal["none", "half", "all"] | None, Option(help="--burst-keep")] = None,
    offload: Annotated[bool | None, Option(help="--burst-keep-offload")] = None,
    offload_inputs: Annotated[bool | None, Option(help="--burst-keep-offload-inputs")] = None,
    do_search: Annotated[
        bool, Option("--search", help="show the strategies that the best was chosen among")
    ] = False,
    top: Annotated[int, Option(min=1, help="of them to show")] = 8,
    json: Annotated[Path | None, Option(help="write all of it as JSON")] = None,
    picture: Annotated[
        Path | None, Option(help="draw one layer's attention, ranks x time (.png, .svg)")
    ] = None,
) -> None:
    """Time, memory and flags of a training job before it runs.

    Sizes and policies that are not given are those of the fastest strategy that fits in memory.
    Exits with 1 if none fits; the nearest to it is shown.
    """
    with in_one_sentence():
        _check_outputs(json, picture)
        asked = Asked(tp, cp, pp, dp, ep, recompute, keep, offload, offload_inputs)
        job, asked = _job(
            model, seq_length, gpus, gpus_per_node, hardware, global_batch_size, asked
        )
        given = asked.given()
        _check_policy(given)
        found = search(job, tuple(sorted(given.items())))
        show(job, found, top if do_search else 0)
        if json:
            with _writing("--json", json):
                json.write_text(as_json(job, found))
        if picture:
            with _writing("--picture", picture):
                _draw(job, found[0], picture)
    if not found[0].fits:
        raise Exit(1)


def _job(
    model: str, seq: str, gpus: str, per_host: int | None, hardware: str, batch: str, asked: Asked
) -> tuple[Job, Asked]:
    """The job; sizes that a file of Megatron's arguments has stand in for options left out."""
    described, in_file = model_of(model), _arguments_in(model)
    seq = seq or str(in_file.get("seq_length", ""))
    if not seq:
        raise BurstError(
            "plan: --seq-length must be given, because everything depends on it; got none, neither "
            "as an option nor in the model's file; write for example --seq-length 1M"
        )
    machine = hardware_of(hardware)
    count, tokens = whole_number(gpus, "--gpus"), whole_number(seq, "--seq-length")
    sizes = {
        name: whole_number(str(in_file[flag]), f"--{flag}".replace("_", "-"))
        for name, flag in _IN_FILE.items()
        if flag in in_file and getattr(asked, name) is None
    }
    asked = Asked(**{**asked.given(), **sizes})
    if batch:
        sequences = whole_number(batch, "--global-batch-size")
    else:
        sequences = _usual_batch(count, tokens)
    share = per_host or even_share(count, machine.host.gpus)
    job = Job(described, tokens, count, share, sequences, machine)
    return job, asked


def _usual_batch(gpus: int, tokens: int) -> int:
    """Sequences of a step. Only DP and PP can have odd factors of the GPUs, such as the 9 of a rack
    of 72, because CP and TP divide the sequence: the batch gets them, unless it grew fourfold.
    """
    sequences = max(1, max(_STEP_TOKENS, _GPU_TOKENS * gpus) // tokens)
    odd = gpus // (gpus & -gpus)
    return ceil(sequences / odd) * odd if odd <= 4 * sequences else sequences


def _arguments_in(model: str) -> dict:
    path = Path(model)
    if model.lower() in PRESETS or path.suffix == ".json" or not path.is_file():
        return {}
    return megatron_arguments(text_of(path))


def _check_policy(given: dict[str, object]) -> None:
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


def _check_outputs(json: Path | None, picture: Path | None) -> None:
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
def _writing(option: str, path: Path) -> Iterator[None]:
    """A file that the system will not write is refused in one sentence."""
    try:
        yield
    except OSError as error:
        raise unwritable("plan", option, path, error.strerror or str(error)) from None


def _draw(job: Job, best: Candidate, path: Path) -> None:
    call = attention_call(job, best.strategy)
    ranks = range(min(call.topology.cp_size, MOST_RANKS))
    panels = []
    for direction in Direction:
        timeline = attention_time(call, job.hardware, direction, ranks=ranks)
        shown = "" if len(ranks) == call.topology.cp_size else f", the first {len(ranks)} ranks"
        title = (
            f"{job.model.name} {in_units(job.seq)}, {best.strategy.layout}: one layer's attention, "
            f"{direction},\n{call.in_words}{shown}, {timeline.seconds:.3g} s"
        )
        panels.append(Panel(title, timeline))
    save_timelines(panels, call.topology, path)
