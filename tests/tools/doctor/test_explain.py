"""`doctor --explain`: one sentence from lines of thousands of ranks, about the first of a chain.

Guards against a rank that is named because it gave up first, and files that cannot be read whole.
"""

import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from megatron_burst.errors import BurstError
from megatron_burst.tools.doctor import explain
from megatron_burst.tools.doctor.explain import explained
from megatron_burst.tools.main import app

NODE, GROUP = 8, 16  # ranks of a node and of a group


def line(rank, what, waits_for, culprits, began=0.0, **more):
    first = rank // GROUP * GROUP
    waits = {
        "number": 41, "what": "backward", "layer": 7, "peers": [each - first for each in waits_for],
        "step": 3, "steps": 9, "link": "intra", "cargo": "grad", "num_bytes": 2 << 20,
        "broken": False, "since": 1000.0 + began,
    }  # fmt: skip
    waits |= {name: more.pop(name) for name in [*more] if name in waits}
    return {
        "time": 1600.0 + began, "rank": rank, "cp_rank": rank - first,
        "group": f"group {first}", "ranks": list(range(first, first + GROUP)),
        "nodes": [cp_rank // NODE for cp_rank in range(GROUP)], "what": what, "waits": waits,
        "culprits": [each - first for each in culprits], "error": "burst attention: x; got y; z",
    } | more  # fmt: skip


def write(folder, lines):
    for each in lines:
        with (folder / f"rank-{each['rank']}.jsonl").open("a") as file:
            file.write(json.dumps(each) + "\n")
    return folder


def ring_of_deaths(silent):
    """Each rank of the group waits for the one before it, and they end one after the other; each
    names its neighbour only."""
    for place in range(1, GROUP):
        rank = (silent + place) % GROUP
        before = (rank - 1) % GROUP
        yield line(rank, "hop", [before], [before], began=0.1 * place, step=2 + place)


def test_in_a_chain_of_deaths_the_first_is_named(tmp_path):
    said = explained(write(tmp_path, ring_of_deaths(13)))
    assert said.startswith("rank 13 on node 1 never started step 3 of layer 7, backward; ranks")
    assert "(intra grad hop, 2 MiB)" in said


def test_thousands_of_ranks_of_other_groups_that_wait_for_these_change_nothing(tmp_path):
    lines = [*ring_of_deaths(13)]
    for first in range(GROUP, 256 * GROUP, GROUP):  # data-parallel groups notice later
        slow = first + 5
        lines += [line(rank, "pass", [slow], [slow], began=20, step=0, layer=1, number=60)
                  for rank in range(first, first + GROUP) if rank != slow]  # fmt: skip
    random.Random(0).shuffle(lines)
    assert len(lines) > 3800
    said = explained(write(tmp_path, lines))
    assert said.startswith("rank 13 on node 1 never started step 3 of layer 7, backward")


def test_a_chain_through_all_ranks_is_followed_once():
    """Each of 20,000 ranks waits for the next one: no rank is looked up for each before it."""
    lookups = Counter()

    class Lines(dict):
        def __getitem__(self, rank):
            lookups[rank] += 1
            return dict.__getitem__(self, rank)

    lines, last = Lines({rank: SimpleNamespace(culprits=(rank + 1,)) for rank in range(20_000)}), {}
    assert {explain._end(rank, lines, last) for rank in lines} == {20_000}
    assert max(lookups.values()) == 1


def test_a_rank_that_failed_itself_is_named_with_its_error(tmp_path):
    own = line(3, "failure", [], [3], began=-600.0, error="OutOfMemoryError: no memory\nat a line")
    others = [line(rank, "failure of others", [], [3], began=1) for rank in (1, 2)]
    said = explained(write(tmp_path, [own, *others]))
    assert (
        said
        == "rank 3 on node 0 failed in step 3 of layer 7, backward: OutOfMemoryError: no memory"
    )


def test_a_rank_that_began_nothing_one_whose_connections_broke_and_ranks_that_differ(tmp_path):
    for name in "abc":
        (tmp_path / name).mkdir()
    late = [line(rank, "pass", [9], [9], step=0) for rank in (8, 10)]
    assert explained(write(tmp_path / "a", late)).startswith(
        "rank 9 on node 1 never began layer 7, backward; ranks that waited: rank 8"
    )
    cut = [line(rank, "hop", [9], [9], broken=True) for rank in (8, 10)]
    cut.append(line(9, "hop", [8, 10], [9], broken=True))
    assert "rank 9 on node 1 lost its connections in step 3" in explained(
        write(tmp_path / "b", cut)
    )
    differ = [line(rank, "difference", [], []) for rank in range(4)]
    assert explained(write(tmp_path / "c", differ)) == "ranks made different calls: y"


def test_lines_that_were_cut_off_are_left_out(tmp_path):
    write(tmp_path, ring_of_deaths(4))
    (tmp_path / "rank-5.jsonl").write_text(json.dumps(line(5, "hop", [4], [4]))[:80])
    (tmp_path / "rank-99.jsonl").write_bytes(b"\xff\xfe{}\n[]\n")
    assert "rank 5 on node 0" in explained(tmp_path)  # which wrote nothing that can be read


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command(tmp_path, as_json):
    asked = ["doctor", "--explain", str(tmp_path), *["--json"] * as_json]
    nothing = CliRunner().invoke(app, asked)
    assert nothing.exit_code == 0
    assert as_json or "torchrun's output then names that rank" in " ".join(nothing.output.split())
    write(tmp_path, ring_of_deaths(13))
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 1 and "rank 13 on node 1 never started step 3" in done.output
    if as_json:
        assert json.loads(done.output)["breaks"]


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(BurstError, match="doctor: --explain must name the folder of MEGATRON_"):
        explained(tmp_path / "none")
