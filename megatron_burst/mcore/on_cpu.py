"""Real Megatron-Core and megatron.training on CPU processes over gloo, for trying out and testing.

As few adaptations as can be: each is one function that names the line of Megatron which needs it
(file:line of the 0.19.2 wheel, below megatron/). What Megatron can do by itself is left to it: the
zigzag slice of RoPE, the RNG tracker, recomputation, streams and the fused functions written in
PyTorch are its own code. A run on GPUs never touches this module.
"""

import copy
import functools
import importlib
import logging
from argparse import Namespace
from types import ModuleType
from typing import Any

import torch

from megatron_burst.errors import BurstError
from megatron_burst.mcore.cpu_arguments import adjust_args
from megatron_burst.mcore.cuda_means_cpu import CudaMeansCpu
from megatron_burst.mcore.datasets import use_built_dataset_helpers
from megatron_burst.patching import rebind
from megatron_burst.say import say

logger = logging.getLogger(__name__)


def install(training: bool = True) -> tuple[str, ...]:
    """Make Megatron run on this process's CPU; a second call changes nothing.

    Call it in the process that trains (after a fork or spawn) and in its main thread, before or
    after importing Megatron. Nothing is undone before the process ends.

    Args:
        training: also what DDP, the optimizers, the schedules and pretrain() need; False is enough
            to build a GPTModel and to run it forward and backward.

    Returns:
        The names of the adaptations in force.

    Raises:
        BurstError: this process has a CUDA device.
    """
    if torch.cuda.is_available():
        raise BurstError(
            "CPU mode: no CUDA device may be visible, because Megatron's CUDA calls are redirected "
            f"to the CPU; got {torch.cuda.device_count()} of them. "
            "Set CUDA_VISIBLE_DEVICES to the empty string, or run without CPU mode."
        )
    adaptations = (*_FOR_MODELS, *_FOR_TRAINING) if training else _FOR_MODELS
    for adapt in adaptations:
        adapt()
    return tuple(adapt.__name__ for adapt in adaptations)


# ---- building a model and running it --------------------------------------------------------


@functools.cache
def tensors_stay_on_the_cpu() -> None:
    """CUDA is hard-coded: core/models/common/embeddings/rope_utils.py:62 moves the zigzag's index
    there, core/transformer/utils.py:39, core/optimizer/optimizer.py:690 and
    core/pipeline_parallel/schedules.py:749 allocate there.

    The mode holds for the calling thread, which for CPU tensors also runs the backward pass.
    """
    mode = CudaMeansCpu()
    mode.__enter__()
    # A mode is off while it answers a call, and Tensor.backward is one; it runs recomputation.
    run_backward = torch.autograd._engine_run_backward

    def run_in_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run_backward(*args, **kwargs)

    torch.autograd._engine_run_backward = run_in_mode


@functools.cache
def current_device_is_the_cpu() -> None:
    """Layers allocate there: core/tensor_parallel/layers.py:1000 and
    core/models/common/embeddings/rotary_pos_embedding.py:162."""
    torch.cuda.current_device = torch.cpu.current_device


@functools.cache
def rng_states_are_the_cpus() -> None:
    """The RNG tracker forks CUDA's generator (core/tensor_parallel/random.py:318), and full
    recomputation restores it (:528). Here both work on the CPU's generator."""
    random = importlib.import_module("megatron.core.tensor_parallel.random")

    def get_state(device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: object = None, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = get_state
    torch.cuda.set_rng_state = random._set_cuda_rng_state = set_state
    torch.cuda.manual_seed = torch.manual_seed
    # random.py:333 warns when the CPU's generator moved inside a fork, which is the point here.
    moved = "CPU RNG state changed"
    logging.getLogger(random.__name__).addFilter(lambda record: moved not in record.getMessage())


@functools.cache
def norms_work_under_sequence_parallel() -> None:
    """core/transformer/torch_norm.py:50 refuses sequence parallelism, which only asks for a mark on
    the parameters (core/distributed/finalize_model_grads.py:452 reduces the gradients of those)."""
    norm_class = importlib.import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    build = norm_class.__new__

    def build_marked(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        plain = copy.copy(config)
        plain.sequence_parallel = plain.persist_layer_norm = False
        norm = build(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    norm_class.__new__ = staticmethod(build_marked)


@functools.cache
def fused_functions_run_uncompiled() -> None:
    """core/jit.py:21 makes every @jit_fuser function a torch.compile, which builds C++ on a CPU
    (--disable-jit-fuser comes too late for the modules that are imported by then)."""
    torch.compiler.set_stance("force_eager")


# ---- training -------------------------------------------------------------------------------


def _megatron_training(name: str) -> ModuleType:
    return importlib.import_module(f"megatron.training.{name}")


@functools.cache
def streams_are_the_cpus() -> None:
    """DDP is built on a side stream (training/models/dist_utils.py:303), timers wait for the GPU
    (core/timers.py:152); core/transformer/moe/token_dispatcher.py:946 waits for the event that
    torch's stream of a CPU does not return."""
    torch.cpu.Stream.record_event = lambda self, event=None: event or torch.cpu.Event()
    for name in ("Stream", "Event", "stream", "current_stream", "synchronize"):
        setattr(torch.cuda, name, getattr(torch.cpu, name))


@functools.cache
def splits_of_an_all_to_all_are_numbers() -> None:
    """core/transformer/moe/token_dispatcher.py:930 makes NumPy arrays of those that lie on a GPU,
    and torch takes no tensors."""
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")

    def on_the_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    dispatcher.maybe_move_tensor_to_cpu = on_the_host


@functools.cache
def meshes_are_the_cpus() -> None:
    """Both FSDPs hard-code the device of their mesh:
    core/distributed/torch_fully_sharded_data_parallel.py:81, fsdp/mcore_fsdp_adapter.py:418."""
    from torch.distributed import DeviceMesh

    from_group = DeviceMesh.from_group

    def on_the_cpu(group: Any, device_type: str, *rest: Any, **options: Any) -> DeviceMesh:
        return from_group(group, "cpu", *rest, **options)

    DeviceMesh.from_group = staticmethod(on_the_cpu)


@functools.cache
def the_cpu_counts_as_a_device() -> None:
    """training/initialize.py:66 asserts CUDA unless told otherwise, :270 and :447 build no groups
    and no RNG states without a device."""
    training = _megatron_training("training")
    torch.cuda.device_count = torch.cpu.device_count
    torch.cuda.set_device = torch.cpu.set_device
    training.initialize_megatron = functools.partial(
        training.initialize_megatron, allow_no_cuda=True
    )


@functools.cache
def no_gpu_architecture_is_asked_for() -> None:
    """training/arguments.py:1414 asks the GPU's architecture, to demand one hardware queue before
    Blackwell (10)."""
    _megatron_training("arguments").get_device_arch_version = lambda: 10


@functools.cache
def arguments_that_need_cuda_are_turned_off() -> None:
    """Defaults are Transformer Engine, NCCL and CUDA extensions; see adjust_args."""
    arguments = _megatron_training("arguments")
    validate_args = arguments.validate_args

    @functools.wraps(validate_args)
    def validate_adjusted(args: Namespace, *rest: Any, **options: Any) -> Any:
        changed = adjust_args(args)
        if changed and args.rank == 0:
            say(f"megatron_burst CPU mode adds: {' '.join(changed)}")
        return validate_args(args, *rest, **options)

    rebind(arguments, "validate_args", validate_adjusted)


@functools.cache
def no_fused_function_is_warmed_up() -> None:
    """training/initialize.py:497 feeds random tensors to fused functions to compile them. Nothing
    is compiled here, and the draws, whose number depends on the context parallel size, would move
    the generator that the weights are drawn from next."""
    _megatron_training("training").set_jit_fusion_options = lambda *args, **options: None


_FOR_MODELS = (
    tensors_stay_on_the_cpu,
    current_device_is_the_cpu,
    rng_states_are_the_cpus,
    norms_work_under_sequence_parallel,
    fused_functions_run_uncompiled,
)
_FOR_TRAINING = (
    streams_are_the_cpus,
    splits_of_an_all_to_all_are_numbers,
    meshes_are_the_cpus,
    the_cpu_counts_as_a_device,
    no_gpu_architecture_is_asked_for,
    arguments_that_need_cuda_are_turned_off,
    no_fused_function_is_warmed_up,
    use_built_dataset_helpers,
)
