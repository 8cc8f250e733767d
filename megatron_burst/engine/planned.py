"""Lets the planner settle what `auto` leaves open, where the machine's speeds are known."""

from dataclasses import replace
from functools import lru_cache

from megatron_burst.config import BurstConfig
from megatron_burst.engine.setup import Pattern
from megatron_burst.plan.attention import AttentionCall
from megatron_burst.plan.auto import choose_call
from megatron_burst.plan.cost import AttentionShape
from megatron_burst.plan.hardware_file import hardware
from megatron_burst.plan.topology import Topology

_hardware = lru_cache(hardware)  # files are read once


def planned(
    shape: AttentionShape, topology: Topology, pattern: Pattern, config: BurstConfig
) -> tuple[BurstConfig, str]:
    """The configuration with the fastest way by simulation, and why, in words.

    What the user asked for stays. Ranks agree if their files say the same.

    Args:
        shape: sizes of the call on one rank.
        topology: of the group, with its hosts as rows.
        pattern: mask and layout.
        config: what the user asked for; unchanged if its `hardware` is None.

    Raises:
        BurstError: if the hardware is unknown, or what was asked for cannot run.
    """
    if config.hardware is None or topology.cp_size == 1:
        return config, ""
    call = AttentionCall(
        shape, topology, intra=config.intra, inter=config.inter,
        heads_per_round=config.heads_per_round, pieces=config.pieces, circulate=config.circulate,
        pulled=config.transfer != "send", overlap=config.overlap, backend=config.backend,
        layout=pattern.layout, mask=pattern.mask, again=config.keep != "none",
    )  # fmt: skip
    machine = _hardware(config.hardware)
    chosen = choose_call(call, machine)
    way = chosen.call
    in_rounds = way.mode != "ring" and way.pieces
    settled = replace(
        config,
        intra=way.mode,
        inter=way.between,
        heads_per_round=way.heads if in_rounds else config.heads_per_round,
        circulate=way.circulate,
    )
    return settled, f"planned for {machine.name}: {chosen.reason}; "
