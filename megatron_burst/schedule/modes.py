"""The modes by name; a new one is a function from a spec to a program, and a line here."""

from functools import lru_cache

from megatron_burst.schedule.a2a import a2a
from megatron_burst.schedule.gather import gather
from megatron_burst.schedule.program import Program
from megatron_burst.schedule.ring import ring
from megatron_burst.schedule.spec import Spec

MODES = {"ring": ring, "gather": gather, "a2a": a2a}


@lru_cache(maxsize=64)
def program_of(spec: Spec) -> Program:
    """The program of a rank (`Spec.of`); the same object for equal specs.

    Raises:
        BurstError: if the mode cannot run that spec.
    """
    return MODES[spec.intra or "ring"](spec)
