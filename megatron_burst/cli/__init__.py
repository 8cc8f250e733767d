"""The command line: `megatron-burst`, or `python -m megatron_burst.cli`."""
