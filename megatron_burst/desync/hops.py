"""For what a rank waits, and for whom all wait in the end; loaded when something takes long.

Ranks that wait for half of their time-out post in the store for whom. So a rank that gives up can
follow who waits for whom, to the ranks that wait for nobody: these stopped the others.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_burst.comm.stamps import Members, PendingPass, RunningPass
from megatron_burst.schedule.program import Transfer
from megatron_burst.schedule.topology import Link


@dataclass(frozen=True, slots=True)
class Waits:
    """What a rank waits for; ranks are cp ranks."""

    number: int  # of the pass
    what: str  # kind of the pass, in a word
    layer: int  # the caller's number; 0 if it gave none
    peers: tuple[int, ...]  # for whom it waits
    step: int = 0  # of the rank's program, from 1; 0: for the others' stamps, before the first
    steps: int = 0  # of the program
    # of the transfer:
    link: str = ""
    cargo: str = ""
    num_bytes: int = 0  # that these peers send, or receive
    broken: bool = False  # whether the connections to these are
    since: float = field(default=0.0, compare=False)  # when the wait began, in seconds since 1970

    @classmethod
    def at(cls, begun: Members | PendingPass) -> "Waits":
        """In this pass, or in a rank's latest one, for nobody yet."""
        return cls(begun.number, begun.stamp.word, begun.stamp.layer, ())

    @classmethod
    def of(cls, words: Mapping[str, Any]) -> "Waits":
        """Of JSON."""
        return cls(**{**words, "peers": tuple(words["peers"])})


def awaited_hop(log: Members) -> Waits | None:
    """The first hop that the rank's latest passes wait for; None if they wait for none.

    Passes whose transfers are over are forgotten.
    """
    while log.runs:
        hop = _hop_of(log.runs[0])
        if hop or len(log.runs) == 1:
            return hop
        with suppress(IndexError):  # the thread of the passes may add one
            log.runs.popleft()
    return None


def _hop_of(run: RunningPass) -> Waits | None:
    """A transfer that others must take part in, and for which nothing on this rank is left."""
    over = [getattr(handle, "what", handle) for handle in run.handles]  # a clock has others
    count = len(run.program.ops)
    if len(over) <= count or not over[count].query():
        return None
    for index, (op, handle) in enumerate(zip(run.program.ops, over, strict=False)):
        under_way = isinstance(op, Transfer) and handle is not None and not handle.query()
        if under_way and all(over[earlier].query() for earlier in run.waits[index]):
            return _waits(run, index, getattr(handle, "waiting_for", None))
    return None


def issued_hop(log: Members) -> Waits | None:
    """The transfer that the latest pass could not start."""
    for run in [*log.runs][-1:]:
        for index, (op, handle) in enumerate(zip(run.program.ops, [*run.handles], strict=False)):
            if isinstance(op, Transfer) and handle is None:
                return _waits(run, index, None)
    return None


def _waits(run: RunningPass, index: int, peer: int | None) -> Waits:
    program, op = run.program, run.program.ops[index]
    peers = dict.fromkeys(end.peer for end in (*op.recvs, *op.sends))
    peers = (peer,) if peer is not None else tuple(peers)
    ends = [end for end in op.recvs if end.peer in peers] or op.sends
    links = {program.topology.link(program.cp_rank, peer_rank) for peer_rank in peers}
    return Waits(
        run.number, run.stamp.word, run.stamp.layer, peers, index + 1, len(program.ops),
        Link.INTER if Link.INTER in links else Link.INTRA, op.cargo,
        run.unit * sum(program.num_bytes(end.rows) for end in ends if end.peer in peers),
    )  # fmt: skip


# ---- what others wait for ----


def tell(log: Members, waits: Waits | None) -> None:
    """Post what this rank waits for, or that it waits no more."""
    key = f"{log.name}/waits/{log.rank}"
    with suppress(RuntimeError):  # the store may be gone, with the rank that keeps it
        log.store.set(key, json.dumps(asdict(waits))) if waits else log.store.delete_key(key)


def culprits(log: Members, waits: Waits) -> list[int]:
    """The ranks for which this one waits in the end, as far as others say; tells them of it."""
    tell(log, waits)
    posts = {}
    with suppress(RuntimeError):
        for rank in range(log.size):
            key = f"{log.name}/waits/{rank}"
            # empty: deleted in between, as that rank waits no more
            if log.store.check([key]) and (text := log.store.get(key)):
                posts[rank] = Waits.of(json.loads(text))
    return ends_of(waits.peers, posts | {log.rank: waits}, log.size)


def ends_of(peers: Iterable[int], posts: Mapping[int, Waits], size: int) -> list[int]:
    """Who stops ranks that wait, of `size` in all: whose connections broke, else where chains of
    waiting ranks end that begin with `peers`; if they wait in a circle, who came last."""
    if any(post.broken for post in posts.values()):
        return _apart(posts, size)
    seen, ranks = set[int](), {*peers}
    while ranks - seen:
        seen |= ranks
        ranks = {peer for rank in ranks & posts.keys() for peer in posts[rank].peers}
    ends = sorted(seen - posts.keys())
    return ends or [max(seen, key=lambda rank: posts[rank].since)] if seen else []


def _apart(posts: Mapping[int, Waits], size: int) -> list[int]:
    """The ranks to which most connections are broken, of several those that say nothing. A rank
    that lost all of its connections is itself apart, unless others miss another one."""
    broken = {rank: post.peers for rank, post in posts.items() if post.broken}
    missed = [peer for peers in broken.values() if len(peers) < size - 1 for peer in peers]
    ranks = {*broken, *(peer for peers in broken.values() for peer in peers)}
    counts = Counter(missed or (broken if size > 2 else ranks))
    most = [rank for rank, count in counts.items() if count == max(counts.values())]
    return sorted([rank for rank in most if rank not in posts] or most)


def named_ranks(log: Members, ranks: Sequence[int]) -> str:
    """ "cp ranks [13] (rank 29 on node 1)"."""
    world = log.ranks
    nodes = [f" on node {log.nodes[rank]}" if log.nodes else "" for rank in ranks]
    where = [f"rank {world[rank]}{node}" for rank, node in zip(ranks, nodes, strict=True)]
    return f"{log.parallel_kind.rank}s {[*ranks]} ({', '.join(where)})"
