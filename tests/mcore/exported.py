"""Logits of a model in a file that Megatron-Bridge made, without Bridge.

`tests/integrations/export_logits.py` writes such files; GPU tests and CPU mode read them.
"""

from dataclasses import fields
from pathlib import Path

import torch


def errors_of(path: Path, dtype: torch.dtype, backend: str) -> tuple[torch.Tensor, set[str]]:
    """Errors of this rank's tokens, and the classes of core attentions.

    Args:
        path: of the file.
        dtype: of weights and activations.
        backend: burst's, which computes attention.

    Returns:
        the norm of each token's error over the norm of its true logits, float64, [batch, tokens of
        the rank]; and names of classes.
    """
    from megatron.core import parallel_state

    from tests.mcore.gpt import sharded

    given = torch.load(path, weights_only=False)
    gpt = model_of(given, dtype, backend)
    batch = {name: given[name].cuda() for name in ("tokens", "truth")}
    batch = sharded(batch, parallel_state.get_context_parallel_group())
    with torch.no_grad():  # rotary embeddings are of all positions, and then sharded
        got = gpt(batch["tokens"], given["position_ids"].cuda(), attention_mask=None)
    truth = batch["truth"].double()
    errors = (got.double() - truth).norm(dim=-1) / truth.norm(dim=-1)
    cores = {type(layer.self_attention.core_attention).__name__ for layer in gpt.decoder.layers}
    return errors.cpu(), cores


def model_of(given: dict, dtype: torch.dtype, backend: str):
    """The file's model with TransformerEngine's layers, over all ranks."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from megatron_burst import burst_spec
    from megatron_burst.config import BurstConfig

    config = config_of(given, dtype, parallel_state.get_context_parallel_world_size())
    config.burst = BurstConfig(backend=backend)
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=True, normalization=config.normalization
    )
    gpt = GPTModel(config, burst_spec(spec), **given["arguments"]).to(dtype).cuda().eval()
    absent, unknown = gpt.load_state_dict(given["weights"], strict=False)
    absent = [name for name in absent if not name.endswith("_extra_state")]  # fp8's scales
    assert not absent and not unknown, (absent, unknown)
    return gpt


def config_of(given: dict, dtype: torch.dtype, cp: int):
    """Megatron's configuration of the file; it reads also attributes that are no fields, as those
    of YaRN."""
    from megatron.core import transformer

    kind = getattr(transformer, given["config kind"])
    options = given["config"] | dict(
        params_dtype=dtype, pipeline_dtype=dtype, bf16=dtype is torch.bfloat16,
        context_parallel_size=cp, cp_comm_type="burst", perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
    )  # fmt: skip
    names = {field.name for field in fields(kind) if field.init}
    config = kind(**{name: options.pop(name) for name in names & options.keys()})
    if options.get("yarn_rotary_scaling_factor") is None:  # Megatron takes None for a factor
        options = {name: x for name, x in options.items() if not name.startswith("yarn_")}
    vars(config).update(options)
    return config
