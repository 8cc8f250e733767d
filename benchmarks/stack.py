"""A stack of Megatron's transformer layers to measure recomputation on."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from benchmarks.layers import Widths
from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from megatron_burst.mcore.patches import switch_on_keep
from megatron_burst.mcore.specs import burst_spec


def start(cpu: bool, cp_size: int) -> None:
    """Make Megatron's groups, all ranks one context-parallel group."""
    if cpu:
        from megatron_burst.tools import cpu_mode

        cpu_mode.install(training=False)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=cp_size)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    switch_on_keep(BurstConfig(keep="all"))


class Stack:
    """The layers of a middle pipeline stage, without embedding and head.

    Args:
        widths: their sizes.
        burst: whether attention is burst's; otherwise Megatron's own.
        comm_type: `cp_comm_type` of Megatron's own.
    """

    def __init__(self, widths: Widths, burst: bool, comm_type: str = "p2p") -> None:
        cp_size = parallel_state.get_context_parallel_world_size()
        if not burst and cp_size > 1 and not HAVE_TE:
            raise BurstError(
                "benchmarks.recompute: Megatron's own context parallelism needs TransformerEngine, "
                "because its local attention holds whole sequences; got none installed; pip "
                "install --no-build-isolation -e '.[te]' in megatron_burst's checkout"
            )
        self.burst = burst and cp_size > 1
        self._config = _config(widths, cp_size, "burst" if burst else comm_type)
        make = specs.get_gpt_layer_with_transformer_engine_spec
        spec = make() if HAVE_TE else specs.get_gpt_layer_local_spec(normalization="RMSNorm")
        self._model = GPTModel(
            self._config, burst_spec(spec) if self.burst else spec, vocab_size=8,
            max_sequence_length=widths.seq, pre_process=False, post_process=False,
            position_embedding_type="rope",
        ).to(self._config.params_dtype)  # fmt: skip
        shape = (widths.seq // cp_size, widths.batch, widths.hidden)
        device = next(self._model.parameters()).device
        self._hidden, self._dout = (
            torch.randn(shape, dtype=self._config.params_dtype, device=device) for _ in range(2)
        )
        self._hidden.requires_grad_()

    def set(self, recompute: str, burst: BurstConfig, layers: int | None = None) -> None:
        """Choose how activations are recomputed, and what is kept.

        Args:
            recompute: "full", "selective" (attention only) or "off".
            burst: what is kept, and burst's other options.
            layers: how many layers keep; None: all.
        """
        full = recompute == "full"
        self._config.recompute_granularity = "full" if full else None
        self._config.recompute_method = "uniform" if full else None
        self._config.recompute_num_layers = 1 if full else None
        self._config.burst = replace(burst, keep_layers=layers)
        for layer in self._model.decoder.layers:
            attention = layer.self_attention
            attention.checkpoint_core_attention = recompute == "selective"
            if self.burst:
                forward = attention.core_attention.burst
                attention.core_attention.burst = replace(forward, config=self._config.burst)

    def run(self) -> Sequence[Tensor]:
        """One forward and backward pass; the gradients."""
        self._model.set_input_tensor(self._hidden)
        out = self._model(None, None, None)
        out.backward(self._dout)
        grad, self._hidden.grad = self._hidden.grad, None
        return [grad]

    def attention_alone(self) -> Callable[[], None]:
        """A function that runs attention's forward once per layer, on the first layer's tensors."""
        cores = [layer.self_attention.core_attention for layer in self._model.decoder.layers]
        taken: list[tuple] = []
        hook = cores[0].register_forward_pre_hook(
            lambda module, args, kwargs: taken.append((args, kwargs)), with_kwargs=True
        )
        self._model.set_input_tensor(self._hidden)
        with torch.no_grad():
            self._model(None, None, None)
        hook.remove()
        args, kwargs = taken[0]

        def attend() -> None:
            with torch.no_grad():
                for core in cores:
                    core(*args, **kwargs)

        return attend


def _config(widths: Widths, cp_size: int, comm_type: str) -> TransformerConfig:
    return config_of(
        getattr(torch, widths.dtype),
        num_layers=widths.layers, hidden_size=widths.hidden, ffn_hidden_size=widths.ffn,
        num_attention_heads=widths.heads_q, num_query_groups=widths.heads_kv,
        kv_channels=widths.head_dim, context_parallel_size=cp_size,
        cp_comm_type=comm_type if cp_size > 1 else None,
    )  # fmt: skip


def config_of(dtype: torch.dtype, **options: object) -> TransformerConfig:
    """Megatron's configuration of a gated model with RMSNorm, without biases or dropout.

    Args:
        dtype: of weights and activations.
        options: Megatron's, of sizes and all else.
    """
    cpu_mode = not torch.cuda.is_available()
    return TransformerConfig(
        gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False,
        normalization="RMSNorm", hidden_dropout=0.0, attention_dropout=0.0,
        bf16=dtype is torch.bfloat16, fp16=dtype is torch.float16, params_dtype=dtype,
        pipeline_dtype=dtype, use_cpu_initialization=cpu_mode, masked_softmax_fusion=not cpu_mode,
        bias_activation_fusion=not cpu_mode, bias_dropout_fusion=not cpu_mode,
        apply_rope_fusion=HAVE_TE and not cpu_mode, persist_layer_norm=False,
        gradient_accumulation_fusion=False, **options,
    )  # fmt: skip
