"""Tests that share a GPU leave it as they find it, and what one compiles the others find."""

import os
import re
from functools import lru_cache
from pathlib import Path
from zlib import crc32

import pytest
import torch

from tests.ranks import end_crews

# that share a long module
_WORKERS = {
    "test_masks.py": 3, "test_bits.py": 2, "test_nodes.py": 2, "test_trees.py": 2,
    "test_failed_passes.py": 1,
}  # fmt: skip
_PLACE = re.compile(r"-(\d-\d)-")  # ranks and nodes, in a test's name
_COMPILED = Path(__file__).parents[2] / ".cache" / "flash-attn-4"
# FlashAttention-4 compiles each variant for seconds, in each process without this
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(_COMPILED))


def _begin_with_another_gpu() -> None:
    """Let workers of xdist begin with different GPUs: a test of one GPU takes the first, and ranks
    that are fewer than GPUs do."""
    worker, count = os.environ.get("PYTEST_XDIST_WORKER", ""), torch.cuda.device_count()
    if worker and count > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        first = int(worker.removeprefix("gw")) % count
        order = [(first + place) % count for place in range(count)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, order))


_begin_with_another_gpu()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `--dist loadscope`, one worker runs all tests of a module that starts ranks, which share
    processes, or a part of a long one: of equally many ranks and nodes, where names have them.
    Other tests run wherever there is time."""
    from xdist.scheduler import LoadScopeScheduling

    class ByRanks(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = config.rootpath / nodeid.partition("::")[0]
            if not _starts_ranks(path):
                return nodeid
            place = _PLACE.search(nodeid) if path.name in _WORKERS else None
            share = crc32(nodeid.encode()) % _WORKERS.get(path.name, 1)
            return f"{path} {place[1] if place else share}"

    return ByRanks(config, log) if config.getvalue("dist") == "loadscope" else None


@lru_cache
def _starts_ranks(path):
    return "run_ranks" in path.read_text()


def pytest_collection_modifyitems(config, items):
    """On several workers, long modules first, then others that start ranks, then what fits in where
    there is time."""
    # workers of xdist do not know how tests are distributed
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: (item.path.name not in _WORKERS, not _starts_ranks(item.path)))


@pytest.fixture(autouse=True, scope="module")
def no_idle_ranks(request):
    """Ends processes that earlier modules started, if this one starts none: they hold memory."""
    if not _starts_ranks(request.path):
        end_crews()


@pytest.fixture(autouse=True)
def no_idle_memory():
    """Frees what a test leaves in torch's cache of this process."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
