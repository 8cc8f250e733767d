"""Calls of transformers' models with sharded batches: their loss, its labels, logits and memory.

Guards against whatever reads labels, their number or whole rows of hidden states beside the causal
loss; against a fused loss that is not the model's; and against attention that is recomputed, or a
loss of several micro-batches that is that of each.
"""

import pytest
import torch
import torch.distributed as dist

from megatron_burst.errors import BurstError
from tests.integrations.test_hf import SIZES, batch_of, model_of
from tests.ranks import preload, run_ranks

pytest.importorskip("trl", reason="make test-integrations FRAMEWORKS=hf")
preload("transformers", "megatron_burst.hf", "peft")


def grads_of(model) -> dict[str, torch.Tensor]:
    """The mean over ranks of all gradients."""
    grads = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(grad)
            grads[name] = grad / dist.get_world_size()
    return grads


def mean_of(loss: torch.Tensor) -> float:
    """Over ranks."""
    total = loss.detach().double().clone()
    dist.all_reduce(total)
    return float(total / dist.get_world_size())


def largest_error(ours: dict, theirs: dict) -> float:
    """Relative to the largest gradient of each parameter."""
    assert ours.keys() >= theirs.keys()
    return max(
        float((ours[name] - x).abs().max() / x.abs().max().clamp(min=1e-4))
        for name, x in theirs.items()
    )


def one_process(model, batch, count=None):
    """Loss and gradients of a model on one process, of labels that are not shifted."""
    out = model(input_ids=batch["input_ids"], use_cache=False).logits.double()
    losses = torch.nn.functional.cross_entropy(
        out[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
    )
    loss = losses / (count or (batch["labels"][:, 1:] != -100).sum())
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return float(loss.detach()), {name: x for name, x in grads.items() if x is not None}


def sharded(model, batch, **options):
    """The same on all ranks, of a sharded batch."""
    from megatron_burst.hf import shard_batch

    out = model(**shard_batch(batch, **options), use_cache=False)
    out.loss.backward()
    return mean_of(out.loss), grads_of(model), out


# ---- the loss without logits -------------------------------------------------------------------


def errors_of_fused(rank: int, family: str, more: dict) -> tuple[float, float]:
    batch = batch_of(packed=False, rows=32)
    loss, grads = one_process(model_of(family, "sdpa", **more), batch)
    ours, our_grads, _ = sharded(model_of(family, "burst", **more), batch, fused_loss=True)
    return abs(ours - loss), largest_error(our_grads, grads)


CAPPED = {"final_logit_softcapping": 3.0}


@pytest.mark.parametrize(
    ("family", "more"),
    [("Llama", {}), ("Qwen3", {"tie_word_embeddings": True}), ("Cohere", {"logit_scale": 0.3}),
     ("Granite", {"logits_scaling": 3.0}), ("Gemma3", CAPPED)],
)  # fmt: skip
def test_the_fused_loss_is_the_models(family, more):
    bound = 1e-9 if family in ("Llama", "Qwen3") else 1e-5  # others have norms in float32
    for errors in run_ranks(errors_of_fused, 2, family, more):
        assert max(errors) < bound


def what_logits_are(rank: int) -> list[str]:
    from megatron_burst.hf import shard_batch

    model = model_of("Llama", "burst")
    out = model(**shard_batch(batch_of(packed=True), fused_loss=True), use_cache=False)
    said = []
    reads = (
        lambda x: x.shape, lambda x: x.argmax(-1), lambda x: x[..., :-1], lambda x: x + 1,
        lambda x: torch.softmax(x, -1), lambda x: x.detach(),
    )  # fmt: skip
    for read in reads:
        with pytest.raises(ValueError, match="nothing may read the logits") as raised:
            read(out.logits)
        said.append(str(raised.value))
    assert not hasattr(out.logits, "shape") and out[1] is out.logits
    return said


def test_logits_of_a_fused_loss_raise_one_sentence():
    (said,) = run_ranks(what_logits_are, 1)
    assert all(sentence.count(";") == 2 for sentence in said)


def heads_that_are_refused(rank: int) -> list[str]:
    from megatron_burst.hf import shard_batch

    said = []
    batch = shard_batch(batch_of(packed=False, rows=32), fused_loss=True)
    biased = model_of("Llama", "burst")
    biased.lm_head.bias = torch.nn.Parameter(torch.zeros(64, dtype=torch.float64))
    odd = model_of("Llama", "burst")
    odd.config.logit_scale = 0.5  # which Llama does not apply
    for model in (biased, odd):
        with pytest.raises(BurstError) as raised:
            model(**batch, use_cache=False)
        said.append(str(raised.value))
    return said


def test_heads_that_the_fused_loss_does_not_know_are_refused():
    for bias, scale in run_ranks(heads_that_are_refused, 2):
        assert "linear layer without a bias" in bias and "as its config says" in scale


# ---- what reads labels and their number --------------------------------------------------------


def micro_batches(rank: int) -> tuple[float, float]:
    """Two of them, divided by the labels of both."""
    from megatron_burst.hf import shard_batch

    batches = [batch_of(packed=False, rows=32), batch_of(packed=False, rows=16)]
    count = sum(int((x["labels"][:, 1:] != -100).sum()) for x in batches)
    oracle, model = model_of("Llama", "sdpa"), model_of("Llama", "burst")
    loss = sum(one_process(oracle, batch, count)[0] for batch in batches)
    ours = 0.0
    for batch in batches:
        out = model(**shard_batch(batch | {"num_items_in_batch": count}), use_cache=False)
        out.loss.backward()
        ours += mean_of(out.loss)
    theirs = {name: p.grad for name, p in oracle.named_parameters()}
    return abs(ours - loss), largest_error(grads_of(model), theirs)


def test_the_callers_number_of_labels_counts():
    for errors in run_ranks(micro_batches, 2):
        assert errors[0] < 3e-6 and errors[1] < 3e-6  # transformers' loss is in float32


def made(kind: str, name: str, **more):
    """A tiny model of a class that is no causal language model."""
    import transformers

    sizes = {x: y for x, y in SIZES.items() if x != "head_dim"} | more
    config = getattr(transformers, f"{name}Config")(**sizes)
    config._attn_implementation = "burst"
    return getattr(transformers, f"{name}{kind}")(config).train()


def readers_that_are_refused(rank: int) -> dict[str, str]:
    from megatron_burst.hf import shard_batch

    batch = shard_batch(batch_of(packed=False, rows=32))
    unlabelled = {x: y for x, y in batch.items() if "labels" not in x}
    no_labels = {x: y for x, y in batch.items() if x != "labels"}
    experts = made("ForCausalLM", "Mixtral", num_local_experts=4)
    llama, bert = made("ForCausalLM", "Llama"), made("ForMaskedLM", "ModernBert")

    def of_own_loss(input_ids=None, position_ids=None, labels=None, **rest):
        out = type(llama).forward(llama, input_ids=input_ids, position_ids=position_ids, **rest)
        return out.__class__(loss=out.logits.mean(), logits=out.logits)

    other = made("ForCausalLM", "Llama")
    other.forward = of_own_loss  # as Liger does
    calls = {
        "a score of the last token": lambda: made("ForSequenceClassification", "Llama",
                                                  num_labels=1)(**unlabelled),
        "labels of a score": lambda: made("ForSequenceClassification", "Llama",
                                          num_labels=64)(**batch),
        "masked": lambda: bert(**batch),
        "experts": lambda: experts(**batch, output_router_logits=True, use_cache=False),
        "smoothing": lambda: llama(**no_labels, use_cache=False),
        "last rows": lambda: llama(**batch, logits_to_keep=1, use_cache=False),
        "by place": lambda: llama(batch["input_ids"], burst=batch["burst"]),
        "own loss": lambda: other(**batch, use_cache=False),
        "generation": lambda: llama.generate(batch["input_ids"][:, :4], max_new_tokens=2),
    }  # fmt: skip
    said = {}
    for name, call in calls.items():
        with pytest.raises(BurstError) as raised:
            call()
        said[name] = str(raised.value)
    return said


SAID = {
    "a score of the last token": "a row for each token.*call unshard",
    "labels of a score": "labels must be next tokens.*LlamaForSequenceClassification",
    "masked": "ModernBertForMaskedLM; pass neither labels nor shift_labels",
    "experts": "auxiliary loss of experts must be off",
    "smoothing": "shift_labels without labels.*label_smoothing_factor, compute_loss_func",
    "last rows": "logits_to_keep; leave it out",
    "by place": "passed by name",
    "own loss": "another loss in LlamaForCausalLM",
    "generation": r'set_attn_implementation\("sdpa"\)',
}


def test_what_would_read_a_shard_as_the_sample_is_refused():
    for said in run_ranks(readers_that_are_refused, 2):
        for name, pattern in SAID.items():
            with pytest.raises(ValueError, match=f"^burst in transformers: .*{pattern}"):
                raise ValueError(said[name])


def trl_with_a_second_fused_loss(rank: int) -> str:
    from trl.trainer.utils import add_fused_lm_head

    from megatron_burst.hf import shard_batch

    model = model_of("Llama", "burst")
    add_fused_lm_head(model)
    batch = batch_of(packed=False, rows=32)
    out = model(**shard_batch(batch), fused_lm_head=True)
    loss, _ = one_process(model_of("Llama", "sdpa"), batch)
    assert abs(mean_of(out.loss) - loss) < 1e-5
    with pytest.raises(BurstError) as raised:
        model(**shard_batch(batch, fused_loss=True), fused_lm_head=True)
    return str(raised.value)


def test_trls_fused_head_is_right_and_needs_no_other():
    for said in run_ranks(trl_with_a_second_fused_loss, 2):
        assert "leave fused_loss out" in said


# ---- precision ---------------------------------------------------------------------------------


def under_autocast(rank: int) -> tuple[float, float, float]:
    """The float32 weights of a Trainer with bf16=True; RoPE gives float32 where v is bfloat16."""
    batch = batch_of(packed=False, rows=32)
    losses = {}
    for name in ("sdpa", "burst", "fused"):
        model = model_of("Qwen3", name.replace("fused", "burst"), use_sliding_window=False).float()
        with torch.autocast("cpu", torch.bfloat16):
            if name == "sdpa":
                losses[name], oracle = one_process(model, batch)
            else:
                losses[name], grads, _ = sharded(model, batch, fused_loss=name == "fused")
    error = max(float((grads[name] - x).norm() / x.norm()) for name, x in oracle.items())
    return abs(losses["burst"] - losses["sdpa"]), abs(losses["fused"] - losses["sdpa"]), error


def test_autocast_is_that_of_sdpa():
    for plain, fused, error in run_ranks(under_autocast, 2):
        assert plain < 4e-3 and fused < 4e-3 and error < 0.05  # bfloat16


def of_norms_in_float32(rank: int) -> list[str]:
    """As RoPE and norms of k-bit training make them."""
    from types import SimpleNamespace

    from transformers import AttentionInterface

    from megatron_burst.hf import shard_batch

    batch = shard_batch(batch_of(packed=False, rows=32))["burst"]
    q, k, v = (torch.randn(2, 4, 32, 8) for _ in range(3))
    module = torch.nn.Linear(1, 1)
    attend = AttentionInterface()["burst"]
    dtypes = [attend(module, q, k, v.bfloat16(), None, burst=batch)[0].dtype]
    module.config = SimpleNamespace(_is_quantized=True, dtype=torch.bfloat16)
    dtypes.append(attend(module, q, k, v, None, burst=batch)[0].dtype)
    del module.config
    dtypes.append(attend(module, q, k, v, None, burst=batch)[0].dtype)
    return [str(x) for x in dtypes]


def test_float32_of_norms_and_rope_is_narrowed_as_for_flash_attention():
    (dtypes,) = run_ranks(of_norms_in_float32, 1)
    assert dtypes == ["torch.bfloat16", "torch.bfloat16", "torch.float32"]


# ---- recomputation -----------------------------------------------------------------------------


def attention_calls(rank: int, keep: dict, reentrant: bool) -> tuple[int, int, int, float]:
    """Calls of attention's forward in a step, tensors on the host, bytes kept, the error."""
    from megatron_burst import BurstConfig
    from megatron_burst.attention import BurstAttentionFunction
    from megatron_burst.recompute.offload import HostMemory

    calls, packed = [], []
    forward, pack = BurstAttentionFunction.forward, HostMemory.pack
    BurstAttentionFunction.forward = staticmethod(lambda *x: calls.append(x) or forward(*x))
    HostMemory.pack = lambda *x, **y: packed.append(x) or pack(*x, **y)
    try:
        batch = batch_of(packed=False, rows=32)
        oracle = model_of("Llama", "burst")
        _, grads, _ = sharded(oracle, batch)
        calls.clear()
        model = model_of("Llama", "burst")
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        _, ours, _ = sharded(model, batch, config=BurstConfig(**keep), fused_loss=True)
    finally:
        BurstAttentionFunction.forward, HostMemory.pack = forward, pack
    return len(calls), len(packed), largest_error(ours, grads)


KEPT = {
    "nothing": ({}, False, 4, 0),
    "all": ({"keep": "all"}, False, 2, 0),
    "all, reentrant": ({"keep": "all"}, True, 2, 0),
    "one layer": ({"keep": "all", "keep_layers": 1}, False, 3, 0),
    "results on the host": ({"keep": "all", "keep_offload": "results"}, False, 2, 2),
    "inputs on the host": ({"keep_offload": "inputs"}, False, 4, 2),
    "both on the host": ({"keep": "all", "keep_offload": "both"}, False, 2, 4),
}


@pytest.mark.parametrize(("keep", "reentrant", "calls", "packed"), KEPT.values(), ids=KEPT)
def test_checkpointing_keeps_attention_and_offloads(keep, reentrant, calls, packed):
    for counted, on_host, error in run_ranks(attention_calls, 2, keep, reentrant, fresh=True):
        assert (counted, on_host) == (calls, packed) and error < 1e-6


def reentrant_inputs(rank: int) -> str:
    with pytest.raises(BurstError) as raised:
        attention_calls(rank, {"keep_offload": "inputs"}, True)
    return str(raised.value)


def test_reentrant_checkpoints_do_not_offload_inputs():
    for said in run_ranks(reentrant_inputs, 2):
        assert said.endswith("pass use_reentrant=False")


# ---- PEFT --------------------------------------------------------------------------------------


def errors_of_lora(rank: int, modules: list[str], saved: list[str] | None, fused: bool):
    """Of loss and gradients of adapters against one process; which frozen weights got gradients."""
    from peft import LoraConfig, get_peft_model

    def tuned(attention):
        model = model_of("Llama", attention)
        torch.manual_seed(1)
        config = LoraConfig(
            r=4, target_modules=modules, modules_to_save=saved, init_lora_weights=False
        )
        model = get_peft_model(model, config).double()
        return model

    batch = batch_of(packed=False, rows=32)
    loss, grads = one_process(tuned("sdpa"), batch)
    model = tuned("burst")
    model.activation_checkpointing_enable({"use_reentrant": False})
    ours, our_grads, _ = sharded(model, batch, fused_loss=fused)
    frozen = [p.grad for p in model.parameters() if not p.requires_grad]
    assert frozen and all(grad is None for grad in frozen)
    return abs(ours - loss), largest_error(our_grads, grads)


LORA = {
    "attention": (["q_proj", "v_proj"], None, False),
    "fused": (["q_proj", "down_proj"], None, True),
    "the head": (["q_proj", "lm_head"], None, True),
    "a head of its own": (["q_proj"], ["lm_head"], True),
}


@pytest.mark.parametrize(("modules", "saved", "fused"), LORA.values(), ids=LORA)
def test_lora_on_two_ranks_is_that_on_one(modules, saved, fused):
    for loss, error in run_ranks(errors_of_lora, 2, modules, saved, fused):
        assert loss < 1e-6 and error < 1e-6


def errors_of_qlora(rank: int, folder: str) -> tuple[float, float]:
    """Of 4-bit weights under adapters; all but the products is in float32."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)

    def tuned(attention):
        model = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation=attention, quantization_config=quantized,
            dtype=torch.bfloat16, device_map={"": "cpu"},
        )  # fmt: skip
        model = prepare_model_for_kbit_training(
            model, gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        torch.manual_seed(1)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return get_peft_model(model, config).train()

    batch = batch_of(packed=False, rows=32)
    with torch.autocast("cpu", torch.bfloat16):
        loss, grads = one_process(tuned("sdpa"), batch)
        ours, our_grads, _ = sharded(tuned("burst"), batch, fused_loss=True)
    error = max(float((our_grads[name] - x).norm() / x.norm()) for name, x in grads.items())
    return abs(ours - loss), error


def test_qlora_on_two_ranks_is_that_on_one(tmp_path):
    pytest.importorskip("bitsandbytes")
    more = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}  # blocks of 64 weights
    model_of("Llama", "sdpa", **more).bfloat16().save_pretrained(tmp_path)
    for loss, error in run_ranks(errors_of_qlora, 2, str(tmp_path)):
        assert loss < 2e-3 and error < 0.05  # bfloat16


def errors_without_adapters(rank: int) -> list[float]:
    """Of the fused loss under disable_adapter(), and of an adapter without a head of its own."""
    from contextlib import nullcontext

    from peft import LoraConfig, get_peft_model

    from megatron_burst.hf import shard_batch

    batch, errors = batch_of(packed=False, rows=32), []
    own = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    on_head = {"target_modules": ["q_proj", "lm_head"]}
    for options, other, off in ((own, False, True), (on_head, False, True), (own, True, False)):
        losses = []
        for attention in ("sdpa", "burst"):
            model = model_of("Llama", attention)
            torch.manual_seed(1)
            config = LoraConfig(r=4, init_lora_weights=False, **options)
            model = get_peft_model(model, config).double()
            if "modules_to_save" in options:
                model.get_output_embeddings().modules_to_save["default"].weight.data.mul_(2)
            if other:
                model.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj"]))
                model.set_adapter("other")
            with model.disable_adapter() if off else nullcontext(), torch.no_grad():
                if attention == "sdpa":
                    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
                    labels = batch["labels"][:, 1:].flatten()
                    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels)
                else:
                    shard = shard_batch(batch, fused_loss=True)
                    loss = model(**shard, use_cache=False).loss
                losses.append(mean_of(loss))
        errors.append(abs(losses[0] - losses[1]))
    return errors


def test_the_fused_loss_takes_the_head_that_peft_takes():
    for errors in run_ranks(errors_without_adapters, 2):
        assert max(errors) < 1e-9


def refused_by_peft(rank: int) -> list[str]:
    from peft import LoHaConfig, LoraConfig, PromptTuningConfig, TaskType, get_peft_model

    from megatron_burst.hf import shard_batch

    batch = batch_of(packed=False, rows=32)
    said = []
    prompts = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2)
    scores = LoraConfig(r=2, task_type=TaskType.SEQ_CLS)
    dropped = LoraConfig(r=2, target_modules=["lm_head"], lora_dropout=0.1)
    cases = (
        (model_of("Llama", "burst"), prompts, shard_batch(batch)),
        (made("ForSequenceClassification", "Llama", num_labels=64), scores, shard_batch(batch)),
        (model_of("Llama", "burst"), dropped, shard_batch(batch, fused_loss=True)),
        (
            model_of("Llama", "burst"),
            LoHaConfig(r=2, target_modules=["lm_head"]),
            shard_batch(batch, fused_loss=True),
        ),
    )
    for model, config, shard in cases:
        with pytest.raises(BurstError) as raised:
            get_peft_model(model, config)(**shard)
        said.append(str(raised.value))
    return said


def test_what_peft_adds_is_refused_where_a_shard_would_be_wrong():
    for prompts, scores, dropped, loha in run_ranks(refused_by_peft, 2):
        assert "PromptTuningConfig; use LoRA" in prompts
        assert "labels must be next tokens" in scores
        assert all("an adapter of the head must be plain LoRA" in x for x in (dropped, loha))
