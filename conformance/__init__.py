"""Peers' own test programs, run with burst in place of their context parallelism.

`python -m conformance.run` (`make conformance`) runs those of `suites.py` from checkouts of
TransformerEngine and Megatron-LM. Not in the wheel; nothing of theirs is copied.
"""
