"""Where burst is slower than a peer, or needs more memory: the tables of losses.md."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.compared import LIBRARIES, Comparison, compare
from benchmarks.frontier_cases import problem_in
from benchmarks.frontier_table import Point, in_equal_memory, points_of, runs_in
from benchmarks.limits import FOUR, sheet
from benchmarks.sheets import FRONTIER_CSV, LOSS_CSV, PACKED_CSV, RECOMPUTE_CSV, SLICES_CSV
from benchmarks.style import gpu_of
from benchmarks.tables import Ratio, markdown, measured_by, times_of
from megatron_burst.tools.units import in_units

_SIZES = "sizes_2xh200_one_node+sizes_4xh200_one_node+gather_then_all_to_all_h200"
_PEERS = "peers_4xh200_one_node+peers_few_heads_4xh200_one_node"
_CAUSAL = (
    "attention_1xh200", "attention_2xh200_one_node", FOUR, _SIZES, _PEERS, "attention_2x2xh200",
    "seeds_1xh100", "seeds_long_1xh100", "seeds_4xh200_one_node",
)  # fmt: skip
_PACKED = (
    "packed_1xh200", "packed_2xh200_one_node", "packed_2xh100_one_node", "packed_4xh200_one_node",
    "packed_2x1xh200", "packed_2x2xh200",
)  # fmt: skip
_MODES = "burst:recompute", "burst:forward", "burst:plain"  # of the loss
_HEAD = "times as fast", "GiB: burst, beside", "run, n"
_HEAD_OF_ATTENTION = (
    "GPUs", "heads", "tokens", "sample", "burst", "beside", *_HEAD[:2], "forward alone", _HEAD[2],
)  # fmt: skip
_LIKE = {"none": "full", "off": "off", "all": "full-keep", "selective": "selective"}  # in layers
Lines = Iterator[tuple[str, ...]]


def attention() -> Lines:
    """Of both passes, and of forward alone; burst as it runs by itself."""
    yield _HEAD_OF_ATTENTION
    yield from _attention({"burst:auto": "", "burst:auto@zigzag": "documents at any token"})


def on_cudnn() -> Lines:
    """The same with cuDNN, TransformerEngine's kernel."""
    yield _HEAD_OF_ATTENTION
    yield from _attention({"burst:backend=cudnn": "on cuDNN"})


def _attention(variants: dict[str, str]) -> Lines:
    lines: dict[tuple[str, ...], dict[str, tuple[str, str]]] = {}
    sheets = *((name,) for name in _CAUSAL), *((name, PACKED_CSV) for name in _PACKED)
    for each in (one.alike() for names in sheets for one in compare(sheet(*names))):
        words, place = each.problem.words(), each.problem
        for name, words_of_variant in variants.items():
            row = _by_itself(each) if name == "burst:auto" else each.rows.get(name)
            for peer in (each.fastest(impl) for impl in ("te", *LIBRARIES)):
                if row and peer and (cells := _loss_cells(row, peer)):
                    gpus = " + ".join([f"{place.ranks // place.nodes}"] * place.nodes)
                    sample = ", ".join(
                        f"{fact} {words[fact]}".removeprefix("mask ")
                        for fact in ("mask", "head dim", "dtype", "batch")
                        if words[fact] not in ("128", "bfloat16", "1")
                    )
                    line = (
                        f"{gpus} {gpu_of(row.gpu)}", words["heads"], words["S"], sample,
                        words_of_variant or row.mode, f"{peer.impl} `{peer.mode}`", cells[2],
                    )  # fmt: skip
                    lines.setdefault(line, {})[place.pass_] = cells[:2]
    for (*first, origin), passes in lines.items():
        forward, _ = passes.get("fwd", ("-", "-"))
        yield *first, *passes.get("fwd_bwd", ("-", "-")), forward, origin


def _by_itself(each: Comparison) -> Any:
    """Burst's row; the one that gathers for forward alone of grouped heads of 192/128."""
    of, gather = each.problem, each.rows.get("burst:gather")
    is_grouped = (of.head_dim_qk, of.pass_) == (192, "fwd") and of.heads_kv < of.heads_q
    return gather if is_grouped and gather and gather.ms else each.burst


def steps() -> Lines:
    """Settings of Megatron's that are faster in no more memory; steps and layers of one setting."""
    yield "step", "burst", "Megatron", *_HEAD
    for name in ("1xh200", "1xh100", "2xh200", "2xh100", "4xh200"):
        runs = {}
        for _, rows in runs_in(sheet(f"frontier_{name}", FRONTIER_CSV)):
            points = [point for point in points_of(rows) if point.ms]
            if {point.is_burst for point in points} == {True, False}:
                row = rows[0]
                runs[row.model, row.layers, row.seq, row.documents, row.ranks] = rows, points
        for rows, points in runs.values():
            yield from _in_memory(rows, {point.name: point for point in points})
    for name in ("slices_2xh200", "tensor_4xh200"):
        rows = [row for row in sheet(name, SLICES_CSV) if row.ms]
        ours = {(row.seq, row.layers): row for row in rows if row.impl.startswith("burst")}
        for row in rows:
            own = ours.get((row.seq, row.layers))
            if own and not row.impl.startswith("burst") and (cells := _loss_cells(own, row)):
                what = f"{own.model}, {own.layers} layers, {in_units(own.seq)}"
                step = f"{what}, {own.gpus} {gpu_of(own.gpu)}"
                yield step, f"`{own.impl}`", f"`{row.impl}`", *cells
    for name in ("recompute_2xh200", "recompute_4xh200"):
        rows = {(row.seq, row.impl, row.mode): row for row in sheet(name, RECOMPUTE_CSV) if row.ms}
        for (seq, impl, mode), own in rows.items():
            peer = rows.get((seq, "megatron", _LIKE.get(mode)))
            if impl == "burst" and peer and (cells := _loss_cells(own, peer)):
                what = f"{own.note.split()[0]} layers of Llama-3-8B, {in_units(seq)}"
                step = f"{what}, {own.ranks} {gpu_of(own.gpu)}"
                yield step, f"`{mode}`", f"`{peer.mode}`", *cells


def _in_memory(rows: list, points: dict[str, Point]) -> Lines:
    row = next(row for row in rows if row.ms)
    counted = "" if row.active_gib is not None else " (allocated)"
    for name, (gain, best) in in_equal_memory(list(points.values())).items():
        if f"{gain:.3f}" < "1.000":
            own, peer = points[best], points[name]
            gib = f"{own.peak_gib:.2f}, {peer.peak_gib:.2f}{counted}"
            yield (
                f"{problem_in(row)}, {row.ranks} {gpu_of(row.gpu)}", _setting(best),
                _setting(name), f"**{gain:.3f}**", gib, _origin(row, own.steps),
            )  # fmt: skip


def _setting(name: str) -> str:
    return f"`{name.partition(':')[2]}`"


def loss() -> Lines:
    """The LM head and loss: each of burst's modes beside every other that ran with it."""
    yield "tokens, GPUs", "hidden x classes", "beside", *(f"`{name}`" for name in _MODES), _HEAD[2]
    runs: dict[tuple, dict[str, Any]] = {}
    for row in sheet("loss_h200", LOSS_CSV):
        if row.ms:
            head = row.ranks, row.hidden, row.vocab, row.tokens
            runs.setdefault((*head, row.date[:10], measured_by(row)), {})[row.impl] = row
    newest = {
        (*run[:4], name, peer): (rows[name], rows[peer])
        for run, rows in runs.items() for name in rows for peer in rows
        if name in _MODES and not peer.startswith("burst")
    }  # fmt: skip
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for (ranks, hidden, vocab, tokens, name, peer), pair in sorted(newest.items()):
        if cells := _loss_cells(*pair):
            ratio, gib, origin = cells
            head = f"{in_units(tokens)}, {ranks}", f"{hidden} x {in_units(vocab)}"
            lines.setdefault((*head, f"`{peer}`", origin), {})[name] = f"{ratio}; {gib}"
    for (*first, origin), modes in lines.items():
        yield *first, *(modes.get(name, "-") for name in _MODES), origin


def _loss_cells(row: Any, peer: Any) -> tuple[str, ...]:
    """Cells of a ratio, memory and origin, if one is worse for burst; memory alone of two runs."""
    ratio = Ratio.of(row, peer)
    if ratio is None:
        return ()
    is_one = measured_by(row) == measured_by(peer)
    gib, is_slow, is_more = "-", is_one and round(ratio.value, 2) < 1, False
    if row.peak_gib and peer.peak_gib is not None:
        gib = f"{row.peak_gib:.2f}, {peer.peak_gib:.2f}"
        is_more = row.peak_gib > 1.01 * peer.peak_gib
    if not is_slow and not is_more:
        return ()
    speed = f"**{ratio}**" if is_slow else f"{ratio}" if is_one else "another run"
    return speed, f"**{gib}**" if is_more else gib, _origin(row)


def _origin(row: Any, count: int = 0) -> str:
    """The day, commit and machine of a row, and how many repetitions it has."""
    noted = re.search(r"(\d+) repetition", row.note)
    count = count or len(times_of(row)) or int(noted[1] if noted else 0)
    return "; ".join([", ".join([row.date[:10], *measured_by(row)]), *[f"{count}"] * bool(count)])


TABLES: dict[str, Callable[[], Lines]] = {
    "attention": attention, "cudnn": on_cudnn, "steps": steps, "loss": loss,
}  # fmt: skip


def table(name: str) -> str:
    """A table of the page; its last cells have a run's number, and how many repetitions it has."""
    head, *lines = TABLES[name]()
    numbers: dict[str, int] = {}
    short = []
    for *cells, origin in lines:
        run, _, count = origin.partition("; ")
        number = numbers.setdefault(run, len(numbers) + 1)
        short.append([*cells, f"{number}, {count}" if count else f"{number}"])
    runs = "; ".join(f"({number}) {run}" for run, number in numbers.items())
    return f"{markdown([head, *short])}\n\nRows: {runs}."
