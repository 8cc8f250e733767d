"""All-to-all: each rank of a node computes all rows of the node for some heads.

A round is a group of KV heads with the query heads that use them, sharded over the ranks. Their Q,
K and V go to the rank that computes them, and results come back. While a round is computed, the
next one's tensors arrive and the last one's results leave, issued behind the kernels that hide it.
Every pair of ranks trades 1/L of a shard, so fewer bytes are sent than with gathered keys unless
heads are grouped; kernel calls are as long as possible, and no gradient is a sum over ranks.

If the ranks do not divide the KV heads, for example if there are fewer heads than ranks, each KV
head goes to several ranks, which share its query heads; the rank that holds the rows sums their
gradients of it. Rounds count heads with these copies.

On several nodes, what was received circulates between nodes (`inter_node`): K and V of a rank's
heads, or in backward its queries. In a flat topology all ranks take part in one all-to-all and
nothing circulates.

Source: Ulysses (arXiv 2309.14509), here in rounds.
"""

from megatron_burst.schedule.a2a_rounds import AllToAllEmitter
from megatron_burst.schedule.a2a_transfers import Results, RoundSides, Wholes
from megatron_burst.schedule.emitter import Gradients, Outputs, Sinks, restored, seen, sums_of
from megatron_burst.schedule.inter_node import Circulating, sums, whole_halo
from megatron_burst.schedule.mask import Span, check_mask, cut
from megatron_burst.schedule.program import (
    AttendBackward,
    Copy,
    Program,
    Ref,
    Stream,
    dkv_fields,
    dq_fields,
    kv_fields,
    travelling_side_fields,
)
from megatron_burst.schedule.spec import Circulate, Spec


def a2a(spec: Spec) -> Program:
    """The program of one rank.

    Raises:
        BurstError: if the heads cannot be sharded evenly, or the layout is striped.
    """
    check_mask(spec.mask, spec.layout, "a2a", spec.topology.inter_size == 1)
    emitter = _AllToAll(spec)
    (emitter.backward if spec.backward else emitter.forward)()
    return emitter.program()


class _AllToAll(AllToAllEmitter):
    def forward(self) -> None:
        there, back = Wholes(self), Results(self)
        keys = self.circulating_keys(there)
        for index, step in enumerate(self.order):
            if step.first:
                q, own = there.of(step.round), there.keys(step.round)
                lse = self.lse(step.round)
                tiles = self.tiles_of_round(step.round)
                results = back.of(step.round)
                name, sinks = f"round {step.round}", Sinks(tiles, self.own_heads(step.round))
                outputs = Outputs(self, name, tiles, sinks, q, lse, results)
            if keys:
                keys.set_out(index)
                keys.pass_on(index)
            kv = keys.piece(step.round, step.distance) if keys and step.distance else own
            if self.reorders:
                kv = seen(self, f"{index}", kv, self.met[index], self.heads_of(step.round)[1])
            for tile in self.tiles[index]:
                outputs.compute(tile, kv)
            if step.first:
                there.post(step.round + 1)
            if step.last:  # in front of operations that wait for the kernels
                back.collect(Stream.SIDE)
                there.arrive(step.round + 1)
                outputs.merge()
                self.emit(Copy((lse,), results))
                back.post(step.round)
        back.collect()

    def circulating_keys(self, there: Wholes) -> Circulating | None:
        if self.alone or (self.spec.backward and self.spec.circulate is Circulate.Q):
            return None
        return Circulating(
            self, self.order, lambda round_: (there.keys(round_),),
            lambda round_: kv_fields(self.heads_of(round_)[1], self.spec.shape),
            whole_halo(self, self.rows_kv),
        )  # fmt: skip

    def circulating_queries(self, sides: RoundSides) -> Circulating | None:
        if self.alone or self.spec.circulate is Circulate.KV:
            return None
        return Circulating(
            self, self.order, sides.bare,
            lambda round_: travelling_side_fields(self.heads_of(round_)[0], self.spec.shape),
            whole_halo(self, self.rows),
        )  # fmt: skip

    def backward(self) -> None:
        there = Wholes(self)
        back, sides = Results(self), RoundSides(self, there)
        keys, queries = self.circulating_keys(there), self.circulating_queries(sides)
        of_queries, of_keys = self.sums_of_both(back)
        for index, step in enumerate(self.order):
            if self.alone:
                self.compute_alone(index, there, back, sides)
                continue
            there.arrive(step.round)
            for circulating in (keys, queries):
                if circulating:
                    circulating.set_out(index)
                    circulating.pass_on(index)
            visits = step.distance > 0
            side = sides.of(step.round)
            if visits and queries:
                side = self.side_for_kernel(queries.piece(step.round, step.distance))
            kv = there.keys(step.round)
            if visits and keys:
                kv = keys.piece(step.round, step.distance)
            both = self.compute(index, side, kv)
            if step.first:
                there.post(step.round + 1)
            if step.last:
                there.arrive(step.round + 1)
            travelling, local = (of_keys, of_queries) if keys else (of_queries, of_keys)
            of_both = reversed(both) if keys else both
            # gradients returned to this node go to their owners before the next round's results
            first, second = of_both
            travelling.add(index, first)
            back.post(*travelling.come_home(index))
            local.add(index, second)
        if not self.alone:
            travelling = of_keys if keys else of_queries
            back.post(*travelling.come_home(len(self.order)))
        back.collect()

    def sums_of_both(self, back: Results) -> tuple:
        shape = self.spec.shape
        return (
            sums(self, self.order, False, back.of,
                 lambda r, dtype: dq_fields(self.heads_of(r)[0], shape, dtype), self.rows),
            sums(self, self.order, True, back.of_keys,
                 lambda r, dtype: dkv_fields(self.heads_of(r)[1], shape, dtype), self.rows_kv),
        )  # fmt: skip

    def compute_alone(self, index: int, there: Wholes, back: Results, sides: RoundSides) -> None:
        """A round on one node: one tile, whose results are sent back at once."""
        round_, (tile,) = self.order[index].round, self.tiles[index]
        into = back.of(round_), back.of_keys(round_)
        side, kv = sides.of(round_), there.keys(round_)
        # behind this kernel are those that convert its sums: what they hold up is issued before
        there.post(round_ + 1)
        self.emit(AttendBackward(side, kv, tile.mask, *into, tile.places))
        there.arrive(round_ + 1)
        back.post(round_)

    def compute(self, index: int, side: tuple[Ref, ...], kv: Ref) -> tuple[list, list]:
        """Compute a step's tiles; returns gradients to sum: of queries, and of keys."""
        tiles, heads = self.tiles[index], self.heads_of(self.order[index].round)
        grads = Gradients(self, f"{index}", tiles, side, None, heads, self.rows)
        if self.reorders:
            met, name = self.met[index], f"{index}"
            made = grads.compute(met.tile, seen(self, name, kv, met, heads[1]))
            return grads.sums(), [
                (Span(0, self.rows), (restored(self, name, made, met, heads[1]),))
            ]
        parts = [(tile.kv, grads.compute(tile, kv)) for tile in tiles]
        of_keys = sums_of(parts, cut((seen for seen, _ in parts), self.rows_kv))
        return grads.sums(), of_keys
