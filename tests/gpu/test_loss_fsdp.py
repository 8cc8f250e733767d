"""The fused loss under torch's FSDP2 and under Megatron-FSDP with TransformerEngine's layers, where
FSDP2 makes the output layer a unit of its own.

The truth is the same model without FSDP and with Megatron's own loss, in bf16. Guards against a
weight that is read before it has arrived, or after it was freed, on another stream than the
collectives', and gradients that are reduced before they are complete.
"""

from dataclasses import dataclass, field

import pytest
import torch

from megatron_burst.loss.options import FusedLossConfig
from tests.gpu import needs_gpus, needs_transformer_engine
from tests.mcore.fsdp import gradients, gradients_without_fsdp, losses_of, wrapped
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, needs_gpus(), needs_transformer_engine()]
TOKENS, HIDDEN, VOCAB = 1024, 512, 4096
MEGATRONS = "optim_grads_params"
PER_TOKEN = {"calculate_per_token_loss": True}


@dataclass(frozen=True)
class Case:
    """A model, and its FSDP.

    Attributes:
        strategy: of Megatron-FSDP; "": FSDP2.
        cp: 2: both ranks share samples, in TransformerEngine's ring; 1: each has its own.
    """

    strategy: str = ""
    cp: int = 1
    tied: bool = False
    mtp: int = 0
    grads: str = "recompute"
    options: dict = field(default_factory=dict)


CASES = {
    "FSDP2": Case(),
    "FSDP2, CP2, gradients in forward": Case(cp=2, grads="forward"),
    "FSDP2, MTP, detached heads": Case(mtp=1, options={"mtp_detach_heads": True}),
    "Megatron-FSDP, tied": Case(MEGATRONS, tied=True),
    "Megatron-FSDP, CP2, gradients in forward": Case(MEGATRONS, cp=2, grads="forward"),
    "Megatron-FSDP, MTP, per-token loss": Case(MEGATRONS, mtp=1, options=PER_TOKEN),
}


def model_of(case: Case):
    """A GPT of two layers."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    model_parallel_cuda_manual_seed(7)  # weights come from its generators
    config = TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, ffn_hidden_size=2 * HIDDEN, num_attention_heads=8,
        num_query_groups=4, add_bias_linear=False, normalization="RMSNorm", hidden_dropout=0.0,
        attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16, bias_dropout_fusion=False,
        context_parallel_size=case.cp, cp_comm_type="p2p", mtp_num_layers=case.mtp or None,
        **case.options,
    )  # fmt: skip
    spec = get_gpt_layer_with_transformer_engine_spec()
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=True) if case.mtp else None
    return GPTModel(
        config, spec, VOCAB, TOKENS, position_embedding_type="rope", mtp_block_spec=mtp,
        share_embeddings_and_output_weights=case.tied,
    ).cuda()  # fmt: skip


def batch_of(case: Case, rank: int) -> dict[str, torch.Tensor]:
    """A rank's tokens, a third of them masked."""
    generator = torch.Generator("cuda").manual_seed(rank)
    options = {"generator": generator, "device": "cuda"}
    shape = 2, TOKENS // case.cp
    tokens, labels = torch.randint(0, VOCAB, (2, *shape), **options)
    positions = torch.arange(shape[1], device="cuda").expand_as(tokens).contiguous()
    mask = (torch.rand(shape, **options) < 2 / 3).float()
    return {"tokens": tokens, "labels": labels, "position_ids": positions, "loss_mask": mask}


def run(case: Case, batch: dict, fused: bool) -> dict[str, torch.Tensor]:
    """Losses and gradients, with FSDP and the fused loss or without both."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    from megatron_burst import fuse_loss

    MTPLossLoggingHelper.tracker.clear()
    model = model_of(case)
    if not fused:
        losses = losses_of(model, batch)
        found = gradients_without_fsdp(model, summed=case.options is PER_TOKEN)
    else:
        model = wrapped(fuse_loss(model, FusedLossConfig(grads=case.grads)), case.strategy)
        losses = losses_of(model, batch)
        model.finish_grad_sync()
        found = gradients(model)
    return {"losses": torch.stack(losses).cpu()} | found


def compare_all(rank: int, world: int) -> dict[str, dict[str, float]]:
    """By case, the relative error of each gradient, in norm, and of the losses."""
    from megatron.core import parallel_state

    found = {}
    for name, case in CASES.items():
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(context_parallel_size=case.cp)
        truth, got = (run(case, batch_of(case, rank), fused) for fused in (False, True))
        assert truth.keys() == got.keys()
        pairs = {n: (got[n].double(), x.double()) for n, x in truth.items()}
        found[name] = {n: float((a - b).norm() / b.norm()) for n, (a, b) in pairs.items()}
    return found


@pytest.fixture(scope="module")
def comparisons():
    queues = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}  # FSDP wants more than one
    return run_ranks(
        compare_all, 2, 2, backend="nccl", environment=queues, timeout_s=400, fresh=True
    )


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_without_fsdp_and_fused_loss(comparisons, name):
    """In bf16 to ten roundings of 2e-3."""
    for errors in (found[name] for found in comparisons):
        print(name, max(errors.values()))
        assert max(errors.values()) <= 2e-2, errors
