"""Lets torch's context parallelism run on CPUs, for tests.

It has no rule for its SDPA of CPUs and refuses FlexAttention's gradients there. Its own loop over
ranks and its own gathering run with these; the kernels are torch's for CPUs.
"""

from functools import partial

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as cp
from torch.nn.attention import flex_attention

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def allow() -> None:
    """Do so in this process, which later tests must not use."""
    cp.custom_ops[_FLASH.default] = partial(_over_ranks, _forward)
    cp.custom_ops[_FLASH_BACKWARD.default] = partial(_over_ranks, _backward)
    flex_attention._validate_device = lambda *_: None
    torch.compile = lambda function, **_: function


def _over_ranks(run, _, args, named):
    mesh, *local = (
        args[0].device_mesh,
        *(x.to_local() if isinstance(x, DTensor) else x for x in args),
    )
    results = run(mesh.get_group(), *local, scale=named.get("scale"))
    return tuple(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in results)


def _forward(group, q, k, v, dropout_p=0.0, is_causal=False, scale=None):
    return cp._templated_ring_attention(group, 2, _tile, q, k, v, is_causal=is_causal, scale=scale)


def _tile(q, k, v, is_causal, scale):
    return _FLASH(q, k, v, 0.0, is_causal, scale=scale)


def _backward(group, dout, q, k, v, out, lse, dropout_p, is_causal, scale=None):
    return cp._templated_ring_attention_backward(
        group, 2, _tile_backward, dout, "dout", q, k, v, out, lse, is_causal, scale=scale
    )


def _tile_backward(query, key, value, out, logsumexp, is_causal, dout, scale):
    tensors = dout, query, key, value, out, logsumexp
    return _FLASH_BACKWARD(*tensors, 0.0, is_causal, scale=scale)
