"""The only package that imports megatron: flags, patches, core attention, specs.

The computation is in `megatron_burst.attention`; this package attaches it to Megatron-Core.
"""
