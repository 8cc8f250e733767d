"""FlashAttention-4: CuTe DSL kernels for Hopper and Blackwell (not on the reading path)."""

import importlib
import inspect
import os
import warnings
from functools import cached_property
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from megatron_burst.kernels.interface import Backend, Capability, QuerySide, arch_of
from megatron_burst.kernels.partial import raise_to
from megatron_burst.kernels.visible import Visible
from megatron_burst.schedule.mask import DOCUMENTS, WINDOWS

_WHERE = (
    "window_size_left", "window_size_right",
    "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k",
)  # fmt: skip
_BLOCKS = "block_sparse_tensors", "mask_mod", "aux_tensors"
_INSTALL = "fa4 comes with: pip install -e '.[flash-attn-4]' in megatron_burst's checkout"


class FlashAttention4(Backend):
    """flash_attn.cute's own entry points: without its autograd, results written to given tensors.

    Backward gets delta through `dlse`: its preprocessing computes rowsum(dO * O) - dlse, which is
    delta for an output of zeros (one row, expanded by strides of 0) and dlse = -delta.

    On Hopper its backward uses tiles of 80 query rows for a QK dimension of 128 without a mask. Its
    preprocessing (flash_bwd_preprocess.py) uses tiles of as many rows as 256 threads hold: 16 if
    the V dimension is a multiple of 128, else 32 or 64, which do not divide 80. It then writes
    zeros past the last row: into the next head's delta and, after the last head, into the memory
    that follows, such as the first 16 log-sum-exps. So it is not used for these head dimensions.

    On Hopper its backward rounds head dimensions up to 16 in the kernel and to 32 around it
    (flash_bwd_sm90.py, interface.py, 4.0.0b36), so it is not used for other multiples of 8. On
    Blackwell it supports up to 128, and 192/128 (_validate_head_dims); its kernel for 256 takes no
    dlse.

    Parts of a score matrix are blocks of its block sparsity (block_sparse_utils.py), on Hopper up
    to the head dimension for which all its tiles divide them.
    """

    capability = Capability(
        name="fa4",
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        max_dim=256,
        dim_multiple=32,
        equal_dims_if_grouped=True,
        takes_delta=True,
        rectangular_causal=True,
        masks=frozenset({WINDOWS, DOCUMENTS}),
        block_sparse_on={9: 128},
        sinks=True,
        softcap=True,
        archs=frozenset({9, 10}),
        max_dim_on={10: 128},
        wide_pairs=frozenset({(192, 128)}),
        wrong_pairs_on={9: frozenset((128, dim_v) for dim_v in range(32, 256, 32) if dim_v % 128)},
        speed="FlashAttention-4, the fastest on Hopper",
    )

    @cached_property
    def _interface(self):
        """The module, or a text saying why it cannot be used."""
        # compiled kernels are cached on disk for all ranks; set before the first import
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        try:
            module = importlib.import_module("flash_attn.cute.interface")
            forward = inspect.signature(module._flash_attn_fwd).parameters
            backward = inspect.signature(module._flash_attn_bwd).parameters
        except (ImportError, AttributeError) as error:
            return f"it cannot be imported ({error}); {_INSTALL}"
        shared = {"softcap", *_WHERE, *_BLOCKS}
        of_backward = shared | {"dlse", "deterministic", "dq", "dk", "dv"}
        if not (shared | {"learnable_sink"} <= forward.keys() and of_backward <= backward.keys()):
            return f"the installed one has another interface; {_INSTALL}"
        # at each first compilation the DSL warns that it guesses how to pass a structure
        warnings.filterwarnings("ignore", message="Argument aux_data", module=r"cutlass\.")
        return module

    def missing(self) -> str | None:
        return self._interface if isinstance(self._interface, str) else None

    def finds_largest(self, device: torch.device) -> bool:
        # `fa4_largest` has a subclass of this release's kernel for Hopper
        return arch_of(device) == 9 and version("flash-attn-4") == "4.0.0b36"

    def forward(
        self, q, k, v, scale, visible, into=None, sink=None, softcap=0.0, largest=None
    ):  # fmt: skip
        packed = visible.segments is not None
        out, lse = (x[0] if packed else x for x in into) if into else (None, None)
        run, options = self._interface._flash_attn_fwd, dict(out=out, lse=lse, softcap=softcap)
        if largest is not None:
            from megatron_burst.kernels.fa4_largest import empty_lse, forward_with_largest

            run, options["lse"], rows = forward_with_largest(), *empty_lse(q, packed)
        tensors = (x[0] if packed else x for x in (q, k, v))
        where = _where(visible, q, k, of_keys=False)
        results = run(
            *tensors, softmax_scale=scale, return_lse=True, learnable_sink=sink, **options, **where
        )[:2]
        if largest is not None:
            raise_to(largest, rows if softcap else rows * scale)  # capped scores are scaled before
            if lse is not None:
                lse.copy_(results[1])
        return into or (tuple(x.unsqueeze(0) for x in results) if packed else results)

    def backward(
        self, side: QuerySide, k, v, scale, visible, into=None, deterministic=False, softcap=0.0
    ):
        packed = visible.segments is not None
        dlse, out = None, side.out
        if side.delta is not None:
            # with a stride of 0 in the last axis, it would be copied
            out, dlse = side.dout.new_zeros(v.shape[3]).expand_as(side.dout), -side.delta
        tensors = side.q, k, v, out, side.dout, side.lse, dlse, *(into or (None, None, None))
        if packed:
            tensors = (None if x is None else x[0] for x in tensors)
        *tensors, dlse, dq, dk, dv = tensors
        grads = self._interface._flash_attn_bwd(
            *tensors, softmax_scale=scale, deterministic=deterministic, softcap=softcap,
            dq=dq, dk=dk, dv=dv, dlse=dlse, **_where(visible, side.q, k, of_keys=True),
        )[:3]  # fmt: skip
        return into or (tuple(x.unsqueeze(0) for x in grads) if packed else grads)


def _where(visible: Visible, q: Tensor, k: Tensor, of_keys: bool) -> dict[str, Any]:
    """Segments and band, or blocks, as a pass takes them; None is no bound. `of_keys`: whether the
    pass works on blocks of keys, as backward does."""
    if visible.parts is not None:
        return {"causal": False} | _blocks(visible, q, k, of_keys)
    where: dict[str, Any] = {"causal": visible.causal}
    if visible.windowed:
        band = visible.within(q.shape[1], k.shape[1])
        where = {"window_size_left": band.left, "window_size_right": band.right}
    if (segments := visible.segments) is not None:
        where |= {"cu_seqlens_q": segments.cu_q, "cu_seqlens_k": segments.cu_k}
        where |= {"max_seqlen_q": segments.max_q, "max_seqlen_k": segments.max_k}
    return where


def _blocks(visible: Visible, q: Tensor, k: Tensor, of_keys: bool) -> dict[str, Any]:
    """Parts as blocks."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    from megatron_burst.kernels.masks.block_sparse import SIZE, block_sparse_of
    from megatron_burst.kernels.masks.fa4_mask import is_seen

    blocks = block_sparse_of(visible.parts, q.shape[1], k.shape[1], q.device)
    lists = blocks.of_keys if of_keys else blocks.of_rows
    return {
        "block_sparse_tensors": BlockSparseTensorsTorch(*lists, block_size=(SIZE, SIZE)),
        "mask_mod": is_seen,
        "aux_tensors": [blocks.places, blocks.bits],
    }
