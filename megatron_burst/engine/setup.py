"""Decides how a call runs: schedules, kernel, wire; says why."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megatron_burst.comm.groups import Communicator
from megatron_burst.config import BurstConfig
from megatron_burst.engine.call import Call
from megatron_burst.kernels.backends import choose_backend, problem_of
from megatron_burst.kernels.partial import accumulate_dtype
from megatron_burst.plan.a2a import a2a_schedule
from megatron_burst.plan.choose import (
    Asked,
    Choice,
    choose_circulate,
    choose_heads_per_exchange,
    choose_heads_per_round,
    choose_inter,
    choose_intra,
)
from megatron_burst.plan.cost import AttentionShape
from megatron_burst.plan.gather import gather_schedule
from megatron_burst.plan.layout import Layout
from megatron_burst.plan.mask import Mask
from megatron_burst.plan.ring import ring_schedule
from megatron_burst.plan.schedule import Circulate, Direction
from megatron_burst.plan.topology import Topology

_PLANS = {"ring": ring_schedule, "gather": gather_schedule, "a2a": a2a_schedule}


@dataclass(frozen=True, slots=True)
class Pattern:
    """Which keys a query sees and how scores are scaled."""

    layout: Layout
    mask: Mask
    scale: float


def call_shape(q: Tensor, k: Tensor, v: Tensor, config: BurstConfig) -> AttentionShape:
    """Sizes of a call on one rank.

    Args:
        q: [b, n, h, d_qk].
        k: [b, n, h_kv, d_qk].
        v: [b, n, h_kv, d_v].
        config: says the gradients' dtype on the wire.
    """
    return attention_shape(q, k, v, _grad_dtype(q, config))


def settle_inter(
    shape: AttentionShape, device: str, topology: Topology, pattern: Pattern, config: BurstConfig
) -> tuple[BurstConfig, str]:
    """The configuration with `inter` decided, and why, in words; the same on all ranks.

    Args:
        shape: sizes of the call on one rank.
        device: torch device type.
        topology: of the group, with its hosts as rows.
        pattern: mask, layout, scale.
        config: what the user asked for.
    """
    asked = Asked(
        config.inter, config.intra, config.heads_per_round, config.pieces, config.keep != "none"
    )
    choice = choose_inter(shape, topology, pattern.layout, device, asked)
    several = topology.inter_size > 1
    return replace(config, inter=choice.value), f"between hosts {choice}; " if several else ""


def _grad_dtype(q: Tensor, config: BurstConfig) -> torch.dtype:
    return q.dtype if config.grad_wire == "input" else accumulate_dtype(q.dtype)


def set_up(
    q: Tensor, k: Tensor, v: Tensor, carrier: Communicator, pattern: Pattern, config: BurstConfig
) -> tuple[Call, str]:
    """The call, and what was chosen for it, in words.

    Args:
        q: [b, n, h, d_qk].
        k: [b, n, h_kv, d_qk].
        v: [b, n, h_kv, d_v].
        carrier: of the context-parallel group; of a flat topology for inter "a2a" and "flat".
        pattern: mask, layout, scale.
        config: what the user asked for; its `inter` decided.

    Raises:
        BurstError: if the user asked for what this call cannot have.
    """
    grad_dtype = _grad_dtype(q, config)
    shape = attention_shape(q, k, v, grad_dtype)
    backend, backend_choice = choose_backend(
        problem_of(q, k, v, config.deterministic), config.backend
    )
    topology = carrier.topology
    intra = choose_intra(topology, pattern.layout, q.device.type, config.intra, config.inter)
    chosen = []
    if intra.value == "ring" or topology.inter_size > 1:
        circulate = choose_circulate(shape, config.circulate)
        chosen.append(f"circulate {circulate}")
    else:
        circulate = Choice(Circulate.KV, "one host")
    options: dict[str, object] = {}
    if intra.value == "gather":
        heads = choose_heads_per_round(shape, topology, config.heads_per_round, config.pieces)
        chosen += [f"{heads} of {shape.heads_kv} key heads a round", f"{carrier.transfer}"]
        options = {
            "heads_kv": shape.heads_kv,
            "heads_per_round": heads,
            "rectangular_causal": backend.capability.rectangular_causal,
        }
    elif intra.value == "a2a":
        heads = choose_heads_per_exchange(shape, topology, config.heads_per_round, config.pieces)
        chosen += [f"{heads} key heads of a rank a round", f"{carrier.transfer}"]
        options = {"heads_kv": shape.heads_kv, "heads_per_round": heads}
    schedule = partial(_PLANS[intra.value], topology, carrier.cp_rank, **options)
    backward = partial(schedule, circulate=Circulate(circulate.value))
    rows = {"layout": pattern.layout, "mask": pattern.mask, "tokens": shape.tokens}
    call = Call(
        forward=schedule(direction=Direction.FORWARD, **rows),
        backward=backward(direction=Direction.BACKWARD, **rows),
        backend=backend,
        carrier=carrier,
        scale=pattern.scale,
        grad_dtype=grad_dtype,
        deterministic=config.deterministic,
    )
    words = [f"{topology}", f"{intra}", *chosen, f"backend {backend_choice}"]
    return call, "; ".join(words)


def attention_shape(q: Tensor, k: Tensor, v: Tensor, grad_dtype: torch.dtype) -> AttentionShape:
    """Sizes of a call from its "bshd" tensors and the dtype of gradients on the wire."""
    batch, tokens, heads_q, dim_qk = q.shape
    return AttentionShape(
        batch=batch,
        tokens=tokens,
        heads_q=heads_q,
        heads_kv=k.shape[2],
        dim_qk=dim_qk,
        dim_v=v.shape[3],
        itemsize=q.dtype.itemsize,
        stat_bytes=accumulate_dtype(q.dtype).itemsize,
        grad_bytes=grad_dtype.itemsize,
    )
