"""Megatron's models other than GPT at CP 2 and 4 with burst against CP 1 with its own attention.

Compares the loss and every gradient. Guards against attention layers that are missed among others,
shards that two kinds of layers order differently, and a tower for whole images that joins the
language model's ring. Expert parallelism, pipelines and optimizers are in test_pretrain_on_cpu.py.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist

from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from megatron_burst.mcore.core_attention import BurstCoreAttention
from tests.mcore import models
from tests.mcore.gpt import (
    Model,
    Parallel,
    Run,
    build,
    config_of,
    core_for_latent,
    logits_of,
    loss_and_grads,
    relative_errors,
    start,
)
from tests.mcore.lacking import needs, no_option, parameters, present
from tests.ranks import run_ranks

pytestmark = [pytest.mark.numeric, needs("model classes")]
ALONE, CP2, CP4 = Parallel(), Parallel(cp=2), Parallel(cp=4)
LATENT = Model(latent=True)
EXACT = 1e-9
SINGLE = 1e-5  # Megatron's delta rule is in float32, 6e-8 a rounding, over 64 tokens


@dataclass(frozen=True)
class Case:
    """A model: how it is built for a core attention and some groups, and how it is called."""

    build: Callable
    parallel: Parallel = CP2
    logits_of: Callable = logits_of
    calls: int = 1  # of core attentions, including a tower's
    bound: float = EXACT
    options: dict = field(default_factory=dict)  # of the configuration, which not all releases have
    rows: dict = field(default_factory=dict)  # how Megatron shards the batch


def hybrid(pattern: str, model: Model | None = None, **options) -> Callable:
    def made(parallel: Parallel, change: Callable):
        config = config_of(parallel, model or Model(), num_layers=len(pattern), **options)
        config.deterministic_mode = True
        return models.hybrid(config, change(models.hybrid_stack()), pattern)

    return made


def contiguous(parallel: Parallel, change: Callable):
    """Mamba and the residual stream in contiguous rows, attention in zigzag (#6776)."""
    options = CONTIGUOUS if parallel.cp > 1 else {}
    return hybrid("M*-", **MAMBA, **options)(parallel, change)


def with_delta_net(parallel: Parallel, change: Callable):
    config = config_of(
        parallel, experimental_attention_variant="gated_delta_net", linear_attention_freq=2, **DELTA
    )
    config.deterministic_mode = True
    return build(config, change(models.delta_layers()))


def heterogeneous(parallel: Parallel, change: Callable):
    from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import (
        get_gpt_heterogeneous_layer_spec,
    )

    config = models.heterogeneous_config(parallel)
    config.burst = BurstConfig(intra="ring")
    return build(config, change(get_gpt_heterogeneous_layer_spec(config)))


def mimo(parallel: Parallel, change: Callable):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    return models.mimo(config_of(parallel), change(spec))


def llava(parallel: Parallel, change: Callable):
    """Its spec must name TransformerEngine's class: burst is set by the flag, or by `auto`."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megatron_burst.mcore import patches

    if parallel.cp > 1:
        patches.apply("attention")
    return models.llava(config_of(parallel), get_gpt_layer_local_spec(normalization="RMSNorm"))


MAMBA = dict(mamba_num_heads=4, mamba_head_dim=8, mamba_state_dim=8, mamba_num_groups=2)
DELTA = dict(
    linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=8,
)  # fmt: skip
CONTIGUOUS = dict(linear_cp_layout="contiguous")
EXPERTS = dict(
    num_moe_experts=4, moe_ffn_hidden_size=64, moe_router_topk=2, moe_router_dtype="fp64"
)
CASES = {
    "GPTModel, GDN": Case(with_delta_net, CP4, bound=SINGLE),
    "HybridModel, Mamba": Case(hybrid("M*-", **MAMBA), CP4),
    "HybridModel, GDN": Case(hybrid("G*-", **DELTA), CP4, bound=SINGLE),
    "HybridModel, Mamba in contiguous rows": Case(
        contiguous, CP4, options=CONTIGUOUS, rows=dict(use_contiguous_cp=True)
    ),
    "HybridModel, experts": Case(hybrid("*E*E", **EXPERTS), calls=2),
    "HybridModel, MLA": Case(hybrid("+-", LATENT)),
    "heterogeneous layers": Case(heterogeneous, CP4, calls=2),
    "MimoModel, CLIP tower": Case(mimo, CP4, models.mimo_logits, calls=3),
    # last: its patches stay
    "LLaVAModel, SigLIP tower": Case(llava, CP4, models.llava_logits, calls=3),
}


def bert_step() -> None:
    tokens = torch.zeros(1, 16, dtype=torch.long)
    models.bert(config_of(CP4))(tokens, torch.ones_like(tokens))


REFUSED = {  # what is done, and why it is refused
    "T5Model": (lambda: models.t5(config_of(CP4)), "this mask"),
    "T5Model, decoder alone": (
        lambda: models.t5(config_of(CP4), add_encoder=False),
        "attention other than self-attention",
    ),
    "BertModel": (bert_step, "a mask tensor"),
}


def why(case: Case) -> str:
    """Why this Megatron cannot run it."""
    return no_option(case.options)


def megatrons(spec):
    """A spec with Megatron's own core attention."""
    latent = getattr(getattr(spec, "submodules", None), "mla_layer", None)
    if latent is not None:
        latent.submodules.self_attention.submodules.core_attention = core_for_latent()
    return spec


def truths_of(rank: int) -> dict[str, Run]:
    """By case, Megatron's own run; ranks share the cases."""
    world = dist.get_world_size()
    cases = present(CASES, why)
    mine = {
        name: loss_and_grads(case.build(ALONE, megatrons), case.logits_of)
        for number, (name, case) in enumerate(cases.items()) if number % world == rank
    }  # fmt: skip
    shares: list = [None] * world
    dist.all_gather_object(shares, mine)
    return {name: run for share in shares for name, run in share.items()}


def compare_all(rank: int) -> tuple[dict, dict]:
    """By case: errors of loss and gradients, core attentions, calls of them; and refusals."""
    from megatron_burst import burst_spec

    found = {}
    with ExitStack() as stack:
        for patch in models.stand_ins():
            stack.enter_context(patch)
        start(ALONE)
        truths = truths_of(rank)
        for parallel in (CP2, CP4):
            start(parallel)
            for name, case in present(CASES, why).items():
                if case.parallel == parallel:
                    model = case.build(parallel, burst_spec)
                    cores = [
                        type(module).__name__ for path, module in model.named_modules()
                        if path.endswith("core_attention")
                    ]  # fmt: skip
                    if name == "heterogeneous layers":  # Megatron copies its configurations
                        assert {module.burst.config.intra for module in model.modules()
                                if isinstance(module, BurstCoreAttention)} == {"ring"}  # fmt: skip
                    got = loss_and_grads(model, case.logits_of, **case.rows)
                    errors = relative_errors(got, truths[name])
                    found[name] = errors, cores, got.attention_calls
        said = {}
        for name, (refused, _) in REFUSED.items():
            with pytest.raises(BurstError) as error:
                refused()
            said[name] = str(error.value)
    return found, said


@pytest.fixture(scope="module")
def comparisons(once):
    return once(compared)


def compared():
    return run_ranks(compare_all, 4)


@pytest.mark.parametrize("name", parameters(CASES, why))
def test_loss_and_every_gradient_of_a_model_class(comparisons, name):
    case = CASES[name]
    for errors, cores, calls in (found[name] for found, _ in comparisons):
        assert calls == case.calls
        assert cores.count("BurstCoreAttention") == case.calls - ("tower" in name), cores
        assert max(errors.values()) <= case.bound, errors


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_class_that_is_refused(comparisons, name):
    """Because of its first attention layer that burst does not support, on all ranks."""
    for _, said in comparisons:
        assert f"cannot run with {REFUSED[name][1]}, because" in said[name]
        assert said[name].count("; ") == 2
