"""Puts burst attention into specs: by burst_spec, or when Megatron builds its own specs."""

import copy
import dataclasses
import functools
import inspect
import sys
from argparse import Namespace
from typing import Any, cast

from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_burst.errors import BurstError
from megatron_burst.imports import when_imported
from megatron_burst.installed import find_megatron
from megatron_burst.mcore import core_attention, core_classes, patches
from megatron_burst.mcore.args import global_args
from megatron_burst.mcore.checks import WHO, check_layer, check_run
from megatron_burst.mcore.options import burst_config_of
from megatron_burst.mcore.packed import follow_groups, shards_whole_sample
from megatron_burst.mcore.refusals import refuse
from megatron_burst.patching import on_undo

_CONVERSION = "megatron.bridge.models.conversion.param_mapping"


def layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """The layer spec that Megatron would use for its GPTModelConfig, with burst attention in it.

    For `--spec megatron_burst.spec layer_spec --cp-comm-type burst` (Megatron-Core 0.19 or newer).
    Layers of multi-token prediction are not built from it; those need --context-parallel-impl.

    Raises:
        BurstError: if there are such layers, and the flag is not given; for what burst does not
            support.
    """
    if not patches.rows("spec"):
        raise BurstError("--spec megatron_burst.spec layer_spec: Megatron-Core must be 0.19 or "
                         "newer, because older releases do not pass the model's configuration to "
                         f"it; got {find_megatron()}; pass --context-parallel-impl burst "
                         "instead")  # fmt: skip
    patches.apply("spec")
    # Megatron has read the flag; with --use-checkpoint-args a checkpoint that has it would force
    # burst on a run that did not ask for it (training/checkpointing.py:1925)
    if (args := global_args()) and (args.spec or [None])[0] == "megatron_burst.spec":
        args.spec = None
    from megatron.training.models.gpt import default_layer_spec

    if config.transformer.context_parallel_size > 1:  # check before Megatron builds the model
        check_run()
        refuse("attention", config.transformer, WHO, skip=("attention_dropout",))  # may differ
        if not all(patch.live for patch in patches.rows("attention")):  # else layers build it
            _check_by_spec(config.transformer)
    if getattr(config.transformer, "burst", None) is not None:
        patches.apply("layers")
    return _replaced(default_layer_spec(config, vp_stage))


def _check_by_spec(config: Any) -> None:
    """Refuse what works only with Megatron's and torch's functions replaced."""
    burst = burst_config_of(config)
    options = vars(global_args() or Namespace()) | dict(
        mtp_num_layers=config.mtp_num_layers, burst_keep=burst.keep,
        burst_keep_offload=burst.keep_offload, has_te=HAVE_TE,
    )  # fmt: skip
    refuse("spec", Namespace(**options), "--spec megatron_burst.spec layer_spec")


def burst_spec(spec: Any) -> Any:
    """A copy of a spec tree in which burst attention replaces Megatron's core attention.

    Options come from the configuration's attribute `burst`, if a script sets it to a BurstConfig,
    otherwise from the command line or MEGATRON_BURST.

    `spec`: a ModuleSpec, or anything that contains some: submodules, block submodules, partials,
    lists, tuples and dicts. A spec that already has burst attention is not changed.

    Raises:
        BurstError: if the spec contains neither Megatron's core attention nor burst's.
    """
    patches.apply_when_imported("layers")
    return _replaced(spec)


def _replaced(spec: Any) -> Any:
    cores: dict[type, type | None] = {}
    copied = _copy(spec, {}, cores)
    if not any(cores.values()):
        raise BurstError("burst_spec: the spec must hold Megatron's core attention, or a subclass "
                         "of TransformerEngine's that does not override forward, because burst "
                         "replaces that; got "
                         f"{', '.join(core.__name__ for core in cores) or 'none'} in "
                         f"{type(spec).__name__}; pass a layer or block spec with one")  # fmt: skip
    return copied


def _copy(node: Any, memo: dict[int, Any], cores: dict[type, type | None]) -> Any:
    """Copy the path to each core attention; `memo` keeps shared specs shared, `cores` collects core
    attentions, each with burst's replacement or None."""
    if isinstance(node, type):
        core = core_classes.burst_core_of(node)
        if core is not None or issubclass(node, tuple(core_classes.burst_replacements())):
            cores[node] = core
        if core is not None:
            _convert_alike(node, core)
        return core or node
    if id(node) in memo:
        return memo[id(node)]
    inner, copied = functools.partial(_copy, memo=memo, cores=cores), node
    has_name = dataclasses.is_dataclass(node) and type(node).__name__.endswith("Submodules")
    if has_name or isinstance(node, ModuleSpec):
        values = {f.name: inner(getattr(node, f.name)) for f in dataclasses.fields(cast(Any, node))}
        copied = dataclasses.replace(cast(Any, node), **values)
    elif isinstance(node, functools.partial):
        keywords = {name: inner(value) for name, value in node.keywords.items()}
        copied = functools.partial(inner(node.func), *map(inner, node.args), **keywords)
    elif type(node) in (list, tuple):
        copied = type(node)(map(inner, node))
    elif type(node) is dict:
        copied = {key: inner(value) for key, value in node.items()}
    memo[id(node)] = copied
    return copied


@functools.cache
def _convert_alike(replaced: type, core: type) -> None:
    """Make Megatron-Bridge convert our core attention's weights like those of the one it replaces.

    Its table lists class names (0.6.2, models/conversion/param_mapping.py:1409): an attention sink
    of an unlisted class would abort the conversion.
    """

    def register() -> None:
        mapping = sys.modules[_CONVERSION].AutoMapping
        for kind, names in getattr(mapping, "_MODULE_TYPE_REGISTRY", {}).items():
            if replaced.__name__ in names:
                mapping.register_module_type(core.__name__, kind)

    on_undo(_convert_alike.cache_clear)  # undone together with the import hook
    on_undo(when_imported(_CONVERSION, register))


# ---- what replaces functions of Megatron, called with the original: see patches.py -----------


def build_burst(init, /, self, *arguments, **options) -> None:
    """The constructor of Megatron's attention layers, which builds burst in those that ask for it.

    This covers specs other than GPT's (hybrid, heterogeneous, a user's), which name Megatron's own.
    """
    bound = inspect.signature(init).bind(self, *arguments, **options)
    layer = bound.arguments
    runs_burst = _asks_for_burst(**layer)
    if runs_burst:
        patches.apply("packed", *["anywhere"] * shards_whole_sample())
        layer["submodules"] = _with_burst(**layer)
        layer["cp_comm_type"] = "burst"  # passed on by transformer layers only
    init(*bound.args, **bound.kwargs)
    if runs_burst:
        core = self.core_attention
        _check_core(type(core), **layer)  # built by a function, or with params
        core.burst = dataclasses.replace(core.burst, follows_groups=follow_groups(self))


def with_options(config_of_layer, /, self, layer_number):
    """A heterogeneous model's configuration of one layer, with burst's options added."""
    config = config_of_layer(self, layer_number)
    config.burst = getattr(self, "burst", None)
    return config


def refuse_unset(init, /, self, *arguments, **options) -> None:
    """The same constructor with the flag: requires what `validate_args` sets.

    Without context parallelism also of causal models, which the flag means; with it their
    configuration may say that they are towers, which hold whole samples.
    """
    layer = inspect.signature(init).bind(self, *arguments, **options).arguments
    alone = parallel_state.get_context_parallel_world_size() <= 1
    mask = getattr(layer["attn_mask_type"], "name", None) if alone else None
    refuse("model", Namespace(**vars(layer["config"]) | {"attn_mask_type": mask}), WHO)
    init(self, *arguments, **options)


def _asks_for_burst(config, layer_number, cp_comm_type=None, pg_collection=None, **_) -> bool:
    """Whether a layer is given burst, or else has it in the model's `cp_comm_type`.

    MLA, and attention built without a transformer layer, give none.
    """
    kind = core_attention.comm_type_of_layer(cp_comm_type or config.cp_comm_type, layer_number)
    asks = core_attention.asks_for_burst
    return kind == "burst" and asks(config, layer_number, kind, pg_collection)


def _with_burst(submodules, **layer) -> Any:
    """A layer's submodules, with burst's core attention."""
    cores: dict[type, type | None] = {}
    core = _copy(submodules.core_attention, {}, cores)
    if not any(cores.values()):
        core = getattr(core, "module", core)
        core = core.func if isinstance(core, functools.partial) else core
        # others are known once they are built
        _check_core(core if isinstance(core, type) else None, **layer)
        return submodules
    submodules = copy.copy(submodules)
    submodules.core_attention = core
    return submodules


def _check_core(core, config, layer_number, attn_mask_type, attention_type, **_) -> None:
    """Refuse a layer that should run burst but would build another core attention: a class; None:
    not known yet."""
    if core is None or issubclass(core, tuple(core_classes.burst_replacements().values())):
        return
    check_layer(config, layer_number, attn_mask_type, attention_type, None)
    raise BurstError(f"{WHO}: the model's spec must name burst's core attention, Megatron's own, "
                     "or a subclass of TransformerEngine's that does not override forward, because "
                     f"no other class knows what cp_comm_type=burst means; got {core.__name__} in "
                     f"layer {layer_number}; put one of these into the spec, or train this model "
                     "without burst")  # fmt: skip
