"""Lets the planner resolve "auto" where the machine's speeds are known."""

from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b

from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from megatron_burst.plan.attention import AttentionCall
from megatron_burst.plan.auto import choose_call
from megatron_burst.plan.choose import Choice
from megatron_burst.plan.half import HalfCall, Rates
from megatron_burst.plan.hardware import Hardware
from megatron_burst.plan.hardware_file import hardware
from megatron_burst.schedule.call import AttentionShape
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.topology import Topology

_hardware = lru_cache(hardware)  # files are read once


def planned(call: AttentionCall, config: BurstConfig) -> tuple[BurstConfig, list[Choice]]:
    """The configuration that simulates fastest, and why.

    Options that the user set stay. Ranks agree if their hardware files agree.

    Args:
        call: with the group's nodes as rows.
        config: what the user asked for; unchanged if its `hardware` is None.

    Raises:
        BurstError: if the hardware is unknown, has no speed for the requested kernel, or if the
            requested options cannot run.
    """
    if config.hardware is None or call.topology.cp_size == 1:
        return config, []
    machine = _hardware(config.hardware)
    _check_kernel(machine, config.backend)
    chosen = choose_call(call, machine)
    way = chosen.call
    in_rounds = way.mode != "ring" and way.pieces
    resolved = replace(
        config,
        intra=way.mode,
        inter="auto" if config.tuning.flat else way.between,
    ).tuned(
        heads_per_round=way.heads if in_rounds else config.tuning.heads_per_round,
        circulate=way.circulate,
    )
    return resolved, [Choice(f"planned for {machine.name}", chosen.reason)]


def speeds_digest(config: BurstConfig) -> str:
    """A digest, equal on ranks whose machines are described alike.

    Raises:
        BurstError: if there is no such hardware, or its file is invalid.
    """
    if config.hardware is None:
        return "None"
    speeds = repr(_hardware(config.hardware)).encode()
    return f"{config.hardware}, whose figures are {blake2b(speeds, digest_size=4).hexdigest()}"


def _check_kernel(machine: Hardware, backend: str) -> None:
    known = {kernel.backend: None for kernel in machine.kernels}
    if backend != "auto" and known.keys().isdisjoint(backend.split(",")):
        raise BurstError(
            f"burst attention: hardware {machine.name} must have the kernel's speed, because "
            f"auto chooses what the simulation finds fastest; got {backend}, and speeds of "
            f"{', '.join(known)}; leave out --burst-hardware (hardware), or choose one of these"
        )


def rates(config: BurstConfig) -> Rates:
    """Rates that decide whether rows are resharded between nodes: the named machine's, if any."""
    return Rates() if config.hardware is None else Rates.of(_hardware(config.hardware))


def half_call(
    layout: Layout, mask: Mask, topology: Topology, shape: AttentionShape, config: BurstConfig
) -> HalfCall:
    """A call that keeps the later half.

    Args:
        layout: how tokens are sharded.
        mask: which keys a query may see.
        topology: of the group.
        shape: sizes of the call on one rank.
        config: what the user asked for; options alone decide whether there is an all-to-all.
    """
    exchanged = "a2a" in (config.inter, config.intra if topology.inter_size == 1 else None)
    return HalfCall(layout, mask, topology, shape, rates(config), exchanged)
