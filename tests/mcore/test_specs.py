"""Specs with burst instead of Megatron's core attention: what is replaced and what is not.

Guards against a missed core attention (Megatron's own would then run, or refuse, at CP > 1), and
modifying the caller's spec.
"""

import functools
import sys

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec, import_module
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_burst import burst_spec
from megatron_burst.errors import BurstError
from megatron_burst.mcore.core_attention import BurstCoreAttention
from megatron_burst.patching import undo_all
from tests.mcore.gpt import (
    SEQ,
    VOCAB,
    Model,
    Parallel,
    config_of,
    loss_and_grads,
    megatrons_own,
    relative_errors,
    start,
)
from tests.mcore.lacking import needs
from tests.ranks import run_ranks


def core_of(layer_spec):
    return layer_spec.submodules.self_attention.submodules.core_attention


def test_a_layer_spec_is_copied_with_burst_in_it_and_nothing_else_changed():
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    before = repr(spec)
    ours = burst_spec(spec)
    assert core_of(ours) is BurstCoreAttention
    assert repr(spec) == before and core_of(spec) is DotProductAttention
    assert repr(ours) == before.replace(repr(DotProductAttention), repr(BurstCoreAttention))
    assert ours.module is TransformerLayer  # gpt_layer_specs.py:770 tests for exactly this class


def test_latent_attention_is_replaced_too():
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", multi_latent_attention=True)
    assert core_of(burst_spec(spec)) is BurstCoreAttention


def test_every_layer_of_a_block_with_experts_is_replaced():
    """Dense and expert layers have separate specs."""
    config = config_of(num_layers=4, num_moe_experts=2, moe_layer_freq=[0, 1, 0, 1])
    block = get_gpt_decoder_block_spec(config, False, normalization="RMSNorm", pp_rank=0)
    ours = burst_spec(block)
    assert type(ours) is type(block) and ours is not block
    assert [core_of(layer) for layer in ours.layer_specs] == [BurstCoreAttention] * 4
    assert [core_of(layer) for layer in block.layer_specs] == [DotProductAttention] * 4
    assert repr(ours) == repr(block).replace(repr(DotProductAttention), repr(BurstCoreAttention))
    assert ours.layer_norm is block.layer_norm


def mtp_block(rank):
    """Core attentions in burst's copy of a multi-token prediction block; whether it is shared."""
    start(Parallel())  # Megatron asks its pipeline group which layers to build
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    block = get_gpt_mtp_block_spec(config_of(mtp_num_layers=2), layer, False)
    first, second = burst_spec(block).layer_specs
    names = ("mtp_model_layer", "transformer_layer")  # the second up to 0.16
    (layer,) = (getattr(first.submodules, n) for n in names if hasattr(first.submodules, n))
    return core_of(layer).__name__, first is second


def test_a_block_for_multi_token_prediction_is_replaced():
    assert run_ranks(mtp_block, 1) == [("BurstCoreAttention", True)]


def test_specs_that_are_shared_stay_shared():
    """Megatron sometimes compares layer specs by identity; two copies would differ."""
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    first, second, other = burst_spec([layer, layer, get_gpt_layer_local_spec()])
    assert first is second and first is not other


def test_partials_lists_tuples_and_dicts_are_walked():
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    tree = {
        "keyword": functools.partial(dict, submodules=layer.submodules),
        "function": functools.partial(DotProductAttention, softmax_scale=2.0),
        "argument": functools.partial(list, [layer]),
        "tuple": (layer, "text", None, 3),
        "params": ModuleSpec(module=dict, params={"core": DotProductAttention}),
        "module": ModuleSpec(module=DotProductAttention, params={"attention_dropout": 0.0}),
    }
    ours = burst_spec(tree)
    submodules = ours["keyword"].keywords["submodules"]
    assert submodules.self_attention.submodules.core_attention is BurstCoreAttention
    assert ours["function"].func is BurstCoreAttention
    assert ours["function"].keywords == {"softmax_scale": 2.0}
    assert core_of(ours["argument"].args[0][0]) is BurstCoreAttention
    assert core_of(ours["tuple"][0]) is BurstCoreAttention
    assert ours["tuple"][1:] == ("text", None, 3)
    assert ours["params"].params == {"core": BurstCoreAttention}
    assert ours["module"].module is BurstCoreAttention
    assert ours["module"].params == {"attention_dropout": 0.0}
    assert tree["function"].func is tree["module"].module is DotProductAttention


def test_a_class_of_the_callers_own_is_left_alone():
    """A custom attention may do what burst does not."""

    class Own(DotProductAttention):
        pass

    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = Own
    with pytest.raises(BurstError, match=r"must hold Megatron's core.*got Own in ModuleSpec; pa"):
        burst_spec(spec)


def test_bridge_is_told_of_burst_again_after_undo_all(monkeypatch):
    """It learns of the class when its table of classes is imported; undo_all reverts that."""
    name = "megatron.bridge.models.conversion.param_mapping"
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for _ in range(2):
        burst_spec(spec)
        undo_all()
    burst_spec(spec)
    waiting = [finder for finder in sys.meta_path if getattr(finder, "module", None) == name]
    finders = len(sys.meta_path)
    burst_spec(spec)
    again = len(sys.meta_path)
    undo_all()
    assert len(waiting) == 1 and again == finders


@pytest.mark.parametrize("tree", [ModuleSpec(module=TransformerLayer), [], None, "spec"])
def test_refuses_a_spec_without_core_attention(tree):
    """It would be returned unchanged, and Megatron's own attention would run."""
    message = rf"^burst_spec: the spec must hold Megatron's core.*got none in {type(tree).__name__}"
    with pytest.raises(BurstError, match=message):
        burst_spec(tree)


def errors_of_a_model_built_by_megatron(rank):
    """A model that Megatron builds with `--spec megatron_burst.spec layer_spec`."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig

    start(Parallel())
    truth = megatrons_own(Model(), Parallel())
    start(Parallel(cp=2))
    config = config_of(Parallel(cp=2), transformer_impl="local")
    layer_spec = import_module(["megatron_burst.spec", "layer_spec"])
    model_config = GPTModelConfig(
        transformer=config, transformer_layer_spec=layer_spec, vocab_size=VOCAB, seq_length=SEQ,
        position_embedding_type="rope", parallel_output=False,
    )  # fmt: skip
    groups = ProcessGroupCollection.use_mpu_process_groups()
    torch.manual_seed(1234)
    gpt = GPTModelBuilder(model_config).build_model(groups).double()
    cores = [type(layer.self_attention.core_attention).__name__ for layer in gpt.decoder.layers]
    return cores, relative_errors(loss_and_grads(gpt), truth)


@needs("--spec")
def test_megatrons_builder_makes_the_model_from_layer_spec():
    for cores, errors in run_ranks(errors_of_a_model_built_by_megatron, 2):
        assert cores == ["BurstCoreAttention"] * 2
        assert max(errors.values()) <= 1e-9, errors
