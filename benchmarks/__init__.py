"""Compares burst with its peers, from a checkout: `python -m benchmarks.attention --help`."""
