"""Door for `--spec megatron_burst.spec layer_spec`."""

from megatron_burst.mcore.spec_tree import burst_spec, layer_spec

__all__ = ["burst_spec", "layer_spec"]
