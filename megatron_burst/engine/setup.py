"""Decides how a call runs (mode, kernel, transfers), with reasons."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from megatron_burst.comm.groups import Communicator
from megatron_burst.config import BurstConfig
from megatron_burst.engine.passes import Call
from megatron_burst.kernels.backends import choose_backend, problem_of
from megatron_burst.kernels.partial import accumulate_dtype
from megatron_burst.plan.attention import AttentionCall
from megatron_burst.plan.choose import Choice
from megatron_burst.plan.choose_heads import USUAL_MULTIPROCESSORS
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.spec import AttentionShape, Dtype, Kernel
from megatron_burst.schedule.topology import Topology


@dataclass(frozen=True, slots=True)
class Pattern:
    """Which keys a query sees and how scores are scaled."""

    layout: Layout
    mask: Mask
    scale: float


def way_of(
    shape: AttentionShape,
    device: torch.device,
    topology: Topology,
    pattern: Pattern,
    config: BurstConfig,
) -> AttentionCall:
    """The call as the planner sees it; the planner makes all choices except the kernel.

    Args:
        shape: sizes of the call on one rank.
        device: of its tensors.
        topology: of the group.
        pattern: mask, layout, scale.
        config: what the user asked for.
    """
    tuning = config.tuning
    return AttentionCall(
        shape, topology, intra=config.intra, inter="flat" if tuning.flat else config.inter,
        heads_per_round=tuning.heads_per_round, pieces=tuning.pieces, circulate=tuning.circulate,
        transfer=tuning.transfer, overlap=tuning.overlap, backend=config.backend,
        layout=pattern.layout, mask=pattern.mask, device=device.type,
        multiprocessors=multiprocessors(device), grad_wire=tuning.grad_wire,
        resend=tuning.resend,
        again=config.keep != "none",
    )  # fmt: skip


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; on CPU those of a typical GPU."""
    if device.type != "cuda":
        return USUAL_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def resolve_inter(way: AttentionCall, config: BurstConfig) -> tuple[BurstConfig, list[Choice]]:
    """The configuration with `inter` decided, and why; the same on all ranks.

    Args:
        way: the call, with the group's nodes as rows.
        config: what the user asked for.
    """
    choice = way.between_why
    said = [_named("between nodes", choice)] if way.topology.inter_size > 1 else []
    return config if config.tuning.flat else replace(config, inter=choice.value), said


def set_up(
    q: Tensor, k: Tensor, v: Tensor, carrier: Communicator, pattern: Pattern, config: BurstConfig
) -> tuple[Call, list[Choice]]:
    """The call, and the choices made for it.

    Args:
        q: [b, n, h, d_qk].
        k: [b, n, h_kv, d_qk].
        v: [b, n, h_kv, d_v].
        carrier: of the context-parallel group; flat for inter "a2a" and flat tuning.
        pattern: mask, layout, scale.
        config: what the user asked for, with `inter` decided.

    Raises:
        BurstError: if the user asked for something that this call cannot do.
    """
    shape = attention_shape(q, k, v)
    backend, backend_choice = choose_backend(
        problem_of(q, k, v, config.deterministic, pattern.mask), config.backend
    )
    way = replace(
        way_of(shape, q.device, carrier.topology, pattern, config),
        kernel=Kernel(
            backend.capability.rectangular_causal,
            backend.capability.takes_delta,
            backend.capability.wide_grads,
        ),
    )
    narrow = way.priced.grad_bytes == q.dtype.itemsize
    sums = accumulate_dtype(q.dtype)
    dtypes = {Dtype.INPUT: q.dtype, Dtype.SUM: sums, Dtype.WIRE: q.dtype if narrow else sums}
    pulled = carrier.transfer.value == "pull"
    call = Call.of(way, backend, carrier, pattern.scale, dtypes, config.deterministic, pulled)
    return call, [*_choices(way, carrier.transfer), _named("backend", backend_choice)]


def _choices(way: AttentionCall, transfer: Choice) -> list[Choice]:
    """The choices made for a call."""
    if way.topology.cp_size == 1:
        return [Choice("one rank: the kernel alone")]
    choices = [Choice(f"{way.topology}"), way.mode_why]
    if way.mode == "ring" or way.arranged.inter_size > 1:
        choices.append(_named("circulate", way.circulate_why))
    if way.mode == "gather":
        choices += [Choice(f"{way.heads} of {way.shape.heads_kv} KV heads per round"), transfer]
    elif way.mode == "a2a":
        choices += [Choice(f"{way.heads} KV heads of a rank per round"), transfer]
    return choices


def _named(what: str, choice: Choice) -> Choice:
    return replace(choice, value=f"{what} {choice.value}")


def attention_shape(
    q: Tensor, k: Tensor, v: Tensor, grad_dtype: torch.dtype | None = None
) -> AttentionShape:
    """Sizes of a call from its "bshd" tensors and the gradients' dtype on the wire; None: the
    accumulation dtype."""
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
        grad_bytes=(grad_dtype or accumulate_dtype(q.dtype)).itemsize,
    )
