"""Runs the schedules of one attention call: `ring`, `gather`, `a2a`; both passes.

`setup` decides how a call runs; nothing here knows of autograd, Megatron or NCCL.
"""
