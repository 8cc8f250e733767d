"""The engine on simulated ranks: test problems, programs, both passes, and the reference."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from threading import Lock
from unittest.mock import patch

import torch

from megatron_burst.call import attention_shape
from megatron_burst.checks.guard import GuardedExecutor
from megatron_burst.engine.executor import Executor
from megatron_burst.engine.memory import empty_like_rows
from megatron_burst.kernels.backends import backends
from megatron_burst.kernels.partial import accumulate_dtype
from megatron_burst.kernels.reference import Reference
from megatron_burst.masks.documents import Documents
from megatron_burst.masks.sample import Sample
from megatron_burst.masks.slices import Slices
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import DOCUMENTS, WINDOWS, Mask
from megatron_burst.schedule.modes import EMITTERS
from megatron_burst.schedule.program import Space, Transfer
from megatron_burst.schedule.spec import Circulate, Direction, Dtype, Kernel, Spec
from megatron_burst.schedule.topology import pretend_nodes
from tests.attention.simulated import run_simulated
from tests.oracle import full_attention, largest_of, rows_of, seen_by, seen_by_slices

_ONE_AT_A_TIME = Lock()  # ranks are threads: one's patch would outlive another's


def problem(cp_size, tokens, heads, dims, seed, batch=2, keys=None):
    """Whole-sequence q, k, v and the gradient of the output, float64; `keys`: rows of k and v on a
    rank, if not as many."""
    generator = torch.Generator().manual_seed(seed)
    queries, keys = (cp_size * rows for rows in (tokens, keys or tokens))
    shapes = [
        (queries, heads[0], dims[0]), (keys, heads[1], dims[0]), (keys, heads[1], dims[1]),
        (queries, heads[0], dims[1]),
    ]  # fmt: skip
    return [torch.randn(batch, *x, generator=generator, dtype=torch.float64) for x in shapes]


def truth(q, k, v, dout, mask, scale, edges=(), parents=(), sink=None, slices=(), softcap=0.0):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    tokens, keys = q.shape[1], k.shape[1]
    if slices:
        seen = seen_by_slices(slices, tokens, keys)
    else:
        seen = seen_by(mask, edges, tokens, parents, keys)
    out = full_attention(*leaves, False, scale, seen, sink, softcap)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@dataclass(frozen=True)
class Way:
    """How a call runs; `rectangular`: whether causal tiles may have more keys than queries."""

    mode: str
    circulate: Circulate = Circulate.KV
    heads_per_round: int = 1
    rectangular: bool = True
    left: bool = False
    layout: Layout = Layout.ZIGZAG
    mask: Mask = Mask.CAUSAL
    backend: str = "reference"
    scale: float = 0.5
    pulls: bool | str = False  # "one slot": as if slots were large
    edges: tuple[int, ...] = ()  # where documents begin, and where the last one ends
    parents: tuple[int, ...] = ()  # of documents that are segments of a tree
    sinks: bool = False
    slices: tuple[tuple[int, ...], ...] = ()  # say alone what is seen; edges then where rows are
    invariant: bool = False
    whole_heads: int = 0
    guarded: bool = False  # whether results are checked for NaN
    softcap: float = 0.0

    def seen(self, rows, keys):
        """Which keys each query of a sample sees."""
        if self.slices:
            return seen_by_slices(self.slices, rows, keys)
        return seen_by(self.mask, self.edges, rows, self.parents, keys)

    def sink(self, q):
        """An attention sink for each head, some larger than all scores; one changes nothing."""
        if not self.sinks:
            return None
        scores = torch.linspace(-3, 9, q.shape[2], dtype=torch.float32).to(q.device)
        return scores.masked_fill(torch.arange(q.shape[2]) == 1, -1e4)


class ByCalls(Reference):
    """A kernel that takes bands and segments, but no intervals."""

    capability = replace(Reference.capability, masks=frozenset({WINDOWS, DOCUMENTS}))


class Passes:
    """Forward and backward of one rank."""

    def __init__(self, way, topology, shard, carrier, grad_dtype=torch.float64):
        q, k, v, _ = shard
        topology = topology.flat() if way.mode == "a2a" else topology
        backend = ByCalls() if way.backend == "calls" else backends()[way.backend]
        can = backend.capability
        kernel = Kernel(way.rectangular and can.rectangular_causal, can.takes_delta, can.wide_grads)
        shape = attention_shape([x.shape for x in (q, k, v)], q.dtype)
        spec = Spec(
            topology, replace(shape, grad_bytes=grad_dtype.itemsize), way.layout, way.mask, kernel,
            intra=way.mode, heads_per_round=way.heads_per_round, a2a_backward_heads=way.whole_heads,
            circulate=way.circulate, pulled=bool(way.pulls), saves_remote=way.left,
            invariant=way.invariant,
        )  # fmt: skip
        passes = [spec.program_spec(carrier.cp_rank, direction) for direction in Direction]
        sums = accumulate_dtype(q.dtype)
        dtypes = {Dtype.INPUT: q.dtype, Dtype.SUM: sums, Dtype.WIRE: grad_dtype}
        one_slot = patch("megatron_burst.schedule.emitter.pulled_count", lambda *_: 1)
        with _ONE_AT_A_TIME, one_slot if way.pulls == "one slot" else nullcontext():
            in_units, (unit, _) = zip(*(one.in_units() for one in passes), strict=True)
            self.programs = [EMITTERS[one.intra](one) for one in in_units]
        self.documents, self.sink = None, way.sink(q)
        sizes = q.shape[1], topology.cp_size
        batch = q.shape[0]
        if way.edges:
            sample = Sample(
                torch.tensor(way.edges, dtype=torch.int32), None, None, way.parents or None
            )
            self.documents = Documents(sample, sizes, way.layout, q.device)
        if way.slices or way.parents:
            given = torch.tensor(way.slices) if way.slices else None
            causal = way.mask.right == 0
            self.documents = Slices(
                given, causal, (*sizes, batch, k.shape[1]), way.layout, q.device, self.documents
            )
        kind = GuardedExecutor if way.guarded else Executor
        self.executors = [
            kind(program, backend, carrier, way.scale, dtypes, False, unit, way.softcap)
            for program in self.programs
        ]

    def forward(self, q, k, v):
        given = {"q": {"q": q}, "kv": {"k": k, "v": v}}
        given |= self._outputs(q, 0)
        self.largest = q.new_full(q.shape[2:3], -torch.inf, dtype=accumulate_dtype(q.dtype))
        options = {"sample_mask": self.documents, "sink": self.sink, "largest": self.largest}
        return self.executors[0].run(given, **options)

    def _outputs(self, like, index):
        """Allocate with rows outermost in memory if the inputs have them so."""
        executor = self.executors[index]
        dtypes = executor.dtypes
        sums = dtypes[Dtype.SUM]
        return {
            buffer.name: {
                field.name: empty_like_rows(
                    like, buffer.rows, field.heads, field.dim, dtypes[field.dtype]
                )
                if field.dim
                else like.new_empty(like.shape[0], field.heads, buffer.rows, dtype=sums)
                for field in buffer.fields
            }
            for buffer in executor.buffers.values()
            if buffer.space is Space.CALL and buffer.name in ("out", "dq", "dkv")
        }

    def both(self, q, k, v, dout):
        """(out, dq, dk, dv); backward sees only forward's inputs and results."""
        run = self.forward(q, k, v)
        out, lse = run.fields["out"]["out"].to(q.dtype), run.fields["out"]["lse"]
        side = {"q": q, "dout": dout, "out": out, "lse": lse}
        given = {"side": side, "kv": {"k": k, "v": v}} | self._outputs(q, 1)
        left_before = {name: x.clone() for name, x in run.saved.items()}
        found = self.executors[1].run(given, run.saved, self.documents).fields
        assert all(torch.equal(run.saved[name], x) for name, x in left_before.items())
        return [out, found["dq"]["dq"], found["dkv"]["dk"], found["dkv"]["dv"]]


class SeenPairs(dict):
    """Whether any query of some chunks sees any key of some, pair by pair."""

    def __init__(self, way, size, lengths):
        self.way, self.size, self.lengths = way, size, lengths  # of queries and keys

    def __missing__(self, between):
        pairs = self.way.seen(*self.lengths)
        queries, keys = map(self._rows, (between.queries, between.keys), self.lengths)
        self[between] = bool(pairs[queries][:, keys].any())
        return self[between]

    def _rows(self, numbers, length):
        edges = self.way.edges if self.way.layout is Layout.DOCUMENTS else (0, length)
        chunks = self.size * (1 if self.way.layout is Layout.CONTIGUOUS else 2)
        each = [(a, (b - a) // chunks) for a, b in pairwise(edges)]
        return [a + n * rows + i for a, rows in each for n in numbers for i in range(rows)]


def run_engine(topology, tensors, way, seed=0):
    """(out, dq, dk, dv) of each rank."""
    size = topology.cp_size
    seen = SeenPairs(way, size, [x.shape[1] for x in tensors[:2]])

    def one(rank, carrier):
        shard = [x[:, rows_in(x, way, rank, size)] for x in tensors]
        passes = Passes(way, topology, shard, carrier, accumulate_dtype(tensors[0].dtype))
        q, k, v, dout = shard
        passes.forward(q, -k, -v)  # neither call may see or corrupt the other's keys
        carrier.sent_bytes = 0
        counted = sum(
            executor.program.num_bytes(give.rows) * executor.unit
            for executor in passes.executors
            for op in executor.program.ops
            for give in (op.sends if isinstance(op, Transfer) else ())
            if not (way.slices or way.parents) or give.needed_by is None or seen[give.needed_by]
        )
        return passes.both(q, k, v, dout), counted, passes.largest

    results, carriers = run_simulated(one, size, seed, way.pulls)
    assert_largest(torch.stack([largest for *_, largest in results]).amax(0), tensors, way)
    for carrier, (_, counted, _) in zip(carriers, results, strict=True):
        # rows with statistics in another dtype than the tensors' are padded, narrow heads most
        padded = accumulate_dtype(tensors[0].dtype) is not tensors[0].dtype
        assert counted == carrier.sent_bytes or (padded and counted < carrier.sent_bytes)
    return [tensors for tensors, *_ in results]


def assert_largest(got, tensors, way):
    """Check the largest score of each head."""
    q, k = (x.double() for x in tensors[:2])
    seen = way.seen(q.shape[1], k.shape[1])
    true = largest_of(q, k, way.scale, seen, way.softcap)
    tolerance = 16 * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), true, rtol=tolerance, atol=tolerance)


def rows_in(x, way, rank, size):
    """The rows of a whole tensor that a rank has."""
    return rows_of(way.layout, rank, size, x.shape[1] // size, way.edges)


def assert_exact(topology, tensors, way, seed=0, dtype=torch.float64):
    """Check in float64, with inputs that the dtype represents; other dtypes must be as exact as one
    rank."""
    tensors = [x.to(dtype) for x in tensors]
    sink = way.sink(tensors[0])
    sink = None if sink is None else sink.double()
    whole = way.mask, way.scale, way.edges, way.parents, sink, way.slices, way.softcap
    expected = truth(*(x.double() for x in tensors), *whole)
    errors = _errors(topology, tensors, way, seed, expected)
    if dtype is torch.float64:
        assert max(float(error.abs().max()) for error in errors) <= 1e-12
        return
    alone = Way("ring", mask=way.mask, backend=way.backend, scale=way.scale, edges=way.edges,
                parents=way.parents, sinks=way.sinks, slices=way.slices,
                softcap=way.softcap)  # fmt: skip
    eps = torch.finfo(dtype).eps
    # what float32 sums leave where terms cancel
    least = 4 * torch.finfo(torch.float32).eps * max(whole.norm() for whole in expected)
    for error, one, whole in zip(
        errors, _errors(pretend_nodes(1, 1), tensors, alone, 0, expected), expected, strict=True
    ):
        # what is sent to other ranks may be rounded once more, by half an eps
        assert error.norm() <= 2 * one.norm() + eps / 2 * whole.norm() + least


def _errors(topology, tensors, way, seed, expected):
    """Errors of (out, dq, dk, dv) as a caller gets them, with the rows of all ranks
    concatenated."""
    size = topology.cp_size
    errors = [
        [result.to(tensors[0].dtype) - whole[:, rows_in(whole, way, rank, size)]
         for result, whole in zip(results, expected, strict=True)]
        for rank, results in enumerate(run_engine(topology, tensors, way, seed))
    ]  # fmt: skip
    return [torch.cat(some, 1) for some in zip(*errors, strict=True)]
