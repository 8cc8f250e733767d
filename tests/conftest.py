"""Settings that every test and every process it starts inherits."""

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("tests.attention.engine")  # its assertions are reported like tests'

os.environ.setdefault("OMP_NUM_THREADS", "1")  # up to eight processes share two cores
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

# durations of examples say nothing on a busy machine
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # modules and tests stay: garbage collection need not scan them again
