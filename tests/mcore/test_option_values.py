"""Values of options that burst compares, against this release's own tables of values.

Guards against a value that a release renames or adds, and that burst then refuses with a sentence
about something else, or takes for one that it supports.
"""

import typing
from dataclasses import fields
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_burst.errors import BurstError
from megatron_burst.mcore.refusals import _BESIDE_ATTENTION, _MASKS, DELTA_NETS, refuse
from tests.mcore import gpt  # noqa: F401  (its processes start with Megatron loaded)

VALUES = {  # option: values that burst runs with, values that it refuses
    "experimental_attention_variant": ({*DELTA_NETS}, {"dsa", "dsv4_hybrid"}),
    "softmax_type": ({"vanilla", "off-by-one", "learnable"}, set()),
    "transformer_impl": ({"local", "transformer_engine"}, {"inference_optimized"}),
    "cuda_graph_impl": ({"none", "local", "transformer_engine"}, {"full_iteration"}),
    "recompute_granularity": ({"full", "selective"}, set()),
    "moe_token_dispatcher_type": ({"allgather", "alltoall", "flex"}, set()),
    "flash_attention_version": (set(), {2, 3, 4}),
    "attention_cp_layout": ({"zigzag"}, {"contiguous"}),
    "attention_backend": ({"auto", "flash", "fused", "unfused"}, {"local"}),
    "attn_mask_type": (set(_MASKS), {"arbitrary", "causal_bottom_right"}),
}


def values_of(option: str) -> set[Any]:
    """The values in a release's table; empty if it has none."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    kinds = {field.name: field.type for field in fields(TransformerConfig)}
    return _named(AttnMaskType if option == "attn_mask_type" else kinds.get(option))


def _named(kind: Any) -> set[Any]:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {value.name for value in kind}
    if typing.get_origin(kind) is typing.Literal:
        return set(typing.get_args(kind))
    return set().union(*map(_named, typing.get_args(kind)))


def is_refused(option: str, value: Any) -> bool:
    feature = "backend" if option == "attention_backend" else "attention"
    options = SimpleNamespace(**{option: value}, context_parallel_size=4)
    try:
        refuse(feature, options, "nobody")
    except BurstError:
        return True
    return False


@pytest.mark.parametrize("option", VALUES)
def test_each_value_of_a_release_is_one_that_burst_knows(option):
    runs, refused = VALUES[option]
    known = {value for value in values_of(option) if value is not None}
    assert known <= runs | refused
    assert {value for value in known if is_refused(option, value)} == known & refused


def test_tables_of_this_release_are_read():
    """Else the test above compares nothing."""
    read = [option for option in VALUES if values_of(option)]
    assert len(read) >= 5 and {"softmax_type", "attn_mask_type", "attention_backend"} <= {*read}


def test_parts_in_cuda_graphs_are_those_of_the_release():
    from megatron.core.transformer import enums

    parts = getattr(enums, "CudaGraphModule", None) or getattr(enums, "CudaGraphScope", None)
    if parts is None:
        pytest.skip("it has no table of what CUDA graphs capture")
    whole = {name for name in _named(parts) if name.startswith("full")}
    assert _named(parts) - whole - {"attn"} == _BESIDE_ATTENTION


def test_letters_of_hybrids_are_those_of_the_release():
    """M and G shard themselves, D is refused by its class, the others are attention or rows."""
    try:
        from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
    except ImportError:
        from megatron.core.ssm.mamba_hybrid_layer_allocation import Symbols
    valid = getattr(Symbols, "VALID_LAYERS", None) or Symbols.VALID
    letters = {value for value in vars(Symbols).values() if isinstance(value, str)} & {*valid}
    assert letters <= {*"MG*+-ED"} and "*" in letters
