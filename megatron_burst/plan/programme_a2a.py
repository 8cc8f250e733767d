"""A schedule that exchanges heads as operations, in the order of `engine/a2a.py`."""

from collections.abc import Callable
from dataclasses import dataclass

from megatron_burst.plan.a2a import A2ASchedule
from megatron_burst.plan.cost import AttentionShape, exchange_shares, exchange_widths
from megatron_burst.plan.kernel_time import Timer
from megatron_burst.plan.operations import Compute, Op, Wait, part_of_heads, tile_runner
from megatron_burst.plan.programme_gather import merged_rows
from megatron_burst.plan.programme_relay import Relayed, carried
from megatron_burst.plan.schedule import Circulate, Direction


def a2a_operations(
    schedule: A2ASchedule, shape: AttentionShape, timer: Timer, pulled: bool, again: bool
) -> tuple[Op, ...]:
    """The operations of a rank that exchanges heads; arguments as in `programme_of`."""
    relayed, run = Relayed(schedule, shape, timer), tile_runner(timer, shape, schedule.direction)
    programme = _Exchange(schedule, shape, timer, pulled, again, relayed, run)
    return tuple(programme.operations())


@dataclass(frozen=True, slots=True)
class _Exchange:
    schedule: A2ASchedule
    shape: AttentionShape
    timer: Timer
    pulled: bool
    again: bool
    relayed: Relayed
    run: Callable

    def operations(self) -> list[Op]:
        relay = self.schedule.relay
        sent: list[int] = []  # the round whose results are under way, if one is
        ops = self._post("there", 0)
        for index, leg in enumerate(relay.legs):
            if relay.is_first(index):
                ops += self._wait("there", leg.round)
                ops += self._post("there", leg.round + 1)
            ops += self.relayed.set_out(index, self._before_own(index))
            ops += self.relayed.pass_on(index)
            ops += [*self.relayed.await_visitor(index), self._attention(index)]
            backward = self.schedule.direction is Direction.BACKWARD
            if backward and not self.relayed.alone:
                ops += self._sum(index, sent)
            elif relay.is_last(index):
                ops += self._merge(index) + self._send_back(leg.round, sent)
        if not self.relayed.alone:
            ops += self.relayed.finish() + self._send_home(len(relay.legs), sent)
        return ops + self._collect(sent)

    def _before_own(self, index: int) -> tuple[tuple, ...]:
        """What a rank's own piece waits for before it sets out: nothing, if forward left it."""
        schedule = self.schedule
        backward = schedule.direction is Direction.BACKWARD
        if backward and schedule.circulate is Circulate.KV and not self.again:
            return ()
        return tuple(wait.key for wait in self._wait("there", self._own_round(index)))

    def _own_round(self, index: int) -> int:
        """The round whose own piece sets out in a step."""
        mine = self.schedule.cp_rank
        hops = self.schedule.relay.legs[index].reads
        rounds = [hop.round for hop in hops if hop.sends == mine]
        return rounds[0] if rounds else self.schedule.relay.legs[index].round

    def _num_bytes(self, what: str, round_: int) -> float:
        width = exchange_widths(self.shape, self.again)[self.schedule.direction][what == "back"]
        heads = len(self.schedule.rounds[round_]) / self.shape.heads_kv
        return heads * self.shape.batch * self.shape.tokens * width

    def _post(self, what: str, round_: int) -> list[Op]:
        if round_ >= len(self.schedule.rounds):
            return []
        num_bytes = self._num_bytes(what, round_)
        posts: list[Op] = [
            carried((what, round_, link), link, share * num_bytes, self.schedule.ranks, self.pulled)
            for link, share in exchange_shares(self.schedule).items()
        ]
        if what == "back":
            return posts
        copy = self.timer.memory(2 * num_bytes)
        return [Compute((("copy", copy),), round_), *posts]

    def _wait(self, what: str, round_: int) -> list[Wait]:
        return [Wait((what, round_, link)) for link in exchange_shares(self.schedule)]

    def _collect(self, sent: list[int]) -> list[Op]:
        """Wait for the results under way, if any, and put them where they belong."""
        if not sent:
            return []
        round_ = sent.pop()
        copy = self.timer.memory(2 * self._num_bytes("back", round_))
        return [*self._wait("back", round_), Compute((("copy", copy),), round_)]

    def _send_back(self, round_: int, sent: list[int]) -> list[Op]:
        ops = self._collect(sent) + self._post("back", round_)
        sent.append(round_)
        return ops

    def _send_home(self, turn: int, sent: list[int]) -> list[Op]:
        comings = self.schedule.relay.homecomings[turn]
        return [op for coming in comings for op in self._send_back(coming.round, sent)]

    def _heads_kv(self, index: int) -> int:
        """Key heads that a rank computes in a step."""
        heads = self.schedule.rounds[self.schedule.relay.legs[index].round]
        return len(heads) // len(self.schedule.ranks)

    def _heads(self, index: int) -> AttentionShape:
        """The heads that a rank computes in a step."""
        return part_of_heads(self.shape, self._heads_kv(index))

    def _attention(self, index: int) -> Compute:
        return Compute(self.run(self.schedule.tiles[index], self._heads_kv(index)), index)

    def _merge(self, index: int) -> list[Op]:
        """Forward: merge a round's tiles; one tile is where it belongs."""
        shape = self._heads(index)
        rows = merged_rows(self.schedule.tiles_of_round(index), self.schedule.num_rows)
        work = rows * shape.batch * shape.heads_q * shape.dim_v * shape.itemsize
        return [Compute((("merge", self.timer.memory(work)),), index)]

    def _sum(self, index: int, sent: list[int]) -> list[Op]:
        """Backward: add up a step's gradients, those that travel first."""
        shape, tiles = self._heads(index), self.schedule.tiles[index]
        queries = sum(len(tile.q) for tile in tiles) * shape.heads_q * shape.dim_qk
        keys = sum(len(tile.kv) for tile in tiles) * shape.heads_kv
        keys *= shape.dim_qk + shape.dim_v
        read = {
            of_keys: n * shape.batch * shape.itemsize for of_keys, n in ((0, queries), (1, keys))
        }
        first = self.relayed.travels(True)
        ops = self.relayed.add(index, first, read[first]) + self._send_home(index, sent)
        return ops + self.relayed.add(index, not first, read[not first])
