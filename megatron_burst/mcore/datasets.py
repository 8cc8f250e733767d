"""Megatron's data set helpers, which its wheel brings built, but without the Makefile."""

import importlib.util
from pathlib import Path

from megatron_burst.patching import Patch


def use_built_dataset_helpers() -> None:
    """Keep Megatron from running make where there is nothing to make."""
    HELPERS_PATCH.apply()


def _compile_unless_built(compile_helpers):
    def compile_where_there_is_a_makefile() -> None:
        from megatron.core.datasets import utils

        built = importlib.util.find_spec("megatron.core.datasets.helpers_cpp")
        if not built or (Path(utils.__file__).parent / "Makefile").is_file():
            compile_helpers()

    return compile_where_there_is_a_makefile


HELPERS_PATCH = Patch(
    owner="megatron.core.datasets.utils",
    name="compile_helpers",
    parameters=(),
    why="the wheel has the data set helpers built, but not the Makefile that would build them, and "
    "Megatron exits without it (training/initialize.py:175)",
    wrap=_compile_unless_built,
)
