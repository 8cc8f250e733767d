"""What Megatron reads of its own sources for the help of its flags, read once for all processes
that fork from one with this module: a rank parses flags twice, for 0.1 s of a core each time."""

from argparse import ArgumentParser
from functools import cache, partial

from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import add_megatron_arguments

if hasattr(ArgumentGroupFactory, "_get_field_docstrings"):  # else an older release
    read = partial(
        cache(ArgumentGroupFactory._get_field_docstrings), object.__new__(ArgumentGroupFactory)
    )
    ArgumentGroupFactory._get_field_docstrings = lambda self, config: read(config)
    add_megatron_arguments(ArgumentParser())
