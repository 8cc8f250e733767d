"""Every fault in every mode, direction and place: each rank hears of it in time, and whose it is.

Guards against hangs, ranks that name another than the faulty one, and numbers that are wrong.
"""

import math
import re

import pytest

from megatron_burst.tools.doctor.explain import explained
from tests.faults.acts import suffer
from tests.faults.sentences import ALIKE, HEAD, PAGE
from tests.faults.table import FAULTS, FRESH, MARGIN_S, ODD, TIMEOUT_S, Case, cases

SOME = {  # in `make test`
    Case("raises", "ring", "backward", "middle"), Case("no memory anywhere", "gather"),
    Case("shape", "a2a"), Case("mask", "nested"), Case("cut off", "nested", "backward", "last"),
    Case("killed", "gather", "backward", "middle"), Case("stopped", "ring", "forward", "middle"),
}  # fmt: skip
EVERY = [
    pytest.param(case, id=str(case), marks=() if case in SOME else pytest.mark.whole)
    for case in cases()
]


@pytest.mark.parametrize("case", EVERY)
def test_every_rank_names_the_faulty_one_in_time(case, patients, tmp_path):
    fault = FAULTS[case.fault]
    if case.fault == "full disk":
        for rank in range(4):
            (tmp_path / f"rank-{rank}.jsonl").symlink_to("/dev/full")
    found = patients.run(suffer, case, str(tmp_path), fresh=case.fault in FRESH)
    for rank, result in enumerate(found):
        if result is None:
            assert rank == ODD and fault.own is None
            continue
        told, took, numbers, again = result
        said = fault.own if rank == ODD else fault.said
        if said is not None:
            words = told.partition("; got ")[2][:500] or told
            assert re.search(said, told) if said else told == "", (rank, words)
            assert took <= TIMEOUT_S + MARGIN_S or rank == ODD, (rank, took)
        wrong = [error for error in numbers if not error <= 1e-12]
        assert not wrong or any(map(math.isnan, wrong)), (rank, numbers)
        assert again == "", (rank, again)
    if fault.passing and fault.said and case.fault != "no memory anywhere":
        assert explained(tmp_path).startswith(f"rank {ODD} on node"), explained(tmp_path)


def test_the_page_says_what_users_read_of_each_fault():
    """`python -m tests.faults.sentences` writes it."""
    faults = [fault for name, fault in FAULTS.items() if name not in ALIKE]
    lines = PAGE.read_text().partition(HEAD)[2].partition("\n\n")[0].splitlines()
    for line, fault in zip(lines, faults, strict=True):
        _, what, other, own, go_on, _ = re.split(r"(?<!\\)\|", line)
        assert what.strip() == fault.what and (go_on.strip() == "yes") == fault.again
        own = other if own.strip() == "the same" else own
        for said, words in ((fault.said, other), (fault.own, own)):
            assert not said or re.search(said, words) or "nothing" in words, (what, words)
