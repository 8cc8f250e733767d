"""Prefill over ranks, and decoding from sharded or gathered K and V, against a dense model.

Guards against a last token that is taken from another row, rows of K and V that are lost, doubled
or seen by the wrong position, and rows of the benchmark that run something else than they say.
"""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from megatron_burst.errors import BurstError
from tests.oracle import full_attention
from tests.ranks import preload, run_ranks

EXAMPLES = str(Path(__file__).parents[2] / "examples")
preload("megatron_burst.tools.world", "megatron_burst.attention")
TOKENS, MORE = 29, 5  # no multiple of twice the ranks


def dense(model, tokens):
    """Logits after the last of these tokens [1, s], on one process."""

    def attend(q, k, v):
        return full_attention(q, k, v, True, q.shape[-1] ** -0.5)

    rows = torch.arange(tokens.shape[1])
    return model(tokens, rows, [attend] * len(model.blocks), -1)


def generated(rank):
    """Errors of each logits, and rows of K and V in a layer, by whether they are gathered."""
    sys.path.append(EXAMPLES)
    import torch.distributed as dist
    from prefill import TINY, Generation, random_model

    model = random_model(TINY, torch.device("cpu"), torch.float64)
    tokens = torch.randint(TINY.vocab, (1, TOKENS + MORE))
    found = {}
    with torch.inference_mode():
        for gathered in (False, True):
            run = Generation(model, dist.group.WORLD, gathered)
            logits = [run.prefill(tokens[:, :TOKENS])]
            logits += [run.decode(tokens[:, place]) for place in range(TOKENS, TOKENS + MORE)]
            truth = [dense(model, tokens[:, : TOKENS + more]) for more in range(MORE + 1)]
            errors = [float((a - b).abs().max()) for a, b in zip(logits, truth, strict=True)]
            found[gathered] = errors, {layer.k.shape[1] for layer in run.layers}
    return found


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_token_has_the_logits_of_a_dense_model(ranks):
    results = run_ranks(generated, ranks)
    for found in results:
        for errors, _ in found.values():
            assert max(errors) < 1e-12  # float64; logits are of order 1
        assert found[True][1] == {TOKENS + MORE}
    sharded = [rows for found in results for rows in found[False][1]]
    assert sum(sharded) == TOKENS + MORE and max(sharded) - min(sharded) <= 12


def test_the_example_runs(tmp_path):
    (tmp_path / "prompt.txt").write_text("A prompt of bytes. " * 10)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [f"{EXAMPLES}/prefill.py", "--prompt", str(tmp_path / "prompt.txt"), "--tokens", "3"]
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = re.findall(r"^190 tokens on 2 ranks, K and V (\w+): .* 3 tokens are the same$",
                      done.stdout, re.MULTILINE)  # fmt: skip
    assert said == ["sharded", "gathered"]


def shared(rank):
    """Errors of tensor-parallel ranks whose weights are parts of one model's."""
    from benchmarks import prefill_cases as cases
    from megatron_burst.tools.world import world_of

    model = cases.MODELS["tiny"]
    ranks = cases.Ranks(world_of("cpu"), 2)
    whole = cases.random_model(cases.sizes_of(model, 1), torch.device("cpu"), torch.float64)
    found = []
    with torch.inference_mode():
        for impl in ("tp-v1", "tp-v3"):
            run = cases.Prefill(model, 64, impl, ranks, torch.float64)
            for name in ("embedding", "norm", "head"):
                getattr(run.model, name).load_state_dict(getattr(whole, name).state_dict())
            for mine, every in zip(run.model.blocks, whole.blocks, strict=True):
                qkv, up = every.qkv.weight.view(3, 2, 32, 64), every.up.weight.view(2, 2, 64, 64)
                mine.qkv.weight.copy_(qkv[:, rank].reshape(96, 64))  # two of four heads
                mine.up.weight.copy_(up[:, rank].reshape(128, 64))  # half of the features
                mine.out.weight.copy_(every.out.weight.chunk(2, 1)[rank])
                mine.down.weight.copy_(every.down.weight.chunk(2, 1)[rank])
            found.append(float((run.run() - dense(whole, run.prompt)).abs().max()))
    return found


def test_tensor_parallel_ranks_compute_the_same_model():
    for errors in run_ranks(shared, 2):
        assert max(errors) < 1e-12


def measured(rank, folder):
    from benchmarks.prefill import measure
    from benchmarks.prefill_cases import IMPLS, Ranks
    from benchmarks.runner import Plan
    from megatron_burst.tools.world import world_of

    world, said = world_of("cpu"), []
    cases = [("tiny", 64, impl) for impl in IMPLS]
    plan = Plan(cases, (), reps=2, out=Path(folder) / "p.csv")
    return measure(plan, Ranks(world, world.size), torch.float32, said.append)


def test_a_row_for_each_implementation(tmp_path):
    from benchmarks.prefill_cases import IMPLS
    from benchmarks.rows import read
    from benchmarks.sheets import PREFILL_CSV

    rows, _ = run_ranks(measured, 2, str(tmp_path))
    assert [row.impl for row in rows] == list(IMPLS) and {row.runs for row in rows} == {"all"}
    written = read([tmp_path / "p.csv"], PREFILL_CSV)
    assert [row.ms for row in written] == pytest.approx([row.ms for row in rows], rel=1e-5)
    # 2 layers: weights 64 (4 + 4 + 4 + 4) 16 and 3 64 128, 64 tokens; head 128 64 for one token;
    # attention 4 heads 16 (4 64 64 / 2)
    flops = 2 * (2 * 64 * (64 * 256 + 3 * 64 * 128) + 4 * 16 * 2 * 64 * 64) + 2 * 64 * 128
    for row in rows:
        assert row.status == "ok" and row.ms_min <= row.ms <= row.ms_max, row.note
        assert row.tflops_per_gpu == pytest.approx(flops / 2 / row.ms / 1e9)
        times = 2 if row.impl == "burst-gathered" else 1  # both of the ranks' halves
        assert row.kv_gib * 2**30 == times * 2 * 2 * 32 * 64 * 4  # K, V, layers, rows, width, bytes


def test_one_rank_alone_is_measured_and_wrong_sizes_are_refused(tmp_path):
    from benchmarks.prefill import app
    from benchmarks.prefill_cases import MODELS, sizes_of
    from benchmarks.rows import read
    from benchmarks.sheets import PREFILL_CSV

    out = tmp_path / "p.csv"
    run = partial(CliRunner().invoke, app)
    options = ["--model", "tiny", "--seq", "64", "--reps", "1", "--out", str(out)]
    done = run([*options, "--rank-of", "4", "--impl", "burst", "--impl", "tp-v3"])
    assert done.exit_code == 0, done.output
    rows = read([out], PREFILL_CSV)
    assert [(row.impl, row.ranks, row.runs, row.status) for row in rows] == [
        ("burst", 4, "one", "ok"), ("tp-v3", 4, "one", "ok"),
    ]  # fmt: skip
    assert [row.kv_gib * 2**30 for row in rows] == pytest.approx([2 * 2 * 16 * 64 * 4] * 2)
    done = run([*options, "--rank-of", "5"])
    assert done.exit_code == 2 and "must be a multiple of twice the ranks" in done.output
    done = run([*options, "--impl", "ulysses"])
    assert done.exit_code == 2 and "got 'ulysses'; choose among burst, burst-g" in done.output
    with pytest.raises(BurstError, match="must divide heads.*got 32 query heads on 3 ranks"):
        sizes_of(MODELS["7b"], 3)
