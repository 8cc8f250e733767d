"""What CPU mode replaces, as rows like those of `mcore/patches.py`."""

from megatron_burst.mcore.patches import patches_of
from megatron_burst.patching import Patch

_CORE = "megatron.core"
_ARGUMENTS = "megatron.training.arguments"
_DISPATCHER = f"{_CORE}.transformer.moe.token_dispatcher"
_CPU = "megatron_burst.tools.cpu_mode"
_TRAINING = "cpu training"
FREE_OUTPUT = f"{_CORE}.pipeline_parallel.schedules:deallocate_output_tensor"
INITIALIZE = "megatron.training.initialize:initialize_megatron"
WARM_UP = "megatron.training.training:set_jit_fusion_options"
_NO_CUDA_ARGUMENT = (
    "allow_no_cuda skip_mpu_initialization get_embedding_ranks get_position_embedding_ranks"
)

_RELEASES = {FREE_OUTPUT: ((0, 16), (0, 17))}
_OTHER_FORMS = {
    INITIALIZE: {
        "0.17": f"extra_args_provider args_defaults ignore_unknown_args {_NO_CUDA_ARGUMENT} "
        "parsed_args store",
        "0.18": f"{_NO_CUDA_ARGUMENT} store",
    },
    WARM_UP: {"0.17, 0.18": ""},
}

# shared reasons
_RNG = (
    "the RNG tracker forks CUDA's generator (core/tensor_parallel/random.py:318), and full "
    "recomputation restores it (:528); here both work on the CPU's"
)
_STREAMS = (
    "DDP is built on a side stream (training/models/dist_utils.py:303), timers wait for the GPU "
    "(core/timers.py:152)"
)
_NO_CUDA = (
    "training/initialize.py:66 asserts CUDA unless told otherwise, :270 and :447 build no groups "
    "and no RNG states without a device"
)

TABLE: tuple[Patch, ...] = (
    *patches_of(
        # for CPU mode, to build and run a model; see cpu_mode.py
        ("cpu", "torch.autograd.graph:_engine_run_backward", f"{_CPU}:run_backward_in_mode",
         "t_outputs args kwargs",
         "a mode is off while it answers a call, and Tensor.backward, which recomputes, is one"),
        ("cpu", "torch.cuda:current_device", "=torch.cpu:current_device", "",
         "layers allocate there: core/tensor_parallel/layers.py:1000, "
         "core/models/common/embeddings/rotary_pos_embedding.py:162"),
        ("cpu", "torch.cuda:get_rng_state", f"={_CPU}:get_rng_state", "device", _RNG),
        ("cpu", "torch.cuda.random:get_rng_state", f"={_CPU}:get_rng_state", "device", _RNG),
        ("cpu", "torch.cuda:set_rng_state", f"={_CPU}:set_rng_state", "new_state device", _RNG),
        ("cpu", f"{_CORE}.tensor_parallel.random:_set_cuda_rng_state", f"={_CPU}:set_rng_state",
         "new_state device graph_safe", _RNG),
        ("cpu", "torch.cuda:manual_seed", "=torch:manual_seed", "seed", _RNG),
        ("cpu", f"{_CORE}.transformer.torch_norm:WrappedTorchNorm.__new__", f"{_CPU}:build_marked",
         "cls config hidden_size eps persist_layer_norm zero_centered_gamma normalization",
         "core/transformer/torch_norm.py:50 refuses sequence parallelism, which only asks for a "
         "mark on the parameters (core/distributed/finalize_model_grads.py:452 reduces their "
         "gradients)"),
        # and for DDP, the optimizers, the schedules and pretrain()
        (_TRAINING, "torch.cuda:Stream", "=torch.cpu:Stream", "device priority kwargs", _STREAMS),
        (_TRAINING, "torch.cuda:Event", "=torch.cpu:Event",
         "enable_timing blocking interprocess external", _STREAMS),
        (_TRAINING, "torch.cuda:stream", "=torch.cpu:stream", "stream", _STREAMS),
        (_TRAINING, "torch.cuda:current_stream", "=torch.cpu:current_stream", "device", _STREAMS),
        (_TRAINING, "torch.cuda:synchronize", "=torch.cpu:synchronize", "device", _STREAMS),
        (_TRAINING, "torch.cpu:Stream.record_event", f"={_CPU}:record_event", "self",
         "core/transformer/moe/token_dispatcher.py:946 waits for the event, which torch's stream "
         "of a CPU does not return"),
        (_TRAINING, f"{_DISPATCHER}:maybe_move_tensor_to_cpu", f"={_CPU}:as_numbers",
         "tensor as_numpy record_stream",
         "core/transformer/moe/token_dispatcher.py:930 makes NumPy arrays of the splits of an "
         "all-to-all that lie on a GPU, and torch takes no tensors"),
        (_TRAINING, FREE_OUTPUT, f"{_CPU}:shrink_output", "out deallocate_pipeline_outputs",
         "interleaved schedules free what they send before it is sent (0.16.1: "
         "core/pipeline_parallel/schedules.py:1522, :1600); from 0.18 on they wait"),
        (_TRAINING, "torch.distributed:DeviceMesh.from_group", f"{_CPU}:mesh_on_the_cpu",
         "group device_type mesh mesh_dim_names",
         "both FSDPs hard-code the device of their mesh: core/distributed/"
         "torch_fully_sharded_data_parallel.py:81, fsdp/mcore_fsdp_adapter.py:418"),
        (_TRAINING, "torch.cuda:device_count", "=torch.cpu:device_count", "", _NO_CUDA),
        (_TRAINING, "torch.cuda:set_device", "=torch.cpu:set_device", "device", _NO_CUDA),
        (_TRAINING, INITIALIZE, f"{_CPU}:initialize_without_cuda",
         "allow_no_cuda skip_mpu_initialization get_embedding_ranks get_position_embedding_ranks "
         "store skip_model_parallel_init seed_pp_group seed_dp_group seed_tp_group seed_ep_group "
         "seed_etp_group skip_random_seed",
         _NO_CUDA),
        (_TRAINING, f"{_ARGUMENTS}:get_device_arch_version", f"={_CPU}:newest_architecture", "",
         "training/arguments.py:1414 asks the GPU's architecture, to demand one hardware queue "
         "before Blackwell (10)"),
        (_TRAINING, f"{_ARGUMENTS}:validate_args", f"{_CPU}:validate_adjusted", "args defaults",
         "defaults are TransformerEngine, NCCL and CUDA extensions"),
        (_TRAINING, WARM_UP, f"={_CPU}:warm_nothing_up", "tp_size",
         "training/initialize.py:497 feeds random tensors to fused functions to compile them: "
         "nothing is compiled here, and the draws, whose number depends on the context parallel "
         "size, would move the generator that the weights are drawn from next"),
        releases=_RELEASES, forms=_OTHER_FORMS,
    ),
)  # fmt: skip
