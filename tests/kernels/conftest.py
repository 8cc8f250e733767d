"""Fixtures shared by kernel tests."""

import pytest

from tests.kernels.interpreter import interpret


@pytest.fixture(scope="module")
def interpreter(interpreted):
    return lambda *args: interpreted(interpret, *args)
