"""One sentence from the lines that ranks wrote when passes failed: which rank stopped the others.

A rank that stops makes those that wait for it give up, and then those that wait for these. Every
line says for whom its rank waited; who is waited for, and did not itself wait, is the first.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_burst.errors import BurstError
from megatron_burst.rules import in_unit
from megatron_burst.tools.doctor.report import few

_WAITING = "hop", "pass"


@dataclass(frozen=True, slots=True)
class Line:
    """What a rank wrote; ranks are those of the job.

    Attributes:
        rank: who wrote it.
        what: "hop" or "pass" that it gave up; "failure" of its own or "failure of others";
            "difference" of calls; "heard", from a rank that gave up.
        began: when, in seconds since 1970: of a wait, its begin.
        culprits: for whom it waited in the end, or who failed.
        waits: as in `comm.hops.Waits`, with ranks of the group.
        error: the sentence that the user saw.
        nodes: of the group's ranks, if known.
    """

    rank: int
    what: str
    began: float
    culprits: tuple[int, ...]
    waits: Mapping[str, Any]
    error: str
    nodes: Mapping[int, int]

    @classmethod
    def of(cls, text: str) -> "Line":
        """Of a line of a file."""
        words = json.loads(text)
        ranks, waits = words["ranks"], words["waits"]
        return cls(
            words["rank"], words["what"], waits["since"] or words["time"],
            tuple(ranks[each] for each in words["culprits"]),
            waits | {"peers": [ranks[each] for each in waits["peers"]]}, words["error"],
            dict(zip(ranks, words["nodes"], strict=False)),
        )  # fmt: skip


def explained(folder: Path) -> str:
    """The sentence; empty if no rank wrote anything.

    Raises:
        BurstError: if there is no such folder.
    """
    if not folder.is_dir():
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
    return f"{_named(first, lines)} {_did(first, lines)}{_others(first, lines)}"


def _read(folder: Path) -> Iterator[Line]:
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                yield Line.of(text)
            except (ValueError, KeyError, TypeError, IndexError):  # a process ended as it wrote
                continue


def _first_of_each(lines: Sequence[Line]) -> list[Line]:
    """What each rank wrote first: later ones follow from it."""
    found: dict[int, Line] = {}
    for line in sorted(lines, key=lambda line: line.began):
        found.setdefault(line.rank, line)
    return list(found.values())


def _root(lines: Sequence[Line]) -> int | None:
    """The rank at which chains of waiting ranks end; of several, the one that most lead to among
    the earliest. None if ranks do not wait, but differ."""
    by_rank = {line.rank: line for line in lines}
    ends: list[tuple[int, float]] = []
    for line in lines:
        rank, seen = line.rank, set()
        while rank in by_rank and rank not in seen:
            seen.add(rank)
            nexts = [each for each in by_rank[rank].culprits if each != rank]
            if not nexts:
                break
            rank = nexts[0]
        if rank != line.rank or line.what == "failure" or rank in line.culprits:
            ends.append((rank, line.began))
    if not ends:
        return None
    counts, began = Counter(rank for rank, _ in ends), {}
    for rank, when in ends:
        began[rank] = min(when, began.get(rank, when))
    return min(counts, key=lambda rank: (round(began[rank]), -counts[rank]))


def _named(rank: int, lines: Sequence[Line]) -> str:
    node = next((line.nodes[rank] for line in lines if rank in line.nodes), None)
    return f"rank {rank}" if node is None else f"rank {rank} on node {node}"


def _did(first: int, lines: Sequence[Line]) -> str:
    """What the first rank did, or did not."""
    own = next((line for line in lines if line.rank == first), None)
    if own and own.what == "failure":
        return f"failed in {_where(own)}: {own.error.splitlines()[0]}"
    waiting = [line for line in lines if line.what in _WAITING and first in line.culprits]
    direct = [line for line in waiting if first in line.waits["peers"]] or waiting
    if not direct:
        told = next(line for line in lines if first in line.culprits)
        return f"failed: {_got(told)}"
    line = min(direct, key=lambda line: (line.waits["number"], line.waits["step"]))
    if own and own.waits["broken"]:
        return f"lost its connections in {_where(line)}"
    return f"never {'started' if line.waits['step'] else 'began'} {_where(line)}"


def _where(line: Line) -> str:
    waits = line.waits
    step = f"step {waits['step']} of " if waits["step"] else ""
    layer = f"layer {waits['layer']}" if waits["layer"] else f"pass {waits['number']}"
    return f"{step}{layer}, {waits['what']}"


def _got(line: Line) -> str:
    return line.error.partition("; got ")[2].partition("; ")[0] or line.error


def _others(first: int, lines: Sequence[Line]) -> str:
    """Who waited for it, and where first."""
    waiting = [line for line in lines if line.what in _WAITING and line.rank != first]
    if not waiting:
        return ""
    waiting.sort(key=lambda line: (line.began, line.rank))
    line = waiting[0]
    hop, named = "", [_named(each.rank, lines) for each in waiting]
    if line.what == "hop":
        waits = line.waits
        hop = f" ({waits['link']} {waits['cargo']} hop, {in_unit(waits['num_bytes'])})"
    return f"; ranks that waited: {few(named)}{hop}"
