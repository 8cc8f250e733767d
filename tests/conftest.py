"""Settings that every test and every process it starts inherits."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # up to eight processes share two cores
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
