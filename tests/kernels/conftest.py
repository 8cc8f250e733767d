"""Fixtures shared by kernel tests."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tests.kernels.interpreter import interpret


@pytest.fixture(scope="module")
def interpreter():
    """Spawns instead of forking: a forked process may have imported Triton already."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        yield lambda *args: pool.submit(interpret, *args).result(timeout=300)
