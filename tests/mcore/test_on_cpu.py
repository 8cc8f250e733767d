"""CPU mode: installed once, refused where a GPU is, and the same weights at every CP size.

That Megatron computes rightly in it is what all other tests of this folder show.
"""

import hashlib
import os
import random
import shlex
import sys
from argparse import Namespace

import numpy as np
import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

from megatron_burst.errors import BurstError
from megatron_burst.mcore import cpu_arguments, on_cpu
from tests.mcore import gpt  # noqa: F401  (its processes start with Megatron loaded)
from tests.ranks import run_ranks

FLAGS = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --train-iters 3
    --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --swiglu
    --tokenizer-type NullTokenizer --vocab-size 127 --distributed-backend gloo --bf16
    --attention-dropout 0 --use-cpu-initialization"""


def test_refuses_a_process_with_a_gpu(monkeypatch):
    """It would move Megatron's tensors off the GPU without a word."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    before = torch.cuda.current_device
    with pytest.raises(BurstError, match=r"^CPU mode: no CUDA device.*got 2 of them\. Set CUDA_V"):
        on_cpu.install()
    assert torch.cuda.current_device is before


def rebound():
    """What is looked up in the places that CPU mode rebinds."""
    from megatron.core.tensor_parallel import random as rng
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.training import arguments, training

    names = ("current_device", "get_rng_state", "set_rng_state", "Stream", "set_device")
    return [
        *(getattr(torch.cuda, name) for name in names),
        *(rng._set_cuda_rng_state, WrappedTorchNorm.__new__, arguments.validate_args),
        *(training.initialize_megatron, training.set_jit_fusion_options),
        *(
            torch.autograd._engine_run_backward,
            len(torch.overrides._get_current_function_mode_stack()),
        ),
    ]


def install_twice(rank):
    original = rebound()
    for_models = on_cpu.install(training=False)
    names = on_cpu.install()
    once = rebound()
    again = on_cpu.install()
    changed = [a is not b for a, b in zip(original, once, strict=True)]
    same = [a is b for a, b in zip(once, rebound(), strict=True)]
    on_device = torch.ones(2, device="cuda:0", pin_memory=True).cuda().device.type
    return for_models, names, again, changed, same, on_device


def test_a_second_install_changes_nothing():
    """Wrappers around wrappers would print twice, and a mode within a mode recurses."""
    ((for_models, names, again, changed, same, on_device),) = run_ranks(install_twice, 1)
    assert names == again and len(set(names)) == len(names) >= len(for_models) > 0
    assert names[: len(for_models)] == for_models
    for name in names:
        assert callable(getattr(on_cpu, name)) and getattr(on_cpu, name).__doc__, name
    assert all(changed) and all(same) and on_device == "cpu"


def arguments_adjusted(rank):
    """Megatron's arguments as CPU mode leaves them, and as the flags that it names leave them."""
    from megatron.training import arguments

    sys.argv = shlex.split(f"pretrain.py {FLAGS.replace('gloo', 'nccl')}")
    args = arguments.parse_args()
    flags = cpu_arguments.adjust_args(args)
    sys.argv += [word for flag in flags for word in flag.split()]
    again = arguments.parse_args()
    differing = [name for name, value in vars(args).items() if getattr(again, name) != value]
    return flags, differing, cpu_arguments.adjust_args(again)


def test_arguments_are_adjusted_as_the_flags_that_are_printed_would():
    ((flags, differing, more),) = run_ranks(arguments_adjusted, 1)
    assert "--transformer-impl local" in flags and "--distributed-backend gloo" in flags
    assert differing == [] and more == []


ONLY_GPUS = {
    "fp8": "hybrid", "fp4": "e2m1", "cuda_graph_impl": "local", "enable_cuda_graph": True,
    "external_cuda_graph": True, "tp_comm_overlap": True, "moe_grouped_gemm": True,
    "moe_permute_fusion": True, "moe_token_dispatcher_type": "flex", "optimizer_cpu_offload": True,
}  # fmt: skip


@pytest.mark.parametrize("name", ONLY_GPUS)
def test_what_only_gpus_have_is_refused(name):
    """Dropped without a word it would train another model, or die deep inside of Megatron."""
    given = Namespace(**{name: ONLY_GPUS[name]})
    with pytest.raises(BurstError, match=f"^CPU mode: .* got {name}={ONLY_GPUS[name]}; leave it"):
        cpu_arguments.adjust_args(given)
    assert cpu_arguments.adjust_args(Namespace()) == []


def test_megatron_fsdp_scales_gradients_without_nccl():
    given = Namespace(use_megatron_fsdp=True, gradient_reduce_div_fusion=True)
    assert cpu_arguments.adjust_args(given) == ["--no-gradient-reduce-div-fusion"]
    assert given.gradient_reduce_div_fusion is False


@pytest.mark.parametrize("asked", AttnBackend)
def test_a_kernel_that_only_gpus_have_is_left_open(asked):
    given = Namespace(attention_backend=asked)
    changed = cpu_arguments.adjust_args(given)
    assert changed == (["--attention-backend auto"] if asked is AttnBackend.fused else [])
    assert given.attention_backend is (AttnBackend.auto if changed else asked)


def initial_weights(rank, cp_size):
    """Digests of the generators' states and of the weights, as pretrain() comes to them."""
    on_cpu.install()
    os.environ |= {"WORLD_SIZE": str(cp_size), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    from megatron_burst.mcore import launch

    launch.prepare([])
    burst = "--context-parallel-impl burst" if cp_size > 1 else ""
    sys.argv = shlex.split(f"pretrain.py {FLAGS} --context-parallel-size {cp_size} {burst}")
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import arguments, training
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    args = arguments.parse_and_validate_args()
    training.initialize_megatron()
    training.set_jit_fusion_options(tp_size=1)  # training/training.py:1117
    states = random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = GPTModelBuilder(gpt_config_from_args(args)).build_model(groups)
    weights = {name: _digest(p.detach().tolist()) for name, p in model.named_parameters()}
    return _digest(states), weights


def _digest(values) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()


def test_initial_weights_are_the_same_at_every_context_parallel_size():
    """Else CP=4 could not be compared with CP=1. Megatron's warm-up of its fused functions, whose
    tensors are larger at CP=1, once moved the generator that the weights are drawn from next."""
    (alone,) = run_ranks(initial_weights, 1, 1)
    assert len(alone[1]) >= 10
    for rank, spread in enumerate(run_ranks(initial_weights, 4, 4)):
        assert spread == alone, rank
