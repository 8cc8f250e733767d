"""`megatron-burst plan --cu-seqlens`: input files, output, pictures, refusals."""

from functools import partial

import numpy as np
import pytest
import torch

from megatron_burst.tools.simulate.sample import numbers_in
from tests.tools import planning

LENGTHS = [5000, 300, 1, 12000, 4096, 2500, 64, 9000]
EDGES = [0, 5000, 5300, 5301, 17301, 21397, 23897, 23961, 32961]


run = partial(planning.run, "llama3-8b")


@pytest.fixture
def lengths(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, LENGTHS)))
    return path


def test_files_of_each_kind(tmp_path, lengths):
    (tmp_path / "a.csv").write_text(",".join(map(str, EDGES)))
    np.save(tmp_path / "a.npy", np.array(EDGES, dtype=np.int32))
    torch.save(torch.tensor(EDGES), tmp_path / "a.pt")
    assert all(numbers_in(tmp_path / f"a.{kind}") == EDGES for kind in ("csv", "npy", "pt"))
    assert numbers_in(lengths) == LENGTHS


def test_both_layouts_are_told_and_drawn(tmp_path, lengths):
    picture = tmp_path / "sample.png"
    text = run("--gpus", 4, "--cu-seqlens", lengths, "--picture", picture)
    assert "32,961 tokens in 8 documents, the longest 12,000 (lengths.txt has lengths)" in text
    rows = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in text.splitlines()
            if line.startswith("│")}  # fmt: skip
    assert [cell.split()[0] for cell in rows["runs as"]] == ["gather", "a2a", "gather"]
    even, anywhere, stays = (float(cell) for cell in rows["work, slowest / mean"])
    assert even == anywhere == 1 < stays
    assert len([name for name in rows if name.startswith("rank ")]) == 4
    assert len(text.splitlines()) < 24  # one screen
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000


def test_more_ranks_than_a_screen_holds(lengths):
    text = run("--gpus", 32, "--cu-seqlens", lengths)
    assert "rank 15" in text and "rank 16" not in text and "16 more ranks" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--search"], "got --search; leave one out"),
        (["--seq-length", "16k"], "must fit into --seq-length"),
        (["--keep", "all"], "got --keep"),
        (["--cp", "3"], "do not fit|does not divide|needs 3 GPUs"),
        (["--tp", "16"], "TP 16"),
    ],
)
def test_what_a_sample_does_not_have_is_refused(options, words, lengths):
    import re

    text = run("--gpus", 4, "--cu-seqlens", lengths, *options, code=2)
    assert re.search(words, " ".join(text.split())) and text.startswith("error: plan: ")


@pytest.mark.parametrize("content", ["", "a b", "1.5 2", "0 0", "5 -3", None])
def test_files_without_documents_are_refused(content, tmp_path):
    path = tmp_path / "sample.txt"
    if content is not None:
        path.write_text(content)
    text = run("--gpus", 2, "--cu-seqlens", path, code=2)
    assert text.startswith("error: plan: --cu-seqlens") and "; got " in text


def test_a_job_of_these_samples(lengths):
    options = "--gpus", 8, "--seq-length", "128k", "--keep", "all", "--cp", 2
    text = run(*options, "--cu-seqlens", lengths)
    assert "packed documents have 6.3% of a causal sequence's pairs" in text
    assert "a step takes" in text and "warning" not in text
    packed, causal = (
        float(said.split("a step takes ")[1].split(" s")[0]) for said in (text, run(*options))
    )
    assert packed < 0.6 * causal
