#!/usr/bin/env bash
# Installs this checkout where a container brought torch, and changes nothing that is there:
#
#     [EXTRAS=flash-attn-4] [PYTHON=python3] scripts/install_in_container.sh [options and packages for pip]
#
# A vendor's torch calls itself 2.11.0a0+..., and its NumPy, TransformerEngine and the rest are
# built to fit it. Every installed package is pinned to the version that it has, so pip adds what
# is missing, or says in the end what does not fit; it replaces nothing.
set -euo pipefail
export LC_ALL=C

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
python=${PYTHON:-python3}
pins=$(mktemp)
trap 'rm -f "$pins"' EXIT

# The image's own constraints would hold for the build of this package too, in which old versions
# of build tools fail; what they keep is pinned here anyway.
unset PIP_CONSTRAINT
export PIP_DISABLE_PIP_VERSION_CHECK=1

installed() { # as NAME==VERSION, one a line
    "$python" -m pip list --format=freeze | grep -iv '^megatron[-_.]burst==' | sort
}

installed >"$pins"
if ! grep -qi '^torch==' "$pins"; then
    echo "install_in_container: torch must be installed already, because this script keeps a" \
        "container's own; $python has none. Elsewhere: pip install -e . -c constraints.txt" >&2
    exit 1
fi

"$python" -m pip install --constraint "$pins" "$@" --editable "$root${EXTRAS:+[$EXTRAS]}"

changed=$(installed | comm -23 "$pins" -)
if [ -n "$changed" ]; then
    echo "install_in_container: nothing that was there may change; pip changed" $changed >&2
    exit 1
fi
echo "install_in_container: kept $(grep -i '^torch==' "$pins") and all else that was there"
