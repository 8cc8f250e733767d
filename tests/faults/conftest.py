"""Processes that many faults share: to start them takes longer than most faults."""

import pytest

from tests.faults.table import ODD, WORLD
from tests.ranks import Crew

_LIMIT_S = 60


class Patients:
    """Runs a function on all ranks, in processes of their own where a fault spoils them."""

    def __init__(self):
        self._crew = None

    def run(self, function, *args, fresh=False):
        """The results of the ranks; None of a rank whose process ended."""
        if fresh or self._crew is None:
            self.end()
            self._crew = Crew("gloo", ((),) * WORLD)
        crew, self._crew = self._crew, None
        try:
            found = crew.run(function, args, _LIMIT_S, mortal=ODD)
            if None not in found and not fresh:
                crew.wait(_LIMIT_S)
                self._crew = crew
            return found
        finally:
            if self._crew is None:
                crew.end()

    def end(self):
        if self._crew:
            self._crew.end()
        self._crew = None


@pytest.fixture(scope="session")
def patients():
    made = Patients()
    yield made
    made.end()
