#!/usr/bin/env bash
# Sets up .venv with what pyproject.toml asks for, in the versions of constraints.txt, then runs the given command in the checkout:
#
#     scripts/bootstrap.sh [command [argument...]]
#
# BURST_ENVIRONMENT=name makes .venvs/name instead: with the packages of BURST_PACKAGES, whose versions
# then count before those of constraints.txt, and those of BURST_ALONE, without what they ask for.
#
# All that it needs (uv, Python, packages, caches) goes below .venv and .cache of the checkout,
# unless a variable set below has a value already. When nothing has changed since the last time it
# installs nothing and needs no network. The Python is the first of these that runs and is fit:
# $PYTHON; those on PATH; pyenv's; one that uv downloads.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd -- "$root"
cache=$root/.cache
read -ra packages <<<"${BURST_PACKAGES:-}"
read -ra alone <<<"${BURST_ALONE:-}"
venv=${BURST_ENVIRONMENT:+.venvs/$BURST_ENVIRONMENT}
venv=${venv:-.venv}
extras=dev
[ -n "${BURST_ENVIRONMENT:-}" ] || extras=dev,hf # frameworks bring transformers of their own
stamp=$venv/.bootstrap-stamp
uv_version=0.13.8
# megatron-core has wheels for these two only; the first is preferred.
fit_pythons=(3.12 3.13)
python_to_set="Install Python 3.12, or set PYTHON=/path/to/python3.12."

say() { echo "bootstrap: $*" >&2; }
fail() { say "$@"; exit 1; }

keep_caches_in_checkout() {
    export UV_CACHE_DIR=${UV_CACHE_DIR:-$cache/uv}
    export UV_PYTHON_INSTALL_DIR=${UV_PYTHON_INSTALL_DIR:-$cache/python}
    export UV_TOOL_DIR=${UV_TOOL_DIR:-$cache/uv-tools}
    export PIP_CACHE_DIR=${PIP_CACHE_DIR:-$cache/pip}
    export XDG_CACHE_HOME=${XDG_CACHE_HOME:-$cache}
    export MPLCONFIGDIR=${MPLCONFIGDIR:-$cache/matplotlib}
    export MYPY_CACHE_DIR=${MYPY_CACHE_DIR:-$cache/mypy}
    export RUFF_CACHE_DIR=${RUFF_CACHE_DIR:-$cache/ruff}
    export HYPOTHESIS_STORAGE_DIRECTORY=${HYPOTHESIS_STORAGE_DIRECTORY:-$cache/hypothesis}
    export PYTEST_DEBUG_TEMPROOT=${PYTEST_DEBUG_TEMPROOT:-$cache/pytest}
    export TRITON_HOME=${TRITON_HOME:-$cache/triton}
    export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$cache/triton/cache}
    export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$cache/inductor}
    export TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$cache/torch_extensions}
    export CUDA_CACHE_PATH=${CUDA_CACHE_PATH:-$cache/cuda}
    mkdir -p "$cache" "$PYTEST_DEBUG_TEMPROOT"
    # Images set it. Without bytecode beside them torch and Megatron take 13 s to import, with it 5.
    unset PYTHONDONTWRITEBYTECODE
}

# Prints "3.12 /real/path/of/python", or nothing when it does not run (a pyenv shim may not).
describe() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2], sys.executable)' 2>/dev/null || true
}

is_fit() {
    local version
    for version in "${fit_pythons[@]}"; do
        [ "$version" != "$1" ] || return 0
    done
    return 1
}

python_candidates() {
    local version home=${PYENV_ROOT:-$HOME/.pyenv}
    for version in "${fit_pythons[@]}"; do
        type -P "python$version" || true
    done
    type -P python3 || true
    type -P python || true
    for version in "${fit_pythons[@]}"; do
        compgen -G "$home/versions/$version.*/bin/python" | sort -rV || true
    done
    for version in "${fit_pythons[@]}"; do
        compgen -G "$UV_PYTHON_INSTALL_DIR/cpython-$version.*/bin/python3" | sort -rV || true
    done
}

# Sets python to a fit interpreter, or to nothing.
find_python() {
    local candidate version path
    python=
    while read -r candidate; do
        read -r version path < <(describe "$candidate") || continue
        if is_fit "$version"; then
            python=$path
            return
        fi
    done < <(python_candidates)
}

# Sets python to $PYTHON, if that is fit.
use_given_python() {
    local version="" path=""
    read -r version path < <(describe "$PYTHON") || true
    [ -n "$version" ] || fail "PYTHON must name a Python that runs; got PYTHON=$PYTHON, which" \
        "does not. Set it to a Python 3.12, or unset it."
    is_fit "$version" || fail "PYTHON must be one of Python ${fit_pythons[*]}, because" \
        "megatron-core has wheels for these only; got PYTHON=$PYTHON, which is $version." \
        "Set it to a Python 3.12, or unset it."
    python=$path
}

# Sets python to that of the environment; what is there is never thrown away.
use_existing_venv() {
    local version="" path=""
    read -r version path < <(describe "$venv/bin/python") || true
    is_fit "${version:-none}" || fail "$venv must hold one of Python ${fit_pythons[*]} that runs;" \
        "got ${version:-one that does not run}. Delete it and run this again."
    if [ -n "${PYTHON:-}" ]; then
        say "PYTHON=$PYTHON is not used, because $venv exists already; delete it to change it."
    fi
    python=$path
}

download_python() {
    say "no Python ${fit_pythons[*]} found; uv downloads 3.12 into $UV_PYTHON_INSTALL_DIR"
    UV_PYTHON_INSTALL_BIN=0 "$uv" python install 3.12 >&2 || fail "a Python 3.12 must be there or" \
        "be downloadable; none was found in PYTHON, on PATH or in pyenv, and uv could not" \
        "download one, for the reason above. $python_to_set"
    find_python
    [ -n "$python" ] || fail "the downloaded Python must run; it does not. $python_to_set"
}

# Sets uv: the one on PATH, the one below .cache, or one that pip puts there.
find_uv() {
    local candidate
    for candidate in uv "$cache/tools/bin/uv" "$cache/tools-venv/bin/uv"; do
        if "$candidate" --version >/dev/null 2>&1; then
            uv=$candidate
            return
        fi
    done
    find_pip
    say "uv is not on PATH; pip of $pip_python puts uv $uv_version below .cache"
    local options=(--quiet --disable-pip-version-check)
    if [ "$pip_python" = "$cache/tools-venv/bin/python" ]; then
        uv=$cache/tools-venv/bin/uv
    else
        options+=(--upgrade --target "$cache/tools")
        uv=$cache/tools/bin/uv
    fi
    # RUSTUP_HOME: pip asks rustc for its version, at which rustup would write into $HOME.
    PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PIP_ROOT_USER_ACTION=ignore RUSTUP_HOME=$TMPDIR/rustup \
        "$pip_python" -m pip install "${options[@]}" "uv==$uv_version" >&2 ||
        fail "uv $uv_version must be installable, because it installs everything else; pip could" \
            "not install it, for the reason above. Put uv on PATH or fix pip's network settings."
}

# Sets pip_python to any Python that has pip: uv's wheel runs with all of them.
find_pip() {
    for pip_python in ${python:+"$python"} python3 python; do
        ! "$pip_python" -m pip --version >/dev/null 2>&1 || return 0
    done
    pip_python=$cache/tools-venv/bin/python
    if ! "${python:-python3}" -m venv --clear "$cache/tools-venv" >/dev/null 2>&1; then
        rm -rf "$cache/tools-venv"
        fail "uv must be on PATH or a Python must have pip, because one of them installs the" \
            "rest; got neither. Install uv, or the packages python3-pip or python3-venv."
    fi
}

# pip's settings (a mirror, a certificate) count for uv too, which does not read them by itself.
hand_pip_settings_to_uv() {
    local config=${XDG_CONFIG_HOME:-$HOME/.config}/uv/uv.toml
    local settings="" value
    if [ -n "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ] || [ -e "$config" ] || [ -e /etc/uv/uv.toml ]
    then
        return
    fi
    settings=$("${pip_python:-$python}" -m pip config list 2>/dev/null) || return 0
    pip_setting() { # in the order in which pip lets one overrule the other
        local section
        for section in :env: install global; do
            sed -n "s/^$section\.$1='\(.*\)'\$/\1/p" <<<"$settings"
        done | sed -n -e 's/\\n/ /g' -e 's/^ *//' -e '1p'
    }
    value=$(pip_setting index-url)
    [ -z "$value" ] || export UV_DEFAULT_INDEX=$value
    value=$(pip_setting extra-index-url)
    [ -z "$value" ] || export UV_INDEX=${UV_INDEX:-$value} UV_INDEX_STRATEGY=unsafe-best-match
    value=$(pip_setting find-links)
    [ -z "$value" ] || export UV_FIND_LINKS=${UV_FIND_LINKS:-${value// /,}}
    value=$(pip_setting trusted-host)
    [ -z "$value" ] || export UV_INSECURE_HOST=${UV_INSECURE_HOST:-$value}
    value=$(pip_setting cert)
    [ -z "$value" ] || export SSL_CERT_FILE=${SSL_CERT_FILE:-$value}
}

# What the installed state depends on, as one line.
fingerprint() {
    { echo "$root ${packages[*]} / ${alone[*]}"; cat pyproject.toml constraints.txt setup.py megatron_burst/version.py scripts/bootstrap.sh; } | sha256sum
}

is_current() {
    [ -x "$venv/bin/python" ] && [ -f "$stamp" ] && [ "$(<"$stamp")" = "$(fingerprint)" ]
}

# One at a time: two makes may start together.
take_turns() {
    command -v flock >/dev/null || return 0
    exec 9>"$cache/bootstrap.lock"
    if ! flock --nonblock 9; then
        say "another one is installing; waiting for it"
        flock 9
    fi
}

fail_to_install() {
    fail "the packages that pyproject.toml, constraints.txt, BURST_PACKAGES and BURST_ALONE name must" \
        "install into $venv; uv could not install them, for the reason above. Fix that (the network," \
        "a full disk, pip's or uv's settings) and run this again."
}

install_packages() {
    local quiet=--quiet
    [ ! -t 2 ] || quiet= # a terminal gets uv's progress bars
    hand_pip_settings_to_uv
    local constraints=$venv/constraints.txt package
    cp constraints.txt "$constraints"
    for package in "${packages[@]}"; do
        sed -i "/^${package%%[<>=[]*}==/d" "$constraints"
    done
    say "uv installs what pyproject.toml asks for into $venv (several GB the first time)"
    "$uv" pip install ${quiet:+"$quiet"} --python "$venv/bin/python" --constraints "$constraints" \
        --build-constraints "$constraints" -e ".[$extras]" "${packages[@]}" >&2 || fail_to_install
    if [ "${#alone[@]}" -gt 0 ]; then
        # built, if they have no wheel, with the torch that runs them and the headers that it brings
        local headers=("$root/$venv"/lib/python*/site-packages/nvidia/*/include)
        CPATH=$(IFS=:; echo "${headers[*]}${CPATH:+:$CPATH}") "$uv" pip install \
            ${quiet:+"$quiet"} --python "$venv/bin/python" --build-constraints "$constraints" \
            --no-deps "${alone[@]}" >&2 || fail_to_install
    fi
    fingerprint >"$stamp"
    say "done in $SECONDS s"
}

bootstrap() {
    take_turns
    ! is_current || return 0
    export TMPDIR=$cache/tmp PYTHONDONTWRITEBYTECODE=1
    mkdir -p "$TMPDIR"
    python="" uv="" pip_python=""
    if [ -x "$venv/bin/python" ] || [ -L "$venv/bin/python" ]; then
        use_existing_venv
        find_uv
    else
        if [ -n "${PYTHON:-}" ]; then use_given_python; else find_python; fi
        find_uv
        [ -n "$python" ] || download_python
        say "making $venv with $python"
        mkdir -p "$(dirname "$venv")"
        "$python" -m venv --without-pip "$venv" >&2 ||
            fail "Python's venv module must work; that of $python does not. $python_to_set"
    fi
    install_packages
}

keep_caches_in_checkout
if [ -n "${PYTHON:-}" ]; then
    (use_given_python)
fi
if ! is_current; then
    (bootstrap) # a subshell: its lock and its environment end with it
fi
[ "$#" -eq 0 ] || exec "$@"
