"""One sentence from the lines that ranks wrote when passes failed: which rank stopped the others.

A rank that stops makes those that wait for it give up, and then those that wait for these. Every
line says for whom its rank waited; who is waited for, and did not itself wait, is the first.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_burst.errors import BurstError
from megatron_burst.files import LongText, Reader, excerpt
from megatron_burst.rules import in_unit
from megatron_burst.tools.doctor.report import few

_WAITING, _LINE = ("hop", "pass"), "\n"
_MOST = 256 << 20  # bytes of a rank's file


@dataclass(frozen=True, slots=True)
class _Waits:
    """What a line has of `desync.hops.Waits`."""

    number: int
    what: str
    layer: int
    peers: tuple[int, ...]
    step: int
    link: str
    cargo: str
    num_bytes: int
    broken: bool
    since: float


@dataclass(frozen=True, slots=True)
class _Written:
    """What a line has of `desync.verdict.report`."""

    time: float
    rank: int
    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    what: str
    waits: _Waits
    culprits: tuple[int, ...]
    error: LongText


@dataclass(frozen=True, slots=True)
class Line:
    """What a rank wrote; ranks are those of the job.

    Attributes:
        rank: who wrote it.
        what: "hop" or "pass" that it gave up; "failure" of its own or "failure of others";
            "difference" of calls; "heard", from a rank that gave up.
        began: when, in seconds since 1970: of a wait, its begin.
        culprits: for whom it waited in the end, or who failed.
        waits: as in `desync.hops.Waits`, with ranks of the job.
        error: the sentence that the user saw.
        nodes: of the group's ranks, if known.
    """

    rank: int
    what: str
    began: float
    culprits: tuple[int, ...]
    waits: _Waits
    error: str
    nodes: Mapping[int, int]

    @classmethod
    def of(cls, said: _Written) -> "Line":
        """An IndexError where a rank of the group is none."""
        ranks, waits = said.ranks, said.waits
        peers = tuple(ranks[each] for each in waits.peers)
        return cls(
            said.rank, said.what, waits.since or said.time,
            tuple(ranks[each] for each in said.culprits), replace(waits, peers=peers), said.error,
            dict(zip(ranks, said.nodes, strict=False)),
        )  # fmt: skip


def explained(folder: Path) -> str:
    """The sentence; empty if no rank wrote anything.

    Raises:
        BurstError: if there is no such folder.
    """
    if not os.path.isdir(folder):
        raise BurstError(
            "doctor: --explain must name the folder of MEGATRON_BURST_FAULTS, because ranks wrote "
            f"there what they waited for; got {folder}, which is none; correct it"
        )
    lines = _first_of_each([*_read(folder)])
    if not lines:
        return ""
    first = _root(lines)
    if first is None:
        return f"ranks made different calls: {_got(min(lines, key=lambda line: line.began))}"
    nodes = {rank: node for line in reversed(lines) for rank, node in line.nodes.items()}
    return f"{_named(first, nodes)} {_did(first, lines)}{_others(first, lines, nodes)}"


def _read(folder: Path) -> Iterator[Line]:
    for path in sorted(folder.glob("*.jsonl")):
        why = "ranks wrote there what they waited for"
        reader = Reader("doctor", str(path), why, "name another folder", most=_MOST)
        whole = reader.text(errors="replace") if path.is_file() else ""
        for text in filter(str.strip, whole.splitlines()):
            with suppress(BurstError, IndexError):  # a process ended as it wrote
                yield Line.of(reader.typed(_Written, reader.json(text), closed=False))


def _first_of_each(lines: Sequence[Line]) -> list[Line]:
    """What each rank wrote first: later ones follow from it."""
    found: dict[int, Line] = {}
    for line in sorted(lines, key=lambda line: line.began):
        found.setdefault(line.rank, line)
    return list(found.values())


def _root(lines: Sequence[Line]) -> int | None:
    """The rank at which chains of waiting ranks end; of several, the one that most lead to among
    the earliest. None if ranks do not wait, but differ."""
    by_rank, last = {line.rank: line for line in lines}, dict[int, int]()
    ends: list[tuple[int, float]] = []
    for line in lines:
        rank = _end(line.rank, by_rank, last)
        if rank != line.rank or line.what == "failure" or rank in line.culprits:
            ends.append((rank, line.began))
    if not ends:
        return None
    counts, began = Counter(rank for rank, _ in ends), {}
    for rank, when in ends:
        began[rank] = min(when, began.get(rank, when))
    return min(counts, key=lambda rank: (round(began[rank]), -counts[rank]))


def _end(rank: int, by_rank: Mapping[int, Line], last: dict[int, int]) -> int:
    """Where the chain from a rank ends: at one that waits for nobody, or where it closes; `last`:
    the ends that are known, to which those of the chain are added."""
    chain: dict[int, int] = {}  # ranks: their places
    while rank not in last and rank not in chain:
        chain[rank] = len(chain)
        culprits = by_rank[rank].culprits if rank in by_rank else ()
        rank = next((each for each in culprits if each != rank), rank)
    closes = chain.get(rank, len(chain))
    end = last.get(rank, rank)
    last |= {each: end if place < closes else each for each, place in chain.items()}
    return next((last[each] for each in chain), end)


def _named(rank: int, nodes: Mapping[int, int]) -> str:
    return f"rank {rank} on node {nodes[rank]}" if rank in nodes else f"rank {rank}"


def _did(first: int, lines: Sequence[Line]) -> str:
    """What the first rank did, or did not."""
    own = next((line for line in lines if line.rank == first), None)
    if own and own.what == "failure":
        return f"failed in {_where(own)}: {excerpt(own.error.partition(_LINE)[0], 500)}"
    waiting = [line for line in lines if line.what in _WAITING and first in line.culprits]
    direct = [line for line in waiting if first in line.waits.peers] or waiting
    if not direct:
        told = next(line for line in lines if first in line.culprits)
        return f"failed: {_got(told)}"
    line = min(direct, key=lambda line: (line.waits.number, line.waits.step))
    if own and own.waits.broken:
        return f"lost its connections in {_where(line)}"
    return f"never {'started' if line.waits.step else 'began'} {_where(line)}"


def _where(line: Line) -> str:
    waits = line.waits
    step = f"step {waits.step} of " if waits.step else ""
    layer = f"layer {waits.layer}" if waits.layer else f"pass {waits.number}"
    return f"{step}{layer}, {waits.what}"


def _got(line: Line) -> str:
    return excerpt(line.error.partition("; got ")[2].partition("; ")[0] or line.error, 500)


def _others(first: int, lines: Sequence[Line], nodes: Mapping[int, int]) -> str:
    """Who waited for it, and where first."""
    waiting = [line for line in lines if line.what in _WAITING and line.rank != first]
    if not waiting:
        return ""
    waiting.sort(key=lambda line: (line.began, line.rank))
    line = waiting[0]
    hop, named = "", [_named(each.rank, nodes) for each in waiting]
    if line.what == "hop":
        waits = line.waits
        hop = f" ({waits.link} {waits.cargo} hop, {in_unit(waits.num_bytes)})"
    return f"; ranks that waited: {few(named)}{hop}"
