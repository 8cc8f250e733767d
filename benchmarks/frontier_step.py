"""A whole training step of one GPT under many settings of recomputation.

Megatron reads some settings when it builds a layer. So each turn of a setting has a model of its
own, with the parameters of a first one, which is in Megatron's DDP and optimizer.
"""

from collections.abc import Iterator
from itertools import accumulate

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.distributed import DistributedDataParallelConfig as Buffers
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
    FineGrainedActivationOffloadingInterface as Offloading,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from benchmarks.documents import SEED
from benchmarks.frontier_cases import OWN_LOSS, Sample, Setting
from benchmarks.stack import config_of, layer_spec, packed_of
from megatron_burst.config import BurstConfig
from megatron_burst.mcore.fused_loss import fuse_loss
from megatron_burst.mcore.packed import partitioned_indices
from megatron_burst.mcore.specs import burst_spec
from megatron_burst.recompute.offload import host_memory
from megatron_burst.tools.job.model import Model

_SAME = Setting("burst", "off", burst=BurstConfig())  # what the parameters are made with


class Trainer:
    """Steps of one model on one sample: forward, backward, and Megatron's distributed optimizer
    with Adam, master weights in fp32 and clipping. The loss is burst's, unless a setting has
    Megatron's. The learning rate is 0, so that steps of all settings have equal losses and
    gradients. The sample's tokens are random; its ranks are all of this run's."""

    def __init__(self, model: Model, sample: Sample, dtype: torch.dtype) -> None:
        self._sizes, self._sample, self._dtype = model, sample, dtype
        self._source = self._built(_SAME)
        buffers = Buffers(  # in fp32, one each for dense weights and experts
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
        )
        self._ddp = DistributedDataParallel(self._source.config, buffers, self._source)
        options = OptimizerConfig(
            optimizer="adam", lr=0.0, min_lr=0.0, bf16=dtype is torch.bfloat16, params_dtype=dtype,
            use_distributed_optimizer=True, clip_grad=1.0,
        )  # fmt: skip
        self._optimizer = get_megatron_optimizer(options, [self._ddp])
        self._batch = _batch_of(model, sample, next(self._source.parameters()).device)

    def use(self, setting: Setting) -> None:
        """Take the steps that follow with a setting."""
        model = self._built(setting, perform_initialization=False)
        _share(model, self._source)
        self._ddp.config = model.config
        self._ddp.module = model if setting.name == OWN_LOSS else fuse_loss(model)

    def release(self) -> None:
        """Free what the setting keeps between steps, or has left where it failed: its model too,
        as Megatron's modules for experts keep tensors of the last step, and with these its graph:
        where that has a checkpoint it has the model, a cycle that Python does not see."""
        self._optimizer.zero_grad()
        for module in self._ddp.module.modules():
            sender = getattr(module, "token_dispatcher", None)
            for name, x in list(vars(sender).items()) if sender else ():
                if isinstance(x, Tensor):
                    setattr(sender, name, x.detach())
        if self._ddp.config.fine_grained_activation_offloading and torch.cuda.is_available():
            Offloading.reset_instance()  # else it offloads what it chose for this model
        self._ddp.module, self._ddp.config = self._source, self._source.config
        host_memory(next(self._source.parameters()).device, None).release()

    def step(self) -> tuple[float, float]:
        """One training step; the loss, and the norm of all gradients."""
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        (report,) = get_forward_backward_func()(
            forward_step_func=self._forward, data_iterator=None, model=self._ddp,
            num_microbatches=1, seq_length=self._sample.seq, micro_batch_size=1,
        )  # fmt: skip
        _, norm, _ = self._optimizer.step()
        dist.all_reduce(report["loss"])
        return float(report["loss"]) / self._sample.seq, float(norm)

    def gradients(self) -> Iterator[Tensor]:
        """Those of the latest step, after clipping: views of DDP's buffers."""
        return (x.main_grad for x in self._source.parameters())

    def _forward(self, data_iterator: None, model: torch.nn.Module) -> tuple:
        """Megatron's forward step: as its pretrain_gpt.py."""
        losses = model(**self._batch, attention_mask=None)
        return losses, self._loss

    def _loss(self, losses: Tensor) -> tuple:
        loss = losses.float().sum()
        tokens = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
        return loss, tokens, {"loss": loss.detach().clone()}

    def _built(self, setting: Setting, **options: object) -> GPTModel:
        sizes, experts = self._sizes, {}
        if sizes.experts:
            experts = {"num_experts": sizes.experts.count, "moe_grouped_gemm": HAVE_TE}
        spec = layer_spec(qk_layernorm=sizes.norms_heads, **experts)
        return GPTModel(
            self._config(setting, **options), spec if setting.burst is None else burst_spec(spec),
            sizes.vocab, self._sample.seq,
            share_embeddings_and_output_weights=sizes.tied, position_embedding_type="rope",
        ).to(device=torch.cuda.current_device(), dtype=self._dtype)  # fmt: skip

    def _config(self, setting: Setting, **options: object) -> TransformerConfig:
        sizes, experts = self._sizes, {}
        if sizes.experts:
            experts = {
                "num_moe_experts": sizes.experts.count, "moe_router_topk": sizes.experts.active,
                "moe_ffn_hidden_size": sizes.experts.ffn, "moe_aux_loss_coeff": 1e-3,
                "moe_router_dtype": "fp32",
                "moe_grouped_gemm": HAVE_TE, "moe_permute_fusion": HAVE_TE,
                "moe_token_dispatcher_type": "alltoall",
            }  # fmt: skip
        config = config_of(
            sizes, sizes.dim_qk, self._dtype, qk_layernorm=sizes.norms_heads,
            calculate_per_token_loss=True, finalize_model_grads_func=finalize_model_grads,
            context_parallel_size=self._sample.ranks,
            cp_comm_type="p2p" if setting.burst is None else "burst",
            **experts, **setting.config, **options,
        )  # fmt: skip
        config.burst = setting.burst or BurstConfig()  # whatever MEGATRON_BURST says
        return config


def _share(model: GPTModel, source: GPTModel) -> None:
    """Give a model another's parameters, buffers and table of rotary embeddings."""
    model.rotary_pos_emb = source.rotary_pos_emb  # which keeps what it computed
    others = dict(source.named_modules())
    for name, module in model.named_modules():
        for kind in ("_parameters", "_buffers"):
            own = getattr(module, kind)
            for key in [key for key, x in own.items() if x is not None]:
                own[key] = getattr(others[name], kind)[key]


def _batch_of(model: Model, sample: Sample, device: torch.device) -> dict:
    """Arguments of this rank's forward: random tokens and labels, all of which count."""
    generator = torch.Generator().manual_seed(SEED)
    tokens, labels = torch.randint(model.vocab, (2, 1, sample.seq), generator=generator)
    positions = torch.cat([torch.arange(length) for length in sample.lengths])
    whole = {"input_ids": tokens, "labels": labels, "position_ids": positions[None]}
    ends = torch.tensor([0, *accumulate(sample.lengths)], dtype=torch.int32)
    rows = slice(None)
    if sample.ranks > 1:
        rows = partitioned_indices(ends, sample.seq, sample.ranks, dist.get_rank()).long()
    batch = {name: x[:, rows].to(device) for name, x in whole.items()}
    batch["loss_mask"] = torch.ones(batch["labels"].shape, device=device)
    if sample.documents:
        batch["packed_seq_params"] = packed_of(ends.to(device), max(sample.lengths))
    return batch
