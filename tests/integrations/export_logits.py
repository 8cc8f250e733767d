"""Writes tiny models of transformers for GPUs without Megatron-Bridge, a file for each:

    .venvs/bridge/bin/python -m tests.integrations.export_logits FOLDER [NAME]

Bridge converts them on the CPU. A file has the weights by Megatron's names, what Bridge configures,
tokens and transformers' logits, computed in float64, and how far its own are off in bf16.
`tests/gpu/test_model_logits.py` reads them.
"""

import inspect
import pickle
import sys
import tempfile
from pathlib import Path

import torch

from tests.integrations.test_bridge_logits import (
    MODELS,
    OWN_LAYERS,
    converted,
    save,
    tiny,
    tokens,
)
from tests.integrations.test_bridge_logits import SIZES as USUAL
from tests.mcore.gpt import Parallel
from tests.ranks import run_ranks

SEQ, VOCAB, WINDOW = 256, 512, 37
# heads that all kernels have, for more than a tile of tokens
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "head_dim": 64,
    "max_position_embeddings": 4 * SEQ,
}  # fmt: skip
LATENT = {
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": 64,
    "kv_lora_rank": 64, "head_dim": 64,
}  # fmt: skip

IMAGES = "Qwen2.5-VL, its language model"
_VISION = {
    "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "patch_size": 4,
    "out_hidden_size": 256,
}  # fmt: skip
_LANGUAGE = SIZES | {  # heads of 128, as Bridge 0.6.2 always has Qwen2.5-VL-7B's sections
    "hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 24, 24],
    },
}  # fmt: skip
NAMES = [name for name in (*MODELS, IMAGES) if name not in OWN_LAYERS]  # classes of Bridge alone


def positions(name: str) -> torch.Tensor:
    """int64 [b, s]; for text and images [3, b, s], as of 8 x 8 tokens of an image after 40."""
    at = torch.arange(SEQ).expand(2, SEQ)
    if name != IMAGES:
        return at.contiguous()
    at, place = at.expand(3, 2, SEQ).clone(), torch.arange(64)
    at[:, :, 40:104] = 40 + torch.stack([0 * place, place // 8, place % 8])[:, None]
    at[:, :, 104:] -= 64 - 8
    return at


def saved(name: str, folder: Path, batch: dict) -> type:
    """Save a model and its logits; returns its class."""
    if name != IMAGES:
        return tiny(name, folder, batch["input_ids"], **sizes_of(name))
    import transformers

    kind = transformers.Qwen2_5_VLForConditionalGeneration
    config = kind.config_class(text_config=USUAL | _LANGUAGE, vision_config=_VISION)
    save(kind, config, folder, **batch)
    return kind


def sizes_of(name: str) -> dict:
    """What a model's configuration has instead of the tests' sizes."""
    _, more = MODELS[name]
    own = {"sliding_window": WINDOW} if "sliding_window" in more else {}
    own |= LATENT if "kv_lora_rank" in more else {}
    return {key: value for key, value in SIZES.items() if key not in more} | own


def exported(rank: int, name: str, folder: Path) -> dict:
    """Bridge's configuration and weights; `folder` has the model in transformers' format."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import MLATransformerConfig

    gpt, provider = converted(name, folder, Parallel(), own_layers=True)
    gpt = getattr(gpt, "language_model", gpt)
    latent = isinstance(provider, MLATransformerConfig)
    given = inspect.signature(GPTModel.__init__).parameters.keys() & vars(provider).keys()
    given -= {"transformer_layer_spec"}  # Megatron's of this configuration
    arguments = {key: getattr(provider, key) for key in given if plain(getattr(provider, key))}
    arguments |= dict(vocab_size=gpt.vocab_size, max_sequence_length=SEQ)
    state = gpt.state_dict()
    return {
        "config kind": "MLATransformerConfig" if latent else "TransformerConfig",
        "config": {key: value for key, value in vars(provider).items() if plain(value)},
        "arguments": arguments | {"parallel_output": False},
        "weights": {key: x.float() for key, x in state.items() if isinstance(x, torch.Tensor)},
    }


def plain(value: object) -> bool:
    """Whether a value can be read where Megatron is, but neither Bridge nor transformers."""
    try:
        written = pickle.dumps(value)
        return b"megatron.bridge" not in written and b"transformers." not in written
    except (pickle.PicklingError, AttributeError, TypeError):  # a lambda, a process group
        return False


def in_bf16(kind: type, folder: Path, batch: dict, truth: torch.Tensor) -> float:
    """The median error of transformers' own logits in bf16, as `tests.mcore.exported` has them."""
    model = kind.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    with torch.no_grad():
        got = model(**batch).logits.double()
    return float(((got - truth).norm(dim=-1) / truth.norm(dim=-1)).median())


def export(name: str, place: Path) -> None:
    """Write a model's file into a folder."""
    batch = {"input_ids": tokens(SEQ, VOCAB), "position_ids": positions(name)}
    with tempfile.TemporaryDirectory() as folder:
        kind = saved(name, Path(folder), batch)
        truth = torch.load(Path(folder) / "logits.pt")
        (model,) = run_ranks(exported, 1, name, Path(folder))
        batch |= {"bf16": in_bf16(kind, Path(folder), batch, truth), "truth": truth.float()}
    path = place / f"{name.replace(', ', '_').replace(' ', '_')}.pt"
    torch.save({"name": name, "tokens": batch.pop("input_ids")} | batch | model, path)
    size = path.stat().st_size / 1e6
    print(f"{path.name}: {size:.1f} MB, transformers' bf16 {batch['bf16']:.1e} off")


if __name__ == "__main__":
    place, *names = sys.argv[1:]
    Path(place).mkdir(parents=True, exist_ok=True)
    for name in names or NAMES:
        export(name, Path(place))
