"""Measures burst beside its peers, from a checkout: `python -m benchmarks.attention --help`."""
