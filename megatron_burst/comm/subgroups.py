"""Process groups of some ranks of a group, which its communicators share."""

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_burst.comm.backend import backend_of, set_seconds
from megatron_burst.comm.symmetric import SymmetricPool
from megatron_burst.comm.watch import Board
from megatron_burst.schedule.call import Cargo
from megatron_burst.schedule.topology import Link

_WHO = "burst attention"
_CONNECT_S = 60  # within which ranks must reach each other over gloo
type Names = tuple[Link, Cargo]
# The one cache here: up to which number groups have names, as long as the default group lives.
_MOST: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


class SubGroups:
    """The sub-groups of a group: one for equal ranks, cargo and thread blocks.

    Making one takes up to seconds, so configurations share them. They wait as long as the group's
    board; torch keeps them until all groups are destroyed.

    Args:
        group: all the ranks.
        board: where they agree.

    Attributes:
        pools: the symmetric memory of sub-groups, by name.
    """

    def __init__(self, group: dist.ProcessGroup, board: Board) -> None:
        self._ranks, self._backend = dist.get_process_group_ranks(group), backend_of(group)
        self._board = board
        self._made: dict[tuple, dist.ProcessGroup] = {}
        self._beside: dist.ProcessGroup | None = None
        self._timeout_s = 0.0
        self.pools: dict[str, SymmetricPool] = {}

    def of(
        self, wanted: Mapping[Names, Sequence[int]], ctas: int | None
    ) -> dict[Names, dist.ProcessGroup]:
        """Sub-groups of this rank by name; all ranks of the group together.

        Args:
            wanted: their cp ranks.
            ctas: most thread blocks of a transfer; None leaves it to NCCL.
        """
        keys = {name: (*sorted(ranks), name[1], ctas) for name, ranks in wanted.items()}
        names = list(wanted)
        lacking = [place for place, name in enumerate(names) if keys[name] not in self._made]
        for place in self._level(lacking):
            self._made[keys[names[place]]] = self._new(wanted[names[place]], ctas)
        return {name: self._made[key] for name, key in keys.items()}

    def beside(self) -> dist.ProcessGroup:
        """A gloo group of all ranks, for what passes by the GPUs; all ranks together.

        It waits twice as long as others: what gloo says of it names no ranks.
        """
        self._level([0])
        self._beside = dist.new_group(
            self._ranks,
            timeout=timedelta(seconds=_CONNECT_S),
            backend="gloo",
            use_local_synchronization=True,
        )
        set_seconds(self._beside, 2 * self._board.timeout_s)
        return self._beside

    def _level(self, lacking: Sequence[int]) -> list[int]:
        """Let all ranks know of equally many process groups; what any of them lacks.

        torch counts them into the name under which the members of a locally synchronised group
        find each other (distributed_c10d.py, _hash_ranks_to_str); with unequal counts they hang.
        """
        known, default = len(distributed_c10d._world.pg_names), dist.group.WORLD
        # a number that was used, before a group was destroyed, would give two groups one name
        used = max(known, _MOST.get(default, 0))
        mine = json.dumps({"process groups": used, "lacking": lacking})
        everyones = [json.loads(text) for text in self._board.share(mine, _WHO)]
        missing = sorted({place for theirs in everyones for place in theirs["lacking"]})
        most = max(theirs["process groups"] for theirs in everyones)
        for _ in range(most - known if missing else 0):
            dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        _MOST[default] = most + len(missing)
        return missing

    def _new(self, cp_ranks: Sequence[int], ctas: int | None) -> dist.ProcessGroup:
        """A new group of some of the ranks; only its members take part in making it."""
        options = None
        if self._backend == "nccl":
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            if ctas is not None:
                options.config.max_ctas = options.config.min_ctas = ctas
        return dist.new_group(
            [self._ranks[rank] for rank in cp_ranks],
            timeout=timedelta(seconds=self._timeout_s),
            backend=self._backend,
            pg_options=options,
            use_local_synchronization=True,
        )

    def follow(self) -> None:
        """Wait as long as the board does: what the user gave, or the group's time-out now."""
        if self._timeout_s != self._board.timeout_s:
            self._timeout_s = self._board.timeout_s
            for group in self._made.values():
                set_seconds(group, self._timeout_s)
            if self._beside is not None:
                set_seconds(self._beside, 2 * self._timeout_s)

    def release(self) -> None:
        """Give symmetric memory back; all ranks together."""
        for pool in self.pools.values():
            pool.release()

    @property
    def symmetric_bytes(self) -> int:
        """Device memory that torch's caching allocator knows nothing of."""
        return sum(pool.num_bytes for pool in self.pools.values())
