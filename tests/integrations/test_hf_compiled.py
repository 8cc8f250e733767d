"""transformers' layers compiled by torch, with burst in the graph, on two ranks.

Guards against graph breaks, a compilation for each layer, and a count of attention calls that sees
none of those in compiled code.
"""

import pytest
import torch
import torch.distributed as dist

from tests.integrations.test_hf import batch_of, model_of
from tests.ranks import preload, run_ranks

pytest.importorskip("trl", reason="make test-integrations FRAMEWORKS=hf")
preload("transformers", "megatron_burst.hf")
LAYERS = 10  # more than torch compiles of one function
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
FAMILIES = {"Llama": ({}, 1), "Qwen3": ({}, 2), "Gemma3": (MIXED, 2)}  # and how many graphs
WAYS = "plain", "FSDP2"


def step(model, batch) -> list[torch.Tensor]:
    """Loss and gradients, whole on each rank."""
    from megatron_burst.hf import shard_batch

    model.zero_grad()
    loss = model(**shard_batch(batch), use_cache=False).loss
    loss.backward()
    grads = [x.grad.full_tensor() if hasattr(x.grad, "full_tensor") else x.grad
             for x in model.parameters()]  # fmt: skip
    return [loss.detach(), *(x.clone() for x in grads)]


def compare(rank: int, family: str, way: str) -> tuple[float, int]:
    """The largest difference of compiled layers from eager ones, and how many graphs they are."""
    from torch._dynamo.utils import counters
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = model_of(family, "burst", num_hidden_layers=LAYERS, **FAMILIES[family][0])
    if way == "FSDP2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    batches = batch_of(True), batch_of(True)
    eager = [x for batch in batches for x in step(model, batch)]
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    compiled = [x for batch in batches for x in step(model, batch)]
    pairs = zip(eager, compiled, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs), counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_layers_are_one_graph_of_each_kind_and_change_nothing(family, way):
    for difference, graphs in run_ranks(compare, 2, family, way, fresh=True):
        assert difference <= 1e-6 and graphs == FAMILIES[family][1]
