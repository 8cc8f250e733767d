"""What both gathers share: rounds of heads; keys and queries, fetched a step ahead.

`gather` has keys in sequence order, `gather_documents` in the order of each document's chunks.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from megatron_burst.schedule.chunks import Between
from megatron_burst.schedule.emitter import Emitter, Outputs, Sinks
from megatron_burst.schedule.gather_steps import StepTiles
from megatron_burst.schedule.inter_node import Circulating, Turn, heads_in_rounds, steps, whole_halo
from megatron_burst.schedule.layout import chunks_held
from megatron_burst.schedule.pieces import Halo, Piece
from megatron_burst.schedule.program import (
    Copy,
    Field,
    Home,
    Ref,
    Stream,
    dkv_fields,
    dq_fields,
    kv_fields,
    travelling_side_fields,
)
from megatron_burst.schedule.spec import Cargo, Circulate, Dtype, Spec


class GatherEmitter(Emitter):
    """Emits a pass that gathers the keys of a few heads at a time.

    Attributes:
        rounds: KV heads of each.
        order: steps of all rounds.
        others: ranks of the node, without this one.
        alone: whether all ranks share the node, so that nothing circulates.
        keys_travel: whether keys circulate between nodes, not queries.
        tiles: of each step.
        keys: of each step.
    """

    tiles: Sequence[StepTiles]
    keys: "Keys"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.rounds = heads_in_rounds(
            spec.shape.heads_kv, spec.heads_per_round or spec.shape.heads_kv
        )
        nodes = spec.topology.inter_size
        self.order = steps(nodes, len(self.rounds), spec.backward, bool(spec.left))
        self.keys_travel = spec.keys_travel
        self.others, self.alone = spec.topology.others(spec.cp_rank), nodes == 1

    def forward(self) -> None:
        self.keys.prepare(0)
        for index, step in enumerate(self.order):
            if step.first:
                every = zip(self.tiles, self.order, strict=True)
                tiles = [tile for of, at in every if at.round == step.round for tile in of.every]
                q, out = (self.of_queries(name, step.round) for name in ("q", "out"))
                heads = self.queries(self.rounds[step.round])
                sinks = Sinks(tiles, range(heads.start, heads.stop))
                outputs = Outputs(self, f"round {step.round}", tiles, sinks, q, out)
            for tile in self.tiles[index].before:
                outputs.compute(tile, self.of_keys("kv", step.round))
            self.keys.prepare_early(index + 1)
            for tile in self.tiles[index].gathered:
                outputs.compute(tile, self.keys.of(index))
            self.keys.prepare_late(index + 1)
            if step.last:
                outputs.merge()

    def steps_of_keys(self, index: int) -> list[Turn]:
        """The steps that use the keys gathered for one."""
        step = self.order[index]
        return [step] if self.keys_travel else [at for at in self.order if at.round == step.round]

    def sent_for(
        self, steps: Sequence[Turn], computing: int, held: int | Piece
    ) -> Between | None:  # fmt: skip
        """What is sent in some steps between a rank of the node that computes, and one that holds
        keys then, or a piece of them."""
        topology, travel = self.spec.topology, self.keys_travel
        holder = held.holder if isinstance(held, Piece) else held
        (row, column), (_, place) = map(topology.coord, (computing, holder))
        away = [step.distance for step in steps]
        queries = (topology.rank_at(row - (0 if travel else n), column) for n in away)
        keys = (topology.rank_at(row - (n if travel else 0), place) for n in away)
        found = Between.ranks(self.spec, queries, keys)
        if found is None or not isinstance(held, Piece):
            return found
        chunks = len(chunks_held(self.spec.layout, holder, topology.cp_size))
        return replace(found, keys=(held.place * chunks // self.spec.shape.keys,))

    def of_keys(self, name: str, round_: int) -> Ref:
        """A round's KV heads of a buffer of the call."""
        return Ref(name, heads=self.rounds[round_])

    def of_queries(self, name: str, round_: int) -> Ref:
        """A round's query heads of a buffer of the call."""
        return Ref(name, heads=self.queries(self.rounds[round_]))

    def dq_of(self, round_: int) -> Ref:
        return self.of_queries("dq", round_)

    def dkv_of(self, round_: int) -> Ref:
        return self.of_keys("dkv", round_)

    def kv_fields_of(self, round_: int) -> tuple[Field, ...]:
        return kv_fields(len(self.rounds[round_]), self.spec.shape)

    def dkv_fields_of(self, round_: int, dtype: Dtype) -> tuple[Field, ...]:
        return dkv_fields(len(self.rounds[round_]), self.spec.shape, dtype)

    def dq_fields_of(self, round_: int, dtype: Dtype) -> tuple[Field, ...]:
        return dq_fields(len(self.rounds[round_]) * self.spec.group, self.spec.shape, dtype)


class Keys(ABC):
    """Keys and values of all ranks of a node, step by step.

    Args:
        emitter: of the program.
        halos: rows of a shard that circulate, by how many nodes away it is from.
        gathers: how many there are.
        rows: that a gather has.
    """

    def __init__(
        self, emitter: GatherEmitter, halos: Sequence[Halo], gathers: int, rows: int
    ) -> None:
        self._emitter, self._halos, spec = emitter, halos, emitter.spec
        self._circulating = None
        if emitter.keys_travel and not (spec.left and spec.backward) and not emitter.alone:
            self._circulating = Circulating(
                emitter, emitter.order, lambda round_: (emitter.of_keys("kv", round_),),
                emitter.kv_fields_of, halos,
            )  # fmt: skip
        self._slots = emitter.slot_count(Cargo.READ, gathers, rows, emitter.kv_fields_of(0))

    @abstractmethod
    def of(self, index: int) -> Ref:
        """The keys and values of a step."""

    @abstractmethod
    def _gather(self, index: int) -> None:
        """Gather a step's keys inside the node."""

    @abstractmethod
    def _arrange(self, index: int) -> None:
        """Put a step's gathered keys in order."""

    def _is_early(self, index: int) -> bool:
        """Whether keys that are on the node may be gathered before the kernels that hide it."""
        return True

    def prepare(self, index: int) -> None:
        """Fetch a step's keys at once."""
        self.prepare_early(index)
        self.prepare_late(index)

    def prepare_early(self, index: int) -> None:
        """Before the kernels that hide it: gather what is on the node."""
        if index < len(self._emitter.order) and not self._comes(index) and self._is_early(index):
            self._gather(index)

    def prepare_late(self, index: int) -> None:
        """After those kernels: what waits for other nodes, and copies."""
        if index >= len(self._emitter.order):
            return
        comes = self._comes(index)
        if not comes and not self._is_early(index):
            self._gather(index)
        if self._circulating:
            self._circulating.set_out(index)
        if comes:
            self._gather(index)
        self._arrange(index)
        if self._circulating:
            self._circulating.pass_on(index)

    def _comes(self, index: int) -> bool:
        """Whether another node sends a step's keys in this pass."""
        return bool(self._circulating and self._emitter.order[index].distance)

    def _source(self, index: int) -> Ref:
        """The shard that this rank contributes: its own, one it received, or one it saved."""
        emitter, step = self._emitter, self._emitter.order[index]
        if not (step.distance and emitter.keys_travel):
            return emitter.of_keys("kv", step.round)
        came = self._circulating and self._circulating.piece(step.round, step.distance)
        if not emitter.spec.left:
            assert came
            return came
        rows = self._halos[step.distance].rows
        name, fields = f"left {step.round}+{step.distance}", emitter.kv_fields_of(step.round)
        left = emitter.buffer(name, Home.LEFT, rows, fields)
        if came and rows:
            emitter.emit(Copy((came,), left, Stream.SIDE))
        return left


class StepSides:
    """The query side of each step, including remote queries if queries circulate."""

    def __init__(self, emitter: GatherEmitter) -> None:
        self._emitter, spec = emitter, emitter.spec
        self._own: tuple[str, ...] = ("side",)
        self._circulating = None
        if spec.circulate is Circulate.Q:
            self._own = "side", emitter.delta().buffer
            self._circulating = Circulating(
                emitter, emitter.order, self._of_round, self._fields,
                whole_halo(emitter, spec.shape.tokens),
            )  # fmt: skip

    def _of_round(self, round_: int) -> tuple[Ref, ...]:
        return tuple(self._emitter.of_queries(name, round_) for name in self._own)

    def _fields(self, round_: int) -> tuple[Field, ...]:
        heads = len(self._emitter.queries(self._emitter.rounds[round_]))
        return travelling_side_fields(heads, self._emitter.spec.shape)

    def prepare(self, index: int) -> None:
        """Start receiving the remote queries of a step."""
        if self._circulating and index < len(self._emitter.order):
            self._circulating.set_out(index)
            self._circulating.pass_on(index)

    def of(self, index: int) -> tuple[Ref, ...]:
        """The side of a step."""
        step = self._emitter.order[index]
        if not (self._circulating and step.distance):
            return self._of_round(step.round)
        return self._emitter.side_for_kernel(self._circulating.piece(step.round, step.distance))
