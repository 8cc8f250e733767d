"""Blocks of the Triton attention kernels that `kernels.py --sweep` tries."""

from itertools import product

from megatron_burst.kernels.triton_tiles import Blocks, KernelPass

# Rows, keys, warps. What is far behind on H200 (results/triton_blocks_h200.csv) is left out.
_NARROW = {
    KernelPass.FORWARD: [
        (128, 128, 8), (128, 128, 4), (128, 64, 4), (64, 128, 4), (64, 64, 4), (256, 64, 8),
    ],
    KernelPass.KEY_GRADS: [
        (64, 128, 8), (128, 128, 8), (64, 128, 4), (128, 64, 4), (64, 64, 4), (32, 128, 4),
    ],
    KernelPass.QUERY_GRADS: [
        (128, 128, 8), (128, 64, 8), (128, 64, 4), (64, 128, 4), (64, 64, 4), (128, 32, 4),
    ],
}  # fmt: skip
_WIDE = {
    KernelPass.FORWARD: [(128, 128, 8), (128, 64, 8), (128, 64, 4), (64, 128, 4), (64, 64, 4)],
    KernelPass.KEY_GRADS: [(64, 128, 8), (32, 128, 8), (64, 64, 4), (32, 64, 4)],
    KernelPass.QUERY_GRADS: [(128, 128, 8), (128, 64, 8), (64, 128, 4), (64, 64, 4), (64, 32, 4)],
}


def candidates(dim: int, tma: bool) -> list[tuple[KernelPass, Blocks]]:
    """What is tried for a head dimension; up to 64, four blocks in flight fit shared memory too."""
    sizes, most_stages = (_NARROW, 4) if dim <= 64 else (_WIDE, 3)
    return [
        (which, Blocks(*each, stages, tma))
        for which, every in sizes.items()
        for each, stages in product(every, range(2, most_stages + 1))
    ]
