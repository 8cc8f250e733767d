"""Options of `megatron-burst plan`: what is refused of them, and what a job has of them."""

import re
from collections.abc import Callable
from math import ceil
from pathlib import Path

from megatron_burst.errors import BurstError, require
from megatron_burst.schedule.layout import Layout
from megatron_burst.tools.documents import typical_packing
from megatron_burst.tools.job.hugging_face import PRESETS
from megatron_burst.tools.job.script import Script
from megatron_burst.tools.lengths import Lengths
from megatron_burst.tools.simulate.sample import Packing, Sample, numbers_in
from megatron_burst.tools.terminal import check_writable
from megatron_burst.tools.units import whole_number

STDOUT = Path("-")
_STEP_TOKENS = 4 << 20  # of a small job
_GPU_TOKENS = 1 << 10  # a GPU and step in a large one: 16M at 16K GPUs, as Llama 3 had


def packing_of(
    script: Script, cu_seqlens: Path | None, lengths: Lengths | None, tokens: int
) -> tuple[Packing | None, str]:
    """How samples of so many tokens are packed: as a script says, else as THD; and how often a
    file's documents are repeated, in words."""
    if lengths:
        return typical_packing(lengths, tokens), ""
    if not cu_seqlens:
        return (Packing(script.layout) if script.layout else None), ""
    sample = Sample.of(numbers_in(cu_seqlens))
    times, count = -(-tokens // sample.tokens), len(sample.lengths)
    words = f"{sample.tokens:,} tokens in {count} documents, repeated {times:,} times"
    packing = Packing(script.layout or Layout.DOCUMENTS, sample.filling(tokens))
    return packing, words if times > 1 else ""


def layout_note(script: Script, lengths: Lengths | None) -> list[str]:
    """That steps of drawn documents are not sharded as a script shards them."""
    if not lengths or script.layout in (None, Layout.DOCUMENTS):
        return []
    return [
        "the plan shards documents of --lengths one by one (--sft), but the script's start at any "
        "token"
    ]


def tokens_of(seq: str) -> int:
    """Tokens of a sequence, which must be given."""
    require("plan", [(seq, "--seq-length must be given, because time and memory depend on it",
                      "none, neither as an option nor in the model's file",
                      "write for example --seq-length 1M")])  # fmt: skip
    return whole_number(seq, "--seq-length")


def batch_of(text: str, tokens: int) -> Callable[[int], int]:
    """Sequences of a step of a job with so many GPUs.

    Only DP and PP can have odd factors of the GPUs, such as the 9 of a rack of 72, because CP and
    TP divide the sequence: the batch gets them, unless it grew fourfold.
    """

    def usual(gpus: int) -> int:
        sequences = max(1, max(_STEP_TOKENS, _GPU_TOKENS * gpus) // tokens)
        odd = gpus // (gpus & -gpus)
        return ceil(sequences / odd) * odd if odd <= 4 * sequences else sequences

    if not text:
        return usual
    sequences = whole_number(text, "--global-batch-size")
    return lambda gpus: sequences


def check_files(cu_seqlens: Path | None, lengths: Path | None) -> None:
    """Refuse documents from two files."""
    require("plan", [(not (cu_seqlens and lengths), "--lengths must not be combined with "
                      "--cu-seqlens, because both say which documents samples have",
                      f"{lengths} and {cu_seqlens}", "leave one out")])  # fmt: skip


def check_sample(values: dict[str, object]) -> None:
    """Refuse options that a sample does not have."""
    options = [f"--{name}" for name, value in values.items() if value and name not in ("tp", "cp")]
    require("plan", [(not options, "without --seq-length, --cu-seqlens must only be combined with "
                      "--gpus, --gpus-per-node, --hardware, --tp, --cp and --picture, because the "
                      "plan is then of one layer's attention, not of a job",
                      "".join(options[:1]).replace("_", "-"), "leave one out")])  # fmt: skip


def check_outputs(json: Path | None, picture: Path | None, frontier: Path | None) -> None:
    """Refuse files that could not be written, before anything is computed."""
    paths = [json]
    for option, path in (("--json", json), ("--picture", picture), ("--frontier", frontier)):
        if path is None or path == STDOUT:
            continue
        check_writable("plan", option, path)
        if option != "--json" and (path.suffix not in (".png", ".svg", ".pdf") or path in paths):
            raise BurstError(
                f"plan: {option} must end in .png, .svg or .pdf and be a file of its own, because "
                f"the suffix selects the format; got {path}; rename it"
            )
        paths.append(path)


def presets_by_family() -> str:
    """Models known by name, a paragraph a family; families of one model share the last."""
    families: dict[str, list[str]] = {}
    for name in sorted(PRESETS, key=lambda name: re.sub(r"\d+", lambda n: n[0].zfill(4), name)):
        families.setdefault(re.split(r"[\d-]", name)[0], []).append(name)
    several = [", ".join(names) for names in families.values() if len(names) > 1]
    single = ", ".join(names[0] for names in families.values() if len(names) == 1)
    return "\n\n".join(["Models known by name:", *several, single])
