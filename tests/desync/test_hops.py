"""Who is named when ranks wait for each other: who stopped the others, not who gave up first."""

from collections import deque
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_burst.comm.communicator import communicator_of
from megatron_burst.comm.group import state_of
from megatron_burst.comm.stamps import PassKind, RunningPass, Stamp
from megatron_burst.comm.transport import DONE, SendRecvs
from megatron_burst.config import BurstConfig
from megatron_burst.desync import verdict
from megatron_burst.desync.hops import Waits, awaited_hop, ends_of
from megatron_burst.errors import DisagreementError
from megatron_burst.schedule.program import Recv, Ref, Transfer
from megatron_burst.schedule.spec import Cargo
from megatron_burst.schedule.topology import Link
from tests.ranks import run_ranks


def waits(*peers, broken=False, since=0.0):
    return Waits(1, "forward", 7, peers, broken=broken, since=since)


CASES = {  # what ranks say; for whom rank 0 waits; who is named
    "in a ring the silent one": ({0: waits(3), 3: waits(2), 2: waits(1)}, (3,), [1]),
    "several": ({0: waits(1, 2), 1: waits(3)}, (1, 2), [2, 3]),
    "in a circle who came last": (
        {0: waits(3, since=1.0), 3: waits(2, since=1.1), 2: waits(0, since=6.0)}, (3,), [2],
    ),
    "a process that ended": (
        {0: waits(2, broken=True), 1: waits(2, broken=True), 3: waits(0)}, (2,), [2],
    ),
    "whose connections broke": (
        {0: waits(2, broken=True), 2: waits(0, 1, 3, broken=True)}, (2,), [2],
    ),
    "the first of processes that ended": (
        {0: waits(1, 2, 3, broken=True), 1: waits(2, broken=True), 3: waits(2, broken=True)},
        (1, 2, 3), [2],
    ),
    "who is cut off, by itself": ({0: waits(1, 2, 3, broken=True)}, (1, 2, 3), [0]),
    "a node": ({0: waits(2, 3, broken=True), 1: waits(2, 3, broken=True)}, (2, 3), [2, 3]),
    "nobody": ({0: waits()}, (), []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_who_is_named(name):
    posts, peers, named = CASES[name]
    assert ends_of(peers, posts, 4) == named


def test_of_two_ranks_the_silent_one_is_named():
    assert ends_of((1,), {0: waits(1, broken=True)}, 2) == [1]


def test_on_a_cpu_a_hop_waits_for_one_peer_at_a_time():
    recvs = tuple(Recv(peer, Ref("kv"), Ref("kv")) for peer in (1, 2))
    topology = SimpleNamespace(link=lambda *ranks: Link.INTRA)
    ops = [Transfer(Link.INTRA, Cargo.READ, (), recvs)]
    program = SimpleNamespace(ops=ops, cp_rank=0, topology=topology, num_bytes=lambda rows: 8)
    hop = SendRecvs([], [1, 2], 20.0, Exception, waiting_for=2)
    run = RunningPass(1, Stamp(PassKind.FORWARD, 1, 0, 0), program, 1, [hop, DONE], [()])
    assert awaited_hop(SimpleNamespace(runs=deque([run]))).peers == (2,)


@pytest.mark.parametrize("status", [0, 46, None])
def test_a_thread_that_would_break_captures_asks_no_gpu(monkeypatch, status):
    """46: no device; None: CUDA's library is not loaded."""
    asked, name = [], "cudaThreadExchangeStreamCaptureMode"
    library = SimpleNamespace() if status is None else SimpleNamespace(**{name: lambda _: status})
    monkeypatch.setattr(verdict.ctypes, "CDLL", lambda _: library)
    monkeypatch.setattr(verdict, "awaited_hop", asked.append)
    log = SimpleNamespace(waits=False, consensus=SimpleNamespace(timeout_s=1))
    for on_gpu in (True, False):
        verdict.HopWatch(on_gpu).late(log)
    assert len(asked) == 1 + (status == 0)


def strayed(rank):
    """A rank whose hop fails while another wants to agree on something new."""
    group = dist.group.WORLD
    communicator_of(group, BurstConfig(timeout_s=20))
    state = state_of(group)
    if rank == 1:  # posts something that rank 0 never does
        state.consensus._store.set(state.consensus.keys()[1], '{"q": "(1, 2)"}')
    dist.barrier()
    return state.log.lost_hop(RuntimeError("Connection closed")) if rank == 0 else None


def test_a_failed_hop_names_the_rank_that_went_astray():
    error, _ = run_ranks(strayed, 2)
    assert type(error) is DisagreementError
    assert "got a call from cp rank 1 that this rank (cp rank 0) did not make" in str(error)
