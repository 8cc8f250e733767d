"""ms-swift with mcore-bridge: plugin files, configuration, model and packed samples.

Run by `make test-integrations FRAMEWORKS=ms-swift`. mcore-bridge imports TransformerEngine and uses
its layers, which need a GPU, so here the same spec has Megatron's local ones. Guards against a
plugin file that loads too late, a wrapper of mcore-bridge's around what burst replaces, and rows or
positions that differ from what burst assumes.
"""

import importlib.util
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from tests.integrations.packed import LENGTHS, TOLERANCE, core_of, documents, one_by_one, run_of
from tests.mcore.gpt import (
    Parallel,
    Run,
    _complete_grads,
    _sum_over_cp,
    relative_errors,
    start,
)
from tests.ranks import preload, run_ranks

if importlib.util.find_spec("mcore_bridge") is None:
    pytest.skip("ms-swift is not installed: make test-integrations", allow_module_level=True)
preload("mcore_bridge.model.register", "swift.megatron.arguments", "swift.megatron.trainers.utils")

TYPED = "--external_plugins {plugin} --cp_comm_type burst --context_parallel_size 2"


def arguments(typed: str):
    """What ms-swift makes of its command line, with plugin files imported, without a run."""
    from swift.megatron.arguments import MegatronSftArguments
    from swift.utils import parse_args

    with mock.patch.object(MegatronSftArguments, "__post_init__", return_value=None):
        args, _ = parse_args(MegatronSftArguments, typed.split())
    args._import_external_plugins()
    return args


def model_of(cp: int, **options):
    """mcore-bridge's model, by its own loader."""
    from mcore_bridge import ModelConfig, get_mcore_model
    from mcore_bridge.model import register

    config = ModelConfig(
        hf_model_type="llama", num_layers=2, hidden_size=64, num_attention_heads=4,
        num_query_groups=2, kv_channels=16, ffn_hidden_size=128, padded_vocab_size=96,
        add_bias_linear=False, swiglu=True, normalization="RMSNorm", hidden_dropout=0.0,
        attention_dropout=0.0, params_dtype=torch.float64, use_cpu_initialization=True,
        perform_initialization=True, context_parallel_size=cp, apply_rope_fusion=False,
        persist_layer_norm=False, masked_softmax_fusion=False, bias_dropout_fusion=False,
        gradient_accumulation_fusion=False, position_embedding_type="rope", **options,
    )  # fmt: skip
    specs = register.get_gpt_decoder_block_spec

    def local(config, use_transformer_engine, **more):
        return specs(config, use_transformer_engine=False, **more)

    torch.manual_seed(1234)
    with mock.patch.object(register, "get_gpt_decoder_block_spec", local):
        return get_mcore_model(config)[0].double()


def packed_by_swift(rank, plugin):
    """What cp_comm_type became, layers, errors of loss and gradients."""
    from swift.megatron.trainers.utils import prepare_batch

    start(Parallel())
    truth = one_by_one(model_of(1))
    args = arguments(TYPED.format(plugin=plugin))
    start(Parallel(cp=2))
    gpt = model_of(2, cp_comm_type=args.cp_comm_type)
    args.task_type, args.is_multimodal = "causal_lm", False  # as ms-swift sets for such a model
    given = {"input_ids": [], "labels": [], "position_ids": []}
    for tokens in documents():  # as its template and data collator make them
        pad = 0, -len(tokens) % 4
        given["input_ids"].append(F.pad(tokens, pad))
        given["labels"].append(F.pad(F.pad(tokens[1:], (1, 0), value=-100), pad, value=-100))
        given["position_ids"].append(torch.arange(len(tokens) + pad[1]))
    batch = {name: torch.cat(rows)[None] for name, rows in given.items()}
    batch = prepare_batch(args, batch | {"seq_lens": list(LENGTHS)})
    labels = batch.pop("labels")[0]
    if hasattr(gpt, "fused_head"):  # ms-swift passes labels to the model and takes its losses
        loss = gpt(**batch, labels=labels[None])[0][labels != -100].sum()
        loss.backward()
        run = Run(_sum_over_cp(loss.detach()), _complete_grads(gpt))
    else:
        run = run_of(gpt, gpt(**batch), labels)
    kinds = args.cp_comm_type, core_of(gpt), hasattr(gpt, "fused_head")
    return kinds, relative_errors(run, truth)


@pytest.mark.parametrize("options", ["", "fused_loss=1"])
def test_a_plugin_file_switches_burst_on_and_swifts_rows_are_bursts(tmp_path, options):
    plugin = tmp_path / "burst.py"
    plugin.write_text("import megatron_burst.auto\n")
    found = run_ranks(packed_by_swift, 2, str(plugin), environment={"MEGATRON_BURST": options})
    for kinds, errors in found:
        assert kinds == ("burst", "BurstCoreAttention", bool(options))
        assert max(errors.values()) < TOLERANCE, errors
