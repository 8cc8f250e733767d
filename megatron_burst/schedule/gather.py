"""Gathering: every rank of a node gets the keys of all, a few heads at a time.

A round is a group of KV heads. Its keys and values are in sequence order, so whatever a rank's
queries may see is one range of rows. While a step is computed, the next step's keys arrive, and the
previous step's key gradients go to the ranks that hold the keys. The first step has none before it
and, in backward, the last has none after it: there the rank's own diagonal tiles, which need no
other rank, hide the transfer. If gradients go on to other nodes, half of the last step's diagonal
tiles come first: they hide the last such sum.

On one node a round is one step. On several, the other nodes' shards circulate (`inter_node`): K and
V, gathered inside the node in each step; or in backward queries, which meet keys gathered once per
round.
"""

from megatron_burst.schedule.emitter import Gradients, Sum, sums_of
from megatron_burst.schedule.gather_rounds import GatherEmitter, Keys, StepSides
from megatron_burst.schedule.gather_steps import Leaf, gather_steps
from megatron_burst.schedule.inter_node import sums
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Span, Tile, check_mask, cut
from megatron_burst.schedule.pieces import Halo, halo
from megatron_burst.schedule.program import Copy, Field, Give, Home, Program, Ref, Stream, Take
from megatron_burst.schedule.spec import Cargo, Circulate, Spec


def gather(spec: Spec) -> Program:
    """The program of one rank.

    Raises:
        BurstError: if the layout cannot be gathered or cannot hold that many rows.
    """
    check_mask(spec.mask, spec.layout, "gather", spec.topology.inter_size == 1)
    emitter: GatherEmitter
    if spec.layout is Layout.DOCUMENTS:  # most runs never load it
        from megatron_burst.schedule.gather_documents import DocumentGather

        emitter = DocumentGather(spec)
    else:
        emitter = _Gather(spec)
    (emitter.backward if spec.backward else emitter.forward)()
    return emitter.program()


class _Gather(GatherEmitter):
    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.plan = gather_steps(spec, self.order)
        self.tiles = [step.tiles for step in self.plan.steps]
        self.halos = self._halos()
        self.keys = KeysInSequence(self)

    def _halos(self) -> tuple[Halo, ...]:
        """Rows of the circulating keys, by how many nodes away they are from."""
        spec, topology = self.spec, self.spec.topology
        row, column = topology.coord(spec.cp_rank)
        owners = (topology.rank_at(row - away, column) for away in range(topology.inter_size))
        terms = topology, spec.layout, spec.mask, spec.shape.keys
        return tuple(halo(*terms, owner) for owner in owners)

    def backward(self) -> None:
        sides, keys, shares = StepSides(self), self.keys, Shares(self)
        rows = self.spec.shape.tokens
        of_queries = sums(self, self.order, False, self.dq_of, self.dq_fields_of, rows)
        of_keys = KeySums(self, shares)
        sides.prepare(0)
        keys.prepare(0)
        for index, step in enumerate(self.order):
            side, tiles, heads = sides.of(index), self.tiles[index], self.rounds[step.round]
            direct = self.dq_of(step.round) if self.alone else None
            counts, own = (len(self.queries(heads)), len(heads)), self.of_keys("kv", step.round)
            grads = Gradients(self, f"{index}", tiles.every, side, direct, counts, rows)
            of_keys.before(index - 1)
            for tile in tiles.before:
                shares.add_own(index, tile, grads.compute(tile, own))
            if tiles.before:  # they hide the transfer inside the node that the sums wait for
                of_keys.add(index - 1)
            keys.prepare_early(index + 1)
            for tile, share in zip(tiles.gathered, shares.of(index), strict=True):
                grads.compute(tile, keys.of(index), into=share)
            if not tiles.before:
                of_keys.add(index - 1)
            sides.prepare(index + 1)
            keys.prepare_late(index + 1)
            of_keys.come_home(index - 1)
            shares.leave(index)
            for tile in tiles.after:
                shares.add_own(index, tile, grads.compute(tile, own))
            of_queries.add(index, grads.sums())
            of_queries.come_home(index)
        of_queries.come_home(len(self.order))
        of_keys.finish()


class KeysInSequence(Keys):
    """Keys in sequence order; rows that no tile of this rank reads are not fetched, so their
    contents are undefined."""

    def __init__(self, emitter: _Gather) -> None:
        plan = self._plan = emitter.plan
        super().__init__(emitter, emitter.halos, len(plan.reads), plan.num_rows)

    def of(self, index: int) -> Ref:
        return Ref(f"keys {self._plan.gathers[index]}")

    def _is_early(self, index: int) -> bool:
        return self._slots > 1 or index == 0  # a single slot is free after the kernels only

    def _gather(self, index: int) -> None:
        emitter, source, plan = self._emitter, self._source(index), self._plan
        step, mine, number = plan.steps[index], emitter.spec.cp_rank, plan.gathers[index]
        if index and number == plan.gathers[index - 1]:
            return
        slot = emitter.buffer(
            f"keys {number}", Home.SLOT, plan.num_rows,
            emitter.kv_fields_of(emitter.order[index].round), Cargo.READ, number, self._slots,
        )  # fmt: skip
        away = emitter.order[index].distance if emitter.keys_travel else 0
        stream = Stream.SIDE if self._comes(index) else Stream.COMPUTE
        for piece in (piece for piece in step.keys if piece.holder == mine):
            if away == 0:
                emitter.emit(Copy((source.at(piece.rows),), slot.at(piece.whole), stream))
                continue
            for rows, packed in self._halos[away].parts(piece.rows):
                there = rows.moved(piece.whole.start - piece.rows.start)
                emitter.emit(Copy((source.at(packed),), slot.at(there), stream))
        reads, steps = plan.reads[number], emitter.steps_of_keys(index)
        gives = [
            Give(peer, slot.at(piece.whole), emitter.sent_for(steps, peer, piece))
            for peer in emitter.others
            for piece in reads[peer]
        ]
        takes = [
            Take(peer, rows, rows, emitter.sent_for(steps, mine, piece))
            for peer in emitter.others
            for piece in reads[mine]
            if piece.holder == peer
            for rows in (slot.at(piece.whole),)
        ]
        emitter.exchange(Cargo.READ, slot, gives, takes)

    def _arrange(self, index: int) -> None:
        """They are in order."""


class Shares:
    """Gradients of gathered keys, sent to the ranks that hold these keys.

    A share is in the kernel's dtype (or the wire's) and rounded once; all shares of a row are
    summed in the accumulation dtype in one pass, so errors do not grow with the number of ranks.
    """

    def __init__(self, emitter: _Gather) -> None:
        self._emitter, self._plan = emitter, emitter.plan
        self.slots = emitter.slot_count(
            Cargo.GRAD, len(self._plan.steps), self._plan.share_rows, self._fields(0)
        )
        self._own: dict[int, list[tuple[Tile, Ref]]] = {}

    def _fields(self, index: int) -> tuple[Field, ...]:
        round_ = self._emitter.order[index].round
        return self._emitter.dkv_fields_of(round_, self._emitter.spec.share_dtype)

    def of(self, index: int) -> list[Ref]:
        """Where the tiles of a step write their shares, one after the other."""
        lengths = [len(tile.kv) for tile in self._plan.steps[index].tiles.gathered]
        slot = self._emitter.buffer(
            f"shares {index}", Home.SLOT, self._plan.share_rows, self._fields(index), Cargo.GRAD,
            index, self.slots,
        )  # fmt: skip
        starts = [sum(lengths[:n]) for n in range(len(lengths))]
        pairs = zip(starts, lengths, strict=True)
        return [slot.at(Span(start, start + length)) for start, length in pairs]

    def add_own(self, index: int, tile: Tile, share: Ref) -> None:
        """Save the share of a tile over the rank's own shard until its step is summed."""
        self._own.setdefault(index, []).append((tile, share))

    def leave(self, index: int) -> None:
        """Start sending a step's shares to the ranks that hold the keys."""
        slot, leaves = Ref(f"shares {index}"), self._plan.steps[index].leaves
        emitter, mine = self._emitter, self._emitter.spec.cp_rank
        steps = emitter.order[index : index + 1]
        gives = [
            Give(leaf.piece.holder, slot.at(leaf.rows), emitter.sent_for(steps, mine, leaf.piece))
            for leaf in leaves[mine]
        ]
        takes = [
            Take(rank, slot.at(leaf.rows), rows, emitter.sent_for(steps, rank, leaf.piece))
            for rank, leaf, rows in self._arrivals(index)
        ]
        emitter.exchange(Cargo.GRAD, slot, gives, takes)

    def _arrivals(self, index: int) -> list[tuple[int, Leaf, Ref]]:
        """(rank, what it sends, where that is received)."""
        leaves, found, start = self._plan.steps[index].leaves, [], 0
        coming = [(rank, leaf) for rank in self._emitter.others for leaf in leaves[rank]]
        total = sum(len(leaf.rows) for _, leaf in coming)
        staged = self._emitter.buffer(
            f"came {index}", Home.STAGING, total, self._fields(index), "shares"
        )
        for rank, leaf in coming:
            stop = start + len(leaf.rows)
            found.append((rank, leaf, staged.at(Span(start, stop))))
            start = stop
        return found

    def sums(self, index: int) -> list[Sum]:
        """The sums of a step, for all rows held here."""
        step, mine = self._plan.steps[index], self._emitter.spec.cp_rank
        parts = [(tile.kv, share) for tile, share in self._own.pop(index, [])]
        for tile, share in zip(step.tiles.gathered, self.of(index), strict=True):
            held = (piece.part(tile.kv) for piece in step.keys if piece.holder == mine)
            parts += [(p.rows, share.at(p.whole.moved(-tile.kv.start))) for p in held if p]
        parts += [(leaf.piece.rows, rows) for _, leaf, rows in self._arrivals(index)]
        edges = (piece.rows for piece in step.keys if piece.holder == mine)
        spans = cut((*edges, *(rows for rows, _ in parts)), self._emitter.spec.shape.keys)
        return sums_of(parts, spans)


class KeySums:
    """Sums of each step's key gradients, computed during the next step.

    Those that go on to other nodes are summed in parallel with its kernels, so that they are sent
    at once. With a single slot, they must be summed before it is filled again.
    """

    def __init__(self, emitter: _Gather, shares: Shares) -> None:
        self._shares, self._last, spec = shares, len(emitter.order) - 1, emitter.spec
        dkv = emitter.dkv_of, emitter.dkv_fields_of
        self._sums = sums(emitter, emitter.order, True, *dkv, emitter.halos)
        self._one_slot = shares.slots == 1
        self._sent_on = spec.circulate is Circulate.KV and not emitter.alone and not self._one_slot

    def before(self, index: int) -> None:
        """Before the tiles of the next step."""
        if index >= 0 and self._one_slot:
            self._form(index)

    def add(self, index: int) -> None:
        """After its first tiles."""
        if index < 0 or self._one_slot:
            return
        if self._sent_on:
            self._sums.add(index, self._shares.sums(index), Stream.SIDE)
        else:
            self._form(index)

    def come_home(self, index: int) -> None:
        """After all of them."""
        if index >= 0 and self._sent_on:
            self._sums.come_home(index, Stream.SIDE)

    def _form(self, index: int) -> None:
        self._sums.add(index, self._shares.sums(index))
        self._sums.come_home(index)

    def finish(self) -> None:
        """The last sums, and the last return transfer."""
        self._form(self._last)
        self._sums.come_home(self._last + 1)
