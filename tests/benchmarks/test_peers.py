"""What each peer computes, refuses, and passes to the library it calls."""

import os
import re
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import benchmarks
from benchmarks import before, facts, te
from benchmarks.cases import Case
from benchmarks.impls import Impl
from benchmarks.peers import Burst, Ceiling, OneGpu, draw_shard
from benchmarks.te import TransformerEngine
from megatron_burst.errors import BurstError
from tests.oracle import full_attention

CASE = Case(64, 2, 4, 2, 8, 8, "causal", "float32")


def world(size, rank=0, nodes=1, device="cpu"):
    return SimpleNamespace(
        rank=rank, size=size, nodes=nodes, device=torch.device(device), group="the group"
    )


@pytest.mark.parametrize("peer_class", [Ceiling, OneGpu])
def test_kernels_alone_compute_attention_and_its_gradients(peer_class):
    peer = peer_class(Impl("ceiling", "auto"), world(2))
    peer.prepare(draw_shard(CASE, world(2)))
    heads = (2, 1) if peer_class is Ceiling else (4, 2)
    assert [x.shape[:3] for x in peer.tensors] == [(2, 64, heads[i]) for i in (0, 1, 1, 0)]
    q, k, v = (x.double().requires_grad_() for x in peer.tensors[:3])
    out = full_attention(q, k, v, True, 8**-0.5)
    truth = (out, *torch.autograd.grad(out, (q, k, v), peer.tensors[3].double()))
    for ours, expected in zip(peer.run_forward_backward(), truth, strict=True):
        torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=1e-5)
    peer.release()
    assert peer.tensors == () and peer.note == "backend torch-cpu"


def test_only_rank_0_computes_alone():
    peer = OneGpu(Impl("one_gpu", "auto"), world(2, rank=1))
    peer.prepare(draw_shard(CASE, world(2)))
    assert peer.tensors == peer.run_forward_backward() == ()
    assert OneGpu.num_bytes(CASE) == 2 * 64 * (4 * 2 * 6 * 16 + 4 * (4 * 8 + 2 * 16))


@pytest.mark.parametrize(("heads", "size"), [((4, 4), 8), ((6, 2), 4)])
def test_the_ceiling_refuses_heads_that_cannot_be_sharded(heads, size):
    case = Case(64, 1, *heads, 8, 8)
    refusal = Ceiling(Impl("ceiling", "auto"), world(size)).refusal(case)
    assert f"{heads[0]}/{heads[1]} heads must be sharded evenly over {size} ranks" in refusal


def test_the_ceiling_keeps_one_key_head_where_there_are_fewer_than_ranks():
    peer = Ceiling(Impl("ceiling", "auto"), world(4))
    assert peer.heads(Case(64, 1, 8, 1)) == (2, 1) and peer.refusal(Case(64, 1, 8, 1)) is None


THEN = {
    "attention.py": """
from megatron_burst.comm.group import FACTOR

def burst_attention(q, k, v, *, group, causal, qkv_format):
    assert (group, causal, qkv_format) == ("the group", True, "sbhd")
    return FACTOR * q * k.mean() * v.mean()
""",
    "comm/group.py": """
FACTOR, released = 2, []
release_buffers, symmetric_bytes = released.append, len
""",
}


def test_an_earlier_commit_runs_beside_todays_package(tmp_path, monkeypatch):
    """A folder of its own, a name of its own; what is measured is the commit, not the checkout."""
    package = tmp_path / "repository" / "megatron_burst"
    for name, text in {"__init__.py": "", "comm/__init__.py": "", **THEN}.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    git = ["git", "-C", package.parent, "-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "then"]):
        subprocess.run([*git, *words], check=True)
    (package / "attention.py").write_text("broken since")
    commit = before.write("HEAD", tmp_path / "before", package.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(before, "FOLDER", tmp_path / "before")
    peer = Burst(Impl("before", "auto"), world(1))
    shard = draw_shard(CASE, world(1))
    peer.prepare(shard)
    assert peer.note == f"commit {commit}" and peer.uncounted_bytes() == len("the group")
    out, dq, _, _ = peer.run_forward_backward()
    torch.testing.assert_close(out, 2 * shard.q.detach() * shard.k.mean() * shard.v.mean())
    torch.testing.assert_close(dq, 2 * shard.dout * shard.k.mean() * shard.v.mean())
    peer.release()
    assert sys.modules["burst_before.comm.group"].released == ["the group"]


def test_no_earlier_commit_is_measured_unless_it_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr(before, "FOLDER", tmp_path)
    with pytest.raises(BurstError, match="write it with `python -m benchmarks.before COMMIT`"):
        Burst(Impl("before", "auto"), world(1))
    with pytest.raises(BurstError, match="COMMIT must be one of this repository.*'no such'"):
        before.write("no such", tmp_path)


@pytest.fixture
def engine(monkeypatch):
    """A stand-in for TransformerEngine that records how it was called."""
    calls = []

    class DotProductAttention(torch.nn.Module):
        def __init__(self, **options):
            super().__init__()
            calls.append(options)

        def set_context_parallel_group(self, *arguments):
            calls.append(arguments)

        def forward(self, q, k, v):
            return (q * k.mean() * v.mean()).flatten(2)

    module = ModuleType("transformer_engine.pytorch")
    module.DotProductAttention = DotProductAttention
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", module)
    monkeypatch.setattr(te, "find_spec", lambda name: True)
    monkeypatch.setenv("CUDNN_HOME", "the user's")  # so it is left alone
    made = "the group", "a stream"
    monkeypatch.setattr(te.TransformerEngine, "_made_once", made)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    return calls


def test_transformer_engine_gets_heads_mask_and_group(engine):
    peer = TransformerEngine(Impl("te", "p2p"), world(2, device="cuda"))
    assert peer.refusal(CASE) is None
    peer.prepare(draw_shard(CASE, world(2)))
    assert engine == [
        {
            "num_attention_heads": 4,
            "kv_channels": (8, 8),
            "num_gqa_groups": 2,
            "attention_dropout": 0.0,
            "qkv_format": "sbhd",
            "attn_mask_type": "causal",
        },
        ("the group", [0, 1], "a stream", "p2p"),
    ]
    shapes = [tuple(x.shape) for x in peer.run_forward_backward()]
    assert shapes == [(32, 2, 32), (32, 2, 4, 8), (32, 2, 2, 8), (32, 2, 2, 8)]
    assert peer.note == "kernel unknown"
    peer.release()
    assert peer.shard is peer.attention is None
    assert os.environ["CUDNN_HOME"] == "the user's"


def test_rows_tell_which_kernel_transformer_engine_took(engine, monkeypatch):
    attention = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
    module = ModuleType(attention)
    module._attention_backends = {"use_fused_attention": True, "fused_attention_backend": 1}
    monkeypatch.setitem(sys.modules, attention, module)
    peer = TransformerEngine(Impl("te", "p2p"), world(2, device="cuda"))
    notes = []
    for chosen in ({}, {"use_flash_attention": True, "flash_attention_backend": "2.8"}):
        module._attention_backends |= chosen
        peer.prepare(draw_shard(CASE, world(2)))
        peer.run_forward()
        notes.append(peer.note)
    assert notes == ["kernel cuDNN (sub-backend 1)", "kernel FlashAttention 2.8"]


def test_rows_tell_every_cudnn_that_is_loaded(tmp_path, monkeypatch):
    """TransformerEngine may have loaded a different cuDNN than torch."""
    numbers = {"/a/libcudnn.so.9": 91900, "/b/libcudnn.so.9": 91400}
    library = SimpleNamespace(
        CDLL=lambda file: SimpleNamespace(cudnnGetVersion=lambda: numbers[file])
    )
    monkeypatch.setattr(facts, "ctypes", library)
    maps = tmp_path / "maps"
    maps.write_text("".join(f"7f00-7f01 r--p 0 00:00 1   {file}\n" for file in numbers) + "8-9 r\n")
    assert facts.loaded_cudnn(maps) == ["9.14.0", "9.19.0"]
    assert facts.loaded_cudnn(tmp_path / "none") == []


def test_a_gpu_is_told_with_a_hash_that_tells_machines_apart(monkeypatch):
    def told(host, uuid):
        monkeypatch.setattr("platform.node", lambda: host)
        properties = SimpleNamespace(uuid=uuid)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return facts.gpu_state(torch.device("cuda"))

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    for name, value in {"clock_rate": 1980, "temperature": 42}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    one = told("a", "u")
    assert re.fullmatch(r"NVIDIA H200; 1980 MHz, 42 C; machine [0-9a-f]{8}", one)
    assert one == told("a", "u") and len({one, told("b", "u"), told("a", "v")}) == 3
    monkeypatch.delattr(torch.cuda, "temperature")  # as where NVML is missing
    assert told("a", "u") == one.replace(" 1980 MHz, 42 C;", "")
    assert facts.gpu_state(torch.device("cpu")) == "CPU"


def test_torchs_cudnn_is_loaded_whole(tmp_path, monkeypatch):
    """TransformerEngine would find the system's parts. Guards also against torch's own in a process
    that names another."""
    torch, lib = tmp_path / "torch" / "__init__.py", tmp_path / "nvidia" / "cudnn" / "lib"
    loaded = []
    library = SimpleNamespace(CDLL=lambda file, mode: loaded.append(file), RTLD_GLOBAL=1)
    monkeypatch.setattr(benchmarks, "ctypes", library)
    monkeypatch.setenv("CUDNN_HOME", "the user's")
    lib.mkdir(parents=True)
    files = [lib / name for name in ("libcudnn.so.9", "libcudnn_graph.so.9")]
    for file in files:
        file.touch()
    benchmarks.load_cudnn_of(torch)
    assert os.environ["CUDNN_HOME"] == "the user's" and not loaded
    monkeypatch.delenv("CUDNN_HOME")
    benchmarks.load_cudnn_of(torch)
    assert os.environ["CUDNN_HOME"] == str(lib.parent) and loaded == [str(x) for x in files]
    loaded.clear()
    monkeypatch.delenv("CUDNN_HOME")
    benchmarks.load_cudnn_of(tmp_path / "none" / "torch" / "__init__.py")
    assert "CUDNN_HOME" not in os.environ and not loaded


def test_rows_name_the_peers_that_are_installed(tmp_path, monkeypatch):
    """By the names that their wheels have; flash-attn's hopper folder calls itself flash_attn_3."""
    wheels = {"liger_kernel": "0.6", "quack_kernels": "0.7", "cut_cross_entropy": "25.1",
              "flash_attn_3": "3.0.0b1", "deepspeed": "0.19.8"}  # fmt: skip
    for name, version in wheels.items():
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    told = dict(each.rsplit(" ", 1) for each in facts.versions().split("; "))
    assert {name: told.get(name.replace("_", "-")) for name in wheels} == wheels


def test_rows_tell_the_commit(monkeypatch):
    assert re.search(r"commit [0-9a-f]{12}( with changes)?(;|$)", facts.versions())
    monkeypatch.setenv("MEGATRON_BURST_COMMIT", "123abc")
    facts.commit.cache_clear()
    assert facts.commit() == "123abc"
    facts.commit.cache_clear()


@pytest.mark.parametrize(
    ("size", "nodes", "reason"),
    [
        (4, 1, None),
        (8, 4, None),
        (8, 2, "shards KV heads over 4 ranks; got 2"),
        (2, 1, "2 rows"),
        (3, 1, "2 rows"),
        (3, 3, "3 rows"),
    ],
)
def test_two_level_exchange_needs_a_grid_of_ranks(engine, size, nodes, reason):
    peer = TransformerEngine(Impl("te", "a2a+p2p"), world(size, 0, nodes, "cuda"))
    refusal = peer.refusal(CASE)
    assert refusal is None if reason is None else reason in refusal


def test_transformer_engine_refuses_the_cpu(engine):
    peer = TransformerEngine(Impl("te", "p2p"), world(2))
    assert peer.refusal(CASE) == "TransformerEngine runs on CUDA only"
