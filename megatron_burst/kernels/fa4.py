"""FlashAttention-4 (the CuTe DSL kernels of the flash-attn-4 package) for Hopper and Blackwell."""

import importlib
import inspect
import warnings
from functools import cached_property

import torch

from megatron_burst.environment import share_kernel_cache
from megatron_burst.kernels.backends import Capability, QuerySide

_INSTALL = "fa4 comes with: pip install -e '.[flash-attn]' in megatron_burst's checkout"


class FlashAttention4:
    """flash_attn.cute's own entry points: no autograd of theirs, results written where told.

    Backward takes delta by `dlse`: its preprocessing computes rowsum(dO * O) - dlse, which is delta
    for an output of zeros (one zero, expanded by stride 0) and dlse = -delta.

    On Hopper its backward rounds head dimensions up to 16 in the kernel and to 32 around it
    (flash_bwd_sm90.py, interface.py, 4.0.0b36), so it is not given other multiples of 8.
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
        archs=frozenset({9, 10}),
        speed="FlashAttention-4, the fastest on Hopper",
    )

    @cached_property
    def _interface(self):
        """The module, or in words why it cannot be used."""
        share_kernel_cache()
        try:
            module = importlib.import_module("flash_attn.cute.interface")
            backward = inspect.signature(module._flash_attn_bwd).parameters
        except (ImportError, AttributeError) as error:
            return f"it cannot be imported ({error}); {_INSTALL}"
        if not {"dlse", "deterministic", "dq", "dk", "dv"} <= backward.keys():
            return f"the installed one has another interface; {_INSTALL}"
        # the DSL warns at each first compilation that it guesses how to pass a structure
        warnings.filterwarnings("ignore", message="Argument aux_data", module=r"cutlass\.")
        return module

    def missing(self) -> str | None:
        return self._interface if isinstance(self._interface, str) else None

    def forward(self, q, k, v, scale, visible, into=None):
        out, lse = into or (None, None)
        return self._interface._flash_attn_fwd(
            q, k, v, softmax_scale=scale, causal=visible.causal, return_lse=True, out=out, lse=lse
        )[:2]

    def backward(self, side: QuerySide, k, v, scale, visible, into=None, deterministic=False):
        dq, dk, dv = into or (None, None, None)
        out, dlse = side.out, None
        if out is None:
            out, dlse = side.dout.new_zeros(1).expand_as(side.dout), -side.delta
        return self._interface._flash_attn_bwd(
            side.q, k, v, out, side.dout, side.lse, softmax_scale=scale, causal=visible.causal,
            deterministic=deterministic, dq=dq, dk=dk, dv=dv, dlse=dlse,
        )[:3]  # fmt: skip
