"""`megatron-burst plan`: options become a job and a strategy; results become tables and files."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal, get_args

from typer import Argument, Exit, Option, echo

from megatron_burst.tools.documents import compare
from megatron_burst.tools.documents_table import as_described, show_documents
from megatron_burst.tools.hardware_file import hardware as hardware_of
from megatron_burst.tools.hardware_file import preset_names
from megatron_burst.tools.job.flags import as_json
from megatron_burst.tools.job.frameworks import takes_logits
from megatron_burst.tools.job.model_file import model_of
from megatron_burst.tools.job.script import arguments_in, given, read_script
from megatron_burst.tools.job.search import search
from megatron_burst.tools.job.strategy import Fsdp, Job, even_share
from megatron_burst.tools.lengths import lengths_in
from megatron_burst.tools.packed import plan_sample
from megatron_burst.tools.pictures import save_picture, save_sample_picture
from megatron_burst.tools.plan_flags import Shown
from megatron_burst.tools.plan_kept import save_frontier
from megatron_burst.tools.plan_notes import no_room, warnings_of, with_keep
from megatron_burst.tools.plan_options import (
    STDOUT,
    batch_of,
    check_files,
    check_outputs,
    check_sample,
    layout_note,
    packing_of,
    tokens_of,
)
from megatron_burst.tools.plan_table import show
from megatron_burst.tools.terminal import in_one_sentence, shown, writing
from megatron_burst.tools.units import whole_number

_NOT_RUN = 3  # exit code; 2 is refused input
Framework = Literal["megatron", "bridge", "verl", "ms-swift", "slime", "nemo-rl", "roll"]
_FRAMEWORK = f"print the plan as settings of {', '.join(get_args(Framework))}"
_CHOSEN = "the fastest that fits, if left out"
Sharding = partial(Option, min=1, metavar="N", rich_help_panel=f"Sharding: {_CHOSEN}")
Policy = partial(Option, rich_help_panel=f"Recomputation: {_CHOSEN}")
Offload = partial(Option, rich_help_panel=f"Copies to host memory: {_CHOSEN}")
Documents = partial(Option, metavar="FILE", rich_help_panel="Packed documents")
Output = partial(Option, rich_help_panel="Output")
_MODEL = (
    "a preset (listed below), hf:ORG/NAME (from the local cache), a config.json or its folder, or "
    "the file that --burst-dump-args wrote for your job"
)
_HARDWARE = f"{', '.join(preset_names())}, or a TOML file from calibrate"
_BATCH = "sequences per step; default: 4M tokens, or 1K per GPU if that is more"
_FSDP = "none, torch or megatron: ZeRO-3; never chosen for you"
_KEEP = (
    "none, half or all of attention's results are kept by full recomputation (--burst-keep); auto: "
    "also outputs of modules, as a run would choose"
)
_CU_SEQLENS = (
    "documents of a packed sample: boundaries or lengths (text, .npy, .pt); without --seq-length, "
    "plan only the attention of this sample"
)
_LENGTHS = (
    "document lengths of a data set: a histogram (.csv), a list (.jsonl), or Megatron's index "
    "(.idx); with --seq-length, compare ways to assign documents to ranks"
)
_PICTURE = "draw one layer's attention over time, or the sample of --cu-seqlens (.png, .svg, .pdf)"
_FRONTIER = "draw peak memory against step time for all memory budgets (.png, .svg, .pdf)"


def plan(
    model: Annotated[str, Argument(metavar="MODEL", help=_MODEL)],
    gpus: Annotated[str, Option(metavar="N", help="GPUs of the job, e.g. 64 or 16k")],
    seq_length: Annotated[
        str, Option(metavar="TOKENS", help="length of a sequence, e.g. 1M, 128k, 1048576")
    ] = "",
    gpus_per_node: Annotated[
        int | None, Option(min=1, metavar="N", help="GPUs per node; default: as in --hardware")
    ] = None,
    hardware: Annotated[str, Option(metavar="NAME|FILE", help=_HARDWARE)] = "h200",
    global_batch_size: Annotated[str, Option(metavar="N", help=_BATCH)] = "",
    tp: Annotated[int | None, Sharding(help="tensor-parallel size")] = None,
    cp: Annotated[int | None, Sharding(help="context-parallel size")] = None,
    pp: Annotated[int | None, Sharding(help="pipeline-parallel size")] = None,
    dp: Annotated[int | None, Sharding(help="data-parallel size")] = None,
    ep: Annotated[int | None, Sharding(help="expert-parallel size")] = None,
    fsdp: Annotated[Fsdp | None, Sharding(min=None, metavar="WHOSE", help=_FSDP)] = None,
    recompute: Annotated[
        Literal["none", "selective", "full"] | None,
        Policy(metavar="WHAT", help="none, selective (the feed-forward) or full"),
    ] = None,
    keep: Annotated[
        Literal["none", "half", "all", "auto"] | None, Policy(metavar="WHAT", help=_KEEP)
    ] = None,
    keep_budget_gib: Annotated[
        float | None,
        Policy(min=0.01, metavar="GIB", help="GPU memory for --keep auto; default: what is left"),
    ] = None,
    offload: Annotated[bool | None, Offload(help="offload kept results")] = None,
    offload_inputs: Annotated[
        bool | None, Offload(help="offload the inputs of recomputed layers")
    ] = None,
    cu_seqlens: Annotated[Path | None, Documents(help=_CU_SEQLENS)] = None,
    lengths: Annotated[Path | None, Documents(help=_LENGTHS)] = None,
    do_search: Annotated[bool, Output("--search", help="show other strategies too")] = False,
    verbose: Annotated[
        bool, Output("--verbose", "-v", help="show ranks, transfers, and small parts too")
    ] = False,
    json: Annotated[
        Path | None,
        Output(metavar="FILE", help="write the plan as JSON, for --burst-plan; -: print only that"),
    ] = None,
    framework: Annotated[Framework | None, Output("--for", metavar="NAME", help=_FRAMEWORK)] = None,
    picture: Annotated[Path | None, Output(metavar="FILE", help=_PICTURE)] = None,
    frontier: Annotated[Path | None, Output(metavar="FILE", help=_FRONTIER)] = None,
) -> None:
    """Predict time and memory of a job, and print its flags.

    Exit status: 0 for a plan that fits, 2 for refused input, 3 if nothing fits.
    """
    with in_one_sentence():
        check_outputs(json, picture, frontier)
        check_files(cu_seqlens, lengths)
        options = {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "ep": ep, "recompute": recompute}
        options |= {
            "keep": keep,
            "offload": offload,
            "offload_inputs": offload_inputs,
            "fsdp": fsdp,
        }
        options["keep_budget_gib"] = keep_budget_gib
        in_file = arguments_in(model)
        described = model_of(model)
        script = read_script(in_file, options)
        fixed = given(script, options)
        count, machine = whole_number(gpus, "--gpus"), hardware_of(hardware)
        on_node = gpus_per_node or even_share(count, machine.node.gpus)
        length = seq_length or in_file.get("seq_length", "")
        if cu_seqlens and not length:
            of_jobs = {"global_batch_size": global_batch_size, "search": do_search, "json": json}
            of_jobs |= {"for": framework, "frontier": frontier}
            check_sample(options | of_jobs)
            whose = Job(described, 1, count, on_node, 1, machine)
            sample = plan_sample(whose, cu_seqlens, dict(fixed))
            if picture:
                with writing("plan", "--picture", picture), shown(0, f"drawing {picture}"):
                    save_sample_picture(*sample, picture)
            return
        tokens = tokens_of(length)
        batch = batch_of(global_batch_size or in_file.get("global_batch_size", ""), tokens)
        drawn_from = lengths_in(lengths) if lengths else None
        packing, repeated = packing_of(script, cu_seqlens, drawn_from, tokens)
        logits = takes_logits(framework, dict(fixed).get("fsdp", "none"))
        job = Job(described, tokens, count, on_node, batch(count), machine, packing, logits)
        with shown(0, "comparing strategies"):
            candidates = search(job, fixed, script.named)
        missing, shown_job, best = "", job, candidates
        if not candidates[0].fits:
            with shown(0, "looking for GPUs that would be enough"):
                missing, shown_job, best = no_room(job, candidates, fixed, batch)
        notes = [*script.notes, *layout_note(script, drawn_from)]
        warnings = [*notes, *warnings_of(shown_job, best, fixed, in_file)]
        if logits:
            warnings.append(
                f"{framework} takes all logits from the model: their memory is counted, and "
                "burst's fused loss, which makes none, is off"
            )
        keeps_none = script.policy.get("keep") == "none" and "burst_keep" not in in_file
        with shown(0, "comparing recomputation, and rules for documents"):
            more = with_keep(job, candidates[0]) if keeps_none and candidates[0].fits else ""
            documents = (
                compare(job, candidates, drawn_from) if drawn_from and candidates[0].fits else None
            )
        # before a reader such as head ends the output
        if json:
            _write(as_json(job, candidates, script.flags, as_described(documents)), json)
        if picture:
            with writing("plan", "--picture", picture), shown(0, f"drawing {picture}"):
                save_picture(job, candidates[0].strategy, picture)
        if frontier:
            with writing("plan", "--frontier", frontier), shown(0, f"drawing {frontier}"):
                save_frontier(job, candidates[0].strategy, frontier)
        outcome = Shown(
            shown_job, best, script, in_file, warnings, missing, do_search, verbose, repeated, more,
            usual_batch=not (global_batch_size or "global_batch_size" in in_file),
            framework=framework,
        )  # fmt: skip
        if json != STDOUT:
            show(outcome)
            if documents:
                show_documents(documents)
    if not candidates[0].fits:
        raise Exit(_NOT_RUN)


def _write(text: str, json: Path) -> None:
    if json == STDOUT:
        echo(text)
        return
    with writing("plan", "--json", json):
        json.write_text(text)
