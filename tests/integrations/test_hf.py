"""transformers' own models with `attn_implementation="burst"` on two ranks, against one process.

Guards against padding, windows, sinks, soft caps or document boundaries that are dropped without a
word, labels shifted at the end of a shard, and a loss that is the mean of ranks with other numbers
of labels.
"""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import preload, run_ranks

pytest.importorskip("trl", reason="make test-integrations FRAMEWORKS=hf")
preload("transformers", "megatron_burst.hf")
SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    attention_dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
FAMILIES = {
    "Llama": {},
    "Qwen3": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "Mistral": {"sliding_window": 7},
    "Gemma2": {"sliding_window": 7, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 0.2},
    "Gemma3": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"],
               "query_pre_attn_scalar": 5},
    "GptOss": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
# of logits, loss and gradients: transformers' loss is in float32 (rounding: 6e-8 of it), so are
# Gemma's norms and the softmax of eager attention, the only one with sinks and soft caps; all else
# is in float64
EXACT, ROUGH = (1e-13, 3e-7, 1e-12), (2e-6, 3e-7, 5e-6)
EAGER = "GptOss", "Gemma2"
LENGTHS = (11, 3, 16)  # documents; the sample gets 2 more rows


def model_of(family: str, attention: str, **more):
    """A tiny random model, the same on all ranks."""
    import transformers

    name = family + ("TextConfig" if family == "Gemma3" else "Config")
    config = getattr(transformers, name)(**SIZES | FAMILIES.get(family, {}) | more)
    torch.manual_seed(0)
    more = {}
    if family == "GptOss":
        more = {"experts_implementation": "eager"}  # the others have no float64
    make = transformers.AutoModelForCausalLM.from_config
    return make(config, attn_implementation=attention, **more).double().train()


def batch_of(packed: bool, rows: int = 30) -> dict[str, torch.Tensor]:
    """A batch with labels of its own, some of them ignored."""
    generator = torch.Generator().manual_seed(1)
    shape = (1, rows) if packed else (2, rows)
    ids = torch.randint(3, 64, shape, generator=generator)
    labels = torch.where(torch.rand(shape, generator=generator) < 0.3, -100, ids)
    batch = {"input_ids": ids, "labels": labels}
    if packed:
        batch["position_ids"] = torch.cat([torch.arange(n) for n in LENGTHS])[None]
        starts = torch.tensor(LENGTHS).cumsum(0)[:-1]
        batch["labels"][:, [0, *starts.tolist()]] = -100  # as collators of packed samples do
    return batch


def logits_of(model, ids, packed: bool):
    """Of a model in one process, one document at a time."""
    parts = ids.split(LENGTHS, 1) if packed else [ids]
    return torch.cat([model(input_ids=part, use_cache=False).logits for part in parts], 1)


def errors_of(rank: int, family: str, packed: bool, layout: str) -> tuple[float, ...]:
    """Largest errors of logits, loss and gradients, relative to the largest values."""
    from megatron_burst.hf import shard_batch

    batch = batch_of(packed, 30 if packed else 32)
    oracle = model_of(family, "eager" if family in EAGER else "sdpa")
    logits = logits_of(oracle, batch["input_ids"], packed)
    loss = oracle.loss_function(logits, batch["labels"], SIZES["vocab_size"])
    loss.backward()
    model = model_of(family, "burst")
    model.activation_checkpointing_enable()
    mine = shard_batch(batch, layout=layout)
    got = model(**mine, use_cache=False)
    got.loss.backward()
    mean = got.loss.detach().clone()
    dist.all_reduce(mean)
    pairs = [(mean / 2, loss)]
    for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
        dist.all_reduce(ours.grad)
        pairs.append((ours.grad / 2, theirs.grad))
    from megatron_burst import unshard

    how = {"layout": layout, "cu_seqlens": mine["burst"].cu_seqlens}
    whole = unshard(got.logits.detach(), **how)[:, : logits.shape[1]]
    errors = [float((x - y).detach().abs().max() / y.abs().max().clamp(min=1e-3)) for x, y in pairs]
    return float((whole - logits).abs().max()), errors[0], max(errors[1:])


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "batch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_on_two_ranks_is_that_on_one(family, packed):
    bounds = ROUGH if family in ("Gemma3", *EAGER) else EXACT
    for errors in run_ranks(errors_of, 2, family, packed, "zigzag"):
        assert all(x < bound for x, bound in zip(errors, bounds, strict=True)), errors


def other_layouts(rank: int) -> list[tuple[float, ...]]:
    cases = (
        ("Qwen3", True, "contiguous"),
        ("Llama", False, "striped"),
        ("Qwen3", False, "contiguous"),
    )
    return [errors_of(rank, *case) for case in cases]


def test_other_layouts():
    for cases in run_ranks(other_layouts, 2):
        for errors in cases:
            assert all(x < bound for x, bound in zip(errors, EXACT, strict=True)), errors


# ---- what is refused ---------------------------------------------------------------------------

ONES, ZERO = torch.ones(1, 30, dtype=torch.long), torch.tensor([[1] * 29 + [0]])
BATCHES = {
    "padding": ({"attention_mask": ZERO}, "must have no padding.*zeros in attention_mask"),
    "an image": ({"pixel_values": ONES}, "else is sharded; got pixel_values"),
    "three axes": ({"position_ids": ONES.expand(3, 1, 30)}, r"position_ids must be .*\(3, 1, 30\)"),
    "two packed": ({"input_ids": ONES.expand(2, 30), "labels": ONES.expand(2, 30), "position_ids":
                    torch.arange(30).remainder(9).expand(2, 30)}, "batch size 1.*2 sequences"),
    "boundaries": ({"cu_seqlens": torch.tensor([0, 40])}, "end within the sample of 30"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BATCHES.values(), ids=BATCHES)
def test_refuses_a_batch_in_one_sentence(change, message):
    from megatron_burst import BurstError
    from megatron_burst.hf import shard_batch

    with pytest.raises(BurstError, match=f"^shard_batch: .*{message}"):
        shard_batch(batch_of(packed=True) | change)


ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
MODELS = {
    "padding": ("Llama", {}, {"attention_mask": ZERO}, "no padding and.*got attention_mask"),
    "a mask": ("Llama", {}, {"attention_mask": torch.ones(1, 1, 30, 30)}, "no padding and no mask"),
    "no burst": ("Llama", {}, {"burst": None}, "no keyword argument burst; to train, call"),
    "dropout": ("Qwen3", {"attention_dropout": 0.1}, {}, "dropout=0.1; set attention_dropout=0.0"),
    "bias": ("Llama", {}, {"bias": torch.ones(1)}, "windows, sinks, a soft cap and a.*got bias"),
    "boundaries": ("Llama", {}, {"cu_seq_lens_q": torch.tensor([0, 30])}, "got cu_seq_lens_q"),
    "a chunk": ("Llama4Text", {"attention_chunk_size": 8, "layer_types": ["chunked_attention"] * 2,
                "intermediate_size_mlp": 48, "num_local_experts": 2}, {}, "got chunked_attention"),
    "other layers": ("Lfm2", {"layer_types": ["conv", "full_attention"]}, {}, "got conv, Conv1d"),
}  # fmt: skip


@pytest.mark.parametrize(("family", "config", "inputs", "message"), MODELS.values(), ids=MODELS)
def test_refuses_by_name_what_a_model_needs_and_burst_lacks(family, config, inputs, message):
    from megatron_burst import BurstError
    from megatron_burst.hf import shard_batch

    model = model_of(family, "burst", **config)
    batch = shard_batch(batch_of(packed=True)) | inputs
    with pytest.raises(BurstError, match=f"^burst in transformers: .*{message}"):
        model(**batch, use_cache=False)


def refused_on_ranks(rank: int) -> list[str]:
    """What ranks are told of different batches, and of what only several ranks cannot have."""
    from megatron_burst import BurstError, burst_attention
    from megatron_burst.hf import shard_batch

    batch, said = batch_of(packed=True), []
    mine = shard_batch(batch, layout="contiguous")
    q = torch.randn(1, 16, 2, 8)
    dynamic = model_of("Llama", "burst", rope_parameters=ROPE)
    calls = (
        lambda: shard_batch(batch | {"input_ids": batch["input_ids"] + rank}),
        lambda: shard_batch(batch, layout="zigzag" if rank else "contiguous"),
        lambda: burst_attention(q, q, q),
        lambda: dynamic(**mine),
        lambda: shard_batch(batch_of(packed=False)),
        lambda: shard_batch(batch | ({"attention_mask": ZERO} if rank else {})),
    )
    for call in calls:
        with pytest.raises(BurstError) as raised:
            call()
        said.append(str(raised.value))
    return said


def test_what_differs_between_ranks_is_refused_on_all():
    for said in run_ranks(refused_on_ranks, 2):
        batches, layouts, layout, rope, length, padding = said
        assert "zeros in attention_mask" in padding and "cp ranks [1]" in padding
        assert "batch=" in batches
        assert "layout=zigzag" in layouts and "layout=contiguous" in layouts
        assert 'got layout "zigzag" after shard(..., layout="contiguous")' in layout
        assert "rope_type dynamic" in rope
        assert "a multiple of 4 tokens" in length


def test_errors_name_also_the_first_layer():
    from megatron_burst import BurstConfig, BurstError
    from megatron_burst.hf import shard_batch

    model = model_of("Llama", "burst")
    model.model.layers[0].self_attn.v_proj.weight.data.fill_(float("nan"))
    with pytest.raises(BurstError, match="layer 1, forward"):
        model(**shard_batch(batch_of(True), config=BurstConfig(nan_guard=True)), use_cache=False)
