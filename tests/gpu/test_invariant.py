"""`--burst-invariant` with Megatron's batch-invariant kernels: bits of token log-probabilities on
one, two and four ranks.

Guards against a layer, a kernel or a tile of the loss whose bits depend on the rows of a rank.
"""

import pytest
import torch

from megatron_burst.config import BurstConfig, Force
from tests.gpu import needs_gpus, needs_transformer_engine
from tests.mcore.invariant import SIZES, model_of, path_of, paths_taken, spread, token_values
from tests.ranks import run_ranks
from tests.sampling import whole

pytestmark = [pytest.mark.gpu, needs_gpus()]
TOKENS = 1024


def spec_of(layers: str):
    from megatron.core.models.gpt import gpt_layer_specs as specs

    from megatron_burst import burst_spec

    if layers == "local":
        return burst_spec(specs.get_gpt_layer_local_spec(normalization="RMSNorm"))
    return burst_spec(specs.get_gpt_layer_with_transformer_engine_spec())


def values_on(rank: int, layers: str) -> dict[int, tuple]:
    """By number of ranks: values, the path that they took, and how far gradients are from those of
    one rank."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.custom_layers.batch_invariant_kernels import (
        set_batch_invariant_mode,
    )

    from megatron_burst.mcore import patches
    from tests.mcore import gpt as models

    models.SEQ = TOKENS  # the process is this test's own
    patches.apply("invariant")
    found, one, config = (
        {},
        None,
        BurstConfig(invariant=True, nodes=1, force=Force(transfer="send")),
    )
    for size in SIZES:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(context_parallel_size=size)
        model_parallel_cuda_manual_seed(7)
        options = dict(params_dtype=torch.bfloat16, bf16=True, kv_channels=64)
        options |= dict(use_cpu_initialization=False, hidden_size=256, ffn_hidden_size=512)
        parallel = models.Parallel(cp=size)
        model = model_of(parallel, config, spec_of(layers), **options).cuda().bfloat16()
        with set_batch_invariant_mode(True), paths_taken() as taken:
            values, grads = token_values(model, "cuda")
        one = one or grads
        found[size] = values, taken, spread(grads, one)
    return found


@pytest.mark.parametrize(
    "layers",
    [*whole("local"), pytest.param("transformer_engine", marks=needs_transformer_engine())],
)
def test_log_probabilities_have_the_same_bits_on_any_number_of_ranks(layers):
    settings = dict(backend="nccl", timeout_s=300, fresh=True)
    for found in run_ranks(values_on, 4, layers, **settings):
        for size, (values, taken, gradients) in found.items():
            print(layers, size, gradients)
            assert torch.equal(values, found[1][0]) and taken == path_of(size), size
            assert gradients <= 4 * torch.finfo(torch.bfloat16).eps
