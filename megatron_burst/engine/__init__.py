"""Runs the schedules of one attention call: `ring` and `gather`, forward and backward.

`setup` decides how a call runs; nothing here knows of autograd, Megatron or NCCL.
"""
