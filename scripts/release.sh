#!/usr/bin/env bash
# Makes a release: checks that the tree is clean and that all files name one version, runs lint and all tests, writes today's
# date into CHANGELOG.md in place of "unreleased" and commits that, builds sdist and wheel, checks them, and tags the commit.
# It pushes and uploads nothing. If building fails, that commit stays: run this again after the fix.
#
#     scripts/release.sh [--no-tests]
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python # `make lint` sees to it that build and twine are in it

fail() { echo "release: $*" >&2; exit 1; }

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' megatron_burst/version.py)
heading=$(grep -m 1 '^## ' CHANGELOG.md)

[ -z "$(git status --porcelain)" ] ||
    fail "the tree must be clean, because a tag names a commit; got changes. Commit or remove them."
grep -qx "version: $version" CITATION.cff ||
    fail "CITATION.cff must name the version of megatron_burst/version.py; got $version. Change one of them."
[[ "$heading" =~ ^"## $version ("(unreleased|[0-9]{4}-[0-9]{2}-[0-9]{2})")"$ ]] ||
    fail "CHANGELOG.md must begin with '## $version (unreleased)' or a date there; got '$heading'. Write it and commit."
! git rev-parse -q --verify "refs/tags/v$version" >/dev/null ||
    fail "v$version must be a new tag; got one that is there. Raise the version."

make lint
[ "${1:-}" = --no-tests ] || make test-all

sed -i "s/^## $version (unreleased)\$/## $version ($(date -u +%F))/" CHANGELOG.md
git diff --quiet -- CHANGELOG.md || git commit --quiet --message "Version $version" -- CHANGELOG.md

rm -rf dist
"$python" -m build --no-isolation # with the setuptools of constraints.txt
"$python" -m twine check --strict dist/*

git tag -a "v$version" -m "megatron_burst $version"
echo "release: v$version is tagged, and dist/ has what to upload:"
echo "    git push origin HEAD v$version"
echo "    $python -m twine upload dist/*"
