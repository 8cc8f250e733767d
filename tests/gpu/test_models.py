"""TransformerEngine layers around burst attention: what only a GPU can run.

fp8 linears with bf16 attention, weight gradients that TransformerEngine itself adds to `main_grad`,
and Megatron's own spec of hybrid stacks. The reference is Megatron's own context parallelism (p2p)
on the same ranks. Guards against attention that is fed fp8 tensors or scales, and gradients lost
where none is returned. Latent attention (MLA) of Megatron's own spec is selected by its
`cp_comm_type`, as with the flag.
"""

import pytest
import torch

from megatron_burst import BurstConfig
from tests.gpu import needs_gpus, needs_transformer_engine
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, needs_gpus(), needs_transformer_engine()]
TOKENS, HIDDEN = 2048, 512
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
SELECTIVE = dict(recompute_granularity="selective", recompute_modules=["core_attn"])
FP8 = {
    f"fp8 {recipe}{name}": dict(fp8="hybrid", fp8_recipe=recipe) | more
    for recipe in ("tensorwise", "delayed", "blockwise")
    for name, more in {"": {}, ", selective": SELECTIVE, ", full": FULL, ", kept": FULL}.items()
}  # of linears; attention is in bf16
CASES = {
    "bf16": {},
    **FP8,
    "fused gradient accumulation": dict(gradient_accumulation_fusion=True),
}
LATENT = dict(
    q_lora_rank=256, kv_lora_rank=128, qk_head_dim=64, qk_pos_emb_head_dim=64, v_head_dim=64,
    rope_type="rope", num_query_groups=8,
)  # fmt: skip


def config_of(comm_type: str, world: int, options: dict):
    """Configuration of four layers."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if "kv_lora_rank" in options else TransformerConfig
    return kind(
        num_layers=4, hidden_size=HIDDEN, ffn_hidden_size=2 * HIDDEN, num_attention_heads=8,
        add_bias_linear=False, normalization="RMSNorm", hidden_dropout=0.0,
        attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16, context_parallel_size=world,
        cp_comm_type=comm_type, bias_dropout_fusion=False,
        **dict(num_query_groups=4) | options,
    )  # fmt: skip


def hybrid(config, burst: bool):
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from megatron_burst import burst_spec

    spec = burst_spec(hybrid_stack_spec) if burst else hybrid_stack_spec
    return HybridModel(
        config, spec, 8, TOKENS, "*-*-", pre_process=False, post_process=False,
        position_embedding_type="rope",
    )  # fmt: skip


def gpt(config, burst: bool):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )

    from megatron_burst import burst_spec

    spec = get_gpt_layer_with_transformer_engine_spec()
    return GPTModel(
        config, burst_spec(spec) if burst else spec, 8, TOKENS, pre_process=False,
        post_process=False, position_embedding_type="rope",
    )  # fmt: skip


def latent(config, burst: bool):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )

    from megatron_burst.mcore import patches

    patches.apply("attention")
    model = GPTModel(
        config, get_gpt_layer_with_transformer_engine_spec(multi_latent_attention=True), 8, TOKENS,
        pre_process=False, post_process=False, position_embedding_type="rope",
    )  # fmt: skip
    ours = getattr(model.decoder.layers[0].self_attention.core_attention, "burst", None)
    assert (ours is not None) == burst
    return model


def gradients(
    build, comm_type: str, world: int, options: dict, burst: BurstConfig | None = None
) -> tuple[torch.Tensor, int]:
    """All gradients of a rank as one vector, and how many went to main_grad."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(7)  # weights come from its generators
    config = config_of(comm_type, world, options)
    config.burst = burst
    model = build(config, comm_type == "burst").cuda()
    shape, generator = (TOKENS // world, 1, HIDDEN), torch.Generator("cuda").manual_seed(11)
    hidden, dout = (
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    hidden.requires_grad_()
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False  # as Megatron's DDP: TE makes no new one
    model.set_input_tensor(hidden)
    model(None, None, None).backward(dout)
    found, fused = [hidden.grad], 0
    for parameter in model.parameters():
        added = getattr(parameter, "grad_added_to_main_grad", False)
        found.append(parameter.main_grad if added else parameter.grad)
        fused += added
    return torch.cat([grad.flatten().double() for grad in found]), fused


def compare_all(rank: int, world: int) -> dict:
    """By model and case: burst's relative error against p2p, fp8's own, gradients in main_grad."""
    from benchmarks.stack import start

    start(False, world)
    found = {}
    for build in (gpt, hybrid):
        exact, _ = gradients(build, "p2p", world, {})
        for name, options in CASES.items():
            truth, _ = gradients(build, "p2p", world, options)
            keep = BurstConfig(keep="all" if "kept" in name else "none")
            got, fused = gradients(build, "burst", world, options, keep)
            found[build.__name__, name] = relative(got, truth), relative(truth, exact), fused
    truth, _ = gradients(latent, "p2p", world, LATENT)
    got, _ = gradients(latent, "burst", world, LATENT)
    found["latent"] = relative(got, truth)
    sinks = gpt(config_of("burst", world, dict(softmax_type="learnable")), True)
    found["sinks"] = [
        parameter.tensor_model_parallel for name, parameter in sinks.named_parameters()
        if name.endswith("softmax_offset")
    ]  # fmt: skip
    return found


def relative(got: torch.Tensor, truth: torch.Tensor) -> float:
    return float((got - truth).norm() / truth.norm())


@pytest.fixture(scope="module")
def comparisons():
    return run_ranks(compare_all, 2, 2, backend="nccl", timeout_s=300, fresh=True)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("model", ["gpt", "hybrid"])
def test_gradients_are_those_of_megatrons_own_context_parallelism(comparisons, model, name):
    """In bf16 to ten roundings of 2e-3; attention may change how fp8 rounds, by no more than fp8's
    own error."""
    for found in comparisons:
        error, of_fp8, fused = found[model, name]
        print(model, name, error, of_fp8, fused)
        assert error <= (of_fp8 if "fp8" in name else 2e-2)
        assert (fused > 0) == ("fused" in name)


def test_latent_attention_of_megatrons_own_spec_has_the_gradients_of_p2p(comparisons):
    """To ten roundings of 2e-3 in bf16."""
    assert max(found["latent"] for found in comparisons) <= 2e-2


def test_sinks_of_transformer_engine_count_on_each_tensor_parallel_rank(comparisons):
    assert all(found["sinks"] == [True] * 4 for found in comparisons)
