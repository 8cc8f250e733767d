"""Settings that every test and every process it starts inherits."""

import fcntl
import gc
import os
import pickle
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, settings

from tests.released import release

# their assertions are reported like tests'
pytest.register_assert_rewrite("tests.attention.engine", "tests.integrations.balanced")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # up to eight processes share two cores
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
if not Path("/dev/nvidiactl").exists():
    # A thread that wakes another is then not interrupted by it. Otherwise a small message over gloo
    # took milliseconds where threads are more than cores, in which gloo's threads were busy:
    # docs/decisions/project.md#where-test-time-went.
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

LONGEST = "test_tutorial.py", "test_site.py", "test_pretrain.py"  # one test is 15 s or more

_BEGUN = count()  # tests of this process

# durations of examples say nothing on a busy machine
for profile in ("few", "every"):
    settings.register_profile(profile, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("few")


def pytest_addoption(parser):
    parser.addoption(
        "--all", action="store_true", help="run all of what tests otherwise sample (make test-all)"
    )


def pytest_configure(config):
    """Tell `sampling.examples`, which is called while tests are collected."""
    settings.load_profile("every" if config.getoption("--all") else "few")


def pytest_collection_modifyitems(config, items):
    """Leave tests with the marker `whole` to --all; begin with what would end alone on one core."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    if not config.getoption("--all"):
        left = [item for item in items if item.get_closest_marker("whole")]
        items[:] = [item for item in items if not item.get_closest_marker("whole")]
        config.hook.pytest_deselected(items=left)


@pytest.fixture
def draw(request):
    """`draw(cases, few, most)` returns `few` of the cases, the same ones in each run; with --all
    `most` of them, or each if None."""
    every, random = request.config.getoption("--all"), Random(request.node.name)

    def drawn(cases, few, most=None):
        cases, count = list(cases), most if every else few
        return cases if count is None else random.sample(cases, min(count, len(cases)))

    return drawn


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """`once(function)` returns `function()`, which one worker calls for all: tests of a module may
    be spread over workers."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def found(function):
        path = shared / f"{function.__module__}.pickle"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                path.write_bytes(pickle.dumps(function()))
            return pickle.loads(path.read_bytes())

    return found


@pytest.fixture(scope="session")
def released(tmp_path_factory, once):
    """A release of a copy of this checkout: `tests.released.Release`."""
    return once(lambda: release(tmp_path_factory.mktemp("released") / "checkout"))


@pytest.fixture(scope="session")
def interpreted():
    """`interpreted(function, *args)` calls it in a process where Triton interprets its kernels.

    Triton decides at import. Spawned instead of forked: a forked process may have imported Triton
    already. One for all tests, because its imports take 4 s of a core.
    """
    with ProcessPoolExecutor(1, get_context("spawn"), _interpret_triton) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(timeout=300)


def _interpret_triton():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Garbage collection need not scan again what stays: modules, tests, cached plans. Tests that
    call it would take ten times as long at the end of a run."""
    if next(_BEGUN) % 100 == 0:
        gc.collect()
        gc.freeze()
