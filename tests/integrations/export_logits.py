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

from tests.integrations.test_bridge_logits import MODELS, OWN_LAYERS, converted, tiny, tokens
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
    """Whether a value can be read where Megatron is, but not Bridge."""
    try:
        return b"megatron.bridge" not in pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):  # a lambda, a process group
        return False


def in_bf16(kind: type, folder: Path, given: torch.Tensor, truth: torch.Tensor) -> float:
    """The median error of transformers' own logits in bf16, as `tests.mcore.exported` has them."""
    model = kind.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    with torch.no_grad():
        got = model(input_ids=given).logits.double()
    return float(((got - truth).norm(dim=-1) / truth.norm(dim=-1)).median())


def export(name: str, place: Path) -> None:
    """Write a model's file into a folder."""
    given = tokens(SEQ, VOCAB)
    with tempfile.TemporaryDirectory() as folder:
        kind = tiny(name, Path(folder), given, **sizes_of(name))
        truth = torch.load(Path(folder) / "logits.pt")
        (model,) = run_ranks(exported, 1, name, Path(folder))
        bf16 = in_bf16(kind, Path(folder), given, truth)
    positions = torch.arange(SEQ).expand_as(given).contiguous()
    batch = {"tokens": given, "position_ids": positions, "truth": truth.float()}
    path = place / f"{name.replace(', ', '_').replace(' ', '_')}.pt"
    torch.save({"name": name, "bf16": bf16} | batch | model, path)
    print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, transformers' bf16 {bf16:.1e} off")


if __name__ == "__main__":
    place, *names = sys.argv[1:]
    Path(place).mkdir(parents=True, exist_ok=True)
    for name in names or MODELS:
        if name not in OWN_LAYERS:  # classes that only Bridge has
            export(name, Path(place))
