"""What the doctor concludes from facts and figures, and from launcher variables; no processes."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.errors import BurstError
from megatron_burst.schedule.topology import Link
from megatron_burst.tools.doctor.compare import (
    check_alike,
    check_compute,
    check_links,
    check_seats,
    link_rates,
)
from megatron_burst.tools.doctor.meeting import Launch, expand_nodes, launch_of
from megatron_burst.tools.doctor.network import check_pairs, knock, own_address
from megatron_burst.tools.doctor.report import Status

USUAL = {
    "gpu": "H200", "gpus": "8", "ranks": "8", "clock": "1980", "driver": "570",
    "hcas": "8 x InfiniBand at 400 Gbit/s", "torch": "2.11.0", "NCCL_DEBUG": "WARN",
}  # fmt: skip


@pytest.mark.parametrize(
    "changes, status, what",
    [
        ({"gpu": "H100"}, Status.WARN, "gpu differs: d has H100; the others H200"),
        ({"gpus": "4"}, Status.WARN, "gpus differs: d has 4; the others 8"),
        ({"ranks": "4"}, Status.WARN, "ranks differs: d has 4; the others 8"),
        ({"clock": "1755"}, Status.WARN, "clock differs: d has 1755; the others 1980"),
        ({"hcas": "7 x InfiniBand at 400 Gbit/s"}, Status.WARN, "hcas differs: d has "
         "7 x InfiniBand at 400 Gbit/s; the others 8 x InfiniBand at 400 Gbit/s"),
        ({"driver": "550"}, Status.WARN, "driver differs: d has 550; the others 570"),
        ({"torch": "2.10.0"}, Status.FAIL,
         "torch differs: d has 2.10.0; the others 2.11.0"),
        ({"te": "2.20"}, Status.FAIL, "te differs: d has 2.20; the others none"),
        ({"NCCL_PROTO": "LL"}, Status.WARN, "NCCL_PROTO differs: d has LL; the others unset"),
    ],
)  # fmt: skip
def test_the_odd_node_is_named(changes, status, what):
    (found,) = check_alike(dict.fromkeys("abc", USUAL) | {"d": USUAL | changes})
    assert (found.status, found.what, found.where) == (status, what, "d")
    assert found.change


def test_equal_nodes_and_names_of_nodes_are_no_difference():
    own = {h: USUAL | {"NCCL_HOSTID": h, "NCCL_IB_HCA": h} for h in "ab"}
    assert [check.status for check in check_alike(own)] == [Status.OK]


def test_ranks_need_a_gpu_each():
    assert check_seats({0: "x", 1: "y"}).status is Status.OK
    for gpus, ranks in (({0: "x", 1: "y", 4: "x"}, [0, 4]), ({0: "x", 1: ""}, [1])):
        found = check_seats(gpus)
        assert found.status is Status.FAIL
        assert found.what == f"ranks {ranks} have no GPU of their own"
    assert check_seats({0: "", 1: ""}).status is Status.SKIP


@given(st.integers(3, 8), st.data())
def test_a_slow_link_is_found_although_both_its_ends_are_late(size, data):
    ring = data.draw(st.permutations(range(size)))
    place = data.draw(st.integers(0, size - 1))
    ends = ring[place], ring[(place + 1) % size]
    ms = {rank: 50.0 if rank in ends else 1.0 for rank in ring}
    nodes = {rank: f"h{rank}" for rank in ring}
    links = link_rates(Link.INTER, [ring], ms, 10**6, nodes)
    assert [(link.source, link.dest) for link in links if link.ratio < 0.7] == [ends]
    found = check_links(Link.INTER, links)
    assert found.status is Status.WARN and "have in common" not in found.change
    assert f"rank {ends[0]} on h{ends[0]} -> rank {ends[1]} on h{ends[1]}: 0.02" in found.what


@given(st.integers(5, 9), st.data())
def test_a_late_rank_is_what_its_slow_links_have_in_common(size, data):
    ring = list(range(size))
    late = data.draw(st.sampled_from(ring))
    ms = {r: 50.0 if (r - late) % size in (0, 1, size - 1) else 1.0 for r in ring}
    links = link_rates(Link.INTRA, [ring], ms, 10**6, dict.fromkeys(ring, "h"))
    slow = {(link.source, link.dest) for link in links if link.ratio < 0.7}
    assert slow == {((late - 1) % size, late), (late, (late + 1) % size)}
    assert f"of ranks [{late}], which slow links" in check_links(Link.INTRA, links).change


def test_even_links_and_none():
    links = link_rates(Link.INTRA, [(0, 1), (2, 3)], dict.fromkeys(range(4), 2.0), 10**9, "aabb")
    assert [link.gb_per_s for link in links] == [500.0] * 4
    assert check_links(Link.INTRA, links).status is Status.OK
    assert check_links(Link.INTER, []).status is Status.SKIP


def test_slow_compute_is_named():
    rates = {0: 700.0, 1: 690.0, 5: 300.0}
    found = check_compute(rates, {0: "a", 1: "a", 5: "b"})
    assert found.status is Status.WARN and "rank 5 on b: 300 (43%)" in found.what
    assert check_compute({0: 700.0, 1: 690.0}, "ab").status is Status.OK


def test_nodes_knock_at_each_others_doors():
    door, closed = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    shut = closed.getsockname()[:2]
    closed.close()
    unreached = knock({"b": door.getsockname()[:2], "c": shut}, 2.0)
    door.close()
    assert list(unreached) == ["c"] and f"127.0.0.1:{shut[1]}" in unreached["c"]
    found = check_pairs({"a": unreached, "b": {}, "c": {}})
    assert found.status is Status.FAIL and found.where == "c"
    assert "1 of 6 ways between nodes are closed: a -> c (127.0.0.1:" in found.what
    assert check_pairs({"a": {}, "b": {}}).status is Status.OK
    assert check_pairs({"a": {}}).status is Status.SKIP


def test_the_address_is_that_of_the_named_interface():
    for pattern in ("=lo", "lo", "=nosuch,lo"):
        assert own_address("192.0.2.1", {"NCCL_SOCKET_IFNAME": pattern}) == "127.0.0.1"
    assert own_address("127.0.0.1", {"NCCL_SOCKET_IFNAME": "^lo"}) == "127.0.0.1"  # by the route
    socket.inet_aton(own_address("127.0.0.1", {}))


def test_launches():
    given = {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
             "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}  # fmt: skip
    launch = launch_of(given)
    assert launch == Launch(5, 16, 1, 4, "n0", 29500) and launch.node_of(9) == "node 2"
    assert launch_of(given | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).joins
    slurm = {
        "SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
        "SLURM_JOB_ID": "31007",
    }  # fmt: skip
    srun = launch_of(slurm)
    assert srun == Launch(9, 16, 1, 8, "gpu07", 21007, nodes=("gpu07", "gpu08"))
    assert srun.node_of(9) == "gpu08"
    assert launch_of(slurm | given) == launch  # torchrun started by srun
    assert launch_of({}) is None
    # a batch script itself is not a step with many tasks
    assert launch_of({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}) is None


@pytest.mark.parametrize("broken", [{"WORLD_SIZE": "many"}, {"MASTER_PORT": ""}, {"RANK": "-1"}])
def test_launches_that_are_none_are_refused(broken):
    given = {"RANK": "5", "WORLD_SIZE": "16", "MASTER_PORT": "29500"}
    with pytest.raises(BurstError, match=f"{next(iter(broken))} must be a number"):
        launch_of(given | broken)


@pytest.mark.parametrize(
    "text, names",
    [
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("r[1-2]n[09-10]-ib", ["r1n09-ib", "r1n10-ib", "r2n09-ib", "r2n10-ib"]),
        ("", []),
    ],
)
def test_slurms_lists_of_nodes(text, names):
    assert list(expand_nodes(text)) == names
