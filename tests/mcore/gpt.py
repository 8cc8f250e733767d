"""A two-layer GPT of Megatron's own modules in float64, and its loss and gradients.

Import it at the top of a test module, so that its processes start with Megatron loaded. They call
`start` first: nothing here changes the process that runs pytest.
"""

import inspect
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.ranks import preload

preload("megatron.core.models.gpt.gpt_layer_specs", "megatron.training.arguments")
preload("megatron_burst.mcore.launch", "megatron_burst.spec", "megatron_burst.tools.cpu_rows")
preload("tests.mcore.flag_help")

SEQ, VOCAB, HEADS = 64, 96, 4
FULL_RECOMPUTE = dict(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)
BLOCK_RECOMPUTE = FULL_RECOMPUTE | dict(recompute_method="block")
SELECTIVE_RECOMPUTE = dict(recompute_granularity="selective", recompute_modules=["core_attn"])


@dataclass(frozen=True)
class Model:
    """What a model is made of; the same for a run and its reference.

    Attributes:
        groups: of query heads, that is KV heads.
        tied: whether embedding and output layer share their weights.
        recompute: whether backward runs each layer's forward again.
        latent: multi-head latent attention (MLA) instead of grouped queries.
        sinks: Megatron's softmax_type; learned ones with a window in every second layer, as in
            gpt-oss.
    """

    groups: int = 2
    tied: bool = False
    recompute: bool = False
    latent: bool = False
    sinks: str = "vanilla"


@dataclass(frozen=True)
class Parallel:
    """How it is sharded over four ranks, as arguments of `initialize_model_parallel`."""

    cp: int = 1
    tp: int = 1
    ep: int = 1


@dataclass
class Run:
    """Results of a run.

    Attributes:
        loss: summed over all tokens.
        grads: by parameter, complete but for the tensor-parallel split.
        attention_calls: how often a core attention ran its forward.
    """

    loss: torch.Tensor
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    attention_calls: int = 0


def start(parallel: Parallel) -> None:
    """Make Megatron's groups anew, on the CPU."""
    from megatron.core import parallel_state, tensor_parallel

    from megatron_burst.tools import cpu_mode

    cpu_mode.install(training=False)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def config_of(parallel: Parallel = Parallel(), model: Model = Model(), **overrides):
    """Megatron's configuration of a model."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    options = dict(
        num_layers=2, hidden_size=64, num_attention_heads=HEADS, num_query_groups=model.groups,
        ffn_hidden_size=128, gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False,
        normalization="RMSNorm", hidden_dropout=0.0, attention_dropout=0.0,
        params_dtype=torch.float64, pipeline_dtype=torch.float64, use_cpu_initialization=True,
        masked_softmax_fusion=False, bias_activation_fusion=False, bias_dropout_fusion=False,
        persist_layer_norm=False, gradient_accumulation_fusion=False,
        context_parallel_size=parallel.cp, tensor_model_parallel_size=parallel.tp,
        expert_model_parallel_size=parallel.ep,
        sequence_parallel=parallel.tp > 1, cp_comm_type="burst" if parallel.cp > 1 else None,
    )  # fmt: skip
    if model.recompute:
        options |= FULL_RECOMPUTE
    if model.sinks != "vanilla":
        options |= dict(softmax_type=model.sinks)
    if model.sinks == "learnable":
        options |= dict(window_size=(8, 0), window_attn_skip_freq=2)
    if not model.latent:
        return TransformerConfig(**options | overrides)
    options |= dict(num_query_groups=HEADS, kv_channels=16, rope_type="rope", q_lora_rank=None)
    options |= dict(kv_lora_rank=24, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=16)
    return MLATransformerConfig(**options | overrides)


def build(config, spec, tied: bool = False):
    """Build a GPTModel from a spec; equal weights for equal configurations and tensor-parallel
    sizes."""
    from megatron.core.models.gpt import GPTModel

    torch.manual_seed(1234)
    with _one_by_one(config) if config.softmax_type == "learnable" else nullcontext():
        gpt = GPTModel(
            config, spec, VOCAB, SEQ, position_embedding_type="rope", parallel_output=False,
            share_embeddings_and_output_weights=tied,
        )  # fmt: skip
    for name, parameter in gpt.named_parameters():
        if name.endswith("softmax_offset"):  # Megatron draws those of all ranks alike
            parameter.data.copy_(_mine(torch.linspace(-1, 1, HEADS), len(parameter)))
    return gpt.double()  # torch's RMSNorm is built in float32


def _one_by_one(config):
    """Draw each weight alike, whatever earlier ones took: burst draws sinks of all ranks, Megatron
    those of one."""
    methods, numbers = ("init_method", "output_layer_init_method"), count()
    draws = {name: partial(_draw, getattr(config, name), numbers) for name in methods}
    return mock.patch.multiple(config, **draws)


def _draw(init, numbers, weight: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(next(numbers))
    return init(weight)


def _mine(heads: torch.Tensor, count: int) -> torch.Tensor:
    """A tensor-parallel rank's part of what there is of each head."""
    from megatron.core import parallel_state

    return heads.split(count)[parallel_state.get_tensor_model_parallel_rank()]


def whole_batch() -> dict:
    """One fixed batch for all ranks of a context-parallel group."""
    generator = torch.Generator().manual_seed(7)
    tokens, labels = torch.randint(0, VOCAB, (2, 2, SEQ), generator=generator)
    positions = torch.arange(SEQ).expand_as(tokens)
    return {"tokens": tokens, "labels": labels, "position_ids": positions}


def logits_of(gpt, batch: dict) -> torch.Tensor:
    """A language model's logits of a rank's part of the batch."""
    return gpt(batch["tokens"], batch["position_ids"], attention_mask=None)


def loss_and_grads(gpt, logits_of=logits_of, **rows) -> Run:
    """Loss and gradients of one fixed batch; torch's cross entropy, as Megatron's is float32.

    `logits_of`: how a model other than a language model is called; `rows`: how Megatron shards.
    """
    from megatron.core import parallel_state

    batch = sharded(whole_batch(), parallel_state.get_context_parallel_group(), **rows)
    calls = []
    for name, module in gpt.named_modules():
        if name.endswith("core_attention"):
            module.register_forward_hook(lambda *_: calls.append(1))
    logits = logits_of(gpt, batch)
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    loss.backward()
    return Run(_sum_over_cp(loss.detach()), _complete_grads(gpt), len(calls))


def sharded(batch: dict, group, **options) -> dict:
    """A rank's part of a batch, by Megatron; since 0.18 it must be told that the groups are
    fixed."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters:
        options["is_hybrid_cp"] = False
    return get_batch_on_this_cp_rank(batch, cp_group=group, **options)


def _sum_over_cp(x: torch.Tensor) -> torch.Tensor:
    from megatron.core import parallel_state

    dist.all_reduce(x, group=parallel_state.get_context_parallel_group())
    return x


def _complete_grads(gpt) -> dict[str, torch.Tensor]:
    """Gradients summed over what Megatron's `finalize_model_grads` sums over."""
    from megatron.core import parallel_state

    grads = {}
    for name, parameter in gpt.named_parameters():
        grads[name] = _sum_over_cp(parameter.grad.clone())
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(grads[name], group=parallel_state.get_tensor_model_parallel_group())
    return grads


def megatrons_own(model: Model, parallel: Parallel) -> Run:
    """Run a model without context parallelism, with Megatron alone."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    spec = get_gpt_layer_local_spec(normalization="RMSNorm", multi_latent_attention=model.latent)
    if model.latent:
        spec.submodules.self_attention.submodules.core_attention = core_for_latent()
    gpt = build(config_of(parallel, model), spec, model.tied)
    assert isinstance(gpt.decoder.layers[0].self_attention.core_attention, DotProductAttention)
    return loss_and_grads(gpt)


def core_for_latent() -> type:
    """Megatron's own, which is right for MLA but does not accept its two extra arguments."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class ForLatent(DotProductAttention):
        def __init__(self, *args, k_channels=None, v_channels=None, **options):
            super().__init__(*args, **options)

    return ForLatent


def relative_errors(got: Run, truth: Run) -> dict[str, float]:
    """Relative errors of the loss and of each gradient."""
    assert got.grads.keys() == truth.grads.keys()
    assert got.attention_calls == truth.attention_calls
    errors = {name: _relative(got.grads[name], truth.grads[name]) for name in truth.grads}
    return errors | {"loss": _relative(got.loss, truth.loss)}


def _relative(got: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest difference over the largest true value."""
    assert got.dtype == truth.dtype == torch.float64 and got.shape == truth.shape
    return float((got - truth).abs().max() / truth.abs().max())
