"""Bad input is refused with one message on all ranks, before anything hangs."""

from time import monotonic

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron_burst.attention import burst_attention
from megatron_burst.config import BurstConfig, Force
from megatron_burst.errors import BurstError, DisagreementError
from tests.options import burst_config
from tests.ranks import run_ranks


def shard(tokens=4, heads=2, dim=8, dtype=torch.float32):
    return torch.randn(1, tokens, heads, dim, dtype=dtype)


def default_call():
    return {"q": shard(), "k": shard(), "v": shard()}


CASES = {  # what differs from a good call, and words of the message
    "odd zigzag shard": (
        {n: shard(3) for n in "qkv"},
        r"multiple of 2.*; pad the sample to a multiple of 4, such as 4 or 8 \(in Megatron",
    ),
    "empty shard": ({n: shard(0) for n in "qkv"}, "no axis may be empty"),
    "heads": ({"q": shard(heads=3)}, "KV heads must divide.*--num-query-groups"),
    "more KV heads": ({"k": shard(heads=4), "v": shard(heads=4)}, "KV heads must divide"),
    "tokens of k and v": ({"v": shard(6)}, "k and v equal heads and tokens"),
    "batches": ({"q": torch.ones(2, 4, 2, 8)}, "must have one batch size.*got q .2, 4, 2, 8., k"),
    "causal of two sequences": (
        {"q": shard(6)},
        r"q and k must have equally many tokens.*got q \(1, 6.*pass causal=False",
    ),
    "the axes of SDPA": (
        {"q": torch.ones(1, 4, 8, 8)} | {name: torch.ones(1, 2, 8, 8) for name in "kv"},
        r"must be \[b, s, h, d\].*got q \(1, 4, 8, 8\), k \(1, 2, .*transpose\(1, 2\) of \[b, h,",
    ),
    "a window of two sequences": (
        {"q": shard(6), "causal": False, "window": (2, 2)},
        "equally many tokens if the mask is",
    ),
    "documents of two sequences": (
        {"q": shard(6), "causal": False, "cu_seqlens": torch.tensor([0, 8])},
        "equally many tokens.*without a window or cu_seqlens",
    ),
    "causal slices of two sequences": (
        {"q": shard(6), "slices": torch.tensor([[0, 12, 0, 8, 0]])},
        "equally many tokens",
    ),
    "no query on a rank": ({"q": shard(0), "causal": False}, "no axis may be empty.*got q .1, 0,"),
    "an odd number of keys in chunks": (
        {"k": shard(3), "v": shard(3), "causal": False, "slices": torch.tensor([[0, 8, 0, 6, 0]])},
        "multiple of 2.*got 3 tokens on a rank",
    ),
    "slices outside of the keys": (
        {"q": shard(6), "causal": False, "slices": torch.tensor([[0, 12, 0, 9, 0]])},
        r"within the 12 queries and 8 keys.*got \[0, 12, 0, 9, 0\]",
    ),
    "heads of k and v": ({"v": shard(heads=1)}, "k and v equal heads"),
    "dims of q and k": ({"k": shard(dim=4)}, "q and k one head dimension"),
    "three axes": ({n: shard()[0] for n in "qkv"}, r"four axes \(bshd\)"),
    "dtypes": ({"k": shard(dtype=torch.bfloat16)}, "one dtype among.*got torch.float32, torch.bf"),
    "integer": ({n: torch.ones(1, 4, 2, 8, dtype=torch.int64) for n in "qkv"}, "one dtype among"),
    "scale": ({"softmax_scale": -0.5}, "softmax_scale must be positive and finite.*got -0.5"),
    "a scale below float32": ({"softmax_scale": 1e-320}, "softmax_scale must be positive and.*got"),
    "a scale past float32": (
        {"softmax_scale": 10**400},
        "softmax_scale must be .* float32.*got 1000",
    ),
    "nan scale": ({"softmax_scale": float("nan")}, "softmax_scale must be positive"),
    "layout": ({"layout": "zigzga"}, "layout must be one of zigzag, contiguous, striped"),
    "format": ({"qkv_format": "dth"}, "qkv_format must be bshd, sbhd or thd.*got 'dth'"),
    "nodes": ({"config": BurstConfig(nodes=3)}, "nodes must divide.*got 3 nodes"),
    "exchange": (
        {"config": BurstConfig(intra="a2a")} | {name: shard(heads=1) for name in "qkv"},
        "must divide the number of query heads.*got 1 query heads on 2 ranks; pass --burst",
    ),
    "no tensor": ({"q": None}, "q must be a dense tensor with data.*got None"),
    "a list": ({"k": [1.0]}, r"k must be a dense tensor.*got \[1.0\]"),
    "an array": ({"v": shard().numpy()}, "v must be a dense tensor.*got a ndarray"),
    "no data": ({"q": shard().to("meta")}, r"q must be a dense tensor.*\(torch.strided, meta\)"),
    "sparse": ({"q": shard().to_sparse()}, "q must be a dense tensor.*torch.sparse_coo"),
    "causal": ({"causal": "no"}, "causal must be True or False.*got 'no'"),
    "no causal": ({"causal": None}, "causal must be True or False.*got None"),
    "lse": ({"return_lse": 1}, "return_lse must be True or False.*got 1"),
    "scale in words": ({"softmax_scale": "x"}, "softmax_scale must be a number.*got 'x'"),
    "learned scale": (
        {"softmax_scale": torch.nn.Parameter(torch.ones(()))},
        "softmax_scale must be a number in float32's range, .* no gradient; got a Para",
    ),
    "options in a dict": ({"config": {"a": 1}}, "config must be a BurstConfig.*got {'a': 1}"),
    "no options in a dict": ({"config": {}}, "config must be a BurstConfig.*got {}"),
    "layer": ({"layer": "a"}, "layer must be a whole number.*got 'a'"),
    "window": ({"window": (-5, 0)}, r"window must be \(left, right\).*got \(-5, 0\)"),
    "padding alone": (
        {"cu_seqlens_padded": torch.tensor([0, 8])},
        "cu_seqlens must come with cu_seqlens_padded",
    ),
    "longest alone": ({"max_seqlen": 8}, "cu_seqlens must come with max_seqlen"),
    **{
        f"max_seqlen {longest!r}": (
            {"cu_seqlens": torch.tensor([0, 8]), "max_seqlen": longest},
            f"max_seqlen must be a whole number.*got {longest!r}",
        )
        for longest in ("16", 100.5)
    },
    "no sink": ({"sink": [0.0, 1.0]}, r"sink must be a dense tensor.*got \[0.0, 1.0\]"),
    "sinks of other heads": (
        {"sink": torch.zeros(3)},
        r"sink must have one score for each query head.*got shape \(3,\) and 2 query heads",
    ),
    "sinks in another dtype": (
        {"sink": torch.zeros(2, dtype=torch.float16)},
        "sink must be in float32 or in q's dtype.*got torch.float16",
    ),
    "backend": ({"config": BurstConfig(backend="flash")}, "the backend flash must be able"),
}


def sentences(rank):
    """The error of every case on this rank."""
    found = {}
    for name, (changes, _) in CASES.items():
        call = default_call() | changes
        q, k, v = call.pop("q"), call.pop("k"), call.pop("v")
        with pytest.raises(BurstError) as first:
            burst_attention(q, k, v, **call)
        with pytest.raises(BurstError) as second:  # agreeing on a call does not accept it
            burst_attention(q, k, v, **call)
        assert str(first.value) == str(second.value)
        found[name] = str(first.value)
    good = burst_attention(*default_call().values())  # the group still works
    return found, bool(good.isfinite().all())


def test_each_misfit_is_one_sentence_on_every_rank():
    import re

    for found, good in run_ranks(sentences, 2):
        assert good and found.keys() == CASES.keys()
        for name, (_, words) in CASES.items():
            assert re.search(words, found[name]), (name, found[name])
            assert "\n" not in found[name] and found[name].count("; got ") == 1


def odd_one_out(rank, change):
    """A good call, then one that differs on rank 1 only."""
    burst_attention(*default_call().values(), config=BurstConfig(timeout_s=20))
    call = default_call() | {"config": BurstConfig(timeout_s=20)}
    call |= change if rank == 1 else {"causal": False}
    try:
        burst_attention(call.pop("q"), call.pop("k"), call.pop("v"), **call)
    except DisagreementError as error:
        return str(error)


@pytest.mark.parametrize(
    "change, words",
    [
        ({n: shard(6) for n in "qkv"}, r"got \w+=\(1, \d, 2, 8\) on cp rank"),
        ({n: shard(3) for n in "qkv"}, r"got \w+=\(1, \d, 2, 8\) on cp rank"),
        ({n: shard(dtype=torch.bfloat16) for n in "qkv"}, "got dtype=torch.b?fl"),
        ({"layout": "striped"}, "got layout="),
        ({"softmax_scale": 2.0}, "got softmax_scale="),
        (
            {"config": BurstConfig(timeout_s=20, force=Force(circulate="q"))},
            "got config=BurstConfig",
        ),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_rank_with_other_shapes_or_options_is_named_on_all_ranks(change, words):
    import re

    change = {"causal": False} | change
    for text in run_ranks(odd_one_out, 3, change):
        assert text and re.search(words, text) and "on cp rank 1" in text, text


def late_odd_one(rank, change):
    """After all agree on a call, rank 1 alone makes a different one."""
    config = BurstConfig(timeout_s=60)
    burst_attention(*default_call().values(), config=config)
    tensors = [shard(**change)] * 3 if rank == 1 else default_call().values()
    with pytest.raises(DisagreementError) as error:
        burst_attention(*tensors, config=config)
    burst_attention(*default_call().values(), config=config)  # the group still works
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({"tokens": 8}, "q=(1, 8, 2, 8)"),
        ({"heads": 4}, "q=(1, 4, 4, 8)"),
        ({"tokens": 5}, "q=(1, 5, 2, 8)"),
    ],
    ids=["sizes", "a configuration", "refused sizes"],
)
def test_a_rank_that_differs_later_is_named_on_all_ranks(change, got):
    for text in run_ranks(late_odd_one, 3, change):
        assert "q=(1, 4, 2, 8)" in text.split(" on cp ranks [0, 2]")[0], text
        assert got in text.split(" on cp ranks [0, 2]")[1].split("[1]")[0], text


def others_documents(rank):
    """Rank 1 passes boundaries that do not fit the sample."""
    ends = [0, 5, 9] if rank == 1 else [0, 5, 8]
    config = BurstConfig(timeout_s=60)
    with pytest.raises(DisagreementError) as error:
        burst_attention(*default_call().values(), config=config, cu_seqlens=torch.tensor(ends))
    good = torch.tensor([0, 5, 8])
    burst_attention(*default_call().values(), config=config, cu_seqlens=good)
    return str(error.value)


def test_documents_that_one_rank_refuses_are_told_to_all_with_the_reason():
    for text in run_ranks(others_documents, 2):
        assert "a refused call (burst attention: documents must end within" in text
        assert "on cp ranks [1]" in text


def outside(rank):
    group = dist.new_group([0])
    if rank == 1:
        with pytest.raises(BurstError, match="calling rank must belong to the group"):
            burst_attention(*default_call().values(), group=group)


def test_a_rank_outside_the_group_is_refused():
    run_ranks(outside, 2)


def test_of_several_processes_without_a_group_it_says_so(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BurstError, match="torch.distributed must be initialised.*one of 2 proc"):
        burst_attention(*default_call().values())


def not_of_one_rank(rank):
    mesh = init_device_mesh("cpu", (1,))
    for wrong in (
        {"q": DTensor.from_local(shard(), mesh)},
        {"sink": DTensor.from_local(torch.zeros(2), mesh)},
    ):
        call = default_call() | wrong
        with pytest.raises(BurstError, match="must be a dense tensor.*got a DTensor"):
            burst_attention(call.pop("q"), call.pop("k"), call.pop("v"), **call)
    ends = DTensor.from_local(torch.tensor([0, 4]), mesh)
    with pytest.raises(BurstError, match="cu_seqlens must be a tensor of int32.*got a DTensor"):
        burst_attention(*default_call().values(), cu_seqlens=ends)


def test_a_tensor_of_a_mesh_is_refused():
    run_ranks(not_of_one_rank, 1)


def not_a_group(rank):
    with pytest.raises(BurstError, match="a process group.*got a DeviceMesh; .* of one dimension"):
        burst_attention(*default_call().values(), group=init_device_mesh("cpu", (1, 1)))


def test_a_mesh_of_several_dimensions_is_not_a_group():
    run_ranks(not_a_group, 1)


REFUSED = {"window": (-5, 0)}, {"softmax_scale": "x"}, {"config": {}}, {"v": None}


def refused_alone(rank):
    """What is said where rank 1 alone passes something wrong, and seconds until then."""
    found = []
    for wrong in REFUSED:
        call = default_call() | (wrong if rank == 1 else {})
        begun = monotonic()
        with pytest.raises(BurstError) as error:
            burst_attention(call.pop("q"), call.pop("k"), call.pop("v"), **call)
        found.append((str(error.value), monotonic() - begun))
    burst_attention(*default_call().values())
    return found


def test_what_one_rank_alone_passes_wrong_is_named_on_all_at_once():
    for found in run_ranks(refused_alone, 2):
        for wrong, (text, seconds) in zip(REFUSED, found, strict=True):
            assert f" {next(iter(wrong))}=" in text and "on cp rank 1" in text, text
            assert seconds < 60  # of 180


@pytest.mark.parametrize(
    "option", [{"circulate": "vk"}, {"grad_wire": "bf16"}, {"timeout_s": 0.0}], ids=str
)
def test_misspelt_options_are_refused_when_they_are_made(option):
    with pytest.raises(BurstError, match="must be (one of|positive).*got"):
        burst_config(**option)


def second_order(rank):
    q, k, v = (x.requires_grad_() for x in default_call().values())
    (dq,) = torch.autograd.grad(burst_attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_second_derivatives_are_refused():
    run_ranks(second_order, 2)
