"""A GPT of Megatron's own modules for testing its loss: cases, groups, models and batches.

Import it where a test module is imported, as tests.mcore.gpt.
"""

from dataclasses import dataclass, field

import torch

from megatron_burst.loss.options import FusedLossConfig
from tests.mcore.gpt import SEQ, VOCAB, Model, Parallel, config_of, sharded
from tests.ranks import preload

preload("megatron_burst.mcore.fused_loss")


@dataclass(frozen=True)
class Case:
    """A model, its groups, and how the loss is asked for."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    sp: bool = False
    tied: bool = False
    mtp: int = 0
    masked: bool = False
    ddp: bool = False
    options: dict = field(default_factory=dict)
    fused: FusedLossConfig = FusedLossConfig()


FORWARD = FusedLossConfig(grads="forward")


def begin(case: Case) -> None:
    """Make a case's groups, on four ranks."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    from megatron_burst.tools import cpu_mode

    # gloo groups keep their threads until the process ends: made once for each arrangement, or
    # thousands of threads bring the machine to a halt
    layout = (case.tp, case.cp, case.pp)
    if getattr(begin, "layout", None) != layout:
        cpu_mode.install(training=False)
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=case.tp, context_parallel_size=case.cp,
            pipeline_model_parallel_size=case.pp,
        )  # fmt: skip
        begin.layout = layout
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    MTPLossLoggingHelper.tracker.clear()  # it is as long as the first model's heads


def model_of(case: Case):
    """This rank's pipeline stage."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )

    from megatron_burst import burst_spec

    single = {"params_dtype": torch.float32, "pipeline_dtype": torch.float32} if case.ddp else {}
    config = config_of(
        Parallel(cp=case.cp, tp=case.tp), Model(groups=4), sequence_parallel=case.sp,
        mtp_num_layers=case.mtp or None,
        pipeline_model_parallel_size=case.pp, variable_seq_lengths=False,
        **single | case.options,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    mtp = get_gpt_mtp_block_spec(config, spec, False) if case.mtp else None
    if case.cp > 1:
        spec, mtp = burst_spec(spec), mtp and burst_spec(mtp)
    torch.manual_seed(1234)
    model = GPTModel(
        config, spec, VOCAB, SEQ, position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=case.tied, mtp_block_spec=mtp,
    )  # fmt: skip
    return model if case.ddp else model.double()


def batch_of(case: Case) -> dict:
    """This rank's part of its data-parallel group's batch."""
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(7 + parallel_state.get_data_parallel_rank())
    tokens, labels = torch.randint(0, VOCAB, (2, 2, SEQ), generator=generator)
    mask = torch.ones(2, SEQ)
    if case.masked:
        mask = (torch.rand(2, SEQ, generator=generator) < 0.4).float()
        mask[:, : SEQ // 4] = 0
        labels[mask == 0] = -1  # some tokenizers' padding: out of range, unchecked
    positions = torch.arange(SEQ).expand_as(tokens).contiguous()
    return sharded(
        {"tokens": tokens, "labels": labels, "position_ids": positions, "loss_mask": mask},
        parallel_state.get_context_parallel_group(),
    )
