"""The row format: which columns each kind of CSV has.

A column has one type and one meaning in all CSVs, which columns.csv says. Numbers may be empty, for
what was not measured.
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Any

from benchmarks.layers import writes

_TYPES = {"text": str, "whole number": int, "number": float | None, "yes or no": bool}
with Path(__file__).with_name("columns.csv").open(encoding="utf-8") as file:
    GLOSSARY = {row["column"]: row for row in csv.DictReader(file)}
_OTHERS = {"int": int, "float": float | None, "str": str}
_USUAL = {"status": "ok", "note": "", "each": ""}


def _row(name: str, columns: str, *bases: type, **more: Any) -> type:
    """A frozen dataclass of columns, such as "date seq ms": "seq:float" has another type than
    usual, "gpu?" may be left out. Numbers are None unless they are given."""
    made = []
    for word in columns.split():
        column, _, other = word.partition(":")
        column, optional = column.rstrip("?"), column.endswith("?")
        kind = _OTHERS[other] if other else _TYPES[GLOSSARY[column]["type"]]
        default = {"default": None} if kind == float | None else {}
        default |= {"default": _USUAL.get(column, "")} if optional or column in _USUAL else {}
        made.append((column, kind, field(**default)))
    return make_dataclass(
        name, made, bases=bases, namespace=more, frozen=True, slots=True, kw_only=True,
        module=__name__,
    )  # fmt: skip


def columns_of(kind: type) -> tuple[str, ...]:
    """Columns of a CSV of such rows."""
    return tuple(field.name.rstrip("_") for field in fields(kind))


@dataclass(frozen=True, slots=True)
class Sheet:
    """A kind of CSV."""

    writer: str  # who writes it
    kind: type  # dataclass of its rows
    beside_ms: tuple[str, ...] = ()  # columns that a row with `ms` has too; predictions lack them
    holds: Callable[[Any], bool] | None = None  # which rows are its own, of the same columns
    shows_others: str = ""  # what shows those


# fmt: off
_MS, _HEADS = "ms ms_min ms_max", "heads_q heads_kv"
_MEASURED = f"run date versions gpu gpus how model layers kind documents:int tokens {_MS} reps"
Row = _row("Row", f"date versions gpu nodes ranks link seq batch {_HEADS} head_dim_qk head_dim_v "
           f"mask dtype impl mode pass_ {_MS} tflops_per_gpu peak_gib status note")
PackedRow = _row("PackedRow", "num_documents longest area seed", Row)
LossRow = _row("LossRow", f"date versions gpu ranks tokens hidden vocab dtype impl {_MS} "
               "gemm_efficiency matmul_tflops peak_gib error_loss error_dhidden "
               "error_dweight status note")
CountedRow = _row("CountedRow", "counted", LossRow)
SliceRow = _row("SliceRow", f"date versions gpu gpus model layers hidden ffn {_HEADS} vocab seq "
                f"documents impl {_MS} tokens_per_s_per_gpu tflops_per_gpu peak_gib loss speedup "
                "loss_difference status note")
FrontierRow = _row("FrontierRow", f"run date versions gpu model layers hidden ffn experts {_HEADS} "
                   f"vocab seq documents ranks impl setting turn {_MS} tflops each peak_gib "
                   "active_gib host_gib loss grad_norm status note",
                   gib=property(lambda row: row.active_gib or row.peak_gib))  # that a step needs
CurveRow = _row("CurveRow", "date versions? gpu? gpus sample impl order step loss grad_norm ms "
                "note")
PrefillRow = _row("PrefillRow", f"date versions gpu model seq ranks nodes runs dtype impl {_MS} "
                  "tokens_per_s tflops_per_gpu peak_gib kv_gib status note")
AccuracyRow = _row("AccuracyRow", f"impl mode ranks simulated {_HEADS} seq tensor error")
KernelRow = _row("KernelRow", f"gpu torch seq {_HEADS} dim causal direction what ms ms_least "
                 "ms_most tflops ratio ratio_least ratio_most note")
RankRow = _row("RankRow", f"date versions gpu ranks seq {_HEADS} dim dtype what mode backend "
               f"{_MS} ratio reps")
MaskRow = _row("MaskRow", f"date versions gpu seq {_HEADS} dim dtype backend mask beside pass_ "
               f"pairs {_MS} tflops ratio reps each each_beside")
LimitRow = _row("LimitRow", f"date versions gpu what size {_MS} rate note")
LogRow = _row("LogRow", f"date versions gpu nodes ranks seq heads layers mode way {_MS} percent "
              "attention_ms exposed_ms intra_ms inter_ms intra_mib inter_mib")
BalanceRow = _row("BalanceRow", "date versions gpu model documents gpus dp cp pp ep micro_batches "
                  "token_limit draws num_documents:float rule step_s bound_s longest_s cpu_ms note")
CostRow = _row("CostRow", f"{_MEASURED} cp area:int")
StepRow = _row("StepRow", f"{_MEASURED} seed rule simulated_ms dp")
SmokeRow = _row("SmokeRow", "what ratio gpu date versions")
# fmt: on


COLUMNS = columns_of(Row)
_BESIDE_MS = "ms_min", "ms_max", "tflops_per_gpu"
ATTENTION_CSV = Sheet(
    "benchmarks.attention", Row, _BESIDE_MS, lambda row: not writes(row.impl, row.mode),
    "benchmarks.show recompute",
)  # fmt: skip
RECOMPUTE_CSV = Sheet(
    "benchmarks.recompute", Row, _BESIDE_MS, lambda row: writes(row.impl, row.mode),
    "benchmarks.show table",
)  # fmt: skip
PACKED_CSV = Sheet("benchmarks.packed", PackedRow, _BESIDE_MS)
ANY_CSV = Sheet("benchmarks.attention, benchmarks.recompute or predict.py", Row)
ANY_PACKED_CSV = Sheet("benchmarks.packed or predict.py", PackedRow)
PREDICTED_CSV, PREDICTED_PACKED_CSV = Sheet("predict.py", Row), Sheet("predict.py", PackedRow)
LOSS_CSV = Sheet("benchmarks.loss", LossRow, ("ms_min", "ms_max", "gemm_efficiency"))
COUNTED_CSV = Sheet("benchmarks.loss --counted", CountedRow, LOSS_CSV.beside_ms)
SLICES_CSV = Sheet("slices", SliceRow)
FRONTIER_CSV = Sheet("benchmarks.frontier", FrontierRow)
CURVES_CSV = Sheet("loss_curves", CurveRow)
PREFILL_CSV = Sheet("benchmarks.prefill", PrefillRow)
ACCURACY_CSV = Sheet("benchmarks.accuracy", AccuracyRow)
KERNELS_CSV = Sheet("benchmarks.kernels", KernelRow)
RANK_CSV = Sheet("benchmarks.one_rank", RankRow)
MASKS_CSV = Sheet("benchmarks.masks", MaskRow)
LIMITS_CSV = Sheet("benchmarks.limits", LimitRow)
LOG_CSV = Sheet("benchmarks.log_cost", LogRow)
BALANCE_CSV = Sheet("benchmarks.balance simulate", BalanceRow)
COSTS_CSV = Sheet("benchmarks.balance_measured", CostRow)
STEPS_CSV = Sheet("benchmarks.balance_measured", StepRow)
SMOKE_CSV = Sheet("benchmarks.show smoke", SmokeRow)
