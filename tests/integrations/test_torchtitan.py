"""torchtitan's Llama, parallelized by its own function over two ranks, against one process.

Guards against burst that is not in place where models and trainers import functions by name,
against masks and requests of attention that are dropped, and against gradients of another sum.
"""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.ranks import preload, run_ranks

pytest.importorskip("torchtitan", reason="make test-integrations FRAMEWORKS=torchtitan")
preload("torchtitan.models.llama3", "torchtitan.trainer")
LENGTHS = (11, 3, 18), (32,)  # documents of each sequence


def model_of():
    """A tiny Llama, the same on all ranks."""
    from torchtitan.models.llama3 import Llama3Model, _debugmodel

    config = _debugmodel("flex")
    config.layers = config.layers[:2]
    torch.manual_seed(0)
    model = Llama3Model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model.double()


def batch_of() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels and positions [2, 32]."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(2048, (2, 2, 32), generator=generator)
    rows = [torch.cat([torch.arange(n) for n in lengths]) for lengths in LENGTHS]
    return tokens, labels, torch.stack(rows)


def plain(q, k, v, *, attention_masks, scale=None, enable_gqa=False, **others):
    """Causal attention within documents, [b, s, heads, d]; masks: positions."""
    rows = torch.arange(q.shape[1])
    document = (attention_masks == 0).cumsum(1)
    seen = (rows[:, None] >= rows) & (document[:, :, None] == document[:, None])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, seen[:, None], scale=scale, enable_gqa=enable_gqa
    )
    return out.transpose(1, 2)


def loss_of(logits, labels):
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )


def errors_of(
    rank: int, balancer: str | None, recompute: str, compiled: bool
) -> tuple[float, float]:
    """Largest errors of loss and gradients; `compiled`: each layer, without a graph break."""
    from torch.distributed.fsdp import FSDPModule
    from torchtitan import trainer
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models.llama3 import parallelize_llama

    import megatron_burst.titan  # noqa: F401  # after torchtitan's models and trainer
    from megatron_burst import operators

    parallel_dims.device_type = "cpu"  # it takes any torch with CUDA for a GPU
    tokens, labels, positions = batch_of()
    oracle = model_of()
    for layer in oracle.layers.values():
        layer.attention.inner_attention.forward = plain
    true = loss_of(oracle(tokens, positions=positions, attention_masks=positions), labels)
    true.backward()
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=2, tp=1, pp=1, ep=1, world_size=2,
                        spmd_backend="partial_dtensor")  # fmt: skip
    model = model_of()
    masks = model.get_attention_masks(positions)
    parallelize_llama(
        model, parallel_dims=dims, dump_folder="",
        compile_config=CompileConfig(enable=compiled, components=["model"], backend="aot_eager"),
        ac_config={"full": FullAC, "selective": SelectiveAC}[recompute].Config(),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", context_parallel_degree=2),
        training=TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32"),
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    mine, targets, told = trainer.prepare_context_parallel_input(
        tokens, labels, {"positions": positions, "attention_masks": masks},
        dims.get_mesh("cp"), torch.device("cpu"), balancer,
    )  # fmt: skip
    calls: list[None] = []
    token = operators.ON_CALL.set(lambda: calls.append(None))
    loss = loss_of(model(mine, **told), targets)
    loss.backward()
    operators.ON_CALL.reset(token)
    # a sequence of each of two batches in two layers, again where all is recomputed
    expected = (8 if recompute == "full" else 4) if compiled else 0
    assert len(calls) == expected, len(calls)
    total = loss.detach().clone()
    dist.all_reduce(total)
    errors = [
        float((ours.grad.full_tensor() - theirs.grad).abs().max() / theirs.grad.abs().max())
        for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True)
    ]
    return float((total / true - 1).abs()), max(errors)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("balancer", "recompute"), [("headtail", "selective"), (None, "full")], ids=str
)
def test_a_llama_on_two_ranks_is_that_on_one(balancer, recompute, compiled):
    for errors in run_ranks(errors_of, 2, balancer, recompute, compiled, fresh=True):
        assert max(errors) < 2e-5, errors


def told(rank: int) -> list[str]:
    """What is said of what burst does not support."""
    from torchtitan.models.common.attention import VarlenAttention

    from megatron_burst import BurstError, titan

    mesh, (tokens, labels, positions) = dist.init_device_mesh("cpu", (1,)), batch_of()
    model, said = model_of(), []
    attention = [layer.attention.inner_attention for layer in model.layers.values()]
    masks = model.get_attention_masks(positions)

    def prepare(masks, *balancer):
        extra = {"positions": positions, "attention_masks": masks}
        titan.prepare_context_parallel_input(tokens, labels, extra, mesh, "cpu", *balancer)

    def in_windows(*place):
        return True

    calls = (
        lambda: prepare(masks),
        lambda: titan.apply_cp_to_forward([VarlenAttention(VarlenAttention.Config())], mesh),
        lambda: titan.apply_cp_to_forward(attention, mesh) or prepare(masks, "ptrr"),
        lambda: prepare({"full": masks}),
        lambda: setattr(masks, "mask_mod", in_windows) or prepare(masks),
        lambda: attention[0](*torch.zeros(3, 1, 4, 2, 8), attention_masks=masks),
        lambda: attention[0](*torch.zeros(3, 1, 4, 2, 8), score_mod=in_windows),
    )
    for call in calls:
        with pytest.raises(BurstError) as raised:
            call()
        said.append(str(raised.value))
    given, told_of = torch.zeros(3, 1, 4, 2, 8), titan.ShardedMask("zigzag", ())
    stands_in = patch.object(titan, "burst_attention", side_effect=RuntimeError)
    with stands_in as called, pytest.raises(RuntimeError):
        attention[1](*given, attention_masks=told_of)
    assert called.call_args.kwargs["layer"] == 2  # which errors name
    return said


def test_refuses_in_one_sentence():
    wanted = ("spmd_backend must be partial_dtensor", "got VarlenAttention", "got ptrr",
              "got dict", "got told", "got BlockMask", "got score_mod")  # fmt: skip
    for text, part in zip(run_ranks(told, 1)[0], wanted, strict=True):
        assert text.startswith("burst in torchtitan: ") and part in text
