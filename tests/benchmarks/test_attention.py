"""The run loop on real processes over gloo; timing; the tensors that all ranks get."""

import csv
import re
from types import SimpleNamespace

import pytest
import torch

from benchmarks.cases import Case
from benchmarks.impls import impls_of
from benchmarks.rows import read
from benchmarks.sheets import COLUMNS
from megatron_burst.tools.terminal import Progress
from tests.ranks import preload, run_ranks

preload("benchmarks.attention")
IMPLS = ("burst:auto", "burst:intra=gather,heads_per_round=1", "te", "ceiling", "one-gpu")
SMALL = {"seq": 64, "heads_q": 4, "heads_kv": 2, "head_dim_qk": 8, "head_dim_v": 8}
CASES = (
    Case(**SMALL, dtype="float32"),
    Case(**SMALL | {"head_dim_v": 4}, batch=2, mask="full", dtype="float32"),
)
FLOPS = (4 * 64**2 * 4 * 8 / 2, 2 * 2 * 64**2 * 4 * (8 + 4))  # forward, all ranks
TOGETHER = ["burst", "burst", "te", "te", "te", "te", "ceiling"]


def bench(rank, folder):
    """What every rank has after a run, after a run without timing, and after a failure on rank 0
    only."""
    from benchmarks.attention import measure
    from benchmarks.runner import Plan
    from megatron_burst.tools.world import attempt, world_of

    world, said = world_of("cpu"), []
    impls, out = impls_of(IMPLS), folder / "attention.csv"
    rows = measure(Plan(CASES, impls, reps=3, out=out), world, said.append)
    none = measure(Plan(CASES, impls, budget_s=0.0, out=out), world, said.append)
    other = folder / "other.csv"
    if rank == 0:
        other.write_text("a,b\n")
    try:
        measure(Plan(CASES, impls, out=other), world, said.append)
    except ValueError as error:
        said.append(str(error))
    reasons = [attempt(lambda: [][1], world)]
    try:
        reasons.append(attempt(lambda: [][world.rank - 1 :] or 1 / world.rank, world))
    except ValueError as error:
        reasons.append(str(error))
    return rows, none, said, reasons


def fail_alone(rank, failing):
    """What each rank has after one failed while the other waits for it; in its own process."""
    from datetime import timedelta

    import torch.distributed as dist

    from megatron_burst.tools import world

    world._FAILED_PATIENCE = timedelta(seconds=1)
    everyone, store = world.world_of("cpu"), dist.distributed_c10d._get_default_store()

    def action():
        if rank == failing:
            raise MemoryError("out of memory")
        store.wait(["it has said so"], timedelta(seconds=60))
        raise SystemExit  # as torchrun ends it

    try:
        return world.attempt(action, everyone)
    except (ValueError, SystemExit) as error:
        store.set("it has said so", "")
        return str(error)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    return run_ranks(bench, 2, folder), folder / "attention.csv"


def test_one_row_for_each_implementation_and_pass_of_each_problem(results):
    _, path = results
    with path.open() as file:
        assert tuple(next(csv.reader(file))) == COLUMNS
    assert ",".join(COLUMNS) == (
        "date,versions,gpu,nodes,ranks,link,seq,batch,heads_q,heads_kv,head_dim_qk,head_dim_v,"
        "mask,dtype,impl,mode,pass,ms,ms_min,ms_max,tflops_per_gpu,peak_gib,status,note"
    )
    rows = read([path])
    assert [row.impl for row in rows] == len(CASES) * (2 * TOGETHER + 2 * ["one_gpu"])
    passes = [*(7 * ["fwd_bwd"]), *(7 * ["fwd"]), "fwd_bwd", "fwd"]
    assert [row.pass_ for row in rows] == len(CASES) * passes
    assert {row.mode for row in rows if row.impl == "te"} == {"p2p", "all_gather", "a2a", "a2a+p2p"}
    assert {(row.nodes, row.ranks, row.gpu) for row in rows} == {(1, 2, "CPU")}
    assert all(f"torch {torch.__version__}" in row.versions and row.link for row in rows)


def test_speed_is_the_operations_of_the_pass_over_the_time(results):
    _, path = results
    rows = read([path])
    for case, flops in enumerate(FLOPS):
        for row in rows[16 * case : 16 * case + 16]:
            if row.impl == "te":
                continue
            factor = 3.5 if row.pass_ == "fwd_bwd" else 1
            gpus = 1 if row.impl == "one_gpu" else 2
            expected = factor * flops / gpus / (row.ms / 1e3) / 1e12
            assert row.tflops_per_gpu == pytest.approx(expected, rel=1e-4)
            assert 0 < row.ms_min <= row.ms <= row.ms_max
            assert row.status == "ok"
            assert len(re.search(r"3 repetitions: ([\d. e-]+)$", row.note)[1].split()) == 3


def test_what_cannot_run_says_why(results):
    _, path = results
    failed = [row for row in read([path]) if row.status != "ok"]
    assert {row.impl for row in failed} == {"te"}
    for row in failed:
        assert row.status == "failed" and "TransformerEngine" in row.note
        assert row.ms is row.tflops_per_gpu is None


def test_every_rank_has_the_slowest_ranks_times_and_only_rank_0_talks(results):
    (first, second), _ = results
    assert [row.ms for row in first[0]] == [row.ms for row in second[0]]
    assert str(CASES[0]) in first[2][0] and len(second[2]) == 1


def test_nothing_is_started_when_time_is_up(results):
    (first, second), _ = results
    assert first[1] == second[1] == []
    assert first[2][-2] == "time is up: 2 problems were not started"


def test_a_file_with_other_columns_is_refused_on_all_ranks_before_anything_runs(results):
    (first, second), _ = results
    assert first[2][-1] == second[2][-1]
    assert "other.csv must be a CSV with the columns" in first[2][-1]


def test_a_failure_everywhere_is_a_reason_and_one_on_some_ranks_ends_the_run(results):
    (first, second), _ = results
    assert first[3] == second[3]
    assert first[3][0] == "IndexError: list index out of range"
    assert "on ranks [0] of 2 only: ZeroDivisionError: division by zero" in first[3][1]


def stub_world(others, answers=()):
    """A CPU world of two: the other rank's times are `others`, rank 0's answers in turn."""
    answers = iter(answers)
    return SimpleNamespace(
        device=torch.device("cpu"),
        barrier=lambda: None,
        gather=lambda mine: [mine, others],
        decide=lambda asked: next(answers, asked),
        progress=Progress(),
    )


def test_turns_alternate_in_order_and_the_slowest_rank_counts():
    from benchmarks.runner import interleave

    order = []
    runs = {name: lambda name=name: order.append(name) for name in "abc"}
    reps = {"a": 3, "b": 2, "c": 1}
    others = {"a": [1e6, 0.0, 1e6], "b": [0.0, 1e6], "c": [0.0]}
    times = interleave(runs, reps, stub_world(others), lambda: False)
    assert order == ["a", "b", "c", "b", "a", "a"]
    assert [times["a"][0], times["a"][2], times["b"][1]] == [1e6] * 3
    assert 0 < times["a"][1] < 1e6 and 0 < times["c"][0] < 1e6


def test_repetitions_end_when_time_is_up():
    from benchmarks.runner import interleave

    order = []
    world = stub_world({"a": [1.0, 1.0]}, answers=(False, True))
    times = interleave({"a": lambda: order.append("a")}, {"a": 9}, world, lambda: False)
    assert len(order) == len(times["a"]) == 2


@pytest.mark.parametrize(("heads", "is_view"), [((4, 4), True), ((4, 2), False)])
def test_tensors_are_the_views_of_one_projection(heads, is_view):
    from benchmarks.peers import draw_shard

    case = Case(**SMALL | {"heads_q": heads[0], "heads_kv": heads[1]}, batch=3, dtype="float32")
    world = SimpleNamespace(rank=1, size=2, device=torch.device("cpu"))
    shard = draw_shard(case, world)
    group = 8 * (heads[0] // heads[1] + 2)  # width of a KV group in the projection
    assert shard.q.shape == shard.dout.shape == (32, 3, 4, 8)
    for x in (shard.k, shard.v):
        assert x.shape == (32, 3, heads[1], 8) and x.requires_grad
        assert x.stride() == (3 * heads[1] * group, heads[1] * group, group, 1)
    storage = shard.k.untyped_storage().data_ptr()
    assert shard.v.untyped_storage().data_ptr() == storage
    assert (shard.q.untyped_storage().data_ptr() == storage) is is_view
    assert not shard.dout.requires_grad


def wrong_answers(rank):
    """Trials of a correct implementation and of one that drops a factor in dk."""
    from benchmarks.bench import try_out
    from benchmarks.peers import Burst, draw_shard
    from megatron_burst.tools.world import world_of

    class Wrong(Burst):
        def run_forward_backward(self):
            out, dq, dk, dv = super().run_forward_backward()
            return out, dq, dk * 1.1, dv

    world, (impl,) = world_of("cpu"), impls_of(("burst:auto",))
    shard = draw_shard(CASES[0], world)
    right = try_out(Burst(impl, world), shard, world)
    again = try_out(Burst(impl, world), shard, world, right.sample)
    wrong = try_out(Wrong(impl, world), shard, world, right.sample)
    return [(trial.status, trial.reason) for trial in (right, again, wrong)]


def test_a_fast_wrong_answer_is_no_peer():
    for right, again, wrong in run_ranks(wrong_answers, 2):
        assert right == again == ("ok", "")
        assert wrong[0] == "failed" and "wrong: out is off by 0, dq is off by 0, dk" in wrong[1]
        assert "dk is off by 0.1, dv is off by 0" in wrong[1]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_alone_says_so_although_others_wait_for_it(failing):
    """Guards against runs that hang because one rank has run out of memory."""
    said = run_ranks(fail_alone, 2, failing, fresh=True, timeout_s=40)[failing]
    silent = f"while ranks [{1 - failing}] said nothing for"
    assert f"a failure on rank {failing}, {silent}" in said
    assert "MemoryError: out of memory" in said
