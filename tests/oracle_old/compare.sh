#!/usr/bin/env bash
# Compare with the old commit: compare.sh [programs|resolution|numbers|texts [COUNT]]
set -euo pipefail
OLD=b601f27a50b62cd3833d690f6e04ac4bb846c1c6
here=$(cd "$(dirname "$0")" && pwd); root=$(cd "$here/../.." && pwd); then="$root/.cache/oracle/then"
mkdir -p "$root/.cache/oracle"
if [ ! -d "$then" ]; then
  mkdir -p "$then"; git -C "$root" archive "$OLD" | tar -x -C "$then"
fi
declare -A counts=([programs]=20000 [resolution]=5000 [numbers]=120 [texts]=1)
for what in ${1:-programs resolution numbers texts}; do
  count=${2:-${counts[$what]}}
  before="$root/.cache/oracle/$what-$count-$(md5sum < "$here/dump.py" | cut -c1-8)"
  for tree in "$then" "$root"; do
    out=$before; [ "$tree" = "$root" ] && out="$root/.cache/oracle/$what-now"
    [ "$tree" = "$then" ] && [ -s "$out" ] && continue
    rm -rf "$then/tests/oracle_old"; cp -r "$here" "$then/tests/"
    (cd "$tree" && PYTHONPATH="$tree" OMP_NUM_THREADS=1 COLUMNS=100 NO_COLOR=1 "$root/.venv/bin/python" -P -m tests.oracle_old.dump "$what" "$count" > "$out.part")
    mv "$out.part" "$out"
  done
  if cmp -s "$before" "$root/.cache/oracle/$what-now"; then
    echo "$what: equal, $(wc -l < "$before") lines"
  else
    echo "$what: differ"; diff "$before" "$root/.cache/oracle/$what-now" | cut -c1-300 | head -${SHOW:-8}; exit 1
  fi
done
