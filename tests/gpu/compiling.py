"""Each kernel is compiled by one process; others that need it wait, and load what it compiled.

Ranks of a test need the same kernels at the same time, and without this each would compile them.
"""

import fcntl
import time
from functools import cached_property
from pathlib import Path
from typing import TextIO

from triton import knobs
from triton.runtime.cache import FileCacheManager

from megatron_burst.kernels.fa4 import FlashAttention4

_MOST_S = 60  # then it compiles too


def turn(path: Path) -> TextIO:
    """A lock on a file, until what is returned is closed or collected."""
    file = open(path, "w")  # noqa: SIM115 - the caller closes it
    ends = time.monotonic() + _MOST_S
    while time.monotonic() < ends:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.05)
    return file


class OneCompiles(FileCacheManager):
    """Triton's cache of a kernel."""

    _turn: TextIO | None = None

    def get_group(self, filename):
        """The kernel's files, or None: this process compiles it."""
        found = super().get_group(filename)
        if found is None:
            self._turn = turn(Path(self.cache_dir, "compiling"))
            found = super().get_group(filename)
            if found is not None:
                self._turn.close()
        return found

    def put_group(self, filename, group):
        """Store the kernel's files, and let others have them."""
        super().put_group(filename, group)
        if self._turn is not None:
            self._turn.close()


def in_triton() -> None:
    """Have Triton's cache do so in this process; others may not find this module."""
    knobs.propagate_env, before = False, knobs.propagate_env
    knobs.cache.manager_class = OneCompiles
    knobs.propagate_env = before


def in_flash_attention() -> None:
    """Have FlashAttention-4's cache do so, once it is imported."""
    imported = FlashAttention4._interface.func

    def interface(self):
        found = imported(self)
        if not isinstance(found, str):
            _change_its_cache()
        return found

    changed = cached_property(interface)
    changed.__set_name__(FlashAttention4, "_interface")
    FlashAttention4._interface = changed


def _change_its_cache() -> None:
    from flash_attn.cute.cache_utils import JITPersistentCache as Cache

    has, put, turns = Cache.__contains__, Cache.__setitem__, {}

    def contains(self, key):
        if has(self, key):
            return True
        mine = turn(self.cache_path / f"{self._key_to_hash(key)}.compiling")
        if has(self, key):
            mine.close()
            return True
        turns[self.cache_path] = mine  # in place of one whose compilation failed
        return False

    def setitem(self, key, kernel):
        put(self, key, kernel)
        if mine := turns.pop(self.cache_path, None):
            mine.close()

    Cache.__contains__, Cache.__setitem__ = contains, setitem
