"""Burst's core attention: Megatron's interface for it, what it computes, and what it refuses.

Guards against changes in Megatron's interface, and options that would be silently ignored.
"""

import inspect
import re

import pytest
import torch
import torch._dynamo
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch._dynamo.backends.debugging import ExplainWithBackend

from megatron_burst.arguments import window_of
from megatron_burst.errors import BurstError
from megatron_burst.mcore import core_attention
from megatron_burst.mcore.checks import check_call, check_decoding, check_layer
from megatron_burst.mcore.core_attention import BurstCoreAttention, window_of_layer
from megatron_burst.mcore.specs import burst_spec
from megatron_burst.schedule.layout import Layout
from megatron_burst.shards import shard
from tests.mcore.gpt import Parallel, config_of, start
from tests.mcore.lacking import needs, no_option
from tests.oracle import full_attention, rows_of
from tests.ranks import run_ranks

CAUSAL = AttnMaskType.causal
CP4 = Parallel(cp=4)


def named(function) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_the_constructor_takes_what_megatron_passes():
    ours = inspect.signature(BurstCoreAttention).parameters
    passed = named(attention.CoreAttentionBuilder.__call__)
    assert {"config", "cp_comm_type", "pg_collection"} <= set(passed) <= set(ours)
    assert {"k_channels", "v_channels"} <= set(ours)  # MLA's, multi_latent_attention.py:214
    required = {name for name, p in ours.items() if p.default is p.empty}
    assert required <= set(passed)


def test_forward_takes_what_megatron_passes():
    """Tensors are passed by position, the rest by name."""
    ours = inspect.signature(BurstCoreAttention.forward).parameters
    # the second up to 0.17
    names = [n for n in ("CoreAttentionInterface", "CoreAttention") if hasattr(attention, n)]
    interface = named(getattr(attention, names[0]).forward)
    assert list(ours)[1:5] == interface[:4] == ["query", "key", "value", "attention_mask"]
    assert set(interface) == set(ours) - {"self"}


def test_parameters_are_in_the_order_of_the_class_that_is_replaced():
    """Whoever passes them to Megatron's DotProductAttention by position can do the same with
    burst's."""
    theirs = named(DotProductAttention.__init__)
    ours = [name for name in named(BurstCoreAttention.__init__) if name in theirs]
    assert ours == theirs
    assert named(BurstCoreAttention.forward) == named(DotProductAttention.forward)


REFUSED_CONFIGS = [  # fields of the configuration, arguments of a layer
    (dict(attention_dropout=0.1), {}),
    ({}, dict(attention_dropout=0.2)),
    (dict(fp8_dot_product_attention=True), {}),
    (dict(fp8_multi_head_attention=True), {}),
    (dict(cuda_graph_impl="full_iteration"), {}),
    (dict(flash_attention_version=3), {}),
    (dict(batch_invariant_mode=True), {}),
    (dict(experimental_attention_variant="dsa"), {}),
    ({}, dict(attention_type="cross")),
    ({}, dict(attn_mask_type=AttnMaskType.arbitrary)),
]


@pytest.mark.parametrize("overrides, arguments", REFUSED_CONFIGS, ids=str)
def test_refuses_a_layer_that_asks_for_something_else(overrides, arguments):
    """Otherwise each would train a different model than requested."""
    if no_option(overrides):  # each is Megatron's, in the tests' release's spelling
        pytest.skip(no_option(overrides))
    config = config_of(CP4)
    for name, value in overrides.items():
        setattr(config, name, value)
    layer = dict(layer_number=7, attn_mask_type=CAUSAL, attention_type="self")
    ((name, value),) = (overrides | arguments).items()
    got = re.escape(f"got {name}={getattr(value, 'name', value)}; ")
    with pytest.raises(BurstError, match=f"^burst core attention: layer 7: .*{got}"):
        BurstCoreAttention(config=config, **layer | arguments)


@pytest.mark.parametrize("freq, with_window", [(None, [1, 2]), (2, [1]), ([0, 1], [2])])
def test_only_the_layers_with_a_window_have_it(freq, with_window):
    """window_attn_skip_freq=2 gives every second layer full attention; a list sets each layer."""
    config = config_of(CP4, window_size=(8, 0), window_attn_skip_freq=freq)
    windows = {layer: window_of_layer(config, layer, causal=True) for layer in (1, 2)}
    assert windows == {layer: (8, 0) if layer in with_window else None for layer in (1, 2)}


@pytest.mark.parametrize(
    "given, causal, full",
    [((8, 0), (8, 0), (8, 0)), ((-1, 0), (None, 0), (None, None)), ((8, 4), (8, 0), (8, 4)),
     ((-1, -1), (None, 0), (None, None))],
)  # fmt: skip
def test_a_window_means_what_it_means_to_transformer_engine(given, causal, full):
    """As in its check_set_window_size: none behind with a causal mask, (-1, 0) is none without."""
    config = config_of(CP4, window_size=given)
    for is_causal, means in ((True, causal), (False, full)):
        assert window_of(window_of_layer(config, 1, is_causal), is_causal) == means


def test_refuses_megatrons_own_attention_as_a_backend():
    config = config_of(CP4, attention_backend=AttnBackend.local)
    with pytest.raises(BurstError, match="got attention_backend=local; "):
        BurstCoreAttention(config, 1, CAUSAL, "self")


def test_dropout_that_megatron_passes_counts_before_the_configured_one():
    check_layer(config_of(CP4, attention_dropout=0.5), 1, CAUSAL, "self", 0.0)


@pytest.mark.parametrize("other", ["p2p", "a2a", "all_gather", "a2a+p2p", "bruts"])
def test_refuses_megatrons_own_context_parallelism_without_transformer_engine(other):
    """It would run burst where something else was requested."""
    message = rf"every layer must run burst.*cp_comm_type='{other.replace('+', '.')}' in layer 3"
    with pytest.raises(BurstError, match=message + ".*or pass --cp-comm-type burst"):
        BurstCoreAttention(config_of(CP4), 3, CAUSAL, "self", cp_comm_type=other)


def packed(**others) -> PackedSeqParams:
    """Parameters of a sample of two documents of 8 tokens."""
    given = dict(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 8, 16], dtype=torch.int32))
    return PackedSeqParams(**given | others)


REFUSED_CALLS = [
    (dict(attention_mask=torch.ones(1, 1, 4, 4)), r"shape \(1, 1, 4, 4\); pass --no-create-att"),
    (dict(attention_bias=torch.ones(1, 2, 4, 4)), r"shape \(1, 2, 4, 4\); "),
    (dict(packed_seq_params=packed(qkv_format="sbhd")), "qkv_format=sbhd; pass .* thd$"),
    (dict(packed_seq_params=packed(qkv_format=None)), "qkv_format=None; pass .* thd$"),
    (dict(packed_seq_params=packed(), attn_mask_type=AttnMaskType.arbitrary), "type=arbitrary; "),
    (dict(attn_mask_type=AttnMaskType.padding), "attn_mask_type=padding; "),
    (dict(attn_mask_type=AttnMaskType.padding_causal), "attn_mask_type=padding_causal; "),
    (dict(attn_mask_type=None), "attn_mask_type=None; "),
]
PLAIN_CALL = dict(
    attention_mask=None, attn_mask_type=CAUSAL, attention_bias=None, packed_seq_params=None
)


OTHER = torch.tensor([0, 4, 16], dtype=torch.int32)
REFUSED_SAMPLES = [
    (packed(cu_seqlens_q=None), "cu_seqlens_q=none; pass packed_seq_params with cu_seqlens_q$"),
    (packed(cu_seqlens_kv=OTHER), "cu_seqlens_kv=other boundaries; pass cu_seqlens_q as"),
    (packed(cu_seqlens_kv_padded=OTHER), "cu_seqlens_kv=other boundaries; "),
    (packed(cu_seqlens_kv=OTHER[:2]), "cu_seqlens_kv=other boundaries; "),
    (packed(local_cp_size=2), "local_cp_size=2 and a cp_group of 1; "),
]


@pytest.mark.parametrize("arguments, message", REFUSED_CALLS)
def test_refuses_a_call_with_more_than_query_key_and_value(arguments, message):
    """Silently dropping a mask, bias or packing would give a different model."""
    check_call(**PLAIN_CALL, tokens=16, samples=2)
    with pytest.raises(BurstError, match="^burst core attention: .*" + message):
        check_call(**PLAIN_CALL | arguments, tokens=16, samples=2)


def test_boundaries_of_whole_rows_separate_nothing():
    """pretrain_vlm.py passes them if its samples need no padding."""
    rows = PLAIN_CALL | dict(packed_seq_params=packed(qkv_format="sbhd"))
    check_call(**rows, tokens=8, samples=2)
    for tokens, samples in ((4, 2), (8, 3), (16, 1)):
        with pytest.raises(BurstError, match="got qkv_format=sbhd; "):
            check_call(**rows, tokens=tokens, samples=samples)
    padded = packed(qkv_format="sbhd", cu_seqlens_q_padded=OTHER)
    with pytest.raises(BurstError, match="got qkv_format=sbhd; "):
        check_call(**rows | dict(packed_seq_params=padded), tokens=8, samples=2)


def test_the_sentence_ends_where_it_ends_when_megatron_builds_the_layer():
    """Megatron's build_module appends words to messages: they would read as part of the advice."""
    core = ModuleSpec(module=BurstCoreAttention, params=dict(attention_dropout=0.5))
    with pytest.raises(BurstError, match=r"attention_dropout=0\.5; pass --attention-dropout 0$"):
        build_module(
            core, config=config_of(CP4), layer_number=1, attn_mask_type=CAUSAL,
            attention_type="self",
        )  # fmt: skip


@pytest.mark.parametrize("tokens", [(1, 8), (4, 8)])
def test_refuses_keys_of_a_cache(tokens):
    """Decoding: one or more query tokens, and the keys of all tokens before."""
    query, key = (torch.zeros(count, 2, 4, 8) for count in tokens)
    message = rf"KV caches are not.*got {tokens[0]} query and 8 key tokens.*parallel-size 1$"
    with pytest.raises(BurstError, match=message):
        check_decoding(query, key)
    check_decoding(key, key)


@needs("inference mode")
def test_refuses_an_inference_engine():
    """It gives each rank the whole prompt, which burst would take for a shard."""
    from megatron.core.inference.utils import InferenceMode

    query = torch.zeros(8, 2, 4, 8)
    with InferenceMode.active(), pytest.raises(BurstError, match="8 query and 8 key.*an inference"):
        check_decoding(query, query)


def layer_of_another_size(rank):
    start(Parallel(cp=2))
    with pytest.raises(BurstError, match="context_parallel_size=1 and a group of 2 ranks; pass"):
        BurstCoreAttention(config_of(), 1, CAUSAL, "self")


def test_refuses_a_layer_whose_context_parallel_size_is_not_its_groups():
    """A layer with whole sequences would be computed as if it had a shard."""
    run_ranks(layer_of_another_size, 2)


def deterministic_layers(rank):
    start(Parallel(cp=2))
    layers = [
        BurstCoreAttention(config_of(Parallel(cp=2), deterministic_mode=mode), 1, CAUSAL, "self")
        for mode in (False, True)
    ]
    return [layer.burst.config.deterministic for layer in layers]


def test_megatrons_deterministic_mode_is_attentions_too():
    assert run_ranks(deterministic_layers, 2) == [[False, True]] * 2


def whole_sequence(scale, causal):
    """Query, key, value, output gradient; output and gradients of full attention."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(4, 8), (2, 8), (2, 5), (4, 5)]  # heads and dimension: MLA's differ for values
    q, k, v, dout = (
        torch.randn(2, 16, *shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = full_attention(*leaves, causal, scale)
    return [q, k, v, dout], [out, *torch.autograd.grad(out, leaves, dout)]


def errors_of_a_layer(rank):
    """Errors of output and gradients by mask type, the output's shape, and the names in the state
    dict."""
    parallel, shapes, errors = Parallel(cp=2), [], {}
    start(parallel)
    rows = rows_of(Layout.ZIGZAG, rank, 2, 8)
    core = BurstCoreAttention(
        config_of(parallel), 1, CAUSAL, "self", softmax_scale=0.5, cp_comm_type="burst",
        k_channels=8, v_channels=5, pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )  # fmt: skip
    for mask_type, causal in ((CAUSAL, True), (AttnMaskType.no_mask, False)):
        # a packed sample of the user's says nothing of Megatron's
        shard(torch.zeros(1, 16), group=core.cp_group, cu_seqlens=torch.tensor([0, 4, 16]))
        tensors, truth = whole_sequence(0.5, causal)
        *leaves, dout = (x.detach()[:, rows].transpose(0, 1).requires_grad_() for x in tensors)
        out = core(*leaves, **PLAIN_CALL | dict(attn_mask_type=mask_type))
        shapes.append(tuple(out.shape))
        got = [out.unflatten(2, (4, 5)), *torch.autograd.grad(out, leaves, dout.flatten(2))]
        pairs = zip(got, truth, strict=True)
        errors[causal] = max(float((a.transpose(0, 1) - b[:, rows]).abs().max()) for a, b in pairs)
    with pytest.raises(BurstError, match="got 1 query and 8 key tokens"):
        core(leaves[0][:1], *leaves[1:], **PLAIN_CALL)
    for arguments, message in REFUSED_CALLS:
        with pytest.raises(BurstError, match=message):
            core(*leaves, **PLAIN_CALL | arguments)
    with pytest.MonkeyPatch.context() as patch:  # Megatron's stand-in for a mask
        patch.setattr(core_attention, "is_graph_capturing", lambda: True)
        stand_in = torch.ones(2, 1, 8, 16, dtype=torch.bool)
        shapes.append(tuple(core(*leaves, **PLAIN_CALL | dict(attention_mask=stand_in)).shape))
    rows = [x[:, 0] for x in leaves]
    for sample, message in REFUSED_SAMPLES:
        with pytest.raises(BurstError, match=f"^burst core attention: .*{message}"):
            core(*rows, **PLAIN_CALL | dict(packed_seq_params=sample))
    return shapes, errors, list(core.state_dict())


def test_a_layer_is_full_attention_with_the_mask_and_scale_that_megatron_passes():
    """Guards against an ignored mask type or softmax_scale, transposed heads, and skipped
    refusals."""
    for shapes, errors, state in run_ranks(errors_of_a_layer, 2):
        assert shapes == [(8, 2, 4 * 5)] * 3
        assert errors.keys() == {True, False} and max(errors.values()) <= 1e-12, errors
        assert state == []  # compatible with checkpoints of Megatron's DotProductAttention


def refused_on_one_rank(rank):
    """What ranks are told if one of them refuses a layer's call; the shape of the next one."""
    parallel = Parallel(cp=2)
    start(parallel)
    core = BurstCoreAttention(config_of(parallel), 1, CAUSAL, "self", cp_comm_type="burst")
    leaves = [torch.randn(8, 2, 4, 8) for _ in range(3)]
    wrong = dict(attention_bias=torch.ones(1)) if rank == 1 else {}
    with pytest.raises(BurstError) as error:
        core(*leaves, **PLAIN_CALL | wrong)
    return str(error.value), core(*leaves, **PLAIN_CALL).shape


def test_what_one_rank_refuses_is_heard_by_the_others_at_once():
    (others, shape), (its_own, _) = run_ranks(refused_on_one_rank, 2)
    assert its_own in others and " on cp rank 1, while cp rank 0 began" in others
    assert its_own.startswith("burst core attention: ") and shape == (8, 2, 32)


def compiled(rank):
    """Graph breaks that torch.compile has in burst's files, and gradients of the input: eager,
    compiled."""
    start(Parallel(cp=2))
    torch.compiler.set_stance("default")  # CPU mode turns it off
    spec = burst_spec(get_gpt_layer_local_spec(normalization="RMSNorm"))
    layer = build_module(spec, config=config_of(Parallel(cp=2)), layer_number=1)
    hidden = torch.randn(8, 1, 64, dtype=torch.float64)

    def run(x):
        return layer(x * 2, attention_mask=None)[0].sin()

    run(hidden)  # patches find what they call
    torch._dynamo.reset()
    explained, grads = ExplainWithBackend("eager"), []
    for each in (run, torch.compile(run, backend=explained)):
        leaf = hidden.clone().requires_grad_()
        each(leaf).sum().backward()
        grads.append(leaf.grad)
    ends = [(each.user_stack[-1], each.reason) for each in explained.output().break_reasons]
    ours = {(end.name, end.lineno) for end, why in ends
            if "megatron_burst/" in end.filename or "megatron_burst runs" in why}  # fmt: skip
    return ours, torch.equal(*grads)


def test_burst_is_one_graph_break_of_a_compiled_layer_and_changes_nothing():
    for ours, equal in run_ranks(compiled, 2):
        assert [name for name, _ in ours] == ["forward"] and equal, ours
