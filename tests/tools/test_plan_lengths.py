"""`megatron-burst plan --lengths`: files of lengths, draws, predicted steps, pictures, refusals.

Guards against documents that a reader miscounts, steps that are not those of the planner or of the
assignment that is recommended, and token limits that do not fit.
"""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from megatron_burst.balance import BatchGrid, Costs, assign
from megatron_burst.balance.packing import sequential
from megatron_burst.tools.documents import CHANGING, SEQUENTIAL, compare, typical_packing
from megatron_burst.tools.hardware_file import preset
from megatron_burst.tools.job.candidate import ROOMY, candidate
from megatron_burst.tools.job.hugging_face import PRESETS
from megatron_burst.tools.job.memory import memory_of
from megatron_burst.tools.job.strategy import Job, Strategy
from megatron_burst.tools.lengths import Lengths, lengths_in
from tests.tools import planning

K = 1 << 10
HISTOGRAM = "shortest,longest,documents\n0,99,5\n100,999,60\n1000,9999,30\n10000,80000,5\n"
LENGTHS = [700, 30, 30, 5000, 12]
JOB = ["--gpus", 16, "--seq-length", "64k", "--tp", 1, "--recompute", "selective"]


run = partial(planning.run, "llama3-8b")


@pytest.fixture
def histogram(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text(HISTOGRAM)
    return path


def bins(found):
    return [tuple(map(int, one)) for one in zip(found.shortest, found.longest, found.counts,
                                                strict=True)]  # fmt: skip


def test_histograms_and_lists_are_read(tmp_path, histogram):
    assert bins(lengths_in(histogram)) == [
        (1, 99, 5), (100, 999, 60), (1000, 9999, 30), (10000, 80000, 5),
    ]  # fmt: skip
    (tmp_path / "a.csv").write_text("documents,length\n3,512\n0,7\n")
    assert bins(lengths_in(tmp_path / "a.csv")) == [(512, 512, 3), (7, 7, 0)]
    lines = ["700", '{"id": 1, "length": 30}', "", "30", '{"length": 5000}', "12"]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert bins(lengths_in(tmp_path / "a.jsonl")) == [
        (12, 12, 1), (30, 30, 2), (700, 700, 1), (5000, 5000, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "", "the columns of no line"),
        ("a.csv", "from,to\n1,2\n", "the columns from, to"),
        ("a.csv", "length,documents\n", "no documents"),
        ("a.csv", "length,documents\n5,0\n", "no documents"),
        ("a.csv", "length,documents\n5,1\n0,1\n", "line 3: 1 documents of 0 to 0 tokens"),
        ("a.csv", "length,documents\n5\n", "line 2: something other than a whole number"),
        ("a.csv", "shortest,longest,documents\n9,5,1\n", "line 2: 1 documents of 9 to 5 tokens"),
        ("a.csv", "shortest,longest,documents\n1,5,-1\n", "-1 documents"),
        ("a.csv", "length,documents\n1.5,1\n", "line 2: something other than a whole number"),
        ("a.jsonl", "", "no documents"),
        ("a.jsonl", "5\n0\n", "line 2: 0, no length from 1 on"),
        ("a.jsonl", "5\ntrue\n", "line 2: true, no length"),
        ("a.jsonl", '{"text": "a"}\n', "no length from 1 on"),
        ("a.jsonl", "5 6\n", "line 1 must be JSON"),
        ("a.jsonl", f"{1 << 80}\n", "no whole number from 2^64 on"),
        ("a.idx", "not an index, but long enough to have a header", "no Megatron index"),
        ("a.txt", "5\n", "a name that ends in .txt"),
        ("a.csv", None, "No such file"),
        ("a.jsonl", b"\xff\xfe", "codec"),
    ],
)
def test_files_without_lengths_are_refused(name, content, said, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    text = " ".join(run(*JOB, "--lengths", path, code=2).split())
    assert text.startswith("error: plan: --lengths: ") and text.count("error: ") == 1
    assert said in text and "; got " in text and ", because " in text


def test_options_that_do_not_go_together_are_refused(tmp_path, histogram):
    (tmp_path / "edges.txt").write_text("0 5 9")
    both = *JOB, "--lengths", histogram, "--cu-seqlens", tmp_path / "edges.txt"
    assert "--lengths must not be combined with --cu-seqlens" in run(*both, code=2)
    assert "--seq-length must be given" in run("--gpus", 8, "--lengths", histogram, code=2)
    short = "--gpus", 8, "--seq-length", 32, "--cp", 8, "--lengths", histogram
    assert "--seq-length of at least 8 x CP x TP" in run(*short, code=2)


def test_draws_fill_the_step_with_documents_of_the_file(histogram):
    found, packed = lengths_in(histogram), 16 * K
    drawn = found.of_step(packed, 40, 32, seed=3)
    assert len(sequential(drawn, packed)) == 40
    assert (drawn == found.of_step(packed, 40, 32, seed=3)).all()
    assert len(drawn) != len(found.of_step(packed, 40, 32, seed=4))
    assert (drawn % 32 == 0).all() and drawn.max() == packed and drawn.min() > 0
    many = found.drawn(20_000, np.random.default_rng(0))
    shares = np.histogram(many, [1, 100, 1000, 10_000, 80_001])[0] / len(many)
    assert shares == pytest.approx([0.05, 0.6, 0.3, 0.05], abs=0.015)
    exact = (80_000 - packed) / 70_001 * 0.05  # of the last bin, all lengths alike
    assert found.share_above(packed) == pytest.approx(exact)
    assert (many > packed).mean() == pytest.approx(exact, abs=0.005)
    sample = typical_packing(found, packed).sample
    assert sample.tokens == packed and 0 < sample.share < 1


def job_of(batch=32, gpus=16, seq=64 * K):
    return Job(PRESETS["llama3-8b"], seq, gpus, 8, batch, preset("h200"))


def one_length(tokens):
    return Lengths(*(np.array([n]) for n in (tokens, tokens, 1)))


@pytest.mark.parametrize("pp", [1, 2])
def test_documents_that_are_alike_take_the_step_of_the_plan(pp):
    """Then no rule gains, and the step is the one that the planner has for any job."""
    lengths = one_length(64 * K)
    job = replace(job_of(), packing=typical_packing(lengths, 64 * K))
    best = candidate(job, Strategy(cp=4, dp=4 // pp, pp=pp, recompute="selective"))
    found = compare(job, [best], lengths)
    first = found.outcomes[0]
    assert first.rule == SEQUENTIAL and found.recommended is first and not found.cut
    # costs of micro-batches are fitted, with errors of some percent
    assert first.seconds == pytest.approx(best.time.seconds, rel=0.03)
    assert first.waiting == pytest.approx((pp - 1) / (job.batch // (4 // pp) + pp - 1))
    assert all(one.seconds >= 0.98 * first.seconds for one in found.outcomes)


def test_what_is_recommended_is_an_assignment_that_takes_as_long(tmp_path, histogram):
    path = tmp_path / "plan.json"
    text = run(*JOB, "--cp", 4, "--dp", 4, "--lengths", histogram, "--json", path)
    plan = json.loads(path.read_text())
    said, strategy = plan["documents"], plan["best"]["strategy"]
    assert f"recommended: {said['recommended']}" in " ".join(text.split())
    least = min(one["step_s"] for one in said["predicted"])
    best = next(one for one in said["predicted"] if one["step_s"] <= 1.01 * least)
    assert f"token_limit {best['token_limit']}: predicted {best['step_s']:.4g} s" in text
    assert best["rule"].startswith("balanced")
    grid = BatchGrid(4, 4, plan["job"]["batch"] // strategy["dp"], best["token_limit"])
    costs, found = Costs.from_plan(path), lengths_in(histogram)
    draws = [found.of_step(64 * K, grid.slots, 8, seed) for seed in range(3)]
    steps = [assign(one, grid, costs, best["cp_sizes"]).seconds for one in draws]
    update = plan["best"]["parts_s"]["gradients and optimizer"]
    assert best["step_s"] == pytest.approx(np.mean(steps) + update)
    table = text[text.index("Documents:") :].splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table if "│" in line]
    assert [row[0] for row in rows] == [one["rule"] for one in said["predicted"]]
    for row, one in zip(rows, said["predicted"], strict=True):
        assert row[2] == f"{one['step_s']:.4g}"
        gain = said["predicted"][0]["step_s"] / one["step_s"]
        assert float(row[4]) == pytest.approx(gain, abs=0.006)


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(cp=4, dp=4, recompute="selective"),
        Strategy(tp=2, cp=2, dp=2, pp=2, recompute="full", keep="all"),
        Strategy(cp=8, dp=2, recompute="full", keep="half", offload_inputs=True),
    ],
)
def test_the_token_limit_is_the_most_that_fits(strategy, histogram):
    job = job_of(batch=128)
    found = compare(job, [candidate(job, strategy)], lengths_in(histogram))

    def peaks(tokens):
        sizes = {size for one in found.outcomes for size in one.cp_sizes}
        for cp in sizes:
            groups = strategy.cp // cp
            some = replace(job, seq=tokens * cp, batch=job.batch * groups)
            yield memory_of(some, replace(strategy, cp=cp, dp=strategy.dp * groups)).peak

    usable = ROOMY * job.hardware.gpu.usable_bytes
    assert job.seq // strategy.cp < found.token_limit
    assert max(peaks(found.token_limit)) <= usable < max(peaks(found.token_limit + 2 * strategy.tp))
    assert all(one.grid.token_limit <= found.token_limit for one in found.outcomes)
    changing = [one for one in found.outcomes if one.rule == CHANGING]
    # half of the results can only be kept where there is context parallelism
    assert all((1 in one.cp_sizes) == (strategy.keep != "half") for one in changing) and changing


def test_a_layout_that_is_faster_with_these_documents_is_named(histogram):
    """A pipeline waits for the longest document, so the one without gains, although micro-batches
    that are alike take as long."""
    job = job_of(batch=16)
    pipeline, flat = (
        candidate(job, Strategy(cp=4, dp=4 // pp, pp=pp, recompute="selective")) for pp in (4, 1)
    )
    found = compare(job, [pipeline, flat], lengths_in(histogram))
    assert found.strategy == pipeline.strategy and found.elsewhere == flat.strategy
    assert found.other.seconds < 0.99 * found.recommended.seconds
    found = compare(job, [flat, pipeline], lengths_in(histogram))
    assert found.elsewhere is None


@pytest.mark.parametrize(
    ("sizes", "shared"),
    [({"tp": 8, "cp": 4, "dp": 32, "ep": 256}, 32), ({"tp": 8, "cp": 8, "dp": 16, "ep": 4}, 1)],
)
def test_experts_are_shared_by_tensor_parallel_ranks_first(sizes, shared, histogram):
    model, lengths = PRESETS["deepseek-v3"], one_length(8 * K)
    job = Job(model, 32 * K, 1024, 8, 64, preset("h200"), typical_packing(lengths, 32 * K))
    best = candidate(job, Strategy(**sizes, recompute="full"))
    assert compare(job, [best], lengths).outcomes[0].grid.ep == shared


def test_a_script_whose_documents_start_at_any_token_is_warned(tmp_path, histogram):
    script = tmp_path / "flags.txt"
    script.write_text(
        "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --ffn-hidden-size 4096 "
        "--vocab-size 32000 --seq-length 65536 --bf16 --dataloader-inter-document-masking"
    )
    text = planning.run(script, "--gpus", 4, "--lengths", histogram)
    warned = [line for line in text.splitlines() if line.startswith("warning")]
    assert sum("--lengths one by one" in line for line in warned) == 1


def test_a_plan_that_does_not_fit_has_no_steps(histogram):
    text = run("--gpus", 1, "--seq-length", "1M", "--lengths", histogram, code=3)
    assert "does not fit" in text and "recommended" not in text
