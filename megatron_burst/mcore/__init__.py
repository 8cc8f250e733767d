"""The only package that imports megatron: flags, patches, core attention, specs, CPU mode.

What is computed lies outside, in `megatron_burst.attention`; here it is attached to Megatron-Core.
"""
