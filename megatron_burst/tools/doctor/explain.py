"""One sentence from the lines that ranks wrote when passes failed: which rank stopped the others.

A rank that stops makes those that wait for it give up, and then those that wait for these. Every
line says for whom its rank waited; who is waited for, and did not itself wait, is the first.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_burst.desync.hops import Waits
from megatron_burst.errors import BurstError, require
from megatron_burst.files import LongText, Reader, excerpt
from megatron_burst.rules import format_bytes
from megatron_burst.tools.doctor.report import few

_WAITING, _LINE = ("hop", "pass"), "\n"
_MOST = 256 << 20  # bytes of a rank's file


@dataclass(frozen=True, slots=True)
class Line:
    """What a rank wrote (`desync.verdict.report`), with ranks of the job."""

    time: float  # in seconds since 1970: of a wait, its begin
    rank: int  # who wrote it
    ranks: tuple[int, ...]  # of its group
    nodes: tuple[int, ...]  # of these, if known
    # "hop" or "pass" that it gave up; "failure" of its own or "failure of others"; "difference" of
    # calls; "heard", from a rank that gave up
    what: str
    waits: Waits
    culprits: tuple[int, ...]  # for whom it waited in the end, or who failed
    error: LongText  # the sentence that the user saw

    def of_job(self) -> "Line":
        """From ranks of the group; an IndexError where one is none."""
        culprits, peers = (
            tuple(self.ranks[each] for each in some) for some in (self.culprits, self.waits.peers)
        )
        began, waits = self.waits.since or self.time, replace(self.waits, peers=peers)
        return replace(self, time=began, culprits=culprits, waits=waits)


def explained(folder: Path) -> str:
    """The sentence; empty if no rank wrote anything.

    Raises:
        BurstError: if there is no such folder.
    """
    require("doctor", [(
        os.path.isdir(folder), "--explain must name the folder of MEGATRON_BURST_FAULTS, because "
        "ranks wrote to it", f"{folder}, which is no folder", "name that folder",
    )])  # fmt: skip
    lines: dict[int, Line] = {}  # what each rank wrote first: later ones follow from it
    for line in sorted(_read(folder), key=lambda line: (line.time, line.rank)):
        lines.setdefault(line.rank, line)
    if not lines:
        return ""
    first = _root(lines)
    if first is None:
        return f"ranks made different calls: {_got(next(iter(lines.values())))}"
    on_node = {rank: f" on node {node}" for line in reversed(lines.values())
               for rank, node in zip(line.ranks, line.nodes, strict=False)}  # fmt: skip
    named = {rank: f"rank {rank}{on_node.get(rank, '')}" for rank in (first, *lines)}
    sentence = f"{named[first]} {_did(first, lines)}"
    if waiting := [line for line in lines.values() if line.what in _WAITING and line.rank != first]:
        sentence += f"; ranks that waited: {few([named[line.rank] for line in waiting])}"
        waits = waiting[0].waits
        if waiting[0].what == "hop":
            sentence += f" ({waits.link} {waits.cargo} hop, {format_bytes(waits.num_bytes)})"
    return sentence


def _read(folder: Path) -> Iterator[Line]:
    for path in sorted(folder.glob("*.jsonl")):
        reader = Reader("doctor", str(path), "ranks wrote it", "name another folder", most=_MOST)
        whole = reader.text(errors="replace") if path.is_file() else ""
        for text in filter(str.strip, whole.splitlines()):
            with suppress(BurstError, IndexError):  # a process ended as it wrote
                yield reader.typed(Line, reader.json(text), closed=False).of_job()


def _root(lines: Mapping[int, Line]) -> int | None:
    """The rank at which chains of waiting ranks end; of several, the one that most lead to among
    the earliest. None if ranks do not wait, but differ."""
    last, counts, began = dict[int, int](), Counter[int](), dict[int, float]()
    for rank, line in lines.items():  # the earliest first
        end = _end(rank, lines, last)
        if end != rank or line.what == "failure" or end in line.culprits:
            counts[end] += 1
            began.setdefault(end, line.time)
    return min(counts, key=lambda rank: (round(began[rank]), -counts[rank]), default=None)


def _end(rank: int, lines: Mapping[int, Line], last: dict[int, int]) -> int:
    """Where the chain from a rank ends: at one that waits for nobody, or where it closes; `last`:
    the ends that are known, to which those of the chain are added."""
    chain: dict[int, int] = {}  # ranks: their places
    while rank not in last and rank not in chain:
        chain[rank] = len(chain)
        culprits = lines[rank].culprits if rank in lines else ()
        rank = next((each for each in culprits if each != rank), rank)
    closes = chain.get(rank, len(chain))
    end = last.get(rank, rank)
    last |= {each: end if place < closes else each for each, place in chain.items()}
    return next((last[each] for each in chain), end)


def _did(first: int, lines: Mapping[int, Line]) -> str:
    """What the first rank did, or did not."""
    own = lines.get(first)
    if own and own.what == "failure":
        return f"failed in {_where(own.waits)}: {excerpt(own.error.partition(_LINE)[0], 500)}"
    blaming = [line for line in lines.values() if first in line.culprits]
    waiting = [line for line in blaming if line.what in _WAITING]
    direct = [line.waits for line in waiting if first in line.waits.peers]
    if not waiting:
        return f"failed: {_got(blaming[0])}"
    waits = min(direct or [line.waits for line in waiting], key=lambda it: (it.number, it.step))
    if own and own.waits.broken:
        return f"lost its connections in {_where(waits)}"
    return f"never {'started' if waits.step else 'began'} {_where(waits)}"


def _where(waits: Waits) -> str:
    step = f"step {waits.step} of " if waits.step else ""
    layer = f"layer {waits.layer}" if waits.layer else f"pass {waits.number}"
    return f"{step}{layer}, {waits.what}"


def _got(line: Line) -> str:
    return excerpt(line.error.partition("; got ")[2].partition("; ")[0] or line.error, 500)
