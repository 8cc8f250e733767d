"""Megatron-Bridge's providers with burst: the released package, on CPU processes.

TransformerEngine's linear layers and norms need a GPU, so models here have Megatron's own, by the
spec that Bridge offers for that; classes of TransformerEngine's attention are the real ones.
"""

import importlib
import importlib.util

import pytest
import torch

from tests.mcore.gpt import VOCAB, Parallel, config_of, loss_and_grads, relative_errors, start
from tests.ranks import preload, run_ranks

if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("Megatron-Bridge is not installed: make test-integrations", allow_module_level=True)
preload("megatron.bridge")


def local_layers(config):
    """Megatron's own layers, and a final norm that runs on a CPU."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization
    )


def built(provider, parallel):
    """The model of a provider, with equal weights for equal providers."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    provider.finalize()
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    torch.manual_seed(1234)
    return provider.provide().double()


def gpt_provider(parallel):
    """Bridge's provider with the configuration of the other models of these tests."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    given, names = config_of(parallel), GPTModelProvider.__dataclass_fields__
    options = {name: value for name, value in vars(given).items() if name in names}
    return GPTModelProvider(
        **options, vocab_size=VOCAB, seq_length=64, position_embedding_type="rope",
        share_embeddings_and_output_weights=False, transformer_layer_spec=local_layers,
    )  # fmt: skip


def gpt_run(rank, parallel):
    """Loss and gradients of a provider's model, and what its layers run."""
    importlib.import_module("megatron_burst.auto")
    start(parallel)
    gpt = built(gpt_provider(parallel), parallel)
    cores = [type(layer.self_attention.core_attention).__name__ for layer in gpt.decoder.layers]
    return loss_and_grads(gpt), cores


def test_a_providers_model_trains_over_two_ranks_as_on_one():
    ((truth, own),) = run_ranks(gpt_run, 1, Parallel())
    assert own == ["DotProductAttention"] * 2
    for run, cores in run_ranks(gpt_run, 2, Parallel(cp=2)):
        assert cores == ["BurstCoreAttention"] * 2
        errors = relative_errors(run, truth)
        assert max(errors.values()) <= 1e-12, errors
