"""Entry point for `--spec megatron_burst.spec layer_spec`, and for specs in Python."""

from megatron_burst.installed import require_megatron

require_megatron("megatron_burst.spec")  # before imports that need a supported Megatron

from megatron_burst.mcore.specs import burst_spec, layer_spec  # noqa: E402

__all__ = ["burst_spec", "layer_spec"]
