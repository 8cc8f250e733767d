"""Megatron's models other than GPT, built from its local modules, which run on a CPU.

Import it where a test module is imported, as tests.mcore.gpt.
"""

import json
from dataclasses import replace
from unittest import mock

import torch
import torch.nn.functional as F

from tests.mcore.gpt import HEADS, SEQ, VOCAB, Parallel, config_of, whole_batch
from tests.ranks import preload

preload("megatron.core.models.hybrid.hybrid_model", "megatron.core.models.mimo")
preload("megatron.core.models.multimodal.llava_model")
IMAGE = VOCAB - 1  # the token that an image patch replaces
SIDE, PATCH = 16, 4  # in pixels, of an image and of a patch
PATCHES = (SIDE // PATCH) ** 2
BLOCKS = [  # of a heterogeneous model; omitted keys are null
    {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.0}},
    {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
    {"attention": {"n_heads_in_group": 4}, "ffn": {"replace_with_linear": True}},
    {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
]


def delta_net():
    """Megatron's gated delta net in the place of self-attention."""
    from megatron.core.ssm import gated_delta_net as delta
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    parts = delta.GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
    )
    return ModuleSpec(delta.GatedDeltaNet, submodules=parts)


def delta_layers():
    """A GPTModel's layers, a delta net and attention, as Megatron builds them for
    `experimental_attention_variant`, which needs TransformerEngine there."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    attention = get_gpt_layer_local_spec(normalization="RMSNorm")
    delta = replace(attention, submodules=replace(attention.submodules, self_attention=delta_net()))
    return TransformerBlockSubmodules([delta, attention], WrappedTorchNorm)


def hybrid_stack():
    """Megatron's stack of mixed layers, without TransformerEngine's modules."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer

    no_mlp = dict(pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp)
    no_attention = dict(
        input_layernorm=IdentityOp, self_attention=IdentityOp, self_attn_bda=IdentityFuncOp
    )

    def part(module, without: dict, **options):
        spec = specs.get_gpt_layer_local_spec(normalization="RMSNorm", **options)
        return ModuleSpec(module=module, submodules=replace(spec.submodules, **without))

    linear = dict(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    # the gated norm is a kernel of mamba_ssm's, of single rows
    mamba = ModuleSpec(MambaMixer, {"rmsnorm": False}, MambaMixerSubmodules(**linear))
    attention = part(TransformerLayer, no_mlp)
    return ModuleSpec(
        HybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=attention,
            mla_layer=part(TransformerLayer, no_mlp, multi_latent_attention=True),
            gdn_layer=replace(
                attention, submodules=replace(attention.submodules, self_attention=delta_net())
            ),
            mamba_layer=ModuleSpec(
                MambaLayer,
                submodules=MambaLayerSubmodules(WrappedTorchNorm, mamba, get_bias_dropout_add),
            ),
            mlp_layer=part(MLPLayer, no_attention),
            moe_layer=part(TransformerLayer, no_attention, num_experts=4),
        ),
    )


def hybrid(config, stack, pattern: str):
    """Build a HybridModel; equal weights for equal configurations and tensor-parallel sizes."""
    from megatron.core import tensor_parallel
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    tensor_parallel.model_parallel_cuda_manual_seed(1)  # Mamba and GDN use this generator too
    torch.manual_seed(1234)
    with mock.patch.object(hybrid_block, "TENorm", WrappedTorchNorm):  # of the last norm
        return HybridModel(
            config, stack, VOCAB, SEQ, pattern, parallel_output=False,
            position_embedding_type="rope",
        ).double()  # fmt: skip


def stand_ins():
    """Patches: PyTorch versions of what Mamba, GDN and towers take from libraries that need GPUs.

    The delta rule itself is Megatron's own, in float32, with deterministic_mode. LLaVAModel with
    context parallelism asserts that its spec has TransformerEngine's attention, in a recent
    version.
    """
    from megatron.core.models.multimodal import llava_model
    from megatron.core.models.vision import clip_vit_model
    from megatron.core.ssm import mamba_mixer
    from megatron.core.ssm.gated_delta_net import common
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    return (
        mock.patch.object(mamba_mixer, "HAVE_MAMBA_SSM", True),
        mock.patch.object(mamba_mixer, "mamba_split_conv1d_scan_combined", scan),
        mock.patch.object(common, "HAVE_FLA", True),
        mock.patch.object(common, "l2norm", unit),
        mock.patch.object(llava_model, "HAVE_TE", True),
        mock.patch.object(llava_model, "TEDotProductAttention", DotProductAttention),
        mock.patch.object(llava_model, "is_te_min_version", return_value=True),
        mock.patch.object(clip_vit_model, "build_module", build_norm),
    )


def unit(x: torch.Tensor) -> torch.Tensor:
    """Like `l2norm` of flash-linear-attention."""
    return x * (x * x).sum(-1, True).add(1e-6).rsqrt()


def build_norm(norm, config, hidden_size: int, eps: float):
    """torch's norm, which takes no configuration."""
    return norm(hidden_size, eps)


def scan(zxbcdt, weight, bias, dt_bias, a, ngroups, headdim, **options) -> torch.Tensor:
    """Mamba-2's recurrence, token by token, like mamba_ssm's `mamba_split_conv1d_scan_combined`.

    [batch, tokens, z x B C dt] to [batch, tokens, heads * headdim].
    """
    tokens, heads = zxbcdt.shape[1], a.shape[0]
    inner, width = heads * headdim, weight.shape[1]
    z, xbc, dt = zxbcdt.split([inner, weight.shape[0], heads], dim=-1)
    rows = F.pad(xbc.transpose(1, 2), (width - 1, 0))
    xbc = F.silu(F.conv1d(rows, weight.unsqueeze(1), bias, groups=weight.shape[0])).transpose(1, 2)
    x, b, c = xbc.tensor_split([inner, inner + (xbc.shape[-1] - inner) // 2], dim=-1)
    x = x.unflatten(-1, (heads, headdim))
    b, c = (y.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, 2) for y in (b, c))
    dt = F.softplus(dt + dt_bias)
    state, rows = 0, []
    for t in range(tokens):
        grown = dt[:, t, :, None, None] * x[:, t, :, :, None] * b[:, t, :, None]
        state = state * (dt[:, t] * a).exp()[..., None, None] + grown
        rows.append((state * c[:, t, :, None]).sum(-1))
    y = torch.stack(rows, 1) + options["D"][:, None] * x
    return y.flatten(-2) * F.silu(z)


def heterogeneous_config(parallel: Parallel):
    """Configuration with layers of 2 and 1 KV heads, without attention, and with linear layers
    instead."""
    from dataclasses import fields

    from megatron.core.transformer.heterogeneous.heterogeneous_config import (
        HeterogeneousTransformerConfig,
    )

    plain = config_of(parallel, num_layers=len(BLOCKS))
    given = {f.name: getattr(plain, f.name) for f in fields(plain) if f.init}
    empty = {"n_heads_in_group": None, "no_op": False, "replace_with_linear": False}
    empty["ffn_mult"] = None
    blocks = [{name: empty | part for name, part in block.items()} for block in BLOCKS]
    text = json.dumps({"block_configs": blocks})
    return HeterogeneousTransformerConfig(**given, heterogeneous_layers_config_encoded_json=text)


def tower_and_projection(config):
    """Specs of a CLIP tower, which attends to whole images, and of the projection after it."""
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules

    vision = replace(
        config, num_layers=1, hidden_size=32, ffn_hidden_size=64, kv_channels=8,
        num_query_groups=HEADS, context_parallel_size=1, normalization="LayerNorm",
    )  # fmt: skip
    linears = MLPSubmodules(ColumnParallelLinear, RowParallelLinear)
    return vision, get_vit_layer_with_local_spec(), linears


def mimo(config, spec):
    """Build a MimoModel: images through a CLIP tower into a GPT."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.mimo import MimoModel, MimoModelConfig
    from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
    from megatron.core.models.vision.clip_vit_model import CLIPViTModel
    from megatron.core.models.vision.multimodal_projector import MultimodalProjector
    from megatron.core.transformer.spec_utils import ModuleSpec

    vision, tower_spec, linears = tower_and_projection(config)
    tower = dict(
        transformer_config=vision, transformer_layer_spec=tower_spec, img_h=SIDE, img_w=SIDE,
        patch_dim=PATCH, add_class_token=False, class_token_len=0,
    )  # fmt: skip
    projection = dict(
        config=replace(config, context_parallel_size=1), submodules=linears, projector_type="mlp",
        input_size=vision.hidden_size,
    )  # fmt: skip
    language = dict(
        config=config, transformer_layer_spec=spec, vocab_size=VOCAB, max_sequence_length=SEQ,
        position_embedding_type="rope", parallel_output=False,
    )  # fmt: skip
    images = ModuleSpec(
        VisionModalitySubmodules,
        submodules={
            "encoders": {"clip": ModuleSpec(CLIPViTModel, tower)},
            "input_projections": [ModuleSpec(MultimodalProjector, projection)],
        },
    )
    torch.manual_seed(1234)
    return MimoModel(
        MimoModelConfig(
            language_model_spec=ModuleSpec(GPTModel, language),
            modality_submodules_spec={"images": images}, special_token_ids={"images": IMAGE},
        )
    ).double()  # fmt: skip


def llava(config, spec):
    """Build a LLaVAModel: the same in Megatron's older class."""
    from megatron.core.models.multimodal.llava_model import LLaVAModel

    vision, tower, linears = tower_and_projection(config)
    vision.vision_model_type = "siglip"  # neither of its two norms needs TransformerEngine
    torch.manual_seed(1234)
    return LLaVAModel(
        config, spec, VOCAB, SEQ, vision, tower, drop_vision_class_token=False,
        vision_projection_config=replace(config, context_parallel_size=1),
        vision_projection_layer_spec=linears, parallel_output=False, img_h=SIDE, img_w=SIDE,
        patch_dim=PATCH, language_position_embedding_type="rope", image_token_index=IMAGE,
    ).double()  # fmt: skip


def llava_logits(model, batch: dict) -> torch.Tensor:
    """Logits of samples in which one token stands for a whole image."""
    images, tokens = image_and_text()
    tokens = torch.cat([tokens[:, :9], tokens[:, 8 + PATCHES :]], 1)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return model(images, tokens, positions, None)[0]


def image_and_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Images [2, 3, SIDE, SIDE], and tokens [2, SEQ] with a place for each."""
    tokens = whole_batch()["tokens"] % IMAGE
    tokens[:, 8 : 8 + PATCHES] = IMAGE  # in the chunks of two ranks of four
    generator = torch.Generator().manual_seed(11)
    return torch.rand(2, 3, SIDE, SIDE, generator=generator).double(), tokens


def mimo_logits(model, batch: dict) -> torch.Tensor:
    """Logits of whole samples: MimoModel shards them itself."""
    images, tokens = image_and_text()
    positions = whole_batch()["position_ids"]
    inputs = {"images": {"clip": {"x": images}}}
    return model(tokens, positions, modality_inputs=inputs)[0]


def t5(config, **parts):
    """Build a T5Model; `parts`: which of its halves it has."""
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model

    encoder = t5_spec.get_t5_encoder_with_local_block_spec(config.num_layers)
    decoder = t5_spec.get_t5_decoder_with_local_block_spec(config.num_layers)
    return T5Model(config, config, encoder, decoder, VOCAB, SEQ, parallel_output=False, **parts)


def bert(config):
    """Build a BertModel, whose constructor requires Megatron's own attention in its spec."""
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    return BertModel(config, 0, bert_layer_local_spec, VOCAB, SEQ, parallel_output=False).double()
