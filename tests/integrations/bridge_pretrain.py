"""Two steps of Megatron-Bridge's pretrain() with the data set of examples/frameworks, on the CPU:

    torchrun --nproc-per-node RANKS tests/integrations/bridge_pretrain.py FOLDER

All ranks are one context-parallel group. Of TransformerEngine, kernels of the optimizer have
PyTorch's in their place; a package for restarts on GPUs, which Bridge imports, is left out.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from functools import partial
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """nvidia-resiliency-ext, which nothing here calls."""

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "nvidia_resiliency_ext":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return MagicMock(__path__=[], __spec__=spec, __version__="0.6.0")

    def exec_module(self, module):
        pass


def on_a_cpu() -> None:
    """Replace what needs a GPU."""
    from megatron.bridge.training import setup
    from megatron.core import optimizer, utils
    from megatron.core.optimizer import clip_grads

    from megatron_burst.tools import cpu_mode
    from tests.integrations.test_bridge import without_gpu

    without_gpu()
    cpu_mode.install()
    setup.initialize_megatron = partial(setup.initialize_megatron, allow_no_cuda=True)
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, True
    clip_grads.multi_tensor_applier = utils.local_multi_tensor_applier
    clip_grads.l2_norm_impl = utils.local_multi_tensor_l2_norm


def configuration(folder: str, ranks: int):
    """Bridge's, of a tiny GPT."""
    from balance_bridge import BalancedDocuments
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.training import config

    from tests.integrations.test_bridge import layers

    off = (
        "masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion",
        "persist_layer_norm", "gradient_accumulation_fusion", "add_bias_linear",
    )  # fmt: skip
    model = GPTModelProvider(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, vocab_size=128,
        ffn_hidden_size=128, seq_length=1024, cp_comm_type="burst", context_parallel_size=ranks,
        calculate_per_token_loss=True, position_embedding_type="rope", normalization="RMSNorm",
        gated_linear_unit=True, activation_func=F.silu, hidden_dropout=0.0, attention_dropout=0.0,
        use_cpu_initialization=True, transformer_layer_spec=layers, params_dtype=torch.float32,
        pipeline_dtype=torch.float32, **dict.fromkeys(off, False),
    )  # fmt: skip
    data = BalancedDocuments(
        path=f"{folder}/documents", costs=f"{folder}/plan.json", token_limit=128 // ranks,
        cp_sizes=tuple({1, ranks}),
    )  # fmt: skip
    return config.ConfigContainer(
        model=model, dataset=data, logger=config.LoggerConfig(log_interval=1),
        train=config.TrainingConfig(global_batch_size=16, micro_batch_size=4, train_iters=2),
        validation=config.ValidationConfig(eval_iters=0), checkpoint=config.CheckpointConfig(),
        optimizer=config.OptimizerConfig(
            lr=1e-2, min_lr=1e-2, use_distributed_optimizer=True, bf16=False, clip_grad=0.0
        ),
        scheduler=config.SchedulerConfig(
            start_weight_decay=0.0, end_weight_decay=0.0, weight_decay_incr_style="constant",
            lr_decay_style="constant", lr_warmup_iters=0,
        ),
        tokenizer=config.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=128),
        ddp=config.DistributedDataParallelConfig(use_distributed_optimizer=True),
        dist=config.DistributedInitConfig(distributed_backend="gloo"),
    )  # fmt: skip


if __name__ == "__main__":
    sys.meta_path.append(Absent())
    import megatron_burst.auto  # noqa: F401

    on_a_cpu()
    from balance_bridge import Resume, forward_step
    from megatron.bridge.training.pretrain import pretrain

    given = configuration(sys.argv[1], int(os.environ["WORLD_SIZE"]))
    pretrain(given, forward_step, callbacks=[Resume()])
