"""The curves of errors by the number of ranks, and what docs/concepts/accuracy.md says of them."""

from pathlib import Path

from benchmarks.accuracy import HEADS, TENSORS, curves
from benchmarks.rows import append
from benchmarks.sheets import ACCURACY_CSV, AccuracyRow

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_real_ranks_of_all_files_and_simulated_ones_of_the_last(tmp_path):
    files = [tmp_path / "accuracy_4xh200.csv", tmp_path / "accuracy_cpu.csv"]
    for path, of_one in zip(files, (0.002, 0.001), strict=True):
        kinds = ("burst", "ring", 1, True), ("burst", "ring", 4, True), ("te", "p2p", 4, False)
        errors = of_one, 1.2 * of_one, 1.5 * of_one
        rows = [
            AccuracyRow(
                impl=impl,
                mode=mode,
                ranks=ranks,
                simulated=simulated,
                heads_q=8,
                heads_kv=8,
                seq=256,
                tensor="dk",
                error=error,
            )
            for (impl, mode, ranks, simulated), error in zip(kinds, errors, strict=True)
        ]
        append(path, rows, ACCURACY_CSV)
    found = curves(files)[8, 8, "dk"]
    assert {label: {r: round(x, 6) for r, x in line.items()} for label, line in found.items()} == {
        "burst ring, simulated": {1: 1.0, 4: 1.2}, "te p2p, 4xh200": {4: 1.5},
        "te p2p, cpu": {4: 1.5},
    }  # fmt: skip


def test_the_page_says_what_was_measured():
    found = curves([RESULTS / "accuracy_4xh200.csv", RESULTS / "accuracy_cpu.csv"])
    assert len(found) == len(HEADS) * len(TENSORS)
    for (_, heads_kv, tensor), lines in found.items():
        of_keys = tensor in ("dk", "dv")
        for mode in ("gather", "ring"):
            real = lines[f"burst {mode}, 4xh200"][4]
            assert real < lines["te p2p, 4xh200"][4]
            assert 1.205 < real < 1.235 if of_keys else 1.07 < real < 1.085
            simulated = lines[f"burst {mode}, simulated"]
            if of_keys:
                assert all(1.37 < simulated[ranks] < 1.435 for ranks in (2, 4, 8))
            else:
                assert simulated[2] < 1.145 and simulated[2] < simulated[8] < 1.245
        for ranks, error in lines["burst a2a, simulated"].items():
            shared = of_keys and heads_kv % ranks
            assert (1.38 < error < 1.49) if shared else error == 1
