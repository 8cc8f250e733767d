"""Apex's extension for gradients of weights, where it is installed: Megatron's own linear layers
add to `main_grad` in it, beside burst attention and the fused loss.

The truth is the same model without it. Guards against gradients that the fused loss and the fused
accumulation lose, or count twice, in one `main_grad`. `tests/mcore/test_apex.py` runs on CPUs with
a stand-in.
"""

from importlib.util import find_spec
from unittest import mock

import pytest
import torch

from megatron_burst.loss.options import FusedLossConfig
from tests.gpu import needs_gpus
from tests.ranks import run_ranks

EXTENSION = "fused_weight_gradient_mlp_cuda"
pytestmark = [
    pytest.mark.gpu,
    needs_gpus(),
    pytest.mark.skipif(
        find_spec(EXTENSION) is None, reason=f"Apex's extension {EXTENSION} is not installed"
    ),
]
TOKENS, HIDDEN, VOCAB, LAYERS, CP = 1024, 512, 4096, 2, 2
HEADS = {  # tied to the embedding or not, and where the loss computes its gradients
    "tied": (True, "recompute"),
    "tied, gradients in forward": (True, "forward"),
    "not tied": (False, "recompute"),
    "not tied, gradients in forward": (False, "forward"),
}


def model_of(tied: bool, fusion: bool, **options):
    """A GPT of Megatron's own layers, in its DDP."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from megatron_burst import burst_spec

    model_parallel_cuda_manual_seed(7)  # weights come from its generators
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, ffn_hidden_size=2 * HIDDEN, num_attention_heads=8,
        num_query_groups=4, add_bias_linear=False, normalization="RMSNorm", hidden_dropout=0.0,
        attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16, bias_dropout_fusion=False,
        context_parallel_size=CP, gradient_accumulation_fusion=fusion, **options,
    )  # fmt: skip
    spec = burst_spec(get_gpt_layer_local_spec(normalization="RMSNorm"))
    model = GPTModel(
        config, spec, VOCAB, TOKENS, position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
    ).cuda()  # fmt: skip
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
    )
    model.zero_grad_buffer()
    return model


def gradients(rank: int, tied: bool, grads: str, fusion: bool) -> dict[str, torch.Tensor]:
    """Sums of the losses, and gradients, after two micro-batches."""
    from megatron_burst import fuse_loss

    model = model_of(tied, fusion)
    fuse_loss(model.module, FusedLossConfig(grads=grads))
    generator = torch.Generator("cuda").manual_seed(rank)
    found = {}
    for batch in range(2):
        shape = 2, 2, TOKENS // CP
        tokens, labels = torch.randint(0, VOCAB, shape, generator=generator, device="cuda")
        positions = torch.arange(shape[2], device="cuda").expand_as(tokens).contiguous()
        mask = torch.ones(tokens.shape, device="cuda")
        out = model(tokens, positions, None, labels=labels, loss_mask=mask)
        (out * (batch + 1)).sum().backward()
        found[f"loss {batch}"] = out.detach().sum()
    return found | {name: x.main_grad.clone() for name, x in model.named_parameters()}


def compare_all(rank: int) -> dict[str, tuple[dict[str, float], int]]:
    """By case: relative errors in norm, and how often the extension was called."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import layers

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=CP)
    added = layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32
    found = {}
    for name, case in HEADS.items():
        truth = gradients(rank, *case, fusion=False)
        with mock.patch.object(
            layers.fused_weight_gradient_mlp_cuda, "wgrad_gemm_accum_fp32", side_effect=added
        ) as counted:
            got = gradients(rank, *case, fusion=True)
        errors = {n: float((got[n] - x).norm() / x.norm()) for n, x in truth.items()}
        found[name] = errors, counted.call_count
    return found


@pytest.fixture(scope="module")
def comparisons():
    return run_ranks(compare_all, CP, backend="nccl", timeout_s=300, fresh=True)


@pytest.mark.parametrize("name", HEADS)
def test_gradients_are_those_without_the_extension(comparisons, name):
    """To what bf16 rounds: without it each micro-batch's gradient is rounded. The extension runs
    for four linear layers in each layer and micro-batch."""
    for found in comparisons:
        errors, calls = found[name]
        print(name, max(errors.values()))
        assert max(errors.values()) <= 1e-2, errors
        assert calls == 4 * LAYERS * 2
