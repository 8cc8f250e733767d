"""Stand-ins for TransformerEngine's linear layers and norms, which need a GPU: Megatron's own, with
TransformerEngine's names and parameters, so that Bridge converts weights into them.
"""

import sys
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear


def normed(x, config, weight, bias):
    """RMSNorm or LayerNorm, as the configuration says."""
    weight = weight + 1 if config.layernorm_zero_centered_gamma else weight
    if config.normalization == "RMSNorm":
        return F.rms_norm(x, weight.shape, weight, config.layernorm_epsilon)
    return F.layer_norm(x, weight.shape, weight, bias, config.layernorm_epsilon)


class TENorm(torch.nn.Module):
    def __init__(self, config, hidden_size, eps=None, **_):
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        with_bias = config.normalization == "LayerNorm"
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size)) if with_bias else None

    def forward(self, x):
        return normed(x, self.config, self.weight, self.bias)


class TELinear(torch.nn.Linear):
    """The whole matrix on every rank: latent attention's first products."""

    def __init__(self, input_size, output_size, *, parallel_mode, bias, **_):
        super().__init__(input_size, output_size, bias)
        self.parallel_mode = parallel_mode  # Bridge asks

    def forward(self, x):
        return super().forward(x), None


class TEColumnParallelLinear(ColumnParallelLinear):
    pass


class TERowParallelLinear(RowParallelLinear):
    pass


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    def __init__(self, input_size, output_size, *, config, **options):
        super().__init__(input_size, output_size, config=config, **options)
        norm = TENorm(config, input_size)
        self.layer_norm_weight, self.layer_norm_bias = norm.weight, norm.bias

    def forward(self, x, *arguments, **options):
        x = normed(x, self.config, self.layer_norm_weight, self.layer_norm_bias)
        return super().forward(x, *arguments, **options)


class TERowParallelLinearLayerNorm(RowParallelLinear):
    """Bridge's own, of Gemma."""

    def __init__(self, input_size, output_size, *, config, **options):
        super().__init__(input_size, output_size, config=config, **options)
        self.post_layernorm = TENorm(config, output_size)

    def forward(self, x):
        output, bias = super().forward(x)
        return self.post_layernorm(output), bias


class FullAttention(torch.nn.Module):
    """Of packed images or frames, each with itself: a vision tower's core attention."""

    def forward(self, q, k, v, *_, packed_seq_params, **__):
        sizes = packed_seq_params.cu_seqlens_q.diff().tolist()
        frames = zip(*(x.transpose(0, 1).split(sizes, 1) for x in (q, k, v)), strict=True)
        out = torch.cat([F.scaled_dot_product_attention(*frame) for frame in frames], 1)
        return out.transpose(0, 1).flatten(1)


def install():
    """Replace TransformerEngine's classes in this process, wherever they were imported to, and its
    kernel that says which rows of packed samples a rank has."""
    from megatron.bridge.models.common import te_layers
    from megatron.core import utils
    from megatron.core.extensions import transformer_engine

    from megatron_burst.mcore.packed import partitioned_indices

    utils.tex = SimpleNamespace(thd_get_partitioned_indices=partitioned_indices)
    ours = (TENorm, TELinear, TEColumnParallelLinear, TERowParallelLinear)
    ours += (TELayerNormColumnParallelLinear,)
    places = dict.fromkeys(ours, transformer_engine) | {TERowParallelLinearLayerNorm: te_layers}
    theirs = {id(getattr(place, one.__name__)): one for one, place in places.items()}
    for module in list(sys.modules.values()):
        if not module.__name__.startswith("megatron."):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in theirs:
                setattr(module, name, theirs[id(value)])
