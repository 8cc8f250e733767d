"""Real Megatron-Core and megatron.training on CPU processes over gloo, for trying out and testing.

As few adaptations as possible; `cpu_rows.py` lists what is replaced, and which line of Megatron
needs it. What Megatron can do by itself is left alone: the zigzag slice of RoPE, the RNG tracker,
recomputation, streams and the fused functions written in PyTorch are its own code. GPU runs never
use this module.
"""

import copy
import inspect
import logging
from argparse import Namespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from megatron_burst.errors import BurstError
from megatron_burst.logs import log_message
from megatron_burst.mcore import patches
from megatron_burst.mcore.refusals import refuse
from megatron_burst.patching import on_undo
from megatron_burst.tools.cpu_rows import TABLE


def install(training: bool = True) -> tuple[str, ...]:
    """Make Megatron run on this process's CPU; returns the replaced names.

    Call it in the process that trains (after a fork or spawn) and in its main thread, before or
    after importing Megatron; a second call changes nothing.

    Args:
        training: also what DDP, the optimizers, the schedules and pretrain() need; False is enough
            to build a GPTModel and to run it forward and backward.

    Raises:
        BurstError: this process has a CUDA device.
    """
    if torch.cuda.is_available():
        raise BurstError(
            "CPU mode: no CUDA device may be visible, because Megatron's CUDA calls are redirected "
            f"to the CPU; got {torch.cuda.device_count()} of them; set CUDA_VISIBLE_DEVICES to the "
            "empty string, or run without CPU mode"
        )
    if not any(isinstance(mode, CudaMeansCpu) for mode in _get_current_function_mode_stack()):
        _enter()
    groups = ("cpu", "cpu training") if training else ("cpu",)
    rows = patches.there(row for row in TABLE if row.group in groups)
    rows += patches.rows("helpers") if training else ()
    for patch in rows:
        patch.apply()
    return tuple(patch.target for patch in rows)


def _enter() -> None:
    """Switch on what is not a replaced function."""
    # CUDA is hard-coded: core/models/common/embeddings/rope_utils.py:62 moves the zigzag's index
    # there, core/transformer/utils.py:39, core/optimizer/optimizer.py:690 and
    # core/pipeline_parallel/schedules.py:749 allocate there. The mode holds for the calling thread,
    # which for CPU tensors also runs the backward pass.
    mode = CudaMeansCpu()
    mode.__enter__()
    on_undo(lambda: mode.__exit__(None, None, None))
    # core/jit.py:21 makes every @jit_fuser function a torch.compile, which builds C++ on a CPU
    # (--disable-jit-fuser comes too late for modules imported before it)
    torch.compiler.set_stance("force_eager")
    # the first call builds dynamo's table of torch's functions, which must not contain one of them
    # twice: a later call may come when names of torch.cuda are those of torch.cpu
    torch.compile(lambda: None)
    on_undo(lambda: torch.compiler.set_stance("default"))
    # core/tensor_parallel/random.py:333 warns when the CPU's generator advanced inside a fork,
    # which is intended here
    logger = logging.getLogger("megatron.core.tensor_parallel.random")

    def is_other(record: logging.LogRecord) -> bool:
        return "CPU RNG state changed" not in record.getMessage()

    logger.addFilter(is_other)
    on_undo(lambda: logger.removeFilter(is_other))


def adjust_args(args: Namespace) -> list[str]:
    """Turn off Megatron's arguments that need CUDA; return the equivalent flags.

    `install` has validate_args do this, so nobody needs to pass these flags.
    """
    refuse("cpu", args, "CPU mode")
    wanted = {
        "transformer_impl": ("local", "--transformer-impl local"),
        "distributed_backend": ("gloo", "--distributed-backend gloo"),
        # CUDA extensions: core/tensor_parallel/layers.py:51, core/fusions/fused_softmax.py:31
        "gradient_accumulation_fusion": (False, "--no-gradient-accumulation-fusion"),
        "masked_softmax_fusion": (False, "--no-masked-softmax-fusion"),
        # TransformerEngine's: core/transformer/transformer_config.py:2184
        "apply_rope_fusion": (False, "--no-rope-fusion"),
        # the same experts one after the other, the same tokens in PyTorch
        "moe_grouped_gemm": (False, "no --moe-grouped-gemm"),
        "moe_permute_fusion": (False, "no --moe-permute-fusion"),
    }
    if getattr(args, "use_megatron_fsdp", False):
        # NCCL's: core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py:4748
        wanted["gradient_reduce_div_fusion"] = (False, "--no-gradient-reduce-div-fusion")
    backend = getattr(args, "attention_backend", None)
    if getattr(backend, "name", backend) == "fused":  # the others run on CPUs
        wanted["attention_backend"] = (type(backend)["auto"], "--attention-backend auto")
    changed = {n: to for n, to in wanted.items() if getattr(args, n, to[0]) != to[0]}
    for name, (value, _) in changed.items():
        setattr(args, name, value)
    return [flag for _, flag in changed.values()]


class CudaMeansCpu(TorchFunctionMode):
    """Redirects every torch call that names a CUDA device or pinned memory to the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # core/optimizer/optimizer.py:1009, :1028 and clip_grads.py:174 compare with the names
            # of CUDA types.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        # this runs at every call of torch: what names no device must cost little
        for value in args:
            if type(value) in _NAMES:
                args = tuple(map(_on_cpu, args))
                break
        if not kwargs:
            return func(*args)
        kwargs = {name: _on_cpu(value) for name, value in kwargs.items()}
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


_NAMES = frozenset((str, torch.device))


def _on_cpu(value: object) -> object:
    """Replace a CUDA device, by name or as torch.device, by the CPU."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.startswith("cuda") else value


# ---- what names are bound to: see cpu_rows.py ------------------------------------------------


def run_backward_in_mode(run_backward, /, *args, **kwargs):
    """Runs autograd's engine under `CudaMeansCpu`."""
    with CudaMeansCpu():
        return run_backward(*args, **kwargs)


def get_rng_state(device: object = None) -> torch.Tensor:
    """The state of the CPU's generator."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: object = None, graph_safe: bool = False) -> None:
    """Set the state of the CPU's generator."""
    torch.set_rng_state(new_state)


def build_marked(build, /, cls: type, config, *args, **kwargs) -> torch.nn.Module:
    """The constructor of Megatron's norms in PyTorch."""
    plain = copy.copy(config)
    plain.sequence_parallel = plain.persist_layer_norm = False
    norm = build(cls, plain, *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def record_event(self: Any, event: Any = None) -> Any:
    """The event, as a CUDA stream returns it."""
    return event or torch.cpu.Event()


def as_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """A tensor as it is, or as a NumPy array where one is asked for."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def shrink_output(deallocate, /, out: Any, deallocate_pipeline_outputs: bool = False) -> None:
    """`deallocate_output_tensor` that keeps the storage, which gloo may still read to send it."""
    whole = out.data if deallocate_pipeline_outputs and torch.is_tensor(out) else None
    deallocate(out, deallocate_pipeline_outputs)
    if whole is not None:
        out.data = whole[(slice(1),) * whole.dim()]


def mesh_on_the_cpu(from_group, /, group, device_type: str, *rest, **options):
    """`DeviceMesh.from_group` for the CPU."""
    return from_group(group, "cpu", *rest, **options)


def initialize_without_cuda(initialize, /, *args, **options):
    """`initialize_megatron` that asserts no CUDA."""
    bound = inspect.signature(initialize).bind(*args, **options)
    bound.arguments["allow_no_cuda"] = True
    return initialize(*bound.args, **bound.kwargs)


def newest_architecture() -> int:
    """Blackwell's, for which nothing is checked."""
    return 10


def validate_adjusted(validate_args, /, args: Namespace, *rest, **options):
    """`validate_args` that adjusts the arguments first."""
    changed = adjust_args(args)
    if changed and args.rank == 0:
        log_message(f"megatron_burst CPU mode runs with {', '.join(changed)}")
    return validate_args(args, *rest, **options)


def warm_nothing_up(tp_size: int | None = None) -> None:
    """Skips warm-up, which would advance the random generator."""
