"""Faults of a rank as data: what it does, where, and what the other ranks are told."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

WORLD, ODD = 4, 2  # ranks, and the one that a fault hits
TIMEOUT_S, MARGIN_S = 5.0, 3.0  # who waits gives up; and has then found whom to name, on busy cores
MODES = {
    "ring": {"intra": "ring", "nodes": 1},
    "gather": {"intra": "gather", "nodes": 1, "heads_per_round": 1},
    "a2a": {"intra": "a2a", "nodes": 1},
    "nested": {"intra": "ring", "nodes": 2},
}
FRESH = ("checkpoints",)  # in processes that have run no checkpoint
DIRECTIONS = "forward", "backward"
PLACES = "first", "middle", "last"

NO_WORD = rf"got (no word from|broken connections of) cp ranks \[{ODD}\]"
SAID = rf"(got \w+: .* on cp rank {ODD}, while)"


@dataclass(frozen=True)
class Fault:
    """A fault, and what ranks then do.

    Attributes:
        what: in words, for the table.
        said: what every other rank is told, as a regular expression; "": nothing, all compute
            right results.
        own: what the rank itself is told; None: it is gone, or stopped.
        again: whether the call can be made again, on all ranks.
        passing: whether it hits a place in a pass, or else a whole call.
        quiet: what follows if nothing is said.
    """

    what: str
    said: str
    own: str | None = None
    again: bool = False
    passing: bool = True
    quiet: str = "the result is right"


FAULTS = {
    "killed": Fault("a process ends (SIGKILL)", NO_WORD),
    "stopped": Fault("a process is stopped (SIGSTOP)", NO_WORD, rf"^$|{NO_WORD}"),
    "stuck": Fault("a rank computes for longer than the time-out", NO_WORD, rf"^$|{NO_WORD}"),
    "slow": Fault("a rank computes for a part of the time-out", "", ""),
    "raises": Fault("an exception on one rank", SAID, "a wrong turn", again=True),
    "no memory": Fault("one rank is out of memory", SAID, "no memory left", again=True),
    "no memory anywhere": Fault(
        "all ranks are out of memory", "no memory left", "no memory left", again=True
    ),
    "cut off": Fault(
        "the connections of a rank break", NO_WORD, NO_WORD,
    ),
    "NaN": Fault("a tile of a rank is NaN", "", "", again=True,
                 quiet="NaN in what depends on it; `nan_guard` names the tile"),
    "flag": Fault("another flag", rf"deterministic=True.* on cp ranks \[{ODD}\]",
                  rf"deterministic=True.* on cp ranks \[{ODD}\]", again=True, passing=False),
    "shape": Fault("a batch of another shape", rf"v=\(2, 8, 4, 4\) on cp ranks \[{ODD}\]",
                   rf"v=\(2, 8, 4, 4\) on cp ranks \[{ODD}\]", again=True, passing=False),
    "dtype": Fault("another dtype", rf"dtype=torch.float32.* on cp ranks \[{ODD}\]",
                   rf"dtype=torch.float32.* on cp ranks \[{ODD}\]", again=True, passing=False),
    "mask": Fault("another mask", rf"causal=False on cp ranks \[{ODD}\]",
                  rf"causal=False on cp ranks \[{ODD}\]", again=True, passing=False),
    "version": Fault("another version of burst", rf"version=0.0.0 .*on cp rank {ODD}",
                     rf"version=0.0.0 .*on cp rank {ODD}", again=True, passing=False),
    "full disk": Fault("a process ends, and the disk for reports is full", NO_WORD, passing=False),
    "checkpoints": Fault(
        "a rank has run checkpoints before, others have not",
        rf"kept for recomputation on cp ranks \[{ODD}\]",
        rf"kept for recomputation on cp ranks \[{ODD}\]", again=True, passing=False,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A fault somewhere."""

    fault: str
    mode: str
    direction: str = "forward"
    place: str = "middle"

    def __str__(self) -> str:
        where = f"{self.direction} {self.place}" if FAULTS[self.fault].passing else "call"
        return f"{self.fault}-{self.mode}-{where}".replace(" ", "_")


def cases() -> Iterator[Case]:
    """All of them."""
    for fault, about in FAULTS.items():
        for mode in MODES:
            if about.passing:
                yield from (Case(fault, mode, *at) for at in product(DIRECTIONS, PLACES))
            else:
                yield Case(fault, mode)
