"""`make test-cpus`: its settings reach every process that computes; what is run and what skipped.

Guards against a run that is green because it had the processor's own kernels.
"""

import os
import runpy
from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks

SCRIPT = Path(__file__).parents[1] / "scripts" / "test_cpus.py"


def kernels_of(rank: int) -> tuple[int, str]:
    """Threads, and the vectors that torch's kernels use."""
    return torch.get_num_threads(), torch.backends.cpu.get_cpu_capability().lower()


@pytest.mark.numeric
def test_ranks_have_the_threads_and_kernels_that_the_environment_asks_for():
    threads, vectors = int(os.environ["OMP_NUM_THREADS"]), os.environ.get("ATEN_CPU_CAPABILITY")
    expected = threads, vectors or kernels_of(0)[1]
    assert [kernels_of(0), *run_ranks(kernels_of, 2)] == [expected] * 3


def test_every_setting_runs_or_is_skipped_by_name_and_one_that_fails_is_not_lost(capsys):
    script, runs = runpy.run_path(f"{SCRIPT}"), []

    def run(setting, threads, arguments):
        runs.append((setting.variable, setting.value, threads))
        return setting.value != "avx2", "1 passed"

    script["main"].__globals__.update(present=lambda: {"AVX2", "MKL"}, run=run)
    with pytest.raises(SystemExit) as end:
        script["main"]()
    aten, mkl = "ATEN_CPU_CAPABILITY", "MKL_CBWR"
    assert end.value.code and runs == [
        *((aten, "default", threads) for threads in (2, 1, 4)), (aten, "avx2", 2), (mkl, "AVX2", 2),
        *((mkl, "COMPATIBLE", threads) for threads in (2, 1, 4)),
    ]  # fmt: skip
    lines = capsys.readouterr().out.partition("\n\n")[2].splitlines()
    assert f"{aten}=avx512: skipped, as there is no AVX512 here" in lines
    assert "ONEDNN_MAX_CPU_ISA=AVX2: skipped, as there is no oneDNN here" in lines
    assert f"{mkl}=COMPATIBLE, 4 threads: 1 passed" in lines
    files = script["numeric_files"]()
    assert "tests/mcore/test_pretrain_balanced.py" in files and "tests/test_logs.py" not in files
