"""A GPT of Megatron's own modules under its own pipeline schedules, with attention counted."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest import mock

import torch

from tests.mcore.gpt import SEQ, VOCAB, config_of, sharded
from tests.ranks import preload

preload("megatron.core.models.gpt", "megatron.core.pipeline_parallel.schedules")
preload("megatron_burst.mcore.launch")
LAYERS = 4


@dataclass(frozen=True)
class Setting:
    """How a step runs, except for recomputation.

    Attributes:
        pp: pipeline stages.
        vp: model chunks on each; 1 is 1F1B, more is interleaved.
        cp: context-parallel ranks.
        tp: tensor-parallel ranks.
        mtp: whether there is a layer of multi-token prediction.
        micro_batches: of a step.
    """

    pp: int = 1
    vp: int = 1
    cp: int = 1
    tp: int = 1
    mtp: bool = False
    micro_batches: int = 4


@dataclass
class Step:
    """What a step did on this rank.

    Attributes:
        grads: by chunk and parameter.
        kernels: forward calls of attention kernels.
        hops: messages between ranks of attention, forward and backward.
    """

    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    kernels: int = 0
    hops: int = 0


def start(setting: Setting) -> None:
    """Make Megatron's groups anew, on the CPU, with what schedules need."""
    from megatron.core import parallel_state, tensor_parallel

    from megatron_burst.tools import cpu_mode

    cpu_mode.install()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=setting.pp,
        virtual_pipeline_model_parallel_size=setting.vp if setting.vp > 1 else None,
        context_parallel_size=setting.cp,
        tensor_model_parallel_size=setting.tp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def config_for(setting: Setting, burst=None, **overrides):
    """Megatron's configuration; `burst` is added where there is context parallelism."""
    from tests.mcore.gpt import Parallel

    options = dict(
        num_layers=LAYERS,
        pipeline_model_parallel_size=setting.pp,
        virtual_pipeline_model_parallel_size=setting.vp if setting.vp > 1 else None,
        mtp_num_layers=1 if setting.mtp else None,
        calculate_per_token_loss=True,
    )
    config = config_of(Parallel(cp=setting.cp, tp=setting.tp), **options | overrides)
    config.burst = burst
    return config


def build(setting: Setting, config, burst: bool = False) -> list:
    """Build this rank's model chunks; equal weights for equal settings. `burst`: on one rank
    too."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs

    from megatron_burst import burst_spec

    torch.manual_seed(1234 + parallel_state.get_pipeline_model_parallel_rank())
    chunks = []
    for chunk in range(setting.vp):
        stage = chunk if setting.vp > 1 else None
        place = dict(ignore_virtual=False, vp_stage=stage)
        spec = specs.get_gpt_layer_local_spec(normalization="RMSNorm")
        spec = burst_spec(spec) if burst or setting.cp > 1 else spec
        mtp = None
        if setting.mtp:
            mtp = specs.get_gpt_mtp_block_spec(config, spec, False, vp_stage=stage)
        gpt = GPTModel(
            config, spec, VOCAB, SEQ, position_embedding_type="rope", parallel_output=False,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            mtp_block_spec=mtp, vp_stage=stage, share_embeddings_and_output_weights=False,
        )  # fmt: skip
        chunks.append(gpt.double())
    return chunks


def batches(setting: Setting, seed: int = 7):
    """The micro-batches of a step, as sharded to this rank."""
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(seed)
    for _ in range(setting.micro_batches):
        tokens, labels = torch.randint(0, VOCAB, (2, 1, SEQ), generator=generator)
        positions = torch.arange(SEQ).expand_as(tokens)
        batch = {"tokens": tokens, "labels": labels, "position_ids": positions}
        batch["loss_mask"] = torch.ones_like(tokens, dtype=torch.float64)
        group = parallel_state.get_context_parallel_group()
        yield sharded(batch, group)


def forward_step(iterator, model):
    """What Megatron's schedules call for each micro-batch and chunk."""
    batch = next(iterator)
    out = model(
        batch["tokens"], batch["position_ids"], None, labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )  # fmt: skip

    def loss_of(out):
        total = out.double().sum()
        return total, torch.tensor(out.numel()), {"loss": total.detach()}

    return out, loss_of


def run_step(setting: Setting, chunks: list, forward_only: bool = False, step=forward_step) -> Step:
    """Run one step under Megatron's schedule and count what attention does."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    iterators = [batches(setting) for _ in chunks]
    with counted() as count:
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if setting.vp > 1 else iterators[0],
            model=chunks if setting.vp > 1 else chunks[0],
            num_microbatches=setting.micro_batches,
            seq_length=SEQ,
            micro_batch_size=1,
            forward_only=forward_only,
        )
    result = Step(kernels=count["kernels"], hops=count["hops"])
    for index, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            if parameter.grad is not None:
                result.grads[f"{index}.{name}"] = parameter.grad.clone()
                parameter.grad = None
    return result


class counted:
    """Counts attention's "kernels" (forward) and "hops" while it is entered."""

    def __enter__(self) -> dict[str, int]:
        from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax

        from megatron_burst.comm.communicator import Communicator
        from megatron_burst.kernels.backends import backends

        count = dict(kernels=0, hops=0)

        def counting(name: str, function: Callable):
            def call(*args, **options):
                count[name] += 1
                return function(*args, **options)

            return call

        owners = [(type(backend), "forward", "kernels") for backend in backends().values()]
        owners += [(FusedScaleMaskSoftmax, "forward", "kernels")]  # in Megatron's own
        owners += [(Communicator, "send", "hops")]
        self._patches = []
        for owner, method, name in owners:
            function = counting(name, getattr(owner, method))
            self._patches.append(mock.patch.object(owner, method, function))
        for patch in self._patches:
            patch.start()
        return count

    def __exit__(self, *_) -> None:
        for patch in self._patches:
            patch.stop()


def relative_error(got: Step, truth: Step) -> float:
    """Largest difference of any gradient, relative to its largest true value."""
    assert got.grads.keys() == truth.grads.keys()
    return max(
        float((got.grads[name] - true).abs().max() / true.abs().max())
        for name, true in truth.grads.items()
    )


def kept_recordings() -> int:
    from megatron_burst.recompute.recording import Recording

    gc.collect()
    return sum(type(each) is Recording for each in gc.get_objects())
