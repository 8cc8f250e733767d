"""Learned sinks on tensor-parallel ranks: how they begin, and their part of a gradient's norm.

Megatron's own class draws equal sinks on all ranks and counts the gradients of one rank alone.
"""

import pytest
import torch
import torch.distributed as dist

from tests.mcore.gpt import HEADS, Model, Parallel, config_of, loss_and_grads, start
from tests.ranks import run_ranks

LEARNED = Model(sinks="learnable")


def sinks_and_norm(tp: int, **options) -> tuple[torch.Tensor, float, float]:
    """All sinks of a new model, and the squared norm of their gradients as Megatron counts it and
    as it is."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

    from megatron_burst import burst_spec

    start(Parallel(tp=tp, cp=2 // tp))
    torch.manual_seed(1234)
    config = config_of(Parallel(tp=tp, cp=2 // tp), LEARNED, **options)
    spec = burst_spec(get_gpt_layer_local_spec(normalization="RMSNorm"))
    model = GPTModel(config, spec, 96, 64, position_embedding_type="rope", parallel_output=False)
    group = parallel_state.get_tensor_model_parallel_group()
    sinks = [x for name, x in model.named_parameters() if name.endswith("softmax_offset")]
    begun = [torch.empty(HEADS // tp, dtype=torch.float64) for _ in range(tp)]
    dist.all_gather(begun, sinks[0].detach().clone(), group=group)
    grads = loss_and_grads(model.double()).grads
    squares = [grads[name].square().sum() for name, x in model.named_parameters()
               if name.endswith("softmax_offset")]  # fmt: skip
    counted = [x for x, sink in zip(squares, sinks, strict=True)
               if param_is_not_tensor_parallel_duplicate(sink)]  # fmt: skip
    norms = torch.stack([sum(counted, torch.zeros(1).double()), sum(squares).reshape(1)])
    dist.all_reduce(norms, group=group)
    return torch.cat(begun), *norms.flatten().tolist()


def on_a_cpu(rank: int):
    return sinks_and_norm(1), sinks_and_norm(2)


def on_each_rank(rank: int):
    return sinks_and_norm(2, use_cpu_initialization=False)


def test_sinks_and_the_norm_of_their_gradients_do_not_depend_on_tensor_parallelism():
    for (alone, norm, whole), (parallel, counted, summed) in run_ranks(on_a_cpu, 2):
        assert torch.equal(alone, parallel) and alone.unique().numel() == HEADS
        assert norm == whole and counted == summed
        assert counted == pytest.approx(norm, rel=1e-9)


def test_ranks_draw_different_sinks():
    for sinks, counted, summed in run_ranks(on_each_rank, 2):
        assert sinks.unique().numel() == HEADS and counted == summed
