"""The ratios that benchmarks/smoke.sh measured, beside the expected ones.

python benchmarks/smoke.py OUT            prints them; OUT has smoke.sh's CSVs
python benchmarks/smoke.py OUT --keep     also makes them the expected ones, from now on

A ratio is the speed of burst, or of one of its kernels, to that of a peer in the same run: above 1
is faster. What is expected was measured on the GPU that its row names; clocks and heat move ratios
by about 2 %.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its own folder alone

from benchmarks.frontier_cases import FRONTIER_CSV
from benchmarks.kernels import KERNELS_CSV
from benchmarks.loss_table import LOSS_CSV
from benchmarks.one_rank import RANK_CSV
from benchmarks.ratios import Ratio
from benchmarks.rows import Sheet, append, read
from megatron_burst.tools.terminal import in_one_sentence

EXPECTED = Path(__file__).parent / "smoke_expected.csv"
_STEPS = {  # settings of burst's, and Megatron's that they are compared with
    "burst:off": "megatron:off", "burst:keep": "megatron:full", "burst:auto-12": "megatron:off",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SmokeRow:
    """An expected ratio; fields are columns."""

    what: str
    ratio: float
    gpu: str
    date: str
    versions: str


SMOKE_CSV = Sheet("benchmarks/smoke.py", SmokeRow)


def ratios(folder: Path) -> dict[str, tuple[float, str, str]]:
    """(ratio, GPU, versions) by what was measured; of equal ones the last."""
    found = {}
    for name, of in {"kernels": _kernels, "rank": _ranks, "loss": _heads, "steps": _steps}.items():
        path = folder / f"{name}.csv"
        found |= {what: rest for what, *rest in of(path)} if path.exists() else {}
    return {what: tuple(rest) for what, rest in found.items()}


def _kernels(path: Path) -> Iterator[tuple]:
    for row in read([path], KERNELS_CSV):
        if row.ratio and row.what != "fa4":  # to which the others' ratios are
            mask = "causal" if row.causal else "full"
            case = f"{row.seq} tokens, {row.heads_q}/{row.heads_kv}, dim {row.dim}, {mask}"
            yield f"{row.what} / fa4, {row.direction}, {case}", row.ratio, row.gpu, row.torch


def _ranks(path: Path) -> Iterator[tuple]:
    for row in read([path], RANK_CSV):
        if row.what == "rank":
            case = f"{row.seq} tokens, {row.heads_q}/{row.heads_kv}"
            what = f"a rank of {row.ranks} / the kernel alone, {case}"
            yield what, row.ratio, row.gpu, row.versions


def _heads(path: Path) -> Iterator[tuple]:
    rows = [row for row in read([path], LOSS_CSV) if row.ms]
    peers = {row.tokens: row for row in rows if row.impl == "megatron:fused"}
    for row in rows:
        if row.impl.startswith("burst") and row.tokens in peers:
            what = f"loss, {row.impl} / megatron:fused, {row.tokens} tokens, {row.vocab} classes"
            yield what, Ratio.of(row, peers[row.tokens]).value, row.gpu, row.versions


def _steps(path: Path) -> Iterator[tuple]:
    rows = [row for row in read([path], FRONTIER_CSV) if row.ms]
    times = {(row.documents, f"{row.impl}:{row.setting}"): row.ms for row in rows}
    for row in rows:
        own = f"{row.impl}:{row.setting}"
        peer = _STEPS.get(own)
        if other := times.get((row.documents, peer)):
            sample = "packed documents" if row.documents else "one document"
            what = f"step of {row.model}, {row.seq} tokens, {sample}, {own} / {peer}"
            yield what, other / row.ms, row.gpu, row.versions


def main(
    out: Annotated[Path, typer.Argument(help="folder of smoke.sh's CSVs")],
    keep: Annotated[bool, typer.Option(help="make these the expected ratios")] = False,
) -> None:
    """Print ratios now and expected."""
    with in_one_sentence():
        found = ratios(out)
        known = {row.what: row for row in read([EXPECTED], SMOKE_CSV)} if EXPECTED.exists() else {}
    print(f"{'ratio':>7} {'expected':>9}   what")
    for what, (ratio, *_) in found.items():
        there = known.get(what)
        said = f"{there.ratio:9.3f}" if there else f"{'-':>9}"
        far = there and abs(ratio / there.ratio - 1) > 0.03
        print(f"{ratio:7.3f} {said} {'!' if far else ' '} {what}")
    if missing := [what for what in known if what not in found]:
        print(f"not measured: {'; '.join(missing)}")
    if keep:
        date = datetime.now(UTC).isoformat(timespec="seconds")
        rows = [
            SmokeRow(what=what, ratio=ratio, gpu=gpu, date=date, versions=versions)
            for what, (ratio, gpu, versions) in found.items()
        ]
        append(EXPECTED, rows, SMOKE_CSV)


if __name__ == "__main__":
    typer.run(main)
