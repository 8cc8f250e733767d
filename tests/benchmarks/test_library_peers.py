"""Other libraries' context parallelism computes attention and its gradients; what it refuses."""

from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from benchmarks.cases import Case
from benchmarks.impls import Impl, impls_of
from benchmarks.library_peers import TorchContextParallel, Ulysses, Yunchang, places
from benchmarks.packed_cases import PackedCase
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from tests.oracle import rows_of, seen_by, truth_of
from tests.ranks import run_ranks
from tests.sampling import whole

SIZES = {"seq": 128, "heads_q": 8, "heads_kv": 4, "head_dim_qk": 16, "head_dim_v": 16}
DOCUMENTS = PackedCase(**SIZES, documents="half", multiple=8)
WINDOW = PackedCase(**SIZES, window=10)
BF16 = 0.01  # relative; attention of bfloat16 is off by 0.002 to 0.004


def world(size, rank=0):
    return SimpleNamespace(rank=rank, size=size, device=torch.device("cpu"), group="the group")


def errors(rank, impls, case, device="cpu"):
    """By implementation the largest relative error of out, dq, dk, dv, over 64 rows or all of
    fewer; or the refusal."""
    from benchmarks.attention import ATTENTION
    from benchmarks.peers import Shard, sample_of
    from megatron_burst.tools.world import world_of

    here, heads = world_of(device), (case.heads_q, case.heads_kv)
    generator = torch.Generator().manual_seed(7)
    shapes = [(case.batch, case.seq, heads[i], case.head_dim_qk) for i in (0, 1, 1, 0)]
    tensors = [torch.randn(x, generator=generator).to(getattr(torch, case.dtype)) for x in shapes]
    rows = rows_of(Layout.ZIGZAG, rank, here.size, case.seq // here.size)
    truth = truth_of(tensors, case.head_dim_qk**-0.5, case.mask == "causal")
    truth = sample_of([x[:, rows].transpose(0, 1) for x in truth])

    def drawn():
        q, k, v, dout = (x[:, rows].transpose(0, 1).to(here.device) for x in tensors)
        return Shard(case, *(x.requires_grad_() for x in (q, k, v)), dout)

    return compare(ATTENTION, impls_of(tuple(impls)), case, here, drawn, truth)


def packed_errors(rank, impls, case, device="cpu"):
    """The same of a packed sample or a window."""
    from benchmarks.packed import PACKED, packed_impls
    from benchmarks.packed_peers import Sample
    from megatron_burst.tools.world import world_of

    here = world_of(device)
    alone = Sample(case, SimpleNamespace(rank=0, size=1, device=here.device)).shard("contiguous")
    tensors = [x.detach().transpose(0, 1).cpu() for x in (alone.q, alone.k, alone.v, alone.dout)]
    mask = Mask(case.window, 0, bool(case.documents))
    truth = truth_of(tensors, case.head_dim_qk**-0.5, seen=seen_by(mask, case.edges, case.seq))
    step = case.seq // 128  # of the positions that are compared
    truth = [x.squeeze(0).flatten(1)[step - 1 :: step] for x in truth]
    return compare(PACKED, packed_impls(impls), case, here, lambda: Sample(case, here), truth)


def compare(kind, impls, case, here, draw, truth):
    found = {}
    for impl in impls:
        peer = kind.peers[impl.name](impl, here)
        if reason := peer.refusal(case):
            found[str(impl)] = reason
            continue
        for _ in range(2):  # what the first made is used again
            peer.prepare(draw())
            peer.run_forward()
            got = peer.sample(peer.run_forward_backward())
            pairs = zip(got, truth, strict=True)
            found[str(impl)] = max(float((a.cpu() - b).norm() / b.norm()) for a, b in pairs)
            peer.release()
    return found


def needs(module):
    why = f"{module} is not installed: make test-integrations FRAMEWORKS=library-peers"
    return pytest.mark.skipif(not find_spec(module), reason=why)


def on_ulysses(rank):
    """Of each problem, the larger error of a rank."""
    cases = Case(**SIZES), Case(**SIZES, batch=2, mask="full")
    found = [errors(rank, ["ulysses"], case) for case in cases]
    found += [packed_errors(rank, ["ulysses"], case) for case in (DOCUMENTS, WINDOW)]
    return [each["ulysses:auto"] for each in found]


def on_torch(rank):
    """The same of torch's two ways, and of its FlexAttention."""
    from benchmarks.packed_peers import Flex
    from tests.benchmarks import torch_on_cpu

    torch_on_cpu.allow()
    TorchContextParallel.refusal = Flex.refusal = lambda peer, case: None
    impls, alike = ["torch:allgather+flash", "torch:alltoall+flash"], SIZES | {"heads_kv": 8}
    cases = [Case(**alike, dtype="float32", mask=mask, batch=2) for mask in ("causal", "full")]
    found = [error for case in cases for error in errors(rank, impls, case).values()]
    for case in (DOCUMENTS, WINDOW):
        blocks = replace(case, seq=1024, dtype="float32")
        found += packed_errors(rank, ["flex"], blocks).values()
    return found


@needs("deepspeed")
@pytest.mark.parametrize("size", [2, 4])
def test_ulysses_on_processes(size):
    for found in run_ranks(on_ulysses, size):
        assert len(found) == 4 and max(found) < BF16


@pytest.mark.parametrize("size", [*whole(2, 4)])
def test_torchs_own_on_processes(size):
    """In float32 sums of at most 1024 terms differ by less than 1024 * 2**-24."""
    for found in run_ranks(on_torch, size):
        assert len(found) == 6 and max(found) < 1024 * 2**-24


@needs("yunchang")
@pytest.mark.parametrize("size", [2, 4])
def test_yunchang_on_processes(size):
    for found in run_ranks(errors, size, ["yunchang"], Case(**SIZES, batch=2)):
        assert found["yunchang:ring+auto"] < BF16 and found["yunchang:ulysses+auto"] < BF16
        hybrid = found["yunchang:usp+auto"]
        assert "got 2" in hybrid if size == 2 else hybrid < BF16


def test_rows_of_ranks_that_exchange_heads():
    """Two pairs of ranks have zigzag's rows of two ranks; all four together have all in order."""
    assert [places(16, 1, rank, 4).tolist() for rank in (0, 3)] == [[0, 1, 14, 15], [6, 7, 8, 9]]
    pairs = [places(16, 2, rank, 4).tolist() for rank in range(4)]
    assert pairs == [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [places(16, 4, rank, 4).tolist() for rank in (1, 2)] == [[4, 5, 6, 7], [8, 9, 10, 11]]


def test_what_is_refused(monkeypatch):
    monkeypatch.setattr("benchmarks.library_peers.find_spec", lambda name: None)
    assert "DeepSpeed is not installed" in Ulysses(Impl("ulysses", "auto"), world(2)).refusal(None)
    ring = Yunchang(Impl("yunchang", "ring+auto"), world(4))
    assert "pip install yunchang" in ring.refusal(Case(**SIZES))
    monkeypatch.setattr("benchmarks.library_peers.find_spec", lambda name: name)
    assert ring.refusal(Case(**SIZES)) is None
    assert "float32" in ring.refusal(Case(**SIZES, dtype="float32"))
    assert "causal masks" in ring.refusal(Case(**SIZES, mask="full"))
    ulysses = Yunchang(Impl("yunchang", "ulysses+auto"), world(4))
    assert ulysses.refusal(Case(128, 1, 8, 2)) == "yunchang shards KV heads over 4 ranks; got 2"
    torchs = TorchContextParallel(Impl("torch", "alltoall+cudnn"), world(2))
    assert torchs.refusal(Case(**SIZES)) == "torch's context parallelism runs on CUDA only"
