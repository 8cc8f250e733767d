"""What determines a program: sizes, the choices that are made for a call, and its kernel."""

from dataclasses import dataclass, replace
from enum import StrEnum
from math import gcd

from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.topology import Topology

USUAL_MULTIPROCESSORS = 132  # of an unknown GPU: a Hopper's


class Cargo(StrEnum):
    """What a hop carries; each has its own communicators, so that neither waits for the other."""

    READ = "read"
    GRAD = "grad"


class Circulate(StrEnum):
    """Which operand circulates in the rings."""

    KV = "kv"  # K and V; dK and dV go back to the owner
    Q = "q"  # in backward only: Q, dO, lse and delta; dQ goes back to the owner


class Direction(StrEnum):
    """The pass that a schedule is for."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Dtype(StrEnum):
    """A buffer's dtype by role; the run maps it to a torch dtype."""

    INPUT = "input"  # of q, k and v
    SUM = "sum"  # the accumulation dtype, also of lse and delta
    WIRE = "wire"  # of sums of gradients that are sent to another rank


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes of one attention call on one rank."""

    batch: int  # sequences
    tokens: int  # rows on a rank; of queries, if `tokens_kv` says how many it has of keys
    heads_q: int  # query heads on a rank
    heads_kv: int  # key and value heads on a rank; divides heads_q
    dim_qk: int  # head dimension of queries and keys
    dim_v: int  # head dimension of values and output
    itemsize: int  # bytes of an input element
    stat_bytes: int  # bytes of an lse or delta element
    grad_bytes: int  # bytes of a gradient element on the wire
    # rows of keys on a rank, in cross-attention; None: as many as of queries
    tokens_kv: int | None = None

    @property
    def exceeds_int32(self) -> bool:
        """Whether a rank's output has more than 2^31 elements, padded as FlashAttention-2 pads its
        sums of dQ: tokens to multiples of 128, head dimensions of 32, above 128 of 64."""
        dim, tokens = 32 if self.dim_v <= 128 else 64, -(-self.tokens // 128) * 128
        return self.batch * tokens * self.heads_q * -(-self.dim_v // dim) * dim > 1 << 31

    @property
    def keys(self) -> int:
        """Rows of keys on a rank."""
        return self.tokens_kv or self.tokens

    @property
    def rows_q(self) -> int:
        """(token, query head) pairs on a rank."""
        return self.batch * self.tokens * self.heads_q

    @property
    def rows_kv(self) -> int:
        """(token, KV head) pairs on a rank."""
        return self.batch * self.keys * self.heads_kv

    def replicated(self, ranks: int) -> "AttentionShape":
        """The shape in an all-to-all over this many ranks: KV heads are copied so that all ranks
        compute equally many, each with an equal part of the query heads."""
        return replace(self, heads_kv=self.heads_kv * (ranks // gcd(self.heads_kv, ranks)))


LONG_SHARD = 32 << 10  # tokens of a rank: kernels take a hundred times as long as moving their keys
_LARGE = 16 << 20  # bytes of a slot; below, a second one costs less than a second barrier
_LONG_ROUND = 256 << 20  # bytes of a slot; a KV head of 512K tokens


def pulled_count(cargo: Cargo, transfers: int, num_bytes: float, tokens: int) -> int:
    """Slots that the transfers of a pass need if ranks pull: inputs arrive before they are
    computed with; partial gradients must not make a rank wait for the slowest one in every
    transfer. One slot is enough if waiting costs about a percent at most: for one transfer, and
    between the two of long shards."""
    long = tokens >= LONG_SHARD or num_bytes >= _LONG_ROUND
    if (transfers == 1 and num_bytes >= _LARGE) or (transfers == 2 and long):
        return 1
    return 2 if cargo is Cargo.READ else min(3, transfers + 1)


def power_below(number: int) -> int:
    """The largest power of two up to `number`."""
    return 1 << number.bit_length() - 1


@dataclass(frozen=True, slots=True)
class Kernel:
    """Properties of the attention kernel (`kernels.interface.Capability`) and of its device that
    choices and programs depend on."""

    rectangular_causal: bool = True
    takes_delta: bool = True
    wide_grads: bool = False
    device: str = "cuda"  # torch device type
    multiprocessors: int = USUAL_MULTIPROCESSORS


@dataclass(frozen=True)
class Spec:
    """How a call runs; equal specs have equal programs.

    A choice that is None is open: `resolve` makes it. What a user asks for is set before.
    """

    topology: Topology  # of the group
    shape: AttentionShape  # sizes on one rank; once resolved, with gradients as wide as on the wire
    layout: Layout = Layout.ZIGZAG  # of the tokens
    mask: Mask = Mask.CAUSAL  # of the sequence
    kernel: Kernel = Kernel()  # that computes the tiles
    # whether backward sends again what forward received: results are kept, so that no backward
    # follows its forward directly
    resends: bool = False
    # between nodes: "ring"; or over all ranks, whatever their nodes: "a2a", or "flat" for one ring
    inter: str | None = None
    intra: str | None = None  # inside a node, or over all ranks: "ring", "gather" or "a2a"
    # KV heads of a round, gathered or computed by a rank; 0: all of them. Rings have no rounds
    heads_per_round: int | None = None
    # KV heads of a rank at a time in backward, if that is an all-to-all after a gather; 0: backward
    # runs as forward
    a2a_backward_heads: int = 0
    # dtype of gradients between ranks: "accumulate" or "input"; None: the input's, but the
    # accumulation dtype where a ring sums them on the way
    grad_wire: str | None = None
    circulate: Circulate | None = None  # what circulates in backward, in the ring or between nodes
    pulled: bool | None = None  # whether ranks of a node read each other's slots by copy engine
    # whether forward saves for backward what it received, and backward reads it
    saves_remote: bool | None = None
    invariant: bool = False  # whether results have the same bits on any number of ranks
    cp_rank: int = 0  # that runs the program; like direction and unit_rows, of a program alone
    direction: Direction = Direction.FORWARD  # of the pass
    # how many rows one row stands for at least, a power of two; slot counts depend on it
    unit_rows: int = 1

    @property
    def mode_topology(self) -> Topology:
        """The topology as the mode sees it: one row of all ranks, if nodes are ignored."""
        return self.topology.flat() if self.inter in ("a2a", "flat") else self.topology

    def program_spec(self, cp_rank: int, direction: Direction) -> "Spec":
        """The spec of one rank's program in a pass, without what no program depends on."""
        backward = direction is Direction.BACKWARD
        if backward and self.a2a_backward_heads:
            as_a2a = replace(
                self, intra="a2a", heads_per_round=self.a2a_backward_heads, saves_remote=False,
                a2a_backward_heads=0,
            )  # fmt: skip
            return as_a2a.program_spec(cp_rank, direction)
        return replace(
            self, topology=self.mode_topology, cp_rank=cp_rank, direction=direction,
            circulate=self.circulate if backward else Circulate.KV, inter=None, resends=False,
            grad_wire=self.grad_wire if self.intra == "ring" else None, a2a_backward_heads=0,
            heads_per_round=None if self.intra == "ring" else self.heads_per_round,
        )  # fmt: skip

    def in_units(self) -> tuple["Spec", int]:
        """The same with rows counted in halves of a shard, so that programs serve all lengths, and
        the rows per half; in cross-attention all lengths of one ratio. Windows and stripes cannot
        be counted in halves: there the spec is unchanged, with 1."""
        tokens, keys = self.shape.tokens, self.shape.tokens_kv
        in_chunks = not self.mask.windowed and self.layout is not Layout.STRIPED
        common = gcd(tokens, keys or 0)
        unit = common // 2 if in_chunks and common % 2 == 0 else 1
        shape = replace(self.shape, tokens=tokens // unit, tokens_kv=keys and keys // unit)
        return replace(self, shape=shape, unit_rows=power_below(unit)), unit

    @property
    def backward(self) -> bool:
        return self.direction is Direction.BACKWARD

    @property
    def queries_stay(self) -> bool:
        """Whether queries stay on their rank, and the other ranks' keys move to them."""
        return not self.backward or self.circulate is Circulate.KV

    @property
    def q_heads_per_kv(self) -> int:
        """Query heads per KV head."""
        return self.shape.heads_q // self.shape.heads_kv

    @property
    def partial_grad_dtype(self) -> Dtype:
        """Dtype of gradients sent inside a node: the kernel's, but no wider than the wire's."""
        return Dtype.WIRE if self.kernel.wide_grads else Dtype.INPUT

    @property
    def ring_sum_dtype(self) -> Dtype:
        """Dtype of gradients that a ring sums on the way; with two ranks there is one hop."""
        narrow = self.grad_wire == "input" or (not self.grad_wire and self.topology.cp_size <= 2)
        return Dtype.WIRE if narrow else Dtype.SUM

    @property
    def grad_dtype(self) -> Dtype:
        """Dtype of the gradients that the kernel returns."""
        return Dtype.SUM if self.kernel.wide_grads else Dtype.INPUT
