#!/usr/bin/env bash
# Runs the mcore tests that hold for every release of Megatron-Core, on the CPU, with each release:
#
#     [RELEASES="0.17.1 0.18.2"] [MEGATRON_LM=/path/to/clone] scripts/test_matrix.sh [pytest's arguments]
#
# Each release gets an environment below .venvs/. MEGATRON_LM is a clone of Megatron-LM: its HEAD is
# tested as main, and the patch for 0.16.1 with its tag, because that wheel has no megatron.training.
# Prints a table at the end; fails if any row of it does.
set -uo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

all=(tests/mcore/test_{releases,gpt,auto,specs,patches}.py)
table=""
failed=0

run() { # a row's name, tests
    local name=$1 output=.cache/matrix-$1.txt
    shift
    mkdir -p .cache
    "${environment[@]}" scripts/bootstrap.sh "$venv/bin/python" -m pytest -q -p no:cacheprovider \
        "$@" 2>&1 | tee "$output"
    [ "${PIPESTATUS[0]}" -eq 0 ] || failed=1
    table+=$(printf '%-14s %s' "$name" "$(tail -1 "$output")")$'\n'
}

checkout() { # a commit of MEGATRON_LM; prints the folder with its files
    local folder=$PWD/.cache/megatron-lm/$1
    rm -rf "$folder" && mkdir -p "$folder"
    git -C "$MEGATRON_LM" archive "$1" megatron | tar -x -C "$folder"
    echo "$folder"
}

with() { # a release, variables: sets the environment, with what its megatron.training imports
    venv=.venvs/megatron-$1
    environment=(env BURST_ENVIRONMENT="megatron-$1"
        BURST_PACKAGES="megatron-core==$1 pyyaml regex six" "${@:2}")
}

for release in ${RELEASES:-0.16.1 0.17.1 0.18.2 0.19.2}; do
    with "$release"
    run "$release" "${all[@]}" "$@"
done
if [ -n "${MEGATRON_LM:-}" ]; then
    venv=.venv environment=(env PYTHONPATH="$(checkout HEAD)")
    run main "${all[@]}" "$@"
    with 0.16.1 PYTHONPATH="$(checkout core_v0.16.1)"
    run 0.16.1-source tests/mcore/test_patches.py "$@"
else
    table+="main           not run: set MEGATRON_LM to a clone of Megatron-LM"$'\n'
fi
printf '\n%s' "$table"
exit "$failed"
