"""What determines a program: the call as one rank sees it, and its kernel."""

from dataclasses import dataclass, replace

from megatron_burst.schedule.call import AttentionShape, Circulate, Direction
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.program import Dtype
from megatron_burst.schedule.slots import power_below
from megatron_burst.schedule.topology import Topology


@dataclass(frozen=True, slots=True)
class Kernel:
    """Properties of the attention kernel that programs depend on
    (`kernels.backends.Capability`)."""

    rectangular_causal: bool = True
    takes_delta: bool = True
    wide_grads: bool = False


@dataclass(frozen=True)
class Spec:
    """Everything that determines a program; equal specs have equal programs.

    Attributes:
        topology: of the group; as the mode sees it.
        cp_rank: the rank that runs the program.
        direction: of the pass.
        shape: sizes on one rank.
        layout: of the tokens.
        mask: of the sequence.
        circulate: what circulates, in the ring or between nodes, in backward.
        kernel: that computes the tiles.
        heads_per_round: KV heads of a round; unused by rings.
        pulled: whether ranks of a node read each other's slots by copy engine.
        left: whether forward saves for backward what it received, and backward reads it.
        times: how many rows one row stands for at least, a power of two; the slot count depends on
            it.
    """

    topology: Topology
    cp_rank: int
    direction: Direction
    shape: AttentionShape
    layout: Layout
    mask: Mask
    circulate: Circulate = Circulate.KV
    kernel: Kernel = Kernel()
    heads_per_round: int = 1
    pulled: bool = False
    left: bool = False
    times: int = 1

    def in_units(self) -> tuple["Spec", int]:
        """The same with rows counted in halves of a shard, so that programs serve all lengths, and
        the rows per half. Windows and stripes cannot be counted in halves: there the spec is
        unchanged, with 1."""
        tokens = self.shape.tokens
        in_chunks = not self.mask.windowed and self.layout is not Layout.STRIPED
        unit = tokens // 2 if in_chunks and tokens % 2 == 0 else 1
        shape = replace(self.shape, tokens=tokens // unit)
        return replace(self, shape=shape, times=power_below(unit)), unit

    @property
    def backward(self) -> bool:
        return self.direction is Direction.BACKWARD

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.shape.heads_q // self.shape.heads_kv

    @property
    def share_dtype(self) -> Dtype:
        """Dtype of gradients sent to another rank of the node: the kernel's, but no wider than the
        wire's."""
        return Dtype.WIRE if self.kernel.wide_grads else Dtype.INPUT

    @property
    def grad_dtype(self) -> Dtype:
        """Dtype of the gradients that the kernel returns."""
        return Dtype.SUM if self.kernel.wide_grads else Dtype.INPUT
