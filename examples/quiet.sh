#!/usr/bin/env bash
# Runs a training and prints what matters of its output: burst's lines, each step's loss and time, and
# why it failed. Megatron prints about a thousand lines more; they are in a file.
#
#     examples/quiet.sh torchrun ... -m megatron_burst pretrain_gpt.py ...
#
# LOG names the file (default: demo/run.log). VERBOSE=1 prints everything.
set -uo pipefail

if [ -n "${VERBOSE:-}" ]; then exec "$@"; fi
log=${LOG:-demo/run.log}
mkdir -p "$(dirname "$log")" || exit
echo "All of the output is in $log." >&2

"$@" 2>&1 | tee "$log" | sed -unE \
    -e 's/^(.*:)?(INFO|WARNING|ERROR):megatron_burst[a-z_.]*://p' \
    -e 's|.*iteration +([0-9]+)/ +([0-9]+) .*iteration \(ms\): ([0-9]+).* lm loss: ([0-9.E+-]+).*|step \1/\2  loss \4  \3 ms|p'
status=${PIPESTATUS[0]}
if ((status)); then
    echo "It ended with status $status; $log has all of its output. What it says of errors:" >&2
    # each rank says the same, after its name
    sed -nE 's/^(\[rank[0-9]+\]: *)?((error|[A-Za-z_.]*Error): .*)/\2/p' "$log" |
        grep -v ChildFailedError | sort -u | head -n 10 >&2
fi
exit "$status"
