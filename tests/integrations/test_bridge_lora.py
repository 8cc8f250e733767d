"""Adapters of Megatron-Bridge (LoRA, CanonicalLoRA, DoRA) with burst, on CPU processes.

Guards against adapters that get no gradient, or a wrong one, where everything else is frozen: in
recomputed layers whose inputs need none, where results are kept, and below the fused loss. Models
and layers are those of `test_bridge`; the reference is Megatron alone on one rank.
"""

import importlib
import importlib.util
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from tests.mcore.gpt import (
    BLOCK_RECOMPUTE,
    FULL_RECOMPUTE,
    HEADS,
    SELECTIVE_RECOMPUTE,
    Parallel,
    Run,
    relative_errors,
    sharded,
    whole_batch,
)
from tests.mcore.pipeline import counted
from tests.ranks import preload, run_ranks

if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("Megatron-Bridge is not installed: make test-integrations", allow_module_level=True)
preload("megatron.bridge", "megatron.bridge.training.config", "megatron.bridge.peft.canonical_lora")

from tests.integrations.test_bridge import CP2, EXACT, built, gpt_provider, start  # noqa: E402

MODULES_OF = {
    "LoRA": "megatron.bridge.peft.lora",
    "CanonicalLoRA": "megatron.bridge.peft.canonical_lora",
    "DoRA": "megatron.bridge.peft.dora",
}


@dataclass(frozen=True)
class Tuning:
    """A model, its adapters, and how they are trained.

    Attributes:
        kind: class of the adapters.
        targets: modules that have them; None: all linear ones of layers.
        dropout: before adapters.
        sinks: whether the model has learned attention sinks.
        tied: whether embedding and output layer share their weights.
        recompute: Megatron's options, as items.
        burst: options; None: those of the environment.
        is_fused: whether the model computes its loss, by burst's.
    """

    kind: str = "LoRA"
    targets: tuple[str, ...] | None = None
    dropout: float = 0.0
    sinks: bool = False
    tied: bool = False
    recompute: tuple = ()
    burst: BurstConfig | None = None
    is_fused: bool = False


def tuned_model(tuning, parallel):
    """A model with adapters; equal weights for equal ones."""
    from megatron.bridge.peft import recompute

    from megatron_burst.mcore import patches
    from megatron_burst.mcore.fused_loss import fuse_loss

    provider = gpt_provider(parallel)
    options = dict(
        tuning.recompute, softmax_type="learnable" if tuning.sinks else "vanilla",
        share_embeddings_and_output_weights=tuning.tied,
    )  # fmt: skip
    for name, value in options.items():
        setattr(provider, name, list(value) if isinstance(value, tuple) else value)
    if tuning.burst is not None:
        provider.burst = tuning.burst
        patches.switch_on_keep(tuning.burst)
    gpt = built(provider)
    # 0.6.2 remembers a model by its address: a later one at the same address would not be changed
    recompute.PEFT_RECOMPUTE_PATCHED.clear()
    return with_adapters(fuse_loss(gpt) if tuning.is_fused else gpt, tuning)


def adapters_of(tuning):
    """Bridge's configuration of them."""
    kind = getattr(importlib.import_module(MODULES_OF[tuning.kind]), tuning.kind)
    targets = {} if tuning.targets is None else {"target_modules": list(tuning.targets)}
    return kind(dim=4, alpha=8, dropout=tuning.dropout, **targets)


def with_adapters(gpt, tuning):
    """The model with weights drawn anew, as one rank's sinks change what later weights are; and
    with adapters that are not zero, else half of their gradients would be."""
    generator = torch.Generator().manual_seed(3)
    for name, x in gpt.named_parameters():
        if name.endswith("softmax_offset"):
            x.data.copy_(torch.linspace(-1, 1, HEADS))
    draw(gpt, generator)
    gpt = adapters_of(tuning)(gpt)
    draw(gpt, generator)
    return gpt


def draw(gpt, generator):
    """Draw all matrices that are trained."""
    for x in gpt.parameters():
        if x.requires_grad and x.ndim == 2:
            x.data.normal_(std=0.1, generator=generator)


def step(gpt, group, is_fused=False):
    """Loss and gradients over all ranks, which must be those of the adapters alone; and calls of
    attention's kernels."""
    batch = sharded(whole_batch(), group)
    labels = {"labels": batch["labels"]} if is_fused else {}
    torch.manual_seed(8)  # of dropout
    with counted() as counts:
        outs = gpt(batch["tokens"], batch["position_ids"], attention_mask=None, **labels)
        if not is_fused:
            outs = F.cross_entropy(outs.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        outs.sum().backward()
    run = Run(outs.detach().sum())
    dist.all_reduce(run.loss, group=group)
    for name, x in gpt.named_parameters():
        assert x.requires_grad == (x.grad is not None) == (".adapter." in name), name
        if x.requires_grad:
            dist.all_reduce(x.grad, group=group)
            run.grads[name], x.grad = x.grad, None
    return run, counts["kernels"]


def steps_of(rank, parallel, tunings, steps):
    """Some steps of each of some models."""
    from megatron.core import parallel_state

    importlib.import_module("megatron_burst.auto")
    start(parallel)
    group = parallel_state.get_context_parallel_group()
    return {
        tuning: [step(gpt, group, tuning.is_fused) for _ in range(steps)]
        for tuning in tunings
        if (gpt := tuned_model(tuning, parallel))
    }


def truths(tunings):
    """One step of each by Megatron alone, on one rank: what changes no result is left out."""
    plain = {
        tuning: replace(tuning, recompute=(), burst=None, is_fused=False) for tuning in tunings
    }
    (runs,) = run_ranks(steps_of, 1, Parallel(), tuple(dict.fromkeys(plain.values())), 1)
    return {tuning: runs[way][0][0] for tuning, way in plain.items()}


def assert_all_equal(tunings, steps=1):
    """All steps of all models over two ranks are those on one; returns their kernel calls."""
    references = truths(tunings)
    assert all(x.any() for run in references.values() for x in run.grads.values())
    ranks = run_ranks(steps_of, 2, CP2, tunings, steps)
    for runs in ranks:
        for tuning, results in runs.items():
            for run, _ in results:
                errors = relative_errors(run, references[tuning])
                assert max(errors.values()) <= EXACT, (tuning, errors)
    return {tuning: [calls for _, calls in results] for tuning, results in ranks[0].items()}


LAST = ("*.layers.1.*.linear_proj", "*.layers.1.*.linear_fc2")
PLAIN = (
    *(Tuning(kind) for kind in MODULES_OF),
    Tuning(targets=("linear_qkv", "output_layer")),
    Tuning(targets=LAST),
    Tuning(sinks=True),
    Tuning(is_fused=True),
    Tuning(is_fused=True, tied=True),
    Tuning(targets=LAST, is_fused=True),
)


def test_adapters_over_two_ranks_have_the_loss_and_gradients_of_one():
    """And frozen weights none: of norms, embeddings, sinks and the head below the fused loss."""
    assert_all_equal(PLAIN)


FULL, BLOCK = (tuple(options.items()) for options in (FULL_RECOMPUTE, BLOCK_RECOMPUTE))
SELECTIVE = tuple({**SELECTIVE_RECOMPUTE, "recompute_modules": ("core_attn",)}.items())
ALL = BurstConfig(keep="all")
MODULES = replace(ALL, keep_modules=("linear_qkv", "linear_proj", "linear_fc1"))
AUTO = BurstConfig(keep="auto", keep_budget_gib=1.0, keep_host_gib=1.0)
KEEPING = (
    Tuning(recompute=FULL, burst=ALL),
    Tuning(recompute=FULL, burst=ALL, is_fused=True),
    Tuning(recompute=BLOCK, burst=ALL),
    Tuning(recompute=SELECTIVE, burst=ALL),
    Tuning(recompute=FULL, burst=ALL, sinks=True),
    *(Tuning(kind, recompute=FULL, burst=MODULES) for kind in MODULES_OF),
    Tuning(recompute=FULL, burst=MODULES, targets=LAST),
    Tuning(recompute=FULL, burst=AUTO),
)


def test_adapters_of_recomputed_layers_have_the_same_gradients():
    """The first layer's input needs no gradient, as the embedding is frozen. Later steps know what
    backward read in earlier ones."""
    without_keep = Tuning(recompute=FULL), Tuning(recompute=FULL, sinks=True)
    calls = assert_all_equal((Tuning(), *without_keep, *KEEPING), steps=3)
    plain_calls = calls[Tuning()]
    assert all(calls[tuning] == [2 * count for count in plain_calls] for tuning in without_keep)
    assert all(calls[tuning] == plain_calls for tuning in KEEPING)


DROPOUT = Tuning(dropout=0.3)
DROPOUT_AND_KEEP = replace(DROPOUT, recompute=FULL, burst=MODULES)


def test_dropout_of_adapters_is_the_same_where_calls_around_it_are_kept():
    """Guards against recomputation that skips a kept call, and so draws other random numbers."""
    for runs in run_ranks(steps_of, 2, CP2, (DROPOUT, DROPOUT_AND_KEEP), 3):
        for (run, _), (truth, _) in zip(runs[DROPOUT_AND_KEEP], runs[DROPOUT], strict=True):
            assert max(relative_errors(run, truth).values()) == 0


def of_heads(rank):
    """What is said of adapters of the head: before the fused loss, after it, where it is computed
    with them off, and where log-probabilities are."""
    from megatron_burst.mcore.fused_loss import fuse_loss, log_probs_and_entropy

    importlib.import_module("megatron_burst.auto")
    start(CP2)
    head, batch = Tuning(targets=("output_layer",)), whole_batch()
    labels = {"labels": batch["labels"]}
    before, after = tuned_model(head, CP2), tuned_model(replace(head, is_fused=True), CP2)

    def call(gpt, **options):
        return gpt(batch["tokens"], batch["position_ids"], attention_mask=None, **options)

    def loss_without_adapters():
        with adapters_of(head).disable_adapter(after):
            call(after, **labels)

    sentences = []
    for attempt in (
        lambda: fuse_loss(before), lambda: call(after, **labels), loss_without_adapters,
        lambda: call(before, output_processor=log_probs_and_entropy),
    ):  # fmt: skip
        with pytest.raises(BurstError) as error:
            attempt()
        sentences.append(str(error.value))
    return sentences, torch.equal(call(after), call(before))


def test_an_adapter_of_the_head_is_refused_by_what_reads_the_heads_weight():
    """Guards against a loss or log-probabilities without it. Logits have it."""
    loss = ("--burst-fused-loss: cannot run with this output layer, because only Megatron's "
            "ColumnParallelLinear computes these logits; got LoRALinear; leave --burst-fused-loss "
            "out")  # fmt: skip
    log_probs = ("--burst-fused-loss: the output layer must have no adapter, because its weight "
                 "alone is read; got LoRALinear; leave that out, or "
                 "--burst-fused-loss")  # fmt: skip
    for sentences, same_logits in run_ranks(of_heads, 2):
        *of_loss, of_log_probs = sentences
        assert of_loss == [loss] * 3
        assert of_log_probs == log_probs
        assert same_logits


def save_adapters(rank, folder):
    """Adapters of a model with burst's options from the environment: saved, with its results."""
    from megatron.core import parallel_state

    from megatron_burst.mcore.fused_loss import FusedHead
    from megatron_burst.mcore.options import burst_config_of

    importlib.import_module("megatron_burst.auto")
    start(CP2)
    gpt = tuned_model(Tuning(recompute=FULL), CP2)
    assert isinstance(gpt.fused_head, FusedHead) and burst_config_of(gpt.config).keep == "all"
    if rank == 0:
        torch.save(adapter_state(gpt), f"{folder}/adapters.pt")
    group = parallel_state.get_context_parallel_group()
    return *step(gpt, group, is_fused=True), sharded_names(gpt)


def load_adapters(rank, folder):
    """The same, on one rank without burst, with the adapters from the file."""
    from megatron.core import parallel_state

    start(Parallel())
    gpt, state = tuned_model(Tuning(), Parallel()), torch.load(f"{folder}/adapters.pt")
    assert state.keys() == adapter_state(gpt).keys()
    for x in gpt.parameters():
        x.data.mul_(not x.requires_grad)
    absent_names, extra_names = gpt.load_state_dict(state, strict=False)
    assert extra_names == [] and not any(".adapter." in name for name in absent_names)
    group = parallel_state.get_context_parallel_group()
    return *step(gpt, group), sharded_names(gpt)


def adapter_state(gpt):
    """What Bridge saves of a model: its names, and weights of adapters."""
    peft = adapters_of(Tuning())
    peft.set_params_to_save(gpt)
    return {name: x for name, x in gpt.state_dict().items() if peft.adapter_key_filter(name)}


def sharded_names(gpt):
    """Names and shapes in a distributed checkpoint."""
    state = gpt.sharded_state_dict()
    return {name: (x.key, getattr(x, "global_shape", None)) for name, x in state.items()}


def test_adapters_that_are_saved_with_burst_are_loaded_without(tmp_path):
    """With the fused loss, which changes the class of the head, and results kept."""
    options = {"MEGATRON_BURST": "fused_loss=1,keep=all"}
    with_burst = run_ranks(save_adapters, 2, str(tmp_path), environment=options)
    ((truth, _, names),) = run_ranks(load_adapters, 1, str(tmp_path))
    for run, _, their_names in with_burst:
        assert max(relative_errors(run, truth).values()) <= EXACT
        assert their_names == names and any(".adapter." in key for key, _ in names.values())
