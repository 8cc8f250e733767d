"""CPU mode: installed once, refused where there is a GPU, same weights at every CP size.

All other tests of this folder show that Megatron computes correctly in it.
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
import torch.distributed as dist
from megatron.core.transformer.enums import AttnBackend

from megatron_burst.errors import BurstError
from megatron_burst.tools import cpu_mode
from tests.mcore import gpt  # noqa: F401  (its processes start with Megatron loaded)
from tests.mcore.lacking import needs
from tests.ranks import run_ranks

FLAGS = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --train-iters 3
    --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --swiglu
    --tokenizer-type NullTokenizer --vocab-size 127 --distributed-backend gloo --bf16
    --attention-dropout 0 --use-cpu-initialization"""


def test_refuses_a_process_with_a_gpu(monkeypatch):
    """It would silently move Megatron's tensors off the GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    before = torch.cuda.current_device
    with pytest.raises(BurstError, match=r"^CPU mode: no CUDA device.*got 2 of them; set CUDA_V"):
        cpu_mode.install()
    assert torch.cuda.current_device is before


def bound() -> list:
    """Current values of what CPU mode rebinds, and the modes and stance that it sets."""
    import megatron.training.training  # noqa: F401  (else later calls would load it)

    from megatron_burst.mcore import patches
    from megatron_burst.patching import _owner_of

    rows = patches.rows("cpu", "cpu training", "helpers")
    places = [_owner_of(patch.place) for patch in rows]
    modes = tuple(type(m).__name__ for m in torch.overrides._get_current_function_mode_stack())
    return [*(vars(owner)[name] for owner, name in places), modes, stance()]


def stance() -> str:
    return torch._dynamo.eval_frame._stance.stance


def install_twice(rank):
    """Names rebound; whether each changes with the first call, stays with the second, and is
    restored after undo; where CUDA tensors are meanwhile."""
    from megatron_burst.patching import undo_all

    original = bound()
    names = [cpu_mode.install(training=False), cpu_mode.install()]
    once = bound()
    names.append(cpu_mode.install())
    changed = [a is not b for a, b in zip(original, once, strict=True)]
    same = [a == b for a, b in zip(once, bound(), strict=True)]
    on_device = torch.ones(2, device="cuda:0", pin_memory=True).cuda().device.type
    undo_all()
    back = [a == b for a, b in zip(original, bound(), strict=True)]
    return names, changed, same, on_device, back, once[-2:]


@needs("training")
def test_a_second_install_changes_nothing_and_all_of_it_is_given_back():
    """Nested wrappers would print twice, and a mode within a mode recurses."""
    ((names, changed, same, on_device, back, set_),) = run_ranks(install_twice, 1)
    for_models, all_names, again = names
    assert all_names == again and len(set(again)) == len(again) > len(for_models) > 0
    assert set(for_models) < set(again)
    assert all(changed) and all(same) and on_device == "cpu"
    assert set_ == [("CudaMeansCpu",), "force_eager"] and all(back)


def arguments_adjusted(rank):
    """Megatron's arguments as CPU mode leaves them, and as the flags that it names leave them."""
    from megatron.training import arguments

    sys.argv = shlex.split(f"pretrain.py {FLAGS.replace('gloo', 'nccl')}")
    args = arguments.parse_args()
    flags = cpu_mode.adjust_args(args)
    sys.argv += [word for flag in flags for word in flag.split()]
    again = arguments.parse_args()
    differing = [name for name, value in vars(args).items() if getattr(again, name) != value]
    return flags, differing, cpu_mode.adjust_args(again)


@needs("training")
def test_arguments_are_adjusted_as_the_flags_that_are_printed_would():
    ((flags, differing, more),) = run_ranks(arguments_adjusted, 1)
    assert "--transformer-impl local" in flags and "--distributed-backend gloo" in flags
    assert differing == [] and more == []


def test_what_only_gpus_have_is_refused():
    """Silently dropped, it would train a different model or crash deep inside Megatron."""
    with pytest.raises(BurstError, match="^CPU mode: .* --fp8-format, .* got fp8=hybrid; leave it"):
        cpu_mode.adjust_args(Namespace(fp8="hybrid"))
    assert cpu_mode.adjust_args(Namespace()) == []


def test_experts_of_a_plan_for_gpus_run_one_after_the_other():
    """A plan's flags of speed compute the same without them; a run on CPUs hears of it."""
    given = Namespace(moe_grouped_gemm=True, moe_permute_fusion=True)
    assert cpu_mode.adjust_args(given) == ["no --moe-grouped-gemm", "no --moe-permute-fusion"]
    assert not given.moe_grouped_gemm and not given.moe_permute_fusion


def test_megatron_fsdp_scales_gradients_without_nccl():
    given = Namespace(use_megatron_fsdp=True, gradient_reduce_div_fusion=True)
    assert cpu_mode.adjust_args(given) == ["--no-gradient-reduce-div-fusion"]
    assert given.gradient_reduce_div_fusion is False


@pytest.mark.parametrize("asked", AttnBackend)
def test_a_kernel_that_only_gpus_have_is_left_open(asked):
    given = Namespace(attention_backend=asked)
    changed = cpu_mode.adjust_args(given)
    assert changed == (["--attention-backend auto"] if asked is AttnBackend.fused else [])
    assert given.attention_backend is (AttnBackend.auto if changed else asked)


def freed_before_received(rank):
    """Smallest value received; on the rank that sends ones, how many are left after the send
    began."""
    from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor

    got = torch.ones(32, 1, 64)
    if rank == 0:
        sending = dist.isend(got, 1)
        cpu_mode.shrink_output(deallocate_output_tensor, got, True)
        others = [torch.zeros(32, 1, 64) for _ in range(100)]  # would reuse a freed one's memory
        dist.barrier()
        sending.wait()
        assert len(others) == 100 and got._base is None
        return got.numel()
    dist.barrier()
    dist.recv(got.zero_(), 0)
    return got.min().item()


def test_an_output_that_megatron_frees_while_it_is_sent_arrives():
    """As interleaved schedules up to 0.17 do: the next stage used to get whatever came after it."""
    assert run_ranks(freed_before_received, 2) == [1, 1.0]


def initial_weights(rank, cp_size):
    """Digests of the generators' states and of the weights when pretrain() starts."""
    cpu_mode.install()
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


@needs("--spec")
def test_initial_weights_are_the_same_at_every_context_parallel_size():
    """Otherwise CP=4 could not be compared with CP=1. Megatron's warm-up of its fused functions,
    whose tensors are larger at CP=1, once advanced the generator from which weights are then
    drawn."""
    (alone,) = run_ranks(initial_weights, 1, 1)
    assert len(alone[1]) >= 10
    for rank, spread in enumerate(run_ranks(initial_weights, 4, 4)):
        assert spread == alone, rank
