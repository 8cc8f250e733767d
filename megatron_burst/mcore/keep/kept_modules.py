"""Modules of Megatron's transformer layers under recomputation: those whose outputs are kept, and
the last one, which is not called again if backward reads nothing of its output, nor is the
all-to-all of experts behind it."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cached_property, update_wrapper
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron_burst.config import BurstConfig
from megatron_burst.logs import log_message_once
from megatron_burst.mcore.keep import module_costs, stage_layers
from megatron_burst.mcore.keep.recompute import modules_within
from megatron_burst.mcore.keep.stage import Stage, stage_of
from megatron_burst.mcore.options import burst_config_of
from megatron_burst.mcore.refusals import CUDA_GRAPHS, KEEP_MODULES, refuse, refuses
from megatron_burst.recompute.auto.budget import WHOLE, ModuleCost, Placed, most
from megatron_burst.recompute.ending import Ending
from megatron_burst.recompute.keep import call_kept, once
from megatron_burst.recompute.keeping import WHO, Keeping, Parcel, Resident, Tensors, running
from megatron_burst.recompute.offload import host_memory

_LAST = "linear_fc2"  # of an MLP, or of experts
_DISPATCH, _COMBINE = "token_dispatch", "token_combine"  # send tokens to experts; results back
_ATTENTION = "core_attention"  # whose results "auto" keeps first
# of a dispatcher of tokens, once the CPU knows how many each expert gets; and the copy's event
_COUNTED = ("input_splits", "output_splits", "output_splits_tp", "num_out_tokens",
            "num_global_tokens_per_local_expert", "d2h_event")  # fmt: skip
_INPUTS = 64  # sizes whose choices are held
_WITHOUT = "recompute_granularity", "fp8", "fp4", *CUDA_GRAPHS  # what modules are not kept with


def modules_of(layer: Any) -> "LayerModules":
    """The modules of a transformer layer; in its first call they are prepared."""
    if not hasattr(layer, "burst_modules"):
        layer.burst_modules = LayerModules(layer)
    return layer.burst_modules


def in_layer(forward: Callable[..., Any], /, self: nn.Module, *args: Any, **options: Any) -> Any:
    """A transformer layer's forward; in a checkpoint its modules are called as they are kept."""
    layer, runs = modules_of(self), running()
    is_whole = not runs and layer.expected_bytes > 0
    if layer.burst.keep != "auto" or not (runs or is_whole):
        return forward(self, *args, **options)
    x = args[0] if args else options["hidden_states"]
    stage = stage_of(layer.burst, x.device)
    first, call = stage.first, lambda: forward(self, *args, **options)
    if is_whole:
        options |= layer.options
        with first.expecting(layer.expected_bytes):
            return call()
    layer.see(x, stage)
    run = runs[-1]
    if run.recomputes:
        first.turn(run)
        kind = stage_layers.layer_kind(self.config)
        living = lambda: (*self.parameters(), *_tensors_of(args, options))  # noqa: E731
        return first.weigh(call, x, run, kind, living)
    with first.timing(prod(module_costs.shared_shape(self.config, x)), layer.skipped):
        return call()


def _tensors_of(*arguments: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


class LayerModules:
    """The modules of one layer."""

    def __init__(self, layer: Any) -> None:
        self.config, self._number = layer.config, layer.layer_number
        # without a checkpoint in its block's running call: bytes that it should hold for backward,
        # and options of that call, which Megatron gives to layers in checkpoints only
        self.expected_bytes, self.options = 0, {}
        # by name: whether they are experts', and the modules
        self._modules: dict[str, list[tuple[bool, nn.Module]]] = defaultdict(list)
        self.skipped: list[nn.Module] = []  # which recomputation does without anyway
        self._within: dict[str, Placed] = {}  # where "auto" keeps modules in the running call
        for path, module in list(layer.named_modules()):
            name = path.rpartition(".")[2]
            if name in KEEP_MODULES:
                self._modules[name].append((".experts." in path, module))
            if name in (_LAST, _ATTENTION):
                self.skipped.append(module)
            if name == _LAST or name in KEEP_MODULES:
                module.forward = LayerModule(self, name, module.forward, module.parameters)
            dispatcher: Any = getattr(module, "token_dispatcher", None)
            # it sends tokens to other ranks, and results back, in calls that do nothing else
            if (type(dispatcher) is MoEAlltoAllTokenDispatcher and dispatcher.ep_size > 1
                    and dispatcher.shared_experts is None):  # fmt: skip
                for call in (_DISPATCH, _COMBINE):
                    setattr(dispatcher, call, LayerModule(self, call, getattr(dispatcher, call)))

    @cached_property
    def burst(self) -> BurstConfig:
        """The model's options."""
        burst, config = burst_config_of(self.config), self.config
        if names := burst.keep_modules:
            refuse("modules", SimpleNamespace(**vars(config), burst_keep_modules=names), WHO)
        return burst

    @cached_property
    def may_end(self) -> bool:
        """Whether recomputation may leave out the last module. Quantized ones pair a first pass
        with its recomputation themselves."""
        config = self.config
        return self.burst.keep != "none" and not (config.fp8 or config.fp4)

    def is_whole_by(self, chosen: dict[str, Placed]) -> bool:
        """Whether a choice is to keep all of this layer."""
        placed = chosen.get(WHOLE, Placed())
        return stage_layers.is_on_host(placed, self.config, self._number) is False

    def packer(self, name: str, device: torch.device) -> Callable[[Tensors], Parcel] | None:
        """The function that stores what a module keeps in this layer; None: it keeps nothing."""
        burst, layer = self.burst, (self.config, self._number)
        if name in burst.keep_modules:
            offloads = burst.offloads_results
            keeps = stage_layers.is_among(burst.keep_layers, *layer)
            on_host = offloads and not stage_layers.is_last(*layer) if keeps else None
        else:
            placed, whole = (self._within.get(key, Placed()) for key in (name, WHOLE))
            on_host, offloads = stage_layers.is_on_host(placed, *layer, whole), placed.host > 0
        if on_host is None:
            return None
        if not offloads:
            return Resident
        memory = host_memory(device, burst.keep_host_gib)
        return memory.pack if on_host else memory.stay

    def see(self, x: Tensor, stage: Stage) -> None:
        """Take the layer's input, [rows, sequences, hidden], whose size says what "auto" keeps, in
        the first pass; recomputation keeps the same, whatever came in between."""
        runs, layers = running(), module_costs.layers_of(stage.models, self.config)
        layers.are_all |= any(run.recomputes for run in runs)
        layers.seen.add(self)
        earlier = [layers.by_frame[run.frame] for run in runs if run.frame in layers.by_frame]
        self._within = earlier[0] if earlier else self.chosen(stage, x)
        for run in runs:
            layers.by_frame.setdefault(run.frame, self._within)

    def chosen(self, stage: Stage, x: Tensor) -> dict[str, Placed]:
        """Where "auto" keeps each module, for the layer's input: by the most that it takes in a
        layer, so that all layers choose alike, and together keep no more than fits."""
        config, layers = self.config, module_costs.layers_of(stage.models, self.config)
        if stage_layers.meets_other_sequences(config):
            x = _as_agreed(x, stage, config)
        tokens = prod(module_costs.shared_shape(config, x))
        if stage.budget_bytes(self.burst, tokens) is None or not tokens:
            return {}
        if module_costs.may_differ(config) and not layers.are_all:
            return {}
        count, whole = layers.are_all and len(layers.seen), layers.may_be_whole
        key = x.shape, x.itemsize, stage.left_bytes, whole, count
        if key not in layers.by_input:
            if any(refuses("modules", name, config) for name in _WITHOUT):
                return {}
            if len(layers.by_input) >= _INPUTS:
                layers.by_input.clear()
            costs = most(layer.costs(x) for layer in (layers.seen if layers.are_all else (self,)))
            layers.by_input[key] = modules_within(self.burst, config, stage, x, costs, whole)
        return layers.by_input[key]

    def costs(self, x: Tensor) -> tuple[ModuleCost, ...]:
        """What keeping each module takes and saves, for the layer's input."""
        return module_costs.costs_of(self._modules, self.config, x)


def _as_agreed(x: Tensor, stage: Stage, config: TransformerConfig) -> Tensor:
    """A layer's input, without data, of the first step's longest micro-batch on any rank, by which
    ranks of other sequences choose too; empty as long as they have not agreed."""
    rows, tokens = x.shape[0] * x.shape[1], prod(module_costs.shared_shape(config, x))
    if 0 < stage.tokens < tokens:
        log_message_once(f"{WHO}: a micro-batch of {tokens} tokens is longer than those of the "
                         f"first step ({stage.tokens}) but keeps the same layers, because its "
                         "experts' ranks have other micro-batches and must recompute the same "
                         "layers, so memory may not suffice; pass --burst-keep-budget-gib to keep "
                         "less")  # fmt: skip
    return x.new_empty((rows * stage.tokens // tokens, 1, x.shape[2]), device="meta")


class LayerModule:
    """A module's forward, or another function of a layer, in checkpoints and outside;
    `parameters`: those that it reads."""

    def __init__(self, layer: LayerModules, name: str, forward: Callable[..., Any],
                 parameters: Callable[[], Iterable[Tensor]] = tuple) -> None:  # fmt: skip
        self._layer, self._name = layer, name
        self._forward, self._parameters = forward, parameters
        update_wrapper(self, forward, updated=())  # some read its parameters
        self._ending = Ending(forward, parameters) if name in (_LAST, _COMBINE) else None

    def __call__(self, *args: Any, **options: Any) -> Any:
        """As the module's own forward."""
        if not running():
            return self._forward(*args, **options)
        if self._ending is not None:
            call = self._ending if self._layer.may_end else self._forward
            return call(*args, **options)
        pack = self._layer.packer(self._name, _tensors_of(args, options)[0].device)
        if pack is None:
            return self._forward(*args, **options)
        debug, parameters = self._layer.burst.keep_debug, tuple(self._parameters())
        keeping = Keeping(pack=pack, debug=debug, parameters=parameters)
        outs = call_kept(self._forward, args, options, keeping)
        if self._name == module_costs.ROUTER:
            outs[1].is_kept = True  # which tokens go where: see `counted_once`
        return outs


def counted_once(count: Callable[..., Any], /, self: Any, point: str, counts: Any = None) -> Any:
    """A dispatcher's copy of the number of tokens of each expert to the CPU, where it waits for the
    GPU: of a decision that is kept, recomputation has the numbers of the first pass."""
    is_kept = running() and getattr(self.routing_map, "is_kept", False)
    if not is_kept or self.drop_and_pad or point != self.cuda_dtoh_point:
        return count(self, point, counts)

    def in_first_pass() -> tuple[Any, dict[str, Any]]:
        on_cpu = count(self, point, counts)
        return on_cpu, {name: getattr(self, name, None) for name in _COUNTED}

    counts, numbers = once(in_first_pass)
    vars(self).update(numbers)
    return counts
