"""Models of text and images by Megatron-Bridge, over two ranks of burst.

Guards against a model whose image tokens get other positions, or other neighbours, than in
transformers. Vision towers run whole on every rank; burst runs in the language model.
"""

import importlib
import importlib.util

import pytest
import torch
import torch.nn.functional as F

from megatron_burst import shard
from tests.mcore.gpt import SEQ
from tests.ranks import preload, run_ranks

if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("Megatron-Bridge is not installed: make test-integrations", allow_module_level=True)
preload("megatron.bridge", "megatron.bridge.training.config")

from tests.integrations.test_bridge import CP2, built, cores_of, on_a_cpu, start  # noqa: E402
from tests.integrations.test_bridge_logits import EXACT, SIZES, error_of, save  # noqa: E402

IMAGE, VIDEO, START = 90, 91, 92  # tokens; text has those below
_VISION = {
    "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "patch_size": 4,
    "out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
_MROPE = {
    "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}  # fmt: skip


def batch():
    """Two sequences of text, each with an image: of 4 x 4 tokens, and of 2 x 4."""
    generator = torch.Generator().manual_seed(8)
    given = torch.randint(0, IMAGE, (2, SEQ), generator=generator)
    grids = torch.tensor([[1, 8, 8], [1, 4, 8]])  # in patches, of which four are a token
    for row, begin, grid in zip(given, (7, 29), grids, strict=True):
        row[begin - 1] = START
        row[begin : begin + int(grid.prod()) // 4] = IMAGE
    shape = int(grids.prod(1).sum()), 3 * 2 * 4 * 4
    pixels = torch.randn(shape, generator=generator, dtype=torch.float64)
    return {"input_ids": given, "pixel_values": pixels, "image_grid_thw": grids}


def tiny(folder):
    import transformers

    config = transformers.Qwen3VLConfig(
        text_config=SIZES | {"rope_parameters": _MROPE}, vision_config=_VISION,
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START,
    )  # fmt: skip
    given = batch()
    kinds = (given["input_ids"] == IMAGE).int()
    kind = transformers.Qwen3VLForConditionalGeneration
    save(kind, config, folder, **given, mm_token_type_ids=kinds)


def packed(given):
    """The same sequences as documents of one sample, as Bridge's collator makes it."""
    from megatron.core.packed_seq_params import PackedSeqParams

    starts = torch.tensor([0, SEQ, 2 * SEQ], dtype=torch.int32)
    lengths = {"max_seqlen_q": SEQ, "max_seqlen_kv": SEQ, "qkv_format": "thd"}
    params = PackedSeqParams(cu_seqlens_q=starts, cu_seqlens_kv=starts, **lengths)
    return {**given, "input_ids": given["input_ids"].view(1, -1), "packed_seq_params": params}


def error_of_packed(got, folder):
    truth = torch.load(folder / "logits.pt").flatten(0, 1)[None]
    starts = torch.tensor([0, SEQ, 2 * SEQ])
    own = shard(truth, layout="zigzag-documents", cu_seqlens=starts)
    return float((got - own).abs().max() / truth.abs().max())


def logits(rank, folder, corrected, as_documents=False):
    """Relative error of this rank's logits, and core attentions of language model and tower."""
    from megatron.bridge import AutoBridge

    from tests.integrations import te_on_cpu

    importlib.import_module("megatron_burst.auto")
    start(CP2)
    te_on_cpu.install()
    bridge = AutoBridge.from_hf_pretrained(folder)
    gpt = built(on_a_cpu(bridge.to_megatron_provider(load_weights=False), CP2))
    bridge.load_hf_weights([gpt])
    tower = gpt.vision_model
    cores = cores_of(gpt.language_model), cores_of(tower)
    for layer in tower.decoder.layers:  # TransformerEngine's needs a GPU
        layer.self_attention.core_attention = te_on_cpu.FullAttention()
    if corrected:
        for merger in (tower.merger, *tower.decoder.deepstack_merger_list):
            merger.activation_func = F.gelu
    with torch.no_grad():
        if as_documents:
            return error_of_packed(gpt(**packed(batch())), folder), *cores
        return error_of(gpt(**batch()), folder), *cores


@pytest.mark.parametrize("as_documents", [False, True], ids=["a batch", "packed"])
def test_logits_of_text_and_images_are_those_of_transformers(as_documents, tmp_path):
    tiny(tmp_path)
    for error, cores, tower in run_ranks(logits, 2, tmp_path, True, as_documents):
        print(f"Qwen3-VL: {error:.1e}")
        assert cores == ["BurstTECoreAttention"] * 2 and len(tower) == 2
        assert error <= EXACT


def test_bridges_tower_merges_patches_with_another_gelu_than_transformers(tmp_path):
    """Bridge 0.6.2 takes the one with tanh, of the tower's layers, for its mergers too."""
    tiny(tmp_path)
    for error, *_ in run_ranks(logits, 2, tmp_path, False):
        assert EXACT < error <= 1e-3


def gemma_with_images(rank, folder):
    from megatron.bridge import AutoBridge
    from transformers import Gemma3Config

    config = Gemma3Config(text_config=SIZES, architectures=["Gemma3ForConditionalGeneration"])
    config.save_pretrained(folder / str(rank))
    start(CP2)
    bridge = AutoBridge.from_hf_pretrained(folder / str(rank))
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.context_parallel_size = 2
    said = "Gemma 3 VL does not support context parallelism with attention bias"
    with pytest.raises(ValueError, match=said):
        built(provider)


def test_bridge_refuses_context_parallelism_of_gemmas_with_images(tmp_path):
    """The images' masks are attention biases there, which burst refuses too."""
    run_ranks(gemma_with_images, 2, tmp_path)
