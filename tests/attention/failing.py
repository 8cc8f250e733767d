"""Makes operations of programs fail, as a kernel does that runs out of memory."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch
from weakref import ref

from megatron_burst.engine import executor
from megatron_burst.engine.executor import Executor
from megatron_burst.schedule.spec import Direction

PLACES = ("memory", "results", "first", "middle", "last")


class NoMemoryError(RuntimeError):
    """Stands for torch.OutOfMemoryError."""


def fail(*_, **__):
    """An operation without memory."""
    raise NoMemoryError("no memory left\nat some line")


@contextmanager
def failing(direction: Direction, place: str, runs: list | None = None, act=None):
    """Passes of a direction fail: where they get their memory or allocate results, or in their
    first, middle or last operation that computes. `runs` gets weak references to them. There
    `act(step, op, binder, run)`, if given, is called instead."""
    run, runs = Executor.run, [] if runs is None else runs

    class Noted(executor.Run):
        def __init__(self, *args):
            super().__init__(*args)
            runs.append(ref(self))

    def failing_run(self, *args, **options):
        if self.program.direction is not direction:
            return run(self, *args, **options)
        with ExitStack() as broken:
            made = fail if place == "memory" else Noted
            broken.enter_context(patch.object(executor, "Run", made))
            if place == "results":
                broken.enter_context(patch.object(Noted, "prepare", fail))
            elif place != "memory":
                steps = self.compiler.steps
                computing = [index for index, step in enumerate(steps) if not step.is_transfer]
                at = computing[{"first": 0, "middle": len(computing) // 2, "last": -1}[place]]
                op, broken_run = self.program.ops[at], fail
                if act:
                    broken_run = partial(act, steps[at], op, self.compiler)
                wrong = *steps[:at], replace(steps[at], run=broken_run), *steps[at + 1 :]
                broken.enter_context(patch.object(self.compiler, "steps", wrong))
            return run(self, *args, **options)

    with patch.object(Executor, "run", failing_run):
        yield
