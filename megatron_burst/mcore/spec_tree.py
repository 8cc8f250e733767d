"""Specs with burst attention in place of Megatron's own: no patch needed."""

import dataclasses
import functools
from typing import Any, cast

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_burst.errors import BurstError
from megatron_burst.mcore.arguments import check_options
from megatron_burst.mcore.core_attention import burst_replacements
from megatron_burst.mcore.providers import provider_patches
from megatron_burst.mcore.refusals import PER_LAYER, WHO, check_run


def layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """The layer spec that Megatron would use, with burst attention in it.

    For `--spec megatron_burst.spec layer_spec --cp-comm-type burst` (Megatron-Core 0.19 or newer).
    Layers of multi-token prediction are not built from it; those need --context-parallel-impl.

    Args:
        config: Megatron's GPTModelConfig.
        vp_stage: virtual pipeline stage.

    Raises:
        BurstError: if there are such layers, and the flag is not given; for what burst does not
            support.
    """
    from megatron.training.models.gpt import default_layer_spec

    if config.transformer.context_parallel_size > 1:
        _check_model(config.transformer)
    return burst_spec(default_layer_spec(config, vp_stage))


def burst_spec(spec: Any) -> Any:
    """A copy of a spec tree in which burst attention replaces Megatron's core attention.

    One that has burst's already stays as it is.

    Args:
        spec: a ModuleSpec or anything that holds some: submodules, block submodules, partials,
            lists, tuples and dicts. It is left as it is.

    Raises:
        BurstError: if there is no core attention of Megatron's in it, nor burst's.
    """
    found: list[type] = []
    copy = _copy(spec, {}, found)
    if not found:
        raise BurstError(
            "burst_spec: the spec must hold a core attention of Megatron's, because that is what "
            f"burst replaces; got none in {type(spec).__name__}; pass a layer or block spec"
        )
    return copy


def _check_model(config: TransformerConfig) -> None:
    """Refuse what a model of `layer_spec` would refuse or ignore, before Megatron builds it."""
    check_run()
    check_options(config, WHO, skip=PER_LAYER)
    by_flag = all(patch.live for patch in provider_patches())  # specs then name burst themselves
    if config.mtp_num_layers and not by_flag:
        raise BurstError(
            "--spec megatron_burst.spec layer_spec: the model must have no layers of multi-token "
            "prediction, because Megatron builds them without --spec; got --mtp-num-layers "
            f"{config.mtp_num_layers}; start the script by python -m megatron_burst, with "
            "--context-parallel-impl burst instead of --spec"
        )


def _copy(node: Any, memo: dict[int, Any], found: list[type]) -> Any:
    """Copy what leads to a core attention; `memo` keeps shared specs shared."""
    if isinstance(node, type):
        core = burst_replacements().get(node, node)
        if core in burst_replacements().values():
            found.append(core)
        return core
    if id(node) in memo:
        return memo[id(node)]
    copy = functools.partial(_copy, memo=memo, found=found)
    made = node
    if isinstance(node, ModuleSpec) or (
        dataclasses.is_dataclass(node) and type(node).__name__.endswith("Submodules")
    ):
        values = {f.name: getattr(node, f.name) for f in dataclasses.fields(node)}
        made = dataclasses.replace(
            cast(Any, node), **{name: copy(value) for name, value in values.items()}
        )
    elif isinstance(node, functools.partial):
        keywords = {name: copy(value) for name, value in node.keywords.items()}
        made = functools.partial(copy(node.func), *map(copy, node.args), **keywords)
    elif isinstance(node, list | tuple) and type(node) in (list, tuple):
        made = type(node)(map(copy, node))
    elif type(node) is dict:
        made = {key: copy(value) for key, value in node.items()}
    memo[id(node)] = made
    return made
