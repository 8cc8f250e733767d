"""Parameters of a pass of attention: sizes, direction, what circulates."""

from dataclasses import dataclass, replace
from enum import StrEnum
from math import gcd


class Cargo(StrEnum):
    """What a hop carries; each has its own communicators, so that neither waits for the other."""

    READ = "read"
    GRAD = "grad"


class Circulate(StrEnum):
    """Which operand circulates in the rings."""

    KV = "kv"  # K, V; in backward dK, dV follow
    Q = "q"  # backward only: Q, dO, lse, delta; dQ follows


class Direction(StrEnum):
    """The pass that a schedule is for."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes of one attention call on one rank.

    Attributes:
        batch: sequences.
        tokens: rows on a rank.
        heads_q: query heads on a rank.
        heads_kv: key and value heads on a rank; divides heads_q.
        dim_qk: head dimension of queries and keys.
        dim_v: head dimension of values and output.
        itemsize: bytes of an input element.
        stat_bytes: bytes of an lse or delta element.
        grad_bytes: bytes of a gradient element on the wire.
    """

    batch: int
    tokens: int
    heads_q: int
    heads_kv: int
    dim_qk: int
    dim_v: int
    itemsize: int
    stat_bytes: int
    grad_bytes: int

    @property
    def rows_q(self) -> int:
        """(token, query head) pairs on a rank."""
        return self.batch * self.tokens * self.heads_q

    @property
    def rows_kv(self) -> int:
        """(token, KV head) pairs on a rank."""
        return self.batch * self.tokens * self.heads_kv

    def replicated(self, ranks: int) -> "AttentionShape":
        """The shape in an all-to-all over this many ranks: KV heads are copied so that all ranks
        compute equally many, each with an equal part of the query heads."""
        return replace(self, heads_kv=self.heads_kv * (ranks // gcd(self.heads_kv, ranks)))
