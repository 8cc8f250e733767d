"""A gather schedule as operations, in the order of `engine/gather.py`."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_burst.plan.cost import AttentionShape
from megatron_burst.plan.gather import GatherSchedule
from megatron_burst.plan.kernel_time import Timer
from megatron_burst.plan.mask import Tile, cut, is_alone
from megatron_burst.plan.operations import Compute, Op, Post, Wait, part_of_heads, tile_runner
from megatron_burst.plan.programme_relay import Relayed, carried
from megatron_burst.plan.schedule import Direction
from megatron_burst.plan.topology import Link


def gather_operations(
    schedule: GatherSchedule,
    shape: AttentionShape,
    timer: Timer,
    direction: Direction,
    pulled: bool,
) -> tuple[Op, ...]:
    """The operations of a rank that gathers; arguments as in `programme_of`."""
    programme = _Gather(schedule, shape, timer, pulled, Relayed(schedule, shape, timer))
    return tuple(programme.forward() if direction is Direction.FORWARD else programme.backward())


@dataclass(frozen=True, slots=True)
class _Gather:
    schedule: GatherSchedule
    shape: AttentionShape
    timer: Timer
    pulled: bool
    relayed: Relayed

    def forward(self) -> list[Op]:
        ops = self._prepare(0)
        run = tile_runner(self.timer, self.shape, Direction.FORWARD)
        for index, step in enumerate(self.schedule.steps):
            heads = len(step.heads)
            ops += [Compute(run(step.before, heads), index), *self._land(index)]
            ops += self._prepare(index + 1)
            ops.append(Compute(run(step.tiles, heads), index))
            if self.schedule.relay.is_last(index):
                tiles, shape = self.schedule.tiles_of_round(index), part_of_heads(self.shape, heads)
                merged = merged_rows(tiles, shape.tokens) * shape.batch * shape.heads_q
                work = self.timer.memory(merged * shape.dim_v * shape.itemsize)
                ops.append(Compute((("merge", work),), index))
        return ops

    def backward(self) -> list[Op]:
        ops = self._prepare(0)
        run = tile_runner(self.timer, self.shape, Direction.BACKWARD)
        for index, step in enumerate(self.schedule.steps):
            heads = len(step.heads)
            leave = self._sum_keys_beside(index - 1)  # behind the kernels that are queued before it
            early, late = (leave, []) if step.before else ([], leave)
            ops += [Compute(run(step.before, heads), index), *early, *self._land(index)]
            ops += self._prepare(index + 1)
            ops += [Compute(run(step.tiles, heads), index), *late]
            ops += self._settle_keys(index - 1)
            ops += [self._leave(index), Compute(run(step.after, heads), index)]
            ops += self._sum_queries(index)
        return ops + self._sum_keys(len(self.schedule.steps) - 1) + self.relayed.finish()

    def _begins(self, index: int) -> bool:
        """Whether a step is the first that uses its gather."""
        steps = self.schedule.steps
        return index == 0 or steps[index].gather != steps[index - 1].gather

    def _prepare(self, index: int) -> list[Op]:
        """Let the visitor of a step come, gather its keys, send on what goes on."""
        if index >= len(self.schedule.steps):
            return []
        ops = self.relayed.set_out(index)
        if self._begins(index):
            row = self._row_bytes(index)
            pieces = self.schedule.reads[self.schedule.steps[index].gather][self.schedule.cp_rank]
            come = sum(len(piece.rows) for piece in pieces) * row
            copy = self.timer.memory(2 * self.shape.tokens * row)
            ops.append(Compute((("copy", copy),), index))
            ops.append(self._post(("read", index), come, self.relayed.landing(index)))
        return ops + self.relayed.pass_on(index)

    def _land(self, index: int) -> list[Op]:
        gathered = [Wait(("read", index))] if self._begins(index) else []
        return [*self.relayed.await_visitor(index), *gathered]

    def _leave(self, index: int) -> Post:
        come = self.schedule.steps[index].arriving_rows * self._row_bytes(index)
        return self._post(("grad", index), come)

    def _post(self, key: tuple, num_bytes: float, after: tuple[tuple, ...] = ()) -> Post:
        row, _ = self.schedule.topology.coord(self.schedule.cp_rank)
        ranks = self.schedule.topology.grid[row]
        return carried(key, Link.INTRA, num_bytes, ranks, self.pulled, after)

    def _row_bytes(self, index: int) -> int:
        """Of a row of a step's keys and values, or of their gradients inside the host."""
        shape, heads = self.shape, len(self.schedule.steps[index].heads)
        return shape.batch * heads * (shape.dim_qk + shape.dim_v) * shape.itemsize

    def _sum_keys(self, index: int) -> list[Op]:
        """Wait for the gradients of a step and add them to this rank's own."""
        return [Wait(("grad", index)), *self.relayed.add(index, True, self._summed_bytes(index))]

    def _sum_keys_beside(self, index: int) -> list[Op]:
        """The same for sums that travel on: formed beside the kernels that follow."""
        if index < 0 or not self.relayed.travels(of_keys=True):
            return []
        return self.relayed.add_beside(index, self._summed_bytes(index), ("grad", index))

    def _settle_keys(self, index: int) -> list[Op]:
        """Behind these kernels: wait for the sums beside them, or form those that stay."""
        if index < 0:
            return []
        if not self.relayed.travels(of_keys=True):
            return self._sum_keys(index)
        return [Wait(("grad", index)), *self.relayed.settle(index)]

    def _summed_bytes(self, index: int) -> int:
        """Of the gradients that others and this rank itself have computed of its keys."""
        rows = self.schedule.steps[index].arriving_rows + self.shape.tokens
        return rows * self._row_bytes(index)

    def _sum_queries(self, index: int) -> list[Op]:
        """Add up the dq of a step's tiles."""
        step, shape = self.schedule.steps[index], self.shape
        heads_q = len(step.heads) * shape.heads_q // shape.heads_kv
        width = shape.batch * heads_q * shape.dim_qk
        if self.relayed.alone:  # rows that have one tile only are written in place
            rows = merged_rows(step.every_tile, shape.tokens)
            work = self.timer.memory(rows * width * shape.itemsize)
            return [Compute((("merge", work),), index)]
        parts = sum(len(tile.q) for tile in step.every_tile)
        return self.relayed.add(index, False, parts * width * shape.itemsize)


def merged_rows(tiles: Sequence[Tile], tokens: int) -> int:
    """Rows that are read and written to join the parts of rows that have several tiles."""
    rows = 0
    for span in cut((tile.q for tile in tiles), tokens):
        parts = sum(tile.q.holds(span) for tile in tiles if not is_alone(tile, tiles))
        rows += (parts + 1) * len(span) if parts else 0
    return rows
