"""Megatron-Bridge's providers with burst: the released package, on CPU processes.

TransformerEngine's linear layers and norms need a GPU, so models here use Megatron's own; the
spec's core attention, which burst replaces, is TransformerEngine's real class. Models that run
without burst, for comparison, use Megatron's own attention.
"""

import importlib
import importlib.util
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_burst.errors import BurstError
from tests.mcore.gpt import (
    SEQ,
    VOCAB,
    Parallel,
    config_of,
    loss_and_grads,
    relative_errors,
    sharded,
)
from tests.mcore.gpt import start as start_without_training
from tests.ranks import preload, run_ranks

if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("Megatron-Bridge is not installed: make test-integrations", allow_module_level=True)
preload("megatron.bridge", "megatron.bridge.training.config")

ROOT = Path(__file__).parents[2]
CP2 = Parallel(cp=2)
# float64 throughout: sums of about 1e4 products, like these tests' other models
EXACT = 1e-9


def start(parallel):
    """Megatron's groups on the CPU, and streams, which TransformerEngine's class creates."""
    from megatron_burst.tools import cpu_mode

    without_gpu()
    cpu_mode.install()
    start_without_training(parallel)


def without_gpu():
    """The base class of TransformerEngine's modules requires a GPU, and is told that there is one
    while it is constructed."""
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule as Base

    init, has_gpu = Base.__init__, mock.patch("torch.cuda.is_available", return_value=True)

    def constructed(self, *arguments, **options):
        with has_gpu:
            init(self, *arguments, **options)

    Base.__init__ = constructed


def layers(config):
    """Megatron's own layers and norms, with the core attention of TransformerEngine's specs."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization
    )
    if config.context_parallel_size > 1:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = TEDotProductAttention
    return spec


def built(provider):
    """A provider's model, with equal weights for equal providers."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    provider.finalize()
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    torch.manual_seed(1234)
    return provider.provide(pre_process=True, post_process=True).double()


def cores_of(gpt):
    return [type(layer.self_attention.core_attention).__name__ for layer in gpt.decoder.layers]


def gpt_provider(parallel):
    """Bridge's provider with the configuration of these tests' other models."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    given, names = config_of(parallel), GPTModelProvider.__dataclass_fields__
    options = {name: value for name, value in vars(given).items() if name in names}
    return GPTModelProvider(
        **options, vocab_size=VOCAB, seq_length=SEQ, position_embedding_type="rope",
        share_embeddings_and_output_weights=False, transformer_layer_spec=layers,
    )  # fmt: skip


def hugging_face(name):
    """A tiny configuration from transformers."""
    import transformers

    return getattr(transformers, f"{name}Config")(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=SEQ,
        architectures=[f"{name}ForCausalLM"], tie_word_embeddings=False,
        torch_dtype=torch.float64,
    )  # fmt: skip


def hugging_face_provider(name, parallel):
    """What Bridge makes of it, on a CPU."""
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_config(hugging_face(name))
    return on_a_cpu(bridge.to_megatron_provider(load_weights=False), parallel)


def on_a_cpu(provider, parallel):
    """A provider whose model runs on a CPU."""
    given = vars(config_of(parallel))
    for option in (
        "params_dtype", "pipeline_dtype", "use_cpu_initialization", "masked_softmax_fusion",
        "bias_activation_fusion", "bias_dropout_fusion", "persist_layer_norm",
        "gradient_accumulation_fusion", "context_parallel_size", "cp_comm_type",
    ):  # fmt: skip
        setattr(provider, option, given[option])
    provider.bf16 = provider.fp16 = provider.apply_rope_fusion = False
    provider.moe_permute_fusion = provider.moe_grouped_gemm = False
    provider.moe_router_dtype = provider.moe_router_dtype and "fp64"  # as the model is
    provider.transformer_layer_spec = layers
    return provider


PROVIDERS = ("GPT", "Llama", "Qwen3")


def steps(rank, parallel):
    """Loss and gradients of each provider's model, and what its layers run."""
    importlib.import_module("megatron_burst.auto")
    start(parallel)
    runs = []
    for name in PROVIDERS:
        own = name == "GPT"
        gpt = built(gpt_provider(parallel) if own else hugging_face_provider(name, parallel))
        runs.append((loss_and_grads(gpt), cores_of(gpt)))
    return runs


def test_models_of_providers_train_over_two_ranks_as_on_one():
    """Guards against a provider whose layers do not get burst, or get it with wrong weights or
    windows."""
    (truths,) = run_ranks(steps, 1, Parallel())
    assert [cores for _, cores in truths] == [["DotProductAttention"] * 2] * 3
    for runs in run_ranks(steps, 2, CP2):
        for name, (run, cores), (truth, _) in zip(PROVIDERS, runs, truths, strict=True):
            assert cores == ["BurstTECoreAttention"] * 2, name
            errors = relative_errors(run, truth)
            assert max(errors.values()) <= EXACT, (name, errors)


def converted(rank, folder):
    """Losses of a Llama from transformers and of Bridge's conversion of it; its weights converted
    back."""
    import transformers
    from megatron.bridge import AutoBridge

    importlib.import_module("megatron_burst.auto")
    start(CP2)
    bridge = AutoBridge.from_hf_pretrained(folder)
    gpt = built(hugging_face_provider("Llama", CP2))
    bridge.load_hf_weights([gpt])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    batch = tokens_and_labels()
    truth = F.cross_entropy(theirs(batch["tokens"]).logits.flatten(0, 1), batch["labels"].flatten())
    weights = dict(theirs.state_dict())
    back = {name: torch.equal(x, weights[name]) for name, x in bridge.export_hf_weights([gpt])}
    group = gpt.decoder.layers[0].self_attention.core_attention.burst.cp_group
    return loss_over(gpt, group), truth.item(), back.keys() == weights.keys(), all(back.values())


def tokens_and_labels():
    generator = torch.Generator().manual_seed(7)
    tokens, labels = torch.randint(0, VOCAB, (2, 2, SEQ), generator=generator)
    return dict(tokens=tokens, labels=labels, position_ids=torch.arange(SEQ).expand_as(tokens))


@torch.no_grad()
def loss_over(gpt, group):
    """The mean loss of a batch that is sharded over a group."""
    batch = sharded(tokens_and_labels(), group)
    logits = gpt(batch["tokens"], batch["position_ids"], attention_mask=None)
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    dist.all_reduce(loss, group=group)
    return loss.item() / group.size()


def test_weights_of_hugging_face_are_converted_and_have_its_loss(tmp_path):
    """The reference is transformers' own attention over the whole sequence."""
    import transformers

    torch.manual_seed(5)
    llama = transformers.LlamaForCausalLM(hugging_face("Llama")).double()
    llama.save_pretrained(tmp_path)
    for loss, truth, same_names, same_weights in run_ranks(converted, 2, str(tmp_path)):
        assert abs(loss - truth) <= 1e-6 * truth  # transformers' RMSNorm and rope are in float32
        assert same_names and same_weights


def evaluated(rank):
    """Losses at CP 2, at CP 1 in Bridge's evaluation, and at CP 2 again."""
    from megatron.bridge.training.eval_context_parallel_rebinding import eval_cp_context
    from megatron.core.process_groups_config import ProcessGroupCollection

    importlib.import_module("megatron_burst.auto")
    start(CP2)
    gpt = built(gpt_provider(CP2))
    train = ProcessGroupCollection.use_mpu_process_groups()
    alone = [dist.new_group([r]) for r in range(2)][rank]
    single = ProcessGroupCollection.use_mpu_process_groups()
    single.cp = alone
    losses = [loss_over(gpt, train.cp)]
    with eval_cp_context(gpt, single, train):
        losses.append(loss_over(gpt, alone))
    return [*losses, loss_over(gpt, train.cp)]


def test_an_evaluation_over_another_group_has_the_same_loss():
    """Guards against a layer that keeps the training group: it would attend to half of the
    sequence."""
    for before, evaluation, after in run_ranks(evaluated, 2):
        assert before == after
        assert abs(evaluation - before) <= EXACT


MODELS = "megatron.bridge.models"
REPLACED = (f"{MODELS}.gemma.gemma3_provider:Gemma3TEDotProductAttention",
            f"{MODELS}.gemma.modeling_gemma4:Gemma4TEDotProductAttention")  # fmt: skip
REFUSED = (
    f"{MODELS}.ministral3.ministral3_provider:MinistralTEDotProductAttention",
    f"{MODELS}.mimo_v2_flash.modeling_mimo_v2_flash:MiMoV2FlashTEDotProductAttention",
    "megatron.bridge.diffusion.models.llada15.llada15_attention:LLaDA15TEDotProductAttention",
)


GEMMA2 = [
    f"{MODELS}.gemma.gemma2_provider:Gemma2{kind}DotProductAttention" for kind in ("", "Flex")
]


def named(place):
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


def sub_classes(rank):
    """How Bridge converts an attention sink for each class; Gemma's windows; what replaces Gemma
    2's, twice; what is refused."""
    from megatron.bridge.models.conversion.param_mapping import AutoMapping
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_burst.mcore.specs import burst_spec

    start(CP2)
    mapping = AutoMapping("core_attention.softmax_offset", "sinks")
    config = config_of(CP2, window_size=16)
    config.interleaved_attn_pattern, config.is_vision_language = (1, 1), False
    layer = dict(attn_mask_type=AttnMaskType.causal, attention_type="self", cp_comm_type="burst")
    kinds, windows = [], []
    plain = named("megatron.core.extensions.transformer_engine:TEDotProductAttention")
    for theirs in (plain, *map(named, REPLACED)):
        core = burst_spec(ModuleSpec(module=theirs)).module
        given = config if theirs is not plain else config_of(CP2)
        built = [core(given, number, **layer) for number in (1, 2)]
        windows.append([one.burst.layer_config.window_size for one in built])
        kinds.append((mapping._detect_parallelism_type(built[0]), issubclass(core, theirs)))
    once = [burst_spec(ModuleSpec(module=named(place))) for place in GEMMA2]
    others = [(x.module.__name__, burst_spec(x).module is x.module) for x in once]
    said = []
    for place in REFUSED:
        with pytest.raises(BurstError) as refused:
            burst_spec(ModuleSpec(module=named(place)))
        said.append(str(refused.value))
    return kinds, windows, others, said


def test_sub_classes_of_transformer_engines_attention_run_burst_or_are_refused():
    """Gemma's class sets windows per layer. Ministral's and MiMo's change queries and values."""
    for kinds, windows, others, said in run_ranks(sub_classes, 2):
        assert kinds == [("column", True), ("replicated", True), ("replicated", True)]
        assert windows == [[None, None], [(15, 0), None], [(15, 0), None]]
        assert others == [("BurstGemma2CoreAttention", True)] * 2
        for place, sentence in zip(REFUSED, said, strict=True):
            assert f"got {place.partition(':')[2]} in ModuleSpec" in sentence


def saved(rank, folder):
    """A provider saved and loaded by Bridge; what a model of it runs."""
    import yaml
    from megatron.bridge.training.model_load_save import load_model_config
    from megatron.bridge.training.utils.config_utils import _ConfigContainerBase
    from megatron.bridge.utils.yaml_utils import safe_yaml_representers

    importlib.import_module("megatron_burst.auto")
    provider = gpt_provider(CP2)
    provider.transformer_layer_spec = type(provider).transformer_layer_spec  # Bridge's own
    own = Path(folder) / str(rank)
    own.mkdir()
    held = {"model": _ConfigContainerBase._convert_value_to_dict(provider)}
    with safe_yaml_representers():
        (own / "run_config.yaml").write_text(yaml.safe_dump(held))
    loaded, _ = load_model_config(str(own))
    start(CP2)
    loaded.transformer_layer_spec = layers
    return loaded.cp_comm_type, cores_of(built(loaded))


def test_a_saved_configuration_runs_burst_again(tmp_path):
    same = "burst", ["BurstTECoreAttention"] * 2
    assert run_ranks(saved, 2, str(tmp_path)) == [same, same]


def without_burst(rank):
    """TransformerEngine's error for such a configuration, in the first forward pass."""
    from transformer_engine.pytorch.attention.dot_product_attention import context_parallel

    q = torch.zeros(2, 8, 4, 16)
    boundaries = [None] * 2, [8, 8], [None] * 2
    with pytest.raises(ValueError, match=r"^Unsupported communication type: burst!$"):
        context_parallel.attn_forward_func_with_cp(
            True, q, q, q, *boundaries[0], *boundaries[1], *boundaries[2], 0.0,
            dist.group.WORLD, [0, 1], None, "burst",
        )  # fmt: skip


def test_without_burst_its_configuration_ends_in_the_sentence_that_the_documents_have():
    run_ranks(without_burst, 2)
    text = (ROOT / "docs" / "integrations.md").read_text()
    assert "Unsupported communication type: burst!" in text
