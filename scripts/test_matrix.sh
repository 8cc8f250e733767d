#!/usr/bin/env bash
# Runs the mcore tests that hold for every release of Megatron-Core, on the CPU, with each release:
#
#     [RELEASES="0.17.1 0.18.2"] [MEGATRON_LM=/path/to/clone] scripts/test_matrix.sh [pytest's arguments]
#
# Each release gets an environment below .venvs/, but 0.19.2, which .venv has. MEGATRON_LM is a clone
# of Megatron-LM: its HEAD is tested as main, and with its tag core_v0.16.1 what asks for
# megatron.training, which that wheel has not. Runs what `make test` samples whole, so that the page
# has every case. Without arguments docs/compatibility.md is made anew.
# Muon and Lion are tested if PYTHONPATH has Emerging-Optimizers 0.4 and absl.
# Prints a table at the end; fails if any test does.
set -uo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

all=(tests/mcore/test_{releases,option_values,specs,gpt,sinks,models,auto,core_attention}.py
    tests/mcore/test_{packed,packed_rows,packed_uses,keep,keep_auto,keep_other_attention,kept_modules}.py
    tests/mcore/test_{max_logits,whole_layers,whole_batches}.py
    tests/mcore/test_{loss,loss_fsdp,loss_uses,megatron_loss}.py)
training=(tests/mcore/test_{arguments,entry_points,patches,pretrain,pretrain_on_cpu,checkpoints}.py)
reports=()
failed=0

run() { # a column's name, where its Megatron is from, tests
    local column=$1 report=.cache/matrix-${#reports[@]}-$1.xml from=$2
    shift 2
    mkdir -p .cache
    "${environment[@]}" scripts/bootstrap.sh "$venv/bin/python" -m pytest -q -p no:cacheprovider \
        -n 2 --dist loadfile --all --junitxml "$report" \
        -o junit_suite_name="$from" "$@" || failed=1
    reports+=("$column=$report")
}

checkout() { # a commit of MEGATRON_LM; prints the folder with its files, and a wheel's built ones
    local folder=$PWD/.cache/megatron-lm/$1
    "${environment[@]}" scripts/bootstrap.sh
    rm -rf "$folder" && mkdir -p "$folder"
    git -C "$MEGATRON_LM" archive "$1" megatron | tar -x -C "$folder"
    rm -f "$folder/megatron/core/datasets/Makefile"
    cp "$venv"/lib/python*/site-packages/megatron/core/datasets/helpers_cpp*.so \
        "$folder/megatron/core/datasets"
    echo "$folder"
}

with() { # a release, variables: sets the environment, with what its megatron.training imports
    venv=.venvs/megatron-$1
    environment=(env BURST_ENVIRONMENT="megatron-$1"
        BURST_PACKAGES="megatron-core==$1 pyyaml regex six" "${@:2}")
    [ "$1" != 0.19.2 ] || venv=.venv environment=(env "${@:2}")
}

for release in ${RELEASES-0.16.1 0.17.1 0.18.2 0.19.2}; do
    with "$release"
    run "$release" wheel "${all[@]}" "${training[@]}" "$@"
done
if [ -n "${MEGATRON_LM:-}" ]; then
    with 0.19.2
    with 0.19.2 PYTHONPATH="$(checkout HEAD)${PYTHONPATH:+:$PYTHONPATH}"
    run main "$(git -C "$MEGATRON_LM" rev-parse --short HEAD)" "${all[@]}" "${training[@]}" "$@"
    with 0.16.1
    with 0.16.1 PYTHONPATH="$(checkout core_v0.16.1)"
    run 0.16.1 "wheel; tag core_v0.16.1" "${training[@]}" "$@"
fi
if [ $# -eq 0 ]; then
    scripts/bootstrap.sh .venv/bin/python scripts/compatibility.py "${reports[@]}"
fi
exit "$failed"
