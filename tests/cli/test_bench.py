"""`megatron-burst bench`: what it measures, reports as wrong, refuses and prints."""

import pytest
from typer.testing import CliRunner

from megatron_burst.cli.main import app
from megatron_burst.errors import BurstError
from tests.ranks import preload, run_ranks

preload("megatron_burst.cli.bench")
SMALL = ["--seq", "64", "--heads", "4/2", "--head-dim", "8", "--reps", "2", "--device", "cpu"]


def bench(rank):
    """Findings for each; then next to engines of which one is right, one wrong and one fails."""
    from functools import partial

    from megatron_burst.cli import bench
    from megatron_burst.cli.world import world_of

    world, problem = world_of("cpu"), bench.Problem(64, (4, 2), 8)
    found = bench.measure(problem, world, reps=2)
    shapes = [tuple(x.shape) for x in found[bench.KERNEL].both()]
    attend = partial(bench.burst_attention, group=world.group, causal=True, qkv_format="sbhd")

    def engine(mode, problem, world, tensors):
        right = bench._attention(attend, tensors)
        wrong = bench.Contender(right.forward, lambda: tuple(1.1 * x for x in right.both()))
        failing = bench.Contender(right.forward, lambda: (right.both()[9],))
        return {"p2p": right, "a2a": wrong, "all_gather": failing}.get(mode, right)

    bench._engine = engine
    beside = bench.measure(problem, world, reps=1)
    refused = bench.measure(bench.Problem(64, (3, 1), 8), world, reps=1)[bench.KERNEL].failure
    return found_of(found), shapes, found_of(beside), refused


def found_of(found):
    return {name: (one.failure, [len(ms) for ms in one.ms], one.gib) for name, one in found.items()}


def test_burst_and_the_kernel_are_measured_and_what_is_missing_or_wrong_says_why():
    for found, shapes, beside, refused in run_ranks(bench, 2):
        assert found["burst"] == found["kernel alone"] == (None, [2, 2], None)
        others = {name: one for name, one in found.items() if name.startswith("te ")}
        assert len(others) == 4
        assert all("TransformerEngine" in failure for failure, _, _ in others.values())
        assert shapes[0] == (1, 64, 2, 8)  # half of the heads, the whole sequence
        assert beside["te p2p"] == beside["te a2a+p2p"] == (None, [1, 1], None)
        assert "out is off by 0.1, dq is off by 0.1" in beside["te a2a"][0]
        assert beside["te all_gather"][0].startswith("IndexError")
        assert beside["te a2a"][1] == beside["te all_gather"][1] == [0, 0]
        assert "got 3/1 heads over 2 ranks" in refused


def test_one_process_alone_prints_one_table():
    done = CliRunner().invoke(app, ["bench", *SMALL])
    assert done.exit_code == 0, done.output
    lines = [line for line in done.stdout.splitlines() if "burst" in line or "kernel" in line]
    assert "64 tokens, heads 4/2 x 8, 1 rank " in done.stdout
    assert any("kernel alone" in line and "x as fast" in line for line in lines)
    (missing,) = [line for line in done.stdout.splitlines() if line.startswith("not measured: ")]
    assert "te p2p, te all_gather, te a2a, te a2a+p2p: TransformerEngine" in missing


def test_the_speed_is_the_operations_over_the_time():
    from megatron_burst.cli.bench import Contender, Problem, table

    problem = Problem(1024, (8, 2), 64)
    pairs = 1024**2 / 2
    assert problem.flops == 7 * 2 * pairs * 8 * 64
    burst = Contender(ms=([1.0], [2.0, 4.0, 3.0]), gib=0.5)
    other = Contender(ms=([1.0], [6.0]))
    rows = table(problem, {"burst": burst, "te p2p": other, "x": Contender(failure="no")}, 2)
    cells = [list(column.cells) for column in rows.columns]
    assert cells[3][0] == f"{problem.flops / 2 / 3e-3 / 1e12:.3g}"
    assert cells[2][0] == "3 (2-4)" and cells[4] == ["", "2.00 x as fast"]
    assert cells[5] == ["0.50", ""]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seq", "x"], "bench: --seq must .*got 'x'"),
        (["--heads", "8/3"], "bench: --heads must .*got '8/3'"),
        (["--seq", "63", "--device", "cpu"], "--seq must .*got 63 on 1 ranks; .*such as 62 or 64"),
        (["--nodes", "3"], "bench: --nodes must divide .*1 rank;"),
        (["--device", "cuda"], "bench: --device cuda must find a GPU"),
    ],
)
def test_a_bad_option_is_refused_in_one_sentence(options, words, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = CliRunner().invoke(app, ["bench", *options])
    assert done.exit_code == 2 and done.output.startswith("error: bench: ")
    with pytest.raises(BurstError, match=words):
        raise BurstError(done.output)
