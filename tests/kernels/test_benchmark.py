"""benchmarks/kernels.py, as far as it runs without a GPU."""

from time import monotonic

import pytest

from benchmarks.candidates import candidates
from benchmarks.kernels import Case, compile_all, run_once
from megatron_burst.kernels.backends import backends
from megatron_burst.kernels.triton_blocks import Pass


def test_processes_that_compile_say_why_a_package_cannot_be_used():
    """Catches a reason in words that is taken for the function that it stands in for."""
    lacking = {name: reason for name, each in backends().items() if (reason := each.missing())}
    if not lacking:
        pytest.skip("all packages are installed")
    case = Case(256, 4, 2, 64, True)
    failures = compile_all([(run_once, case, name) for name in lacking], monotonic() + 100)
    assert len(failures) == len(lacking)
    for name, reason in lacking.items():
        (said,) = [each for each in failures if f"'{name}'" in each]
        assert "RuntimeError" in said and reason.partition("\n")[0] in said


@pytest.mark.parametrize("dim", [64, 128])
def test_a_sweep_tries_each_kernel_and_nothing_twice(dim):
    tried = candidates(dim, tma=True)
    assert {which for which, _ in tried} == set(Pass)
    assert len(set(tried)) == len(tried)
