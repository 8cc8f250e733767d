"""Runs the tests that tests/README.md names for a file: make test-of FILE=megatron_burst/call.py

    python scripts/test_of.py FILE [pytest's arguments]

They are those of the file's row, or else of the innermost folder that has a row.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "tests" / "README.md"
_FOLDERS = {"module": "megatron_burst/", "file or folder": ""}  # of the tables, by their headings


def rows() -> list[tuple[str, list[str]]]:
    """Each file or folder that has a row, and its tests: paths from the root, folders with a slash
    at the end."""
    entries, folder = [], None
    for line in PAGE.read_text().splitlines():
        heading, _, tests = line.strip("| ").partition(" | ")
        folder = _FOLDERS.get(heading, folder)
        if folder is not None and line.startswith("| `"):
            paths = [f"tests/{name}" for name in _names(tests)]
            entries += [(f"{folder}{name}", paths) for name in _names(heading)]
    return entries


def _names(cell: str) -> list[str]:
    return cell.strip("`").split("`, `")


def tests_of(file: str) -> list[str] | None:
    """Paths of the tests of a file or folder, which may be absolute; None without a row."""
    path, table = (ROOT / file).resolve(), dict(rows())
    if not file or not path.exists() or not path.is_relative_to(ROOT):
        return None
    name = f"{path.relative_to(ROOT)}"
    folders = (f"{parent}/" for parent in (Path(name), *Path(name).parents))
    return next((table[row] for row in (name, *folders) if row in table), None)


def main(arguments: list[str]) -> int:
    """Run pytest; returns its exit status."""
    file = arguments[0] if arguments else ""
    tests = tests_of(file)
    if tests is None:
        print(
            "test-of: FILE must be a file that has a row in tests/README.md, because its row names "
            f"the tests; got {file!r}; name another, or tests: make test ARGS=tests/test_docs.py"
        )
        return 2
    import pytest  # heavy, and not for the sentence above

    return pytest.main([*(str(ROOT / test) for test in tests), *arguments[1:]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
