"""What `make conformance` substitutes for others' functions, and its table."""

import enum
import inspect
import os
import pickle
import re
import subprocess
import sys
from argparse import Namespace
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from conformance import on_cpu, results, run, shared_gpus
from conformance.in_place import MODES, TE_FUNCTION, attend, choose_kernel, turned
from conformance.results import Outcome
from conformance.suites import SUITES, Suite, named
from megatron_burst.errors import BurstError
from tests.ranks import preload, run_ranks

preload("conformance.in_place")
REAL, PADDED = (698, 30), (704, 32)  # document lengths without and with padding: 8 | PADDED
HEADS, KV_HEADS, DIM = 4, 2, 16


class Strategy(enum.Enum):
    DUAL_CHUNK_SWAP = 1


DEFAULTS = {
    "softmax_scale": DIM**-0.5, "attn_bias_type": "no_bias", "softmax_type": "vanilla",
    "load_balancing_strategy": Strategy.DUAL_CHUNK_SWAP, "window_size": (-1, 0), "dropout_p": 0.0,
}  # fmt: skip


def te_function():
    """A function with the signature of TransformerEngine's."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = TE_FUNCTION.parameters
    signature = [inspect.Parameter(n, kind, default=DEFAULTS.get(n)) for n in names]

    def function(*args, **options):
        raise AssertionError("burst has its place")

    function.__signature__ = inspect.Signature(signature)
    return function


@dataclass
class AttentionParams:
    """What `choose_kernel` reads of TransformerEngine's class."""

    cp_comm_type: str
    window_size: tuple[int, int]
    num_gqa_groups: int
    cp_size: int = 4
    softmax_type: str = "vanilla"


@pytest.mark.parametrize(
    ("way", "window", "kv_heads", "asked"),
    [
        ("p2p", (-1, 0), 2, "p2p"),
        ("p2p", (512, 0), 2, "all_gather"),
        ("a2a+p2p", (512, 0), 2, "all_gather"),
        ("a2a", (512, 0), 4, "a2a"),
        ("a2a", (512, 0), 2, "all_gather"),  # it would divide by 2 // 4 KV heads
    ],
)
def test_transformer_engine_is_asked_for_a_kernel_of_a_case_that_it_has(
    way, window, kv_heads, asked
):
    params = AttentionParams(way, window, kv_heads)
    assert choose_kernel(lambda params: params.cp_comm_type, params) == asked


def test_transformer_engine_is_asked_about_an_all_to_all_where_there_are_sinks():
    params = AttentionParams("p2p", (128, 0), 2, softmax_type="learnable")
    assert choose_kernel(lambda params: params.cp_comm_type, params) == "a2a"


def with_sinks(rank: int) -> list[torch.Tensor]:
    """out, and the gradient of the sinks, through TransformerEngine's arguments."""
    mine = rows_of((sum(PADDED),), rank, 2)
    q, k, v, dout = (x[mine].unsqueeze(0) for x in sample())
    sink = torch.linspace(-1, 4, HEADS, dtype=torch.float64).requires_grad_()
    edges = torch.tensor([0, sum(PADDED)], dtype=torch.int32)
    out = attend(
        te_function(), True, q, k, v, edges, edges, sum(PADDED), sum(PADDED), None, None,
        cp_group=dist.group.WORLD, cp_global_ranks=range(2), cp_comm_type="p2p",
        qkv_format="bshd", attn_mask_type="causal", softmax_type="learnable",
        softmax_offset=sink.view(1, -1, 1, 1), deterministic=False,
    )  # fmt: skip
    out.backward(dout)
    return [out.detach()[0], sink.grad]


def test_sinks_in_their_place_have_the_gradient_of_all_ranks():
    q, k, v, dout = (x.transpose(0, 1) for x in sample())
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
    sink = torch.linspace(-1, 4, HEADS, dtype=torch.float64).requires_grad_()
    scores = q @ k.mT * DIM**-0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, -torch.inf)
    column = sink.view(-1, 1, 1).expand(-1, scores.shape[1], 1)
    out = torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ v
    out.backward(dout)
    for rank, (got, grad) in enumerate(run_ranks(with_sinks, 2)):
        mine = rows_of((sum(PADDED),), rank, 2)
        torch.testing.assert_close(got, out.detach().transpose(0, 1)[mine], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(grad, sink.grad, rtol=1e-9, atol=1e-9)


def sample() -> list[torch.Tensor]:
    """q, k, v and dout of the whole sample, [tokens, heads, dim]."""
    torch.manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(sum(PADDED), h, DIM, dtype=torch.float64) for h in heads]


def oracle(lengths, padded, window: int) -> list[torch.Tensor]:
    """out, dq, dk, dv of causal documents; padding rows get and contribute nothing."""
    q, k, v, dout = sample()
    for x in (q, k, v):
        x.requires_grad_()
    out, start = torch.zeros_like(q), 0
    for real, length in zip(lengths, padded, strict=True):
        rows = slice(start, start + real)
        grown = [x[rows].transpose(0, 1) for x in (q, k, v)]
        near = torch.ones(real, real, dtype=torch.bool).tril()
        near = near.triu(-window) if window > 0 else near
        part = scaled_dot_product_attention(*grown, attn_mask=near, enable_gqa=True)
        out[rows] = part.transpose(0, 1)
        start += length
    out.backward(dout)
    return [out.detach(), q.grad, k.grad, v.grad]


def rows_of(padded, rank: int, ranks: int) -> torch.Tensor:
    """Chunks r and 2P-1-r of every document."""
    start, rows = 0, []
    for length in padded:
        chunks = torch.arange(start, start + length).chunk(2 * ranks)
        rows += [chunks[rank], chunks[2 * ranks - 1 - rank]]
        start += length
    return torch.cat(rows)


def attended(rank: int, way: str, form: str, window: int, group=None) -> list[torch.Tensor]:
    """out, dq, dk, dv of this rank's rows, through TransformerEngine's arguments."""
    packed, ranks = form == "thd", dist.get_world_size()
    mine = rows_of(PADDED if packed else (sum(PADDED),), rank, ranks)
    q, k, v, dout = (x[mine] for x in sample())
    edges = [torch.tensor([0, x[0], sum(x)], dtype=torch.int32) for x in (REAL, PADDED)]
    if not packed:
        q, k, v, dout = (x.unsqueeze(form.index("b")) for x in (q, k, v, dout))
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    call = partial(
        attend, te_function(), True, q, k, v, edges[0], edges[0], max(PADDED), max(PADDED),
        edges[1], edges[1], cp_group=group or dist.group.WORLD, cp_global_ranks=range(ranks),
        cp_comm_type=way, qkv_format=form,
        attn_mask_type="padding_causal" if packed else "causal", window_size=(window, 0),
        deterministic=True,
    )  # fmt: skip
    with torch.inference_mode():  # as TransformerEngine's test of padding at the tail does first
        before = call()
    out = call()
    assert torch.equal(before, out)
    out.backward(dout)
    results = out.detach(), q.grad, k.grad, v.grad
    return [x if packed else x.squeeze(form.index("b")) for x in results]


def all_attended(rank: int, way: str) -> list:
    return [attended(rank, way, form, w) for form in ("sbhd", "bshd", "thd") for w in (-1, 100)]


def compare(found: list, form: str, window: int) -> None:
    """All ranks' rows with the oracle's."""
    whole = (sum(PADDED),)
    lengths, padded = (REAL, PADDED) if form == "thd" else (whole, whole)
    expected = oracle(lengths, padded, window)
    for rank, tensors in enumerate(found):
        mine = rows_of(padded, rank, len(found))
        for got, truth in zip(tensors, expected, strict=True):
            torch.testing.assert_close(got, truth[mine], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("way", ["p2p", "all_gather", "a2a"])
def test_burst_in_the_place_of_each_of_transformer_engines_ways(way):
    found = run_ranks(all_attended, 2, way)
    forms = [(form, window) for form in ("sbhd", "bshd", "thd") for window in (-1, 100)]
    for i, (form, window) in enumerate(forms):
        compare([results[i] for results in found], form, window)


ON_NODES = [
    *((way, form, -1) for way in MODES for form in ("sbhd", "thd")),
    *((way, "sbhd", 100) for way in MODES),
    ("p2p", "thd", 100),
    ("a2a", "thd", 100),
]


def attended_on_nodes(rank: int) -> list:
    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    given = {"a2a+p2p": [rows[rank // 2], columns[rank % 2]]}
    return [attended(rank, *case, given.get(case[0])) for case in ON_NODES]


def test_burst_in_their_place_on_two_nodes_of_two_ranks():
    found = run_ranks(attended_on_nodes, 4, nodes=2)
    for i, (_, form, window) in enumerate(ON_NODES):
        compare([results[i] for results in found], form, window)


@pytest.mark.parametrize(
    "given",
    [dict(fp8=True), dict(attn_bias_type="post_scale_bias"), dict(cp_comm_type="ulysses"),
     dict(dropout_p=0.1)],
    ids=lambda given: next(iter(given)),
)  # fmt: skip
def test_what_burst_lacks_is_refused_and_never_ignored(given):
    call = dict(cp_comm_type="p2p", qkv_format="sbhd", attn_mask_type="causal") | given
    with pytest.raises(BurstError, match="in place of"):
        attend(te_function(), **call)


def test_none_and_p2p_become_burst_and_nothing_else_does():
    assert [turned(kind) for kind in (None, "p2p", "a2a")] == ["burst", "burst", "a2a"]
    assert turned(["p2p", "all_gather"]) == ["burst", "all_gather"]


PEER = """
import pytest
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("tp", [1, 4])
def test_one(tp, dtype): assert tp < 4
def test_two(): assert False, "two is wrong"
def test_three(): pytest.skip("by itself")
"""


def run_peer(tmp_path, ranks: int, times: int):
    """Exit statuses and rows after a peer's program ran through the plugin with its own suite."""
    (tmp_path / "test_peer.py").write_text(PEER)
    starter = tmp_path / "starter.py"
    starter.write_text(
        "import sys, pytest\n"
        "from conformance import plugin, suites\n"
        "axes = (suites.Axis('dtype', ('fp8',), 'no fp8'),)\n"
        "exclusions = (suites.Exclusion(r'\\[4', 'needs 4 ranks', 2),)\n"
        "plugin.SUITES = (suites.Suite('peer', 'TE', 'x', 'pytest', axes=axes,\n"
        "                              exclusions=exclusions),)\n"
        "sys.exit(pytest.main(['-q', '-p', 'conformance.plugin', '-p', 'no:cacheprovider',\n"
        f"                      '-c', '/dev/null', r'{tmp_path / 'test_peer.py'}']))\n"
    )
    environment = {
        "CONFORMANCE_SUITE": "peer", "CONFORMANCE_RESULTS": str(tmp_path / "results.csv"),
        "PYTHONPATH": str(Path(__file__).parent.parent), "PATH": "/usr/bin:/bin",
        "CONFORMANCE_RANKS": str(ranks),
    }  # fmt: skip
    command = [sys.executable, starter]
    codes = [subprocess.run(command, env=environment).returncode for _ in range(times)]
    return codes, results.read(tmp_path / "results.csv")


def test_each_case_is_counted_once_and_what_is_left_out_has_its_reason(tmp_path):
    codes, rows = run_peer(tmp_path, ranks=2, times=2)
    assert codes == [1, 0]  # the second time nothing is left to run
    found = {case: row.outcome for case, row in results.verdicts(rows).items()}
    assert found == {"test_one[1-bf16]": "passed", "test_two": "failed", "test_three": "skipped"}
    assert {(row.count, row.detail) for row in rows if row.outcome == "left out"} == {
        (2, "no fp8"), (1, "needs 4 ranks"),
    }  # fmt: skip
    assert "two is wrong" in results.verdicts(rows)["test_two"].detail
    assert "| peer | 1 | 1 | 1 | 3 | 0 |" in results.table(rows)


def test_with_four_ranks_cases_that_need_them_run_first(tmp_path):
    _, rows = run_peer(tmp_path, ranks=4, times=1)
    started = [row.case for row in rows if row.outcome == "started"]
    assert started == ["test_one[4-bf16]", "test_one[1-bf16]", "test_two", "test_three"]
    assert {row.detail for row in rows if row.outcome == "left out"} == {"no fp8"}


@pytest.mark.parametrize(
    ("gpus", "asked", "nodes"), [(1, 1, 4), (2, 1, 2), (3, 1, 2), (4, 1, 1), (4, 2, 2), (0, 1, 1)]
)
def test_nodes_are_emulated_where_ranks_share_gpus_or_if_asked(monkeypatch, gpus, asked, nodes):
    monkeypatch.setattr(run, "_gpus", lambda: gpus)
    given = {"te": "te", "megatron_lm": "megatron", "out": None, "limit_s": 1}
    place = run._place(Namespace(**given, ranks=4, nodes=asked))
    assert place.nodes == nodes
    suite = next(named(("test_attention",)))
    told = run.environment_of(suite, place)
    assert told.get("CONFORMANCE_NODES", "1") == str(nodes) and told["CONFORMANCE_RANKS"] == "4"
    command = run.command_of(suite, place)
    assert command[command.index("--nproc-per-node") + 1] == "4"


@pytest.mark.parametrize(
    ("visible", "gpus"), [(None, 2), ("0,1", 2), ("1", 1), ("", 0), ("-1", 0), ("0,-1,1", 1)]
)
def test_gpus_are_those_that_programs_may_use(monkeypatch, visible, gpus):
    """Ranks of a run on one of two GPUs were taken for ranks of one node, which NCCL refuses."""
    listed = subprocess.CompletedProcess((), 0, "GPU 0: H200\nGPU 1: H200\n")
    monkeypatch.setattr(run.shutil, "which", lambda name: name)
    monkeypatch.setattr(run.subprocess, "run", lambda *_, **__: listed)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert run._gpus() == gpus


def test_transformer_engines_checkout_does_not_hide_the_installed_one(tmp_path):
    (tmp_path / "beside.py").touch()
    given = {"te": str(tmp_path), "megatron_lm": None, "out": None, "limit_s": 1}
    place = run._place(Namespace(**given, ranks=2, nodes=1))
    suite = next(named(("test_cp_utils",)))
    code = "from importlib.util import find_spec; print(find_spec('beside'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=run.environment_of(suite, place),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["None"]


def test_ranks_that_share_gpus_find_a_device_each_and_are_on_nodes_of_their_own(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch, "device", kind := torch.device)
    monkeypatch.setattr(sys, "argv", ["run_cp_thd_tail_padding.py"])
    monkeypatch.setenv("CONFORMANCE_RANKS", "4")
    for rank in range(4):
        given = {"CONFORMANCE_NODES": 2, "RANK": rank, "WORLD_SIZE": 4, "NCCL_HOSTID": "before"}
        for name, value in given.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(shared_gpus, "when_imported", lambda module, then: None)
        shared_gpus.install()
        assert os.environ["NCCL_HOSTID"] == f"pretended-{rank // 2}"
    shared_gpus._share()
    exec("seen = torch.cuda.device_count()", inside := {"__name__": "torch.x", "torch": torch})
    assert torch.cuda.device_count() == 4 and inside["seen"] == 2
    for rank in range(4):
        torch.cuda.set_device(rank)
        assert torch.device("cuda", rank) == kind("cuda", rank % 2)
    assert chosen == [0, 1, 0, 1]
    assert pickle.loads(pickle.dumps(kind("cpu"))) == kind("cpu")
    assert isinstance(kind("cpu"), torch.device) and torch.device("cpu") == kind("cpu")


def test_a_case_that_fails_on_any_rank_has_failed():
    rows = [Outcome("s", "c", "started"), Outcome("s", "c", "failed"), Outcome("s", "c", "passed")]
    assert results.verdicts(rows)["c"].outcome == "failed"
    assert results.running(rows) is None
    assert results.running([*rows, Outcome("s", "d", "started")]) == "d"


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_expressions_of_the_table_compile_and_reasons_are_given(suite: Suite):
    for row in suite.exclusions:
        re.compile(row.case)
        assert row.reason
    assert all(axis.reason and axis.values for axis in suite.axes)
    assert suite in list(named((suite.name,)))


def test_groups_on_one_device_accept_what_torch_adds(monkeypatch):
    monkeypatch.setattr(dist.ProcessGroupGloo, "__init__", dist.ProcessGroupGloo.__init__)
    on_cpu.share_one_device()
    added = {"timeout": timedelta(seconds=5), "group_name": "ours", "of_a_later_torch": False}
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, **added)
    assert (group.size(), group.options.group_name) == (1, "ours")
