#!/usr/bin/env bash
# Makes every table and picture of README.md and docs/ again, of the rows that the repository has. No GPU is needed.
#
#   benchmarks/redraw.sh           then `git diff --stat` says what has changed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
plan=("$python" -m megatron_burst.tools plan)
rows=benchmarks/results
run() { echo "== $*"; "$@" >/dev/null; }

# tables
run "$python" -m benchmarks.show docs docs/benchmarks/*.md

# what was measured
run "$python" -m benchmarks.show gains docs/gains.png $rows/{attention_2x,attention_4x,peers_4x}h200_one_node.csv \
    $rows/{packed_2x,packed_4x}h200_one_node.csv $rows/{attention_2x2x,packed_2x1x}h200.csv
run "$python" -m benchmarks.frontier plot docs/frontier.png $rows/frontier_{4xh200,1xh200}.csv \
    --run 2026-11-27T07:26 --run 2026-11-26T06:50 --run 2026-11-26T06:48
for name in packed_2xh200_one_node attention_2x2xh200; do # NAME_tflops.png
    run "$python" -m benchmarks.show plot $rows/$name.csv
done
run "$python" -m benchmarks.show plot $rows/{attention,peers}_4xh200_one_node.csv # of the first name
rm -f $rows/*_memory.png                                                          # no page shows them
for name in loss_curves_1xh200 loss_curves_2xh200 loss_curves_2xh200_defaults; do # NAME.png
    run "$python" -m benchmarks.show curves $rows/$name.csv
done
run "$python" -m benchmarks.show loss $rows/loss_h200.csv # loss_h200_loss.png
run "$python" -m benchmarks.accuracy $rows/accuracy_4xh200.csv $rows/accuracy_cpu.csv --plot docs/accuracy.png \
    --title "error of attention against float64: 4 x H200, 2026-11-21; simulated ranks, 2026-11-26"
run "$python" docs/draw_soak.py # soak.png, soak_gpu.png

# what was predicted
run "$python" -m benchmarks.validate_plan # planner_errors.csv, planner_errors.png
run "$python" -m benchmarks.scaling draw docs/scaling.png --measured $rows/tensor_4xh200.csv --measured $rows/weak_4xh200.csv \
    --measured $rows/strong_4xh200.csv --planned benchmarks/predictions/scaling_h200.csv
run "${plan[@]}" llama3-8b --seq-length 128K --gpus 8 --cp 8 --picture docs/plan_8_ranks.png
run "${plan[@]}" llama3-8b --seq-length 1M --gpus 64 --cp 64 --picture docs/plan_64_ranks.png
run "${plan[@]}" llama3-8b --gpus 4 --cu-seqlens docs/sample_lengths.txt --picture docs/sample.png

# what is drawn of the code
for name in masks groups ring; do run "$python" docs/draw_$name.py; done # ring: schedule.png
run "$python" examples/draw_program.py # program.png
