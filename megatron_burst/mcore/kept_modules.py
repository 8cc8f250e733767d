"""Modules of Megatron's transformer layers under recomputation: those whose outputs are kept, and
the last one, which is not called again if backward reads nothing of its output."""

from collections import defaultdict
from collections.abc import Callable
from functools import cached_property, update_wrapper
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from megatron_burst.config import BurstConfig
from megatron_burst.mcore.options import burst_config_of
from megatron_burst.mcore.recompute import is_among, modules_within
from megatron_burst.mcore.refusals import CUDA_GRAPHS, KEEP_MODULES, refuse, refuses
from megatron_burst.recompute.budget import ModuleCost
from megatron_burst.recompute.ending import Ending
from megatron_burst.recompute.keep import call_kept
from megatron_burst.recompute.keeping import WHO, Keeping, running
from megatron_burst.recompute.later import packer

_LAST = "linear_fc2"  # of an MLP, or of experts
_PREPARED = "burst_modules"  # attribute of a layer
_ASKED = "recompute_granularity", "fp8", "fp4", *CUDA_GRAPHS  # what modules are not kept with


def in_layer(forward: Callable[..., Any], /, self: Module, *args: Any, **options: Any) -> Any:
    """A transformer layer's forward; in a checkpoint its modules are called as they are kept."""
    layer = getattr(self, _PREPARED, None)
    if layer is None:
        layer = LayerModules(self)
        setattr(self, _PREPARED, layer)
    layer.see(args[0] if args else options["hidden_states"])
    return forward(self, *args, **options)


class LayerModules:
    """The modules of one layer."""

    def __init__(self, layer: Module) -> None:
        self._layer, self._found = layer, defaultdict(list)
        self._input: tuple[torch.Size, int] | None = None  # shape and itemsize
        self._within: dict[str, int] = {}  # by module, in how many layers "auto" keeps it
        for path, module in list(layer.named_modules()):
            name = path.rpartition(".")[2]
            if name in KEEP_MODULES:
                self._found[name].append((".experts." in path, module))
            if name == _LAST or name in KEEP_MODULES:
                module.forward = LayerModule(self, name, module)

    @cached_property
    def burst(self) -> BurstConfig:
        """The model's options."""
        burst, config = burst_config_of(self._layer.config), self._layer.config
        if names := burst.keep_modules:
            refuse("modules", SimpleNamespace(**vars(config), burst_keep_modules=names), WHO)
        return burst

    @cached_property
    def may_end(self) -> bool:
        """Whether recomputation may leave out the last module. Quantized ones pair a first pass
        with its recomputation themselves."""
        config = self._layer.config
        return self.burst.keep != "none" and not (config.fp8 or config.fp4)

    def keeps(self, name: str) -> bool:
        """Whether a module's output is kept."""
        burst = self.burst
        layers = burst.keep_layers if name in burst.keep_modules else self._within.get(name, 0)
        return layers != 0 and is_among(layers, self._layer.config, self._layer.layer_number)

    def see(self, x: Tensor) -> None:
        """Take the layer's input, [rows, sequences, hidden], whose size says what "auto" keeps."""
        if not running() or self.burst.keep != "auto" or self._input == (x.shape, x.itemsize):
            return
        self._input, config = (x.shape, x.itemsize), self._layer.config
        if not any(refuses("modules", name, config) for name in _ASKED):
            ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
            shape = x.shape[0] * ranks, x.shape[1]
            costs = self._costs(x, shape[0] * shape[1])
            self._within = modules_within(self.burst, config, shape, x.itemsize, costs)

    def _costs(self, x: Tensor, tokens: int) -> tuple[ModuleCost, ...]:
        """What keeping each module takes and saves.

        Args:
            x: the layer's input, of this rank.
            tokens: of all ranks that share its sequence by tensor parallelism.
        """
        found, shard = [], x.shape[0] * x.shape[1]
        for name, modules in self._found.items():
            num_bytes = flops = 0
            for of_experts, module in modules:
                weights = [x for key, x in module.named_parameters() if "layer_norm" not in key]
                for weight in (x for x in weights if x.dim() == 2):
                    rows = self._routed(shard) if of_experts else tokens
                    made = shard if name == "linear_proj" else rows  # scattered over the ranks
                    flops += 2 * rows * weight.numel()
                    num_bytes += made * weight.shape[0] * x.itemsize
                if hasattr(module, "layer_norm_weight"):  # TransformerEngine keeps its output
                    num_bytes += x.nbytes
            found.append(ModuleCost(name, num_bytes, flops))
        return tuple(found)

    def _routed(self, shard: int) -> int:
        """Tokens of a local expert, if all have equally many."""
        config = self._layer.config
        ranks = config.expert_model_parallel_size * (config.expert_tensor_parallel_size or 1)
        return shard * config.moe_router_topk * ranks // config.num_moe_experts


class LayerModule:
    """A module's forward in checkpoints and outside."""

    def __init__(self, layer: LayerModules, name: str, module: Module) -> None:
        self._layer, self._name, self._module = layer, name, module
        self._forward = module.forward
        update_wrapper(self, self._forward, updated=())  # some read its parameters
        self._ending = Ending(self._forward, module.parameters) if name == _LAST else None

    def __call__(self, *args: Any, **options: Any) -> Any:
        """As the module's own forward."""
        if not running():
            return self._forward(*args, **options)
        if self._ending is not None:
            call = self._ending if self._layer.may_end else self._forward
            return call(*args, **options)
        if not self._layer.keeps(self._name):
            return self._forward(*args, **options)
        burst = self._layer.burst
        device = next(x.device for x in tree_leaves((args, options)) if isinstance(x, Tensor))
        pack, parameters = packer(device, burst), tuple(self._module.parameters())
        keeping = Keeping(pack=pack, debug=burst.keep_debug, parameters=parameters)
        return call_kept(self._forward, args, options, keeping)
