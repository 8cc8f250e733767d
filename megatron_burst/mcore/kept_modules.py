"""Modules of Megatron's transformer layers under recomputation: those whose outputs are kept, and
the last one, which is not called again if backward reads nothing of its output."""

from collections.abc import Callable
from functools import cached_property, update_wrapper
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from megatron_burst.config import BurstConfig
from megatron_burst.mcore.options import burst_config_of
from megatron_burst.mcore.recompute import keeps_layer
from megatron_burst.mcore.refusals import KEEP_MODULES, refuse
from megatron_burst.recompute.ending import Ending
from megatron_burst.recompute.keep import call_kept
from megatron_burst.recompute.keeping import WHO, Keeping, running
from megatron_burst.recompute.later import packer

_LAST = "linear_fc2"  # of an MLP, or of experts
_PREPARED = "burst_modules_prepared"  # attribute of a layer


def in_layer(forward: Callable[..., Any], /, self: Module, *args: Any, **options: Any) -> Any:
    """A transformer layer's forward; in a checkpoint its modules are called as they are kept."""
    if not hasattr(self, _PREPARED):
        setattr(self, _PREPARED, True)
        for path, module in list(self.named_modules()):
            name = path.rpartition(".")[2]
            if name in (*KEEP_MODULES, _LAST):
                module.forward = LayerModule(self, name, module)
    return forward(self, *args, **options)


class LayerModule:
    """A module's forward in checkpoints and outside."""

    def __init__(self, layer: Module, name: str, module: Module) -> None:
        self._layer, self._name, self._module = layer, name, module
        self._forward = module.forward
        update_wrapper(self, self._forward, updated=())  # some read its parameters
        self._ending = Ending(self._forward, module.parameters) if name == _LAST else None

    def __call__(self, *args: Any, **options: Any) -> Any:
        """As the module's own forward."""
        if not running() or not self._applies:
            return self._forward(*args, **options)
        if self._ending is not None:
            return self._ending(*args, **options)
        burst = self._options
        device = next(x.device for x in tree_leaves((args, options)) if isinstance(x, Tensor))
        pack, parameters = packer(device, burst), tuple(self._module.parameters())
        keeping = Keeping(pack=pack, debug=burst.keep_debug, parameters=parameters)
        return call_kept(self._forward, args, options, keeping)

    @cached_property
    def _options(self) -> BurstConfig:
        config = self._layer.config
        burst = burst_config_of(config)
        if names := burst.keep_modules:
            refuse("modules", SimpleNamespace(**vars(config), burst_keep_modules=names), WHO)
        return burst

    @cached_property
    def _applies(self) -> bool:
        """Whether the module is kept, or may be the last one of a checkpoint.

        Quantized modules pair a first pass with its recomputation themselves.
        """
        config, burst = self._layer.config, self._options
        if self._ending is not None:
            return burst.keep != "none" and not (config.fp8 or config.fp4)
        named = self._name in burst.keep_modules
        return named and keeps_layer(burst, config, self._layer.layer_number)
