"""Entry point for frameworks that build Megatron's models themselves. After importing it, layers
whose configuration has cp_comm_type="burst" run burst attention. Options: MEGATRON_BURST."""

from megatron_burst.mcore.launch import switch_on_automatically
from megatron_burst.mcore.launch import take_args as init

__all__ = ["init"]

switch_on_automatically()
