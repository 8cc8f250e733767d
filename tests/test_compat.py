"""The original's functions equal dense attention in the original's layouts; checkpoints, block
masks, the fused loss; arguments, refusals.

Shards are cut here as the original's users cut them, not by the package's own layouts.
"""

import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from megatron_burst import compat, slices
from megatron_burst.comm.communicator import Communicator
from megatron_burst.compat import (
    OpBurstAttn,
    OpBurstAttnStrip,
    SLFusedProjLoss,
    burst_attn_func,
    burst_attn_func_sparse,
    burst_attn_func_striped,
    sl_proj_loss,
)
from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from tests.oracle import full_attention
from tests.ranks import preload, run_ranks

pytestmark = pytest.mark.numeric
preload("megatron_burst.compat")

TOKENS, HEADS, DIM = 24, (4, 2), 6
BOUND = 1e-12  # in float64


def zigzag(x, rank, size):
    chunks = x.chunk(2 * size, dim=1)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=1)


def striped(x, rank, size):
    return x[:, rank::size]


def contiguous(x, rank, size):
    return x.chunk(size, dim=1)[rank]


def heads_first(x):
    return x.transpose(1, 2)


def problem(tokens, causal, scale, seen=None, batch=2):
    """Whole q, k, v and dout, and (out, dq, dk, dv) of dense attention."""
    generator = torch.Generator().manual_seed(tokens)
    tensors = [
        torch.randn(batch, tokens, heads, DIM, generator=generator, dtype=torch.float64)
        for heads in (HEADS[0], HEADS[1], HEADS[1], HEADS[0])
    ]
    leaves = [x.requires_grad_() for x in tensors[:3]]
    out = full_attention(*leaves, causal, scale or DIM**-0.5, seen)
    truth = [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]
    return [x.detach() for x in tensors], truth


def error(
    function, cut, causal, tokens=TOKENS, scale=None, turn=lambda x: x, seen=None, run=None,
    batch=2, **options,
):  # fmt: skip
    """The largest error of out, dq, dk and dv on this rank; turn is its own inverse; `seen` is the
    mask, `run` calls the function."""
    group = options.get("process_group")
    group = group[0] if isinstance(group, tuple) else group
    place = dist.get_rank(group), dist.get_world_size(group)
    tensors, truth = problem(tokens, causal and seen is None, scale, seen, batch)
    q, k, v, dout = (turn(cut(x, *place)).contiguous() for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if function is not burst_attn_func_sparse:
        options = {"flash": "cuda", "optimize_bwd_comm": True, "deterministic": True} | options
    given = {"softmax_scale": scale, "causal": causal} | options
    out = (run or call)(function, *leaves, **given)
    out.backward(dout)
    got = [out.detach(), *(x.grad for x in leaves)]
    assert out.is_contiguous()
    mine = (cut(x, *place) for x in truth)
    return max(float((turn(a) - b).abs().max()) for a, b in zip(got, mine, strict=True))


def call(function, *tensors, **options):
    return function(*tensors, **options)


def errors(rank):
    """Errors by case, on four ranks."""
    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    intra, inter = rows[rank // 2], columns[rank % 2]
    pairs = [(intra, intra), (inter, inter)]
    nested = {"double_group": [intra, inter], "process_group": dist.group.WORLD}
    func, strip, apply = burst_attn_func, burst_attn_func_striped, OpBurstAttnStrip.apply
    return {
        "zigzag": error(func, zigzag, True),
        "scale": error(OpBurstAttn.apply, zigzag, True, scale=0.3),
        "striped": error(strip, striped, True),
        "no mask": error(func, contiguous, False, tokens=20),  # five rows per rank
        "no mask, striped": error(strip, striped, False, tokens=20),
        "heads first": error(func, zigzag, True, turn=heads_first, flash=None),
        "heads first, none": error(apply, striped, True, turn=heads_first, flash="none"),
        "a group of the ranks": error(func, zigzag, True, process_group=columns[rank % 2]),
        "double group": error(func, zigzag, True, **nested),
        "double group, striped": error(strip, striped, True, **nested),
        "double group in pairs": error(func, zigzag, True, **nested | {"double_group": pairs}),
        "pairs": error(func, zigzag, True, process_group=(dist.group.WORLD, dist.group.WORLD)),
    } | masked_errors()


PLACE = torch.arange(TOKENS)
AWAY = PLACE.unsqueeze(1) - PLACE  # how much earlier than each query each key is
WINDOW = (AWAY >= 0) & (AWAY <= 5)
BOTH = (AWAY >= -3) & (AWAY <= 5)
ENDS = torch.tensor([0, 3, 16, TOKENS])
DOCUMENT = (PLACE.unsqueeze(1) >= ENDS).sum(1)
DOCUMENTS = DOCUMENT.unsqueeze(1) == DOCUMENT
# blocks of 2 rows on a rank are blocks of 8 of the sequence
ALIVE = torch.tensor([[1, 1, 0], [0, 1, 0], [1, 0, 1]]).bool()
WHOLE = ALIVE.repeat_interleave(8, 0).repeat_interleave(8, 1)


def masked_errors():
    """By case, with masks that the original has beside the causal one."""
    func, strip, sparse = burst_attn_func, burst_attn_func_striped, burst_attn_func_sparse
    ends = {"cu_seqlen": ENDS.int(), "batch": 1}
    rows = block_mask(lambda b, h, q, k: ALIVE[q // 2, k // 2], TOKENS // 4, 2)
    whole = block_mask(lambda b, h, q, k: DOCUMENTS[q, k] & (k <= q), TOKENS, 4)
    table = slices.prefix_lm(7, TOKENS)
    prefix = (AWAY >= 0) | (PLACE < 7)
    cases = {
        "window": (func, zigzag, True, WINDOW, {"sliding_window": (5, 0)}),
        "window, striped": (strip, striped, True, WINDOW, {"sliding_window": (5, 0)}),
        "window, both sides": (func, zigzag, False, BOTH, {"sliding_window": (5, 3)}),
        "both sides, striped": (strip, striped, False, BOTH, {"sliding_window": (5, 3)}),
        "documents": (func, zigzag, True, DOCUMENTS & (AWAY >= 0), ends),
        "documents, no mask": (func, zigzag, False, DOCUMENTS, ends),
        "block mask of a rank's rows": (sparse, zigzag, False, WHOLE, {"mask_mod": rows}),
        "and causal": (sparse, zigzag, True, WHOLE & (AWAY >= 0), {"mask_mod": rows}),
        "block mask of the whole": (
            sparse, zigzag, True, DOCUMENTS & (AWAY >= 0), {"mask_mod": whole},
        ),
        "slices": (sparse, zigzag, False, prefix, {"mask_mod": table}),
    }  # fmt: skip
    return {
        name: error(function, cut, causal, seen=seen, **options)
        for name, (function, cut, causal, seen, options) in cases.items()
    }


def block_mask(mod, tokens, block):
    return create_block_mask(mod, None, None, tokens, tokens, device="cpu", BLOCK_SIZE=block)


def test_they_equal_dense_attention_in_the_originals_layouts():
    for found in run_ranks(errors, 4):
        assert {case: bad for case, bad in found.items() if bad > BOUND} == {}
        assert len(found) == 22


def in_checkpoints(rank):
    """By function and grad_ckpt: the error in a checkpoint, and bytes that recomputation sends;
    errors of the log-sum-exp."""
    sent, send = [], Communicator.send

    def counting(self, link, cargo, sends, recvs):
        sent.extend(rows.nbytes for _, rows in sends)
        return send(self, link, cargo, sends, recvs)

    Communicator.send = counting
    recomputed = []

    def layer(function, options, *tensors):
        before = len(sent)
        out, lse = function(*(x * 1 for x in tensors), **options, return_lse=True)
        assert not lse.requires_grad
        if torch.is_grad_enabled():
            recomputed.append(sum(sent[before:]))
        return out

    def run(function, *tensors, **options):
        return checkpoint(layer, function, options, *tensors, use_reentrant=True)

    error(burst_attn_func, zigzag, True, run=run, grad_ckpt="full")  # the first sets it up
    found = {}
    for function, cut in ((burst_attn_func, zigzag), (burst_attn_func_striped, striped)):
        for method in ("none", "full", "seq-wise"):
            worst = error(function, cut, True, run=run, grad_ckpt=method, layer_idx=1)
            found[function.__name__, method] = worst, recomputed[-1]

    def as_in_burst_engine(function, *tensors, **_):
        """In the order of its own wrapper, with its pair."""
        given = (None, "cuda", True, True, True, None, [None, None])
        return run(lambda *qkv, return_lse: function(
            *qkv, *given, return_lse, ("full", 1)
        ), *tensors)  # fmt: skip

    worst = error(OpBurstAttnStrip.apply, striped, True, run=as_in_burst_engine)
    found["OpBurstAttnStrip", "full"] = worst, recomputed[-1]
    mask = {"mask_mod": slices.prefix_lm(7, TOKENS), "seen": (AWAY >= 0) | (PLACE < 7)}
    given = mask | {"grad_ckpt": "full", "run": run}
    worst = error(burst_attn_func_sparse, zigzag, False, **given)
    found["burst_attn_func_sparse", "full"] = worst, recomputed[-1]
    return found, lse_errors(rank)


def lse_errors(rank):
    """With heads last and heads first: the log-sum-exp is [b, h, s_local] in both."""
    (q, k, v, _), _ = problem(TOKENS, True, None)
    scores = torch.einsum("bshd,bthd->bhst", q, k.repeat_interleave(2, 2)) * DIM**-0.5
    wanted = scores.masked_fill(AWAY < 0, -torch.inf).logsumexp(-1)
    wanted = heads_first(zigzag(heads_first(wanted), rank, 2))
    rows = [zigzag(x, rank, 2) for x in (q, k, v)]
    _, last = burst_attn_func(*rows, causal=True, return_lse=True)
    _, first = burst_attn_func(*map(heads_first, rows), None, None, True, return_lse=True)
    return [float((lse - wanted).abs().max()) for lse in (last, first)]


def test_checkpoints_keep_what_the_original_keeps():
    for found, lse in run_ranks(in_checkpoints, 2):
        assert max(*lse, *(worst for worst, _ in found.values())) < BOUND
        sent = {case: count for case, (_, count) in found.items()}
        assert [count for (_, method), count in sent.items() if method == "full"] == [0] * 4
        whole = sent["burst_attn_func_striped", "none"]
        assert whole == 2 * 12 * 2 * (DIM + DIM) * 8  # K and V of a rank once
        assert sent["burst_attn_func_striped", "seq-wise"] == whole / 2
        assert 0 < sent["burst_attn_func", "seq-wise"] != sent["burst_attn_func", "none"] > 0


def test_the_check_above_can_fail():
    """A layout other than the function's means another mask."""
    (found, _) = run_ranks(wrong_layouts, 2)
    assert min(found) > 1e-3


def wrong_layouts(rank):
    return [
        error(burst_attn_func, striped, True),
        error(burst_attn_func_striped, zigzag, True),
        error(burst_attn_func, contiguous, True),
    ]


@pytest.fixture
def called(monkeypatch):
    """The arguments that burst_attention is called with."""
    calls = []

    def record(q, k, v, **options):
        calls.append(options | {"shape": tuple(q.shape)})
        return q

    monkeypatch.setattr(compat, "burst_attention", record)
    return calls


Q = torch.zeros(1, 4, 2, 8)
DEFAULTS = {
    "group": None, "causal": False, "softmax_scale": None, "layout": "contiguous",
    "config": BurstConfig(), "shape": (1, 4, 2, 8), "return_lse": False, "layer": 0,
    "window": None, "cu_seqlens": None,
}  # fmt: skip
MAPPED = {
    (): {},
    (0.5, "cuda", True, False, True): {
        "softmax_scale": 0.5, "causal": True, "layout": "zigzag",
        "config": BurstConfig(deterministic=True),
    },
    (None, "triton"): {"config": BurstConfig(backend="triton")},
    (None, None): {"shape": (1, 2, 4, 8)},
    (None, "cuda", False, True): {},
    (None, "cuda", False, False, False, None, (None, None)): {},
    (None, "cuda", False, False, False, None, None): {},
    (None, "cuda", True, False, False, None, None, True): {
        "return_lse": True, "causal": True, "layout": "zigzag",
    },
}  # fmt: skip


@pytest.mark.parametrize("arguments", MAPPED, ids=str)
def test_arguments_of_the_original_become_burst_attentions(arguments, called):
    for function in (burst_attn_func, OpBurstAttn.apply):
        function(Q, Q, Q, *arguments)
        assert called.pop() == DEFAULTS | MAPPED[arguments]
    for function in (burst_attn_func_striped, OpBurstAttnStrip.apply):
        function(Q, Q, Q, *arguments)
        changed = DEFAULTS | MAPPED[arguments]
        layout = "striped" if changed["causal"] else "contiguous"
        assert called.pop() == changed | {"layout": layout}


KEPT = {"none": "none", "full": "all", "seq-wise": "half"}


@pytest.mark.parametrize("method", KEPT)
def test_what_a_checkpoint_keeps_becomes_keep(method, called):
    given = (Q, Q, Q, None, "cuda", True, False, False, None, None, False)
    burst_attn_func(*given, method, 3)
    OpBurstAttn.apply(*given, (method, 3))
    assert called[0] == called[1]
    assert called[0]["config"] == BurstConfig(keep=KEPT[method]) and called[0]["layer"] == 3
    burst_attn_func_striped(*given, method, 3, (5, 0))
    OpBurstAttnStrip.apply(*given, (method, 3), (5, 0))
    assert called[2] == called[3] == called[0] | {"layout": "striped", "window": (5, 0)}
    OpBurstAttnStrip.apply(*given, None)
    assert called[4]["layer"] == 0


def test_the_functions_have_the_originals_arguments_in_its_order():
    names = "q k v softmax_scale flash causal optimize_bwd_comm deterministic process_group"
    names += " double_group return_lse grad_ckpt layer_idx sliding_window cu_seqlen"
    for function in (burst_attn_func, burst_attn_func_striped):
        assert [*inspect.signature(function).parameters] == names.split()
    names = "q k v mask_mod softmax_scale causal process_group double_group return_lse grad_ckpt"
    assert [*inspect.signature(burst_attn_func_sparse).parameters] == [*names.split(), "layer_idx"]
    names = "proj_weight cls_weight ignore_index reduction label_smoothing proj_scale"
    assert [*inspect.signature(SLFusedProjLoss).parameters] == names.split()
    names = "x weight target num_splits ignore_index scale"
    assert [*inspect.signature(sl_proj_loss).parameters] == names.split()


def test_the_page_has_every_argument():
    page = (Path(__file__).parents[1] / "docs" / "versions.md").read_text()
    named = set(re.findall(r"`(\w+)`", page))
    for function in (burst_attn_func, burst_attn_func_sparse, sl_proj_loss, SLFusedProjLoss):
        given = {*inspect.signature(function).parameters, function.__name__}
        assert given - {"target"} <= named, function
    assert {*inspect.signature(SLFusedProjLoss.forward).parameters} - {"self", "target"} <= named


@pytest.mark.parametrize("weighted, smoothing", [(False, 0.0), (True, 0.0), (False, 0.2)])
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_fused_loss_is_torchs(reduction, scale, weighted, smoothing):
    tokens, hidden, vocab = 14, 16, 11
    random = torch.Generator().manual_seed(1)
    x, weight = (
        torch.randn(n, hidden, generator=random, dtype=torch.float64).requires_grad_()
        for n in (tokens, vocab)
    )
    target = torch.randint(vocab, (tokens,), generator=random, dtype=torch.int32)
    target[::5] = -100
    classes = torch.rand(vocab, generator=random, dtype=torch.float64) if weighted else None
    loss = SLFusedProjLoss(weight, classes, -100, reduction, smoothing, scale)(x, target, 3)
    wanted = F.cross_entropy(
        x @ weight.T / (hidden**0.5 if scale else 1), target.long(), classes, reduction=reduction,
        label_smoothing=smoothing * vocab / (vocab - 1),  # Megatron's spares the target
    )  # fmt: skip
    assert loss.shape == wanted.shape
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
    got, true = (torch.autograd.grad(one.square().sum(), [x, weight]) for one in (loss, wanted))
    torch.testing.assert_close(got, true, rtol=1e-12, atol=1e-12)
    if reduction == "none" and not (weighted or smoothing):
        assert torch.equal(sl_proj_loss(x, weight, target, 4, scale=scale), loss)


class NCCLCommunicator:
    """Called like BMTrain's."""


REFUSED = {
    "kernel": ({"flash": "fa2"}, "flash must be.*got 'fa2'"),
    "communicator": ({"process_group": NCCLCommunicator()}, "got a NCCLComm.*bmtrain_group.py"),
    "sub-group": ({"double_group": [NCCLCommunicator(), None]}, "got a NCCLCommunicator"),
    "pairs": (
        {"double_group": [(NCCLCommunicator(), None), (None, None)]}, "got a NCCLCommunicator",
    ),
    "checkpoint": ({"grad_ckpt": "half"}, "none, full or seq-wise.*got 'half'"),
    "three groups": ({"double_group": [None] * 3}, r"\[intra, inter\].*got \[None, None, None\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("function", [burst_attn_func, burst_attn_func_striped])
def test_what_burst_cannot_take_is_refused_in_one_sentence(function, case, called):
    options, words = REFUSED[case]
    with pytest.raises(BurstError, match=f"^{function.__name__}: .*{words}") as refusal:
        function(Q, Q, Q, **options)
    assert "\n" not in str(refusal.value) and not called


@pytest.mark.parametrize(
    "mask, words",
    [
        (lambda b, h, q, k: q >= k, "got a function; pass create_block_mask"),
        (block_mask(lambda b, h, q, k: q >= k, 6, 2), "got 6 rows; make one of 4 or 4"),
    ],
)
def test_masks_that_are_none_of_the_call_are_refused(mask, words, called):
    with pytest.raises(BurstError, match=f"^burst_attn_func_sparse: .*{words}"):
        burst_attn_func_sparse(Q, Q, Q, mask)
    longer = torch.cat((Q, Q), 1)
    with pytest.raises(BurstError, match="got 8 keys and 4 queries; pass slices"):
        burst_attn_func_sparse(Q, longer, longer, block_mask(lambda b, h, q, k: q >= k, 4, 2))
    with pytest.raises(BurstError, match="got a NCCLCommunicator"):
        burst_attn_func_sparse(Q, Q, Q, mask, process_group=NCCLCommunicator())
    assert not called


def refusals(rank):
    """Messages of refusals with real groups and shapes."""
    world, alone = dist.group.WORLD, dist.new_group([rank], use_local_synchronization=True)
    q = torch.zeros(1, 4, 2, 8)
    calls = {
        "one group": {"double_group": [world, None]},
        "no grid": {"double_group": [world, world]},
        "odd rows": {"causal": True, "shorter": 1},
        "shape": {"flash": None, "axes": 3},
        "scale": {"softmax_scale": -1.0},
        "other keys": {"longer": 2, "causal": True},
    }
    said = {}
    for name, options in calls.items():
        given = q[:, options.pop("shorter", 0) :]
        given = given[0] if options.pop("axes", 4) == 3 else given
        keys = torch.cat([given] * options.pop("longer", 1), dim=1)
        with pytest.raises(BurstError) as refusal:
            burst_attn_func(given, keys, keys, **options)
        said[name] = str(refusal.value)
    with pytest.raises(BurstError) as refusal:
        burst_attn_func_striped(q, q, q, causal=True, cu_seqlen=torch.tensor([0, 8]))
    said["documents, striped"] = str(refusal.value)
    out = burst_attn_func(q, q, q, process_group=alone, causal=True)
    return said, tuple(out.shape)


def test_what_the_engine_refuses_is_refused_on_all_ranks():
    words = {
        "one group": "got [[0, 1], None]", "no grid": "a row and a column",
        "odd rows": "multiple of 2", "shape": "(4, 2, 8)", "scale": "got -1.0",
        "other keys": "k (1, 8, 2, 8)", "documents, striped": "in zigzag or contiguous",
    }  # fmt: skip
    for said, shape in run_ranks(refusals, 2):
        assert {name for name in words if words[name] not in said[name]} == set(), said
        assert shape == (1, 4, 2, 8)
