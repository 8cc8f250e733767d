"""ROLL's mcore_adapter, at v0.3.0: its configuration, its model and its packed samples.

Run by `ROLL=clone make test-integrations FRAMEWORKS=roll`: ROLL is in no package registry (the
mcore-adapter there is something else). The model is mcore_adapter's own, without TransformerEngine;
the packing functions are taken out of their file, which imports vLLM and Ray. Guards against an
option that does not reach layers, and rows ordered differently than burst assumes.
"""

import ast
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megatron_burst import next_tokens
from tests.integrations.packed import TOLERANCE, core_of, documents, one_by_one, run_of
from tests.mcore.gpt import Parallel, relative_errors, start
from tests.ranks import run_ranks

if "ROLL" not in os.environ:
    pytest.skip("ROLL must be a clone of ROLL: it is in no registry", allow_module_level=True)

STRATEGY = "roll/distributed/strategy/megatron_strategy.py"
PACKING = "_get_pad_factor", "_get_feature_on_this_cp_rank", "_pack_sequences"


def model_of(cp: int, tp: int = 1, **additional):
    """mcore_adapter's model, with the additional_configs of ROLL's YAML."""
    from mcore_adapter.models.model_config import McaModelConfig
    from mcore_adapter.models.model_factory import McaGPTModel
    from mcore_adapter.training_args import DistributingParallelArguments

    # as from_pretrained does
    with mock.patch.object(McaModelConfig, "__post_init__", return_value=None):
        config = McaModelConfig(
            num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2,
            ffn_hidden_size=128, swiglu=True, add_bias_linear=False, normalization="RMSNorm",
            hidden_dropout=0.0, attention_dropout=0.0, padded_vocab_size=96,
            max_sequence_length=64, transformer_impl="local", params_dtype=torch.float64,
            use_cpu_initialization=True, persist_layer_norm=False, masked_softmax_fusion=False,
            bias_activation_fusion=False, gradient_accumulation_fusion=False,
        )  # fmt: skip
        args = DistributingParallelArguments(
            context_parallel_size=cp, additional_configs=additional,
            tensor_model_parallel_size=tp, sequence_parallel=tp > 1,
        )  # fmt: skip
        config.update_with_args(args)
    config.post_init()
    torch.manual_seed(1234)
    return McaGPTModel(config, pre_process=True, post_process=True, vp_stage=None).double()


def strategy_of(gpt, *methods: str, **imported):
    """Part of ROLL's strategy: some of its methods, and what else they call."""
    from megatron.core import mpu
    from megatron.core.packed_seq_params import PackedSeqParams

    tree = ast.parse((Path(os.environ["ROLL"]) / STRATEGY).read_text())
    # of the first class that has them
    found = {n.name: n for n in reversed([*ast.walk(tree)])
             if isinstance(n, ast.FunctionDef) and n.name in methods}  # fmt: skip
    names = imported | {
        "torch": torch, "math": math, "mpu": mpu, "PackedSeqParams": PackedSeqParams,
        "current_platform": SimpleNamespace(device_type="cpu"),
    }  # fmt: skip
    exec(compile(ast.Module([*found.values()], []), STRATEGY, "exec"), names)
    strategy = type("MegatronInferStrategy", (), {name: names[name] for name in methods})()
    strategy.models_unwrapped = [gpt]
    return strategy


def packed_by_roll(rank):
    """Layers, and errors of loss and gradients."""
    sys.path.insert(0, str(Path(os.environ["ROLL"]) / "mcore_adapter/src"))
    from megatron.core import parallel_state

    import megatron_burst.auto  # noqa: F401

    start(Parallel())
    truth = one_by_one(model_of(1))
    start(Parallel(cp=2))
    gpt = model_of(2, cp_comm_type="burst")
    longest = max(map(len, documents()))
    mask = torch.stack([F.pad(torch.ones(len(x)), (0, longest - len(x))) for x in documents()])
    tokens = torch.stack([F.pad(x, (0, longest - len(x))) for x in documents()])
    tensor = torch.tensor
    with mock.patch.object(torch, "tensor", lambda *a, pin_memory=False, **o: tensor(*a, **o)):
        rows, params, lengths, _ = strategy_of(gpt, *PACKING)._pack_sequences(tokens, mask.long())
    labels = next_tokens(
        rows[0], group=parallel_state.get_context_parallel_group(), layout="zigzag-documents",
        cu_seqlens=lengths, cu_seqlens_padded=params.cu_seqlens_q_padded,
    )  # fmt: skip
    logits = gpt(rows, None, None, packed_seq_params=params)
    return core_of(gpt), relative_errors(run_of(gpt, logits, labels), truth)


def test_additional_configs_reach_layers_and_rolls_rows_are_bursts():
    for core, errors in run_ranks(packed_by_roll, 2):
        assert core == "BurstCoreAttention"
        assert max(errors.values()) < TOLERANCE, errors
