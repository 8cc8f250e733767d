"""How a call runs: the mode, heads a round, what circulates, decided by closed rules.

Pure Python without torch. Nothing here moves data; `megatron_burst.engine` executes what is decided
here.
"""
