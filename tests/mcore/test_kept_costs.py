"""Bytes and FLOPs of modules: a plan counts what a run counts from its layers' weights, or it would
show another choice."""

import pytest
import torch

from megatron_burst.tools.hardware_file import preset
from megatron_burst.tools.job.kept import module_costs
from megatron_burst.tools.job.model import Experts, Latent
from megatron_burst.tools.job.model import Model as Sizes
from megatron_burst.tools.job.strategy import Job, Strategy
from tests.mcore import gpt
from tests.mcore.gpt import HEADS, Model, Parallel, config_of
from tests.mcore.lacking import why_not
from tests.ranks import run_ranks

TOKENS = 32
NORMS = "self_attention.linear_qkv", "self_attention.linear_kv_up_proj", "mlp.linear_fc1"
EXPERTS = dict(
    num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=32,
    moe_shared_expert_intermediate_size=16, moe_token_dispatcher_type="allgather",
)  # fmt: skip
DENSE = Sizes("dense", 2, 64, HEADS, 2, 64 // HEADS, 64 // HEADS, 128, 256)
CASES = {
    "dense": (DENSE, Model(), {}),
    "experts": (
        Sizes("experts", 2, 64, HEADS, 2, 64 // HEADS, 64 // HEADS, 128, 256,
              experts=Experts(4, 2, 32, shared_ffn=16)), Model(), EXPERTS,
    ),
    "latent": (
        Sizes("latent", 2, 64, HEADS, HEADS, 12, 16, 128, 256, latent=Latent(0, 24, 4)),
        Model(latent=True), {},
    ),
}  # fmt: skip


def counted_by_a_run(rank: int, parallel: Parallel, name: str) -> dict:
    """What a run counts of each module, if those of TransformerEngine's that contain a norm do."""
    from megatron.core.models.gpt import gpt_layer_specs as specs

    from megatron_burst.mcore.keep.kept_modules import LayerModules

    gpt.start(parallel)
    _, model, options = CASES[name]
    config = config_of(parallel, model, **options)
    spec = specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, multi_latent_attention=model.latent,
        normalization="RMSNorm",
    )  # fmt: skip
    if model.latent:
        spec.submodules.self_attention.submodules.core_attention = gpt.core_for_latent()
    layer = gpt.build(config, spec).decoder.layers[0]
    for path, module in layer.named_modules():
        if path in NORMS:
            module.layer_norm_weight = None
    x = torch.empty(TOKENS // parallel.tp, 1, config.hidden_size, dtype=torch.bfloat16)
    costs = LayerModules(layer).costs(x)
    return {cost.name: (cost.num_bytes, cost.flops) for cost in costs}


@pytest.mark.parametrize(
    ("name", "tp"), [("dense", 1), ("dense", 2), ("experts", 1), ("latent", 1)]
)
def test_a_plan_counts_modules_as_a_run_does(name, tp):
    lacks = {"experts": "experts", "latent": "MLA"}.get(name)
    if lacks and (why := why_not(lacks)):
        pytest.skip(why)
    job = Job(CASES[name][0], TOKENS, tp, tp, 1, preset("h200"))
    planned = {one.name: (one.num_bytes, one.flops) for one in module_costs(job, Strategy(tp=tp))}
    for found in run_ranks(counted_by_a_run, tp, Parallel(tp=tp), name):
        assert found == planned


class Config:
    """Stands for Megatron's, with what says how its layers differ."""

    num_moe_experts: int | None = None

    def __init__(self, **given):
        vars(self).update(given)


class Copied(Config):
    """As later releases make for each layer of a hybrid."""

    @classmethod
    def from_config(cls, config):
        return cls(**vars(config))


def test_layers_of_a_model_are_found_by_its_configuration_and_models_do_not_mix():
    """A policy and its reference model share a process; heterogeneous layers, a model."""
    from megatron_burst.mcore.keep.module_costs import layers_of

    models, blocks = [], dict(heterogeneous_block_specs=True)
    ours, theirs, some, others = Config(), Config(), Config(**blocks), Config(**blocks)
    found = [layers_of(models, config) for config in (ours, theirs, some, others, ours)]
    assert found[0] is found[4] and found[2] is found[3]
    assert len({id(each) for each in found}) == len(models) == 3
    hybrid = dict(is_hybrid_model=True, num_layers=4, hidden_size=64, num_attention_heads=4)
    for kind in (Config, Copied):
        copies = [kind(**hybrid), kind(**hybrid), kind(**hybrid | dict(num_layers=8))]
        of_layers: list = []
        first, second, other = [layers_of(of_layers, config) for config in copies]
        assert (first is second) == (kind is Copied) and other is not first
    del theirs
    assert layers_of(models, last := Config()).config() is last
    assert len(models) == 3  # one is gone


@pytest.mark.parametrize(
    ("given", "differ"),
    [
        ({}, False), ({"moe_layer_freq": [0, 1]}, False),
        ({"num_moe_experts": 4, "moe_layer_freq": [1, 1]}, False),
        ({"num_moe_experts": 4, "moe_layer_freq": 1}, False),
        ({"num_moe_experts": 4, "moe_layer_freq": [0, 1]}, True),
        ({"num_moe_experts": 4, "moe_layer_freq": 2}, True),
        ({"is_hybrid_model": True}, True), ({"linear_attention_freq": 4}, True),
        ({"heterogeneous_block_specs": True}, True),
    ],
)  # fmt: skip
def test_configurations_say_that_layers_may_differ(given, differ):
    from megatron_burst.mcore.keep.module_costs import may_differ

    assert may_differ(Config(**given)) == differ
