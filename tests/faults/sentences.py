"""Writes the table of docs/reliability.md: what users read of each fault, from a run.

python -m tests.faults.sentences
"""

import re
import tempfile
from pathlib import Path

from tests.faults.acts import suffer
from tests.faults.conftest import Patients
from tests.faults.table import FAULTS, FRESH, ODD, Case

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
HEAD = (
    "| fault of cp rank 2 | another rank | the rank itself | go on |\n| --- | --- | --- | --- |\n"
)
# faults whose sentences are those of another one but for a word
ALIKE = {"stuck", "no memory anywhere", "dtype", "mask", "full disk"}
_FIXED = {  # what is another number in each run, or another path
    r"\[/pytorch/[^\]]*\] ": "", r"127\.0\.0\.1\]:\d+": "10.0.0.2]:40000",
}  # fmt: skip


def cell(told: str | None, quiet: str) -> str:
    """What was got, without the reason and the advice, which are the same in many."""
    if told is None:
        return "(ends)"
    if not told.strip():
        return f"nothing; {quiet}"
    for pattern, words in _FIXED.items():
        told = re.sub(pattern, words, told)
    kind, _, sentence = told.strip().partition(": ")
    got = re.search(r"; (got,? .*)", sentence)
    words = f"... {got[1]}" if got else f"{kind}: {sentence}"
    return words.splitlines()[0].replace("|", "\\|").split("; ")[0] + " ..." * (got is not None)


def row(name: str, told: list[str | None]) -> str:
    """A line of the table."""
    about, other = FAULTS[name], told[1]
    go_on = "yes" if about.again else "it did" if not about.said else "a new group"
    others, own = cell(other, about.quiet), cell(told[ODD], about.quiet)
    cells = [about.what, others, "the same" if own == others else own, go_on]
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    patients, rows = Patients(), []
    for name in (name for name in FAULTS if name not in ALIKE):
        with tempfile.TemporaryDirectory() as folder:
            case = Case(name, "ring", "backward", "middle")
            found = patients.run(suffer, case, folder, fresh=name in FRESH)
        rows.append(row(name, [result and result[0] for result in found]))
    patients.end()
    before, _, rest = PAGE.read_text().partition(HEAD)
    after = rest[re.search(r"^(?!\|)", rest, re.MULTILINE).start() :]
    PAGE.write_text(before + HEAD + "".join(rows) + after)


if __name__ == "__main__":
    main()
