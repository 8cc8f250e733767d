"""Our Triton kernels in Triton's interpreter."""

from megatron_burst.kernels.triton import Triton
from tests.kernels import attention, bands
from tests.kernels.bands import Band


def interpret(tile, sizes, tma):
    """Errors of a tile for given block sizes, in a process of the fixture `interpreted`."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_for_numpy(tensor, *scope):  # int() of a one-element array fails since numpy 2.5
        patch(tensor, *scope)
        put = scope[0].set_attr if scope else setattr  # Triton 3.5 has no scope
        put(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_for_numpy
    from megatron_burst.kernels import triton_backward, triton_forward
    from megatron_burst.kernels.triton_tiles import Blocks

    for module in (triton_forward, triton_backward):
        module.blocks_for = lambda *_: Blocks(*sizes, 4, 1, tma)
    try:
        if isinstance(tile, Band):
            return bands.errors_of(Triton(), tile, into=tile.strided)
        return attention.errors_of(Triton(), tile, "cpu")
    finally:
        interpreter._patch_lang_tensor = patch
