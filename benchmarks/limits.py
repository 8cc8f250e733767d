"""What the hardware allows beside what burst reaches: tables of docs/benchmarks/limits.md, which
`benchmarks.show docs` makes."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from benchmarks.gpu_limits import LIMITS_CSV
from benchmarks.loss_table import LOSS_CSV
from benchmarks.planned import sent_by
from benchmarks.ratios import Ratio, share_of_peak
from benchmarks.rows import ATTENTION_CSV, PACKED_CSV, Row, read
from benchmarks.slice_cases import SLICES_CSV
from benchmarks.tables import check_alike, compare
from megatron_burst.schedule.topology import Link
from megatron_burst.tools.hardware_file import preset_of
from megatron_burst.tools.units import in_units

RESULTS = Path(__file__).parent / "results"
_LINK = re.compile(r"ring ([\d.]+), all-to-all ([\d.]+) GB/s (on one|between 2)")
FOUR = "attention_4xh200_one_node+peers_4xh200_one_node"
CAUSAL = (
    ("attention_2xh200_one_node", (65536, 131072)),
    (FOUR, (65536, 131072, 262144, 524288)),
    ("attention_2x2xh200", (65536, 131072, 262144)),
)  # fmt: skip
_MEMORY_GBS = 4800.0  # of an H200, in its data sheet
NVLINK_GBS = 300.0  # a ring shift inside emulated nodes, where rows have only that between them
Lines = Iterator[tuple[str, ...]]


def sheet(name: str, kind=ATTENTION_CSV) -> list:
    """The rows of a CSV of benchmarks/results, or of several, joined by "+"."""
    return read([RESULTS / f"{one}.csv" for one in name.split("+")], kind)


def machine() -> Lines:
    """What was measured of the machines, with the data sheets' figures."""
    yield "what", "data sheet", "measured", "rows"
    yield from _gpu()
    yield from _links()


def _gpu() -> Lines:
    gpu = preset_of("NVIDIA H200", "limits").gpu
    square = sorted({row.matmul_tflops for row in sheet("loss_h200", LOSS_CSV) if row.ms})
    yield (
        "matrix product, bf16, TFLOP/s", f"{gpu.peak_tflops:.0f}",
        _span(square), "`loss_h200.csv`, `matmul_tflops`",
    )  # fmt: skip
    alone = {(row.what, row.size): row for row in sheet("gpu_limits_1xh200", LIMITS_CSV)}
    kinds = {
        "matmul": ("matrix product of side {}, bf16, TFLOP/s", gpu.peak_tflops),
        "copy": ("copy of {} GiB in the H200's memory, GB/s read and written", _MEMORY_GBS),
    }
    for (kind, size), row in alone.items():
        (what, most), work = kinds[kind], row.rate * row.ms
        yield (
            what.format(size if kind == "matmul" else size >> 30), f"{most:.0f}",
            _span([work / ms for ms in (row.ms_max, row.ms, row.ms_min)]),
            _files("gpu_limits_1xh200"),
        )  # fmt: skip
    causal = [row for row in sheet(FOUR) if (row.impl, row.mode) == ("ceiling", "auto") and row.ms]
    for pass_, name in (("fwd", "forward"), ("fwd_bwd", "forward and backward")):
        found = [row.tflops_per_gpu for row in causal if row.pass_ == pass_]
        yield (
            f"FlashAttention-4 alone, causal, {name}, TFLOP/s", f"{gpu.peak_tflops:.0f}",
            _span(found), f"{_files(FOUR)}, `ceiling`",
        )  # fmt: skip


def _links() -> Lines:
    for gpus, names in (("H200", "attention_4xh200_one_node+attention_2xh200_one_node"),
                        ("H100", "before_2xh100")):  # fmt: skip
        rings, exchanges = zip(*map(rates, sheet(names)), strict=True)
        where = _files(names)
        yield f"NVLink, {gpus}, ring shift by NCCL, GB/s a rank", "450", _span(rings), where
        yield f"NVLink, {gpus}, all-to-all by NCCL, GB/s a rank", "450", _span(exchanges), where
    for name, gpus in (("h200", "H200"), ("h100", "H100")):
        host = preset_of(gpus, "limits").gpu.host_gbs
        yield (
            f"copies to host memory, {gpus}, GB/s", "64", f"{host:.0f}",
            _files(f"frontier_1x{name}"),
        )  # fmt: skip
    rings, _ = zip(*map(rates, sheet("attention_2x2xh200")), strict=True)
    yield (
        "sockets between emulated nodes, ring shift, GB/s a rank", "",
        _span(rings), "`attention_2x2xh200.csv`",
    )  # fmt: skip


def attention() -> Lines:
    """Causal attention: how near it comes to the kernel alone, and to the links' speed."""
    yield (
        "GPUs", "heads", "tokens", "TFLOP/s", "of the kernel alone", "of the data sheet",
        "ms", "ms of transfers inside nodes", "between nodes",
    )  # fmt: skip
    for name, lengths in CAUSAL:
        for one in compare(sheet(name)):
            row, alone = one.burst, one.ceiling
            if one.problem.pass_ != "fwd_bwd" or row.seq not in lengths or row.heads_kv != 8:
                continue
            check_alike(one, [row, alone])
            sent, speed = sent_by(row), rates(row)[0]
            inside = NVLINK_GBS if row.nodes > 1 else speed
            yield (
                " + ".join([f"{row.ranks // row.nodes}"] * row.nodes),
                f"{row.heads_q}/{row.heads_kv}", in_units(row.seq), f"{row.tflops_per_gpu:.0f}",
                f"{Ratio.of(row, alone).value:.2f}" if alone else "", _share(row), f"{row.ms:.1f}",
                f"{sent.get(Link.INTRA, 0) / inside / 1e6:.1f}",
                f"{sent[Link.INTER] / speed / 1e6:.1f}" if row.nodes > 1 else "",
            )  # fmt: skip


def packed() -> Lines:
    """Packed documents on two GPUs."""
    yield "heads", "tokens", "documents", "TFLOP/s", "of the kernel alone", "of the data sheet"
    for one in compare(sheet("packed_2xh200_one_node", PACKED_CSV)):
        row, alone = one.burst, one.ceiling
        if one.problem.pass_ == "fwd_bwd" and row.mask.startswith("drawn") and alone:
            yield (
                f"{row.heads_q}/{row.heads_kv}", in_units(row.seq), f"{row.num_documents}",
                f"{row.tflops_per_gpu:.0f}", f"{Ratio.of(row, alone).value:.2f}", _share(row),
            )  # fmt: skip


def steps() -> Lines:
    """Whole training steps of two Llama-3-8B layers on two GPUs, and the LM head alone."""
    yield "what", "tokens", "TFLOP/s a GPU", "of the matrix product", "of the data sheet"
    losses = [row for row in sheet("loss_h200", LOSS_CSV) if row.ms]
    square = median({row.matmul_tflops for row in losses})
    names = {
        "megatron": "step, Megatron, full recomputation",
        "megatron-keep": "step, Megatron, attention kept",
        "burst": "step, burst, attention kept",
        "burst-recompute": "step, burst, full recomputation, packed",
    }
    newest = {(row.seq, row.impl): row for row in sheet("slices_2xh200", SLICES_CSV)}
    for row in newest.values():
        if row.impl in names:
            kind = names[row.impl] + (
                ", packed" if row.documents and row.impl == "megatron" else ""
            )
            rate = row.tflops_per_gpu
            yield kind, in_units(row.seq), f"{rate:.0f}", f"{rate / square:.2f}", _share(row)
    heads = {
        (row.hidden, row.tokens): row for row in losses
        if (row.ranks, row.impl, row.vocab) == (1, "burst:forward", 131072)
    }  # fmt: skip
    for (hidden, tokens), row in sorted(heads.items()):
        rate = row.gemm_efficiency * row.matmul_tflops
        share = share_of_peak(rate, row.gpu)
        yield (
            f"LM head and loss, forward mode, hidden {hidden}", in_units(tokens),
            f"{rate:.0f}", f"{row.gemm_efficiency:.2f}", f"{share:.2f}",
        )  # fmt: skip


TABLES: dict[str, Callable[[], Lines]] = {
    "machine": machine, "attention": attention, "packed": packed, "steps": steps,
}  # fmt: skip


def _files(name: str) -> str:
    """Those of `sheet`, for a page."""
    return ", ".join(f"`{one}.csv`" for one in name.split("+"))


def rates(row: Row) -> tuple[float, float]:
    """Measured ring shift and all-to-all of a row's run, GB/s a rank."""
    found = _LINK.match(row.link)
    return float(found[1]), float(found[2])


def _span(values) -> str:
    digits = 0 if max(values) > 50 else 1
    least, most = (f"{bound:.{digits}f}" for bound in (min(values), max(values)))
    return f"{median(values):.{digits}f} ({least}-{most})"


def _share(row) -> str:
    """Of the data sheet's bf16 peak of the row's GPU."""
    return f"{share_of_peak(row.tflops_per_gpu, row.gpu):.2f}"
