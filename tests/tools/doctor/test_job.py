"""The doctor in a job, on CPU processes: missing nodes; slow, odd or stuck ranks. Guards against a
doctor that hangs with the job, or sees no problem."""

import json
import multiprocessing
import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from megatron_burst.tools.doctor.meeting import Launch, Meeting
from tests.ranks import preload, preloaded

LATE_S = 0.2  # many times what a transfer takes
preload(
    "megatron_burst.tools.doctor.job", "megatron_burst.tools.main", "megatron_burst.mcore.patches"
)
preload("megatron.training.training")  # which each node looks through


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def torchrun(rank, world, port, node, local_size=2):
    """What torchrun would set on a node of that name."""
    return {
        "RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % local_size,
        "LOCAL_WORLD_SIZE": local_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "NCCL_HOSTID": node,
    }  # fmt: skip


def healthy():
    pass


def slow():
    """This rank is late in every transfer."""
    import torch.distributed as dist

    post = dist.batch_isend_irecv

    def late(operations):
        time.sleep(LATE_S)
        return post(operations)

    dist.batch_isend_irecv = late


def stuck():
    """This rank never starts a transfer."""
    import torch.distributed as dist

    dist.batch_isend_irecv = lambda operations: time.sleep(600)


def impatient():
    """This rank gives up a shift after a second of its 60, and waits for all else as long."""
    from megatron_burst.tools.doctor import job

    real = job.watched

    def watched(meeting, stage, give_up):
        own = replace(meeting, timeout_s=1.0) if stage.startswith("the shift") else meeting
        return real(own, stage, give_up)

    job.watched = watched


def impatient_and_stuck():
    impatient()
    stuck()


def sure_who_comes():
    """This rank waits for the first four ranks, and no more for others, as if its time was over."""
    from megatron_burst.tools.doctor.meeting import Meeting

    real = Meeting.collect

    def collect(self, topic, ranks, patience=1.0):
        if topic == "here" and len(ranks) > 4:
            real(self, topic, range(4))
            patience = 0.0
        return real(self, topic, ranks, patience)

    Meeting.collect = collect


def odd():
    """This rank has a different torch."""
    from megatron_burst.tools.doctor import job

    real = job.software
    job.software = lambda: real() | {"torch": "2.10.0"}


def enter(folder, environment, tamper, arguments):
    os.environ.update({name: str(value) for name, value in environment.items()})
    rank = environment.get("RANK", environment.get("SLURM_PROCID"))
    with (
        open(Path(folder) / f"out{rank}", "w") as out,
        open(Path(folder) / f"err{rank}", "w") as err,
    ):
        sys.stdout, sys.stderr = out, err
        from megatron_burst.tools.main import app

        tamper()
        app(["doctor", *arguments])


def doctor(folder, environments, *arguments, tamper=None, within_s=180):
    """Exit codes and outputs of the processes; `tamper` by rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preloaded())
    processes = []
    for rank, environment in environments.items():
        work = (str(folder), environment, (tamper or {}).get(rank, healthy), arguments)
        processes.append(context.Process(target=enter, args=work, daemon=True))
        processes[-1].start()
    deadline = time.monotonic() + within_s
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = {r: p.exitcode for r, p in zip(environments, processes, strict=True)}
    finally:
        for process in processes:
            process.kill()
    read = {rank: (folder / f"out{rank}").read_text() for rank in environments}
    return codes, read, {rank: (folder / f"err{rank}").read_text() for rank in environments}


def checks_of(text):
    return {(c["name"], c["status"]): c for c in json.loads(text)["checks"]}


def test_a_slow_rank_is_named_and_only_rank_0_reports(tmp_path):
    port = free_port()
    ranks = {rank: torchrun(rank, 4, port, "ab"[rank // 2]) for rank in range(4)}
    codes, out, err = doctor(tmp_path, ranks, "--json", "--timeout-s", "60", tamper={3: slow})
    assert set(codes.values()) == {0}, err
    assert [out[rank] for rank in (1, 2, 3)] == ["", "", ""]
    found = checks_of(out[0])
    assert found["attendance", "ok"]["what"] == "all 4 ranks are there"
    assert found["reachable", "ok"]["what"] == "all 2 nodes reach each other by TCP"
    assert found["hook points", "ok"]["where"] == "all 2 nodes"
    table = json.loads(out[0])["ranks"].splitlines()
    assert [line.split()[-2:] for line in table[1:]] == [["0", "1"], ["2", "3"]]
    links = {(x["kind"], x["source"], x["dest"]): x for x in json.loads(out[0])["links"]}
    assert set(links) == {
        ("intra", 0, 1), ("intra", 1, 0), ("intra", 2, 3), ("intra", 3, 2),
        ("inter", 0, 2), ("inter", 2, 0), ("inter", 1, 3), ("inter", 3, 1),
    }  # fmt: skip
    for kind in ("intra", "inter"):
        assert "rank 3 on b" in found[f"{kind} links", "warn"]["what"]
    assert links["intra", 2, 3]["nodes"] == ["b", "b"]
    # the other rank of the link may be late too, by less
    assert links["intra", 2, 3]["gb_per_s"] < 2 * 2**20 / LATE_S / 1e9


def test_who_says_nothing_is_waited_for_until_the_time_is_over():
    meeting = Meeting(Launch(0, 3, 0, 3, "localhost", 0), dist.HashStore(), timeout_s=0.1)
    meeting.post("here", "first")
    began = time.monotonic()
    assert meeting.collect("here", range(3)) == {0: "first"}
    assert time.monotonic() - began >= 0.1
    began = time.monotonic()
    assert meeting.collect("here", [2], patience=3.0) == {} and time.monotonic() - began >= 0.3


def test_a_missing_node_is_named_and_the_others_are_measured(tmp_path):
    port = free_port()
    ranks = {rank: torchrun(rank, 6, port, "ab"[rank // 2]) for rank in (0, 1, 2, 3)}
    options = ("--json", "--timeout-s", "60")
    codes, out, err = doctor(tmp_path, ranks, *options, tamper={0: sure_who_comes})
    assert set(codes.values()) == {1}, err
    found = checks_of(out[0])
    missing = found["attendance", "fail"]
    assert missing["what"] == "ranks [4, 5] of 6 did not come within 60 s"
    assert missing["where"] == "node 2" and f"127.0.0.1:{port}" in missing["change"]
    assert len(json.loads(out[0])["links"]) == 8 and json.loads(out[0])["breaks"]


def test_a_stuck_rank_is_named_instead_of_waited_for(tmp_path):
    port = free_port()
    ranks = {rank: torchrun(rank, 3, port, "a", local_size=3) for rank in range(3)}
    tamper = {0: impatient, 1: impatient_and_stuck, 2: impatient}
    codes, out, err = doctor(tmp_path, ranks, "--json", "--timeout-s", "60", tamper=tamper)
    assert set(codes.values()) == {1}, err
    late = checks_of(out[0])["time-out", "fail"]
    assert "did not finish the shift over intra links within 1 s" in late["what"]
    assert late["where"] in ("ranks [0, 1, 2]", "ranks [1]", "ranks [0, 1]", "ranks [1, 2]")


def test_a_node_with_another_torch_breaks_a_run(tmp_path):
    port = free_port()
    ranks = {rank: torchrun(rank, 3, port, "abc"[rank], local_size=1) for rank in range(3)}
    codes, out, err = doctor(tmp_path, ranks, "--json", "--timeout-s", "60", tamper={2: odd})
    assert set(codes.values()) == {1}, err
    alike = checks_of(out[0])["alike", "fail"]
    assert alike["what"].startswith("torch differs: c has 2.10.0; the others ")
    assert alike["where"] == "c" and alike["change"] == "install the same torch on all nodes"


def test_under_srun_ranks_find_each_other_by_slurms_variables(tmp_path):
    port = free_port()
    ranks = {
        rank: {
            "SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": 2, "SLURM_LOCALID": rank,
            "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_JOB_ID": 17, "MASTER_PORT": port,
        }
        for rank in range(2)
    }  # fmt: skip
    codes, out, err = doctor(tmp_path, ranks, "--timeout-s", "60")
    assert set(codes.values()) == {0}, err
    assert "all 2 ranks are there" in out[0] and "a run would start" in out[0] and not out[1]
    assert "one context-parallel group:\nnode 0  0  1\n" in out[0]


def test_a_rank_without_a_store_says_so_in_a_sentence(tmp_path):
    ranks = {1: torchrun(1, 2, free_port(), "a")}
    codes, _, err = doctor(tmp_path, ranks, "--timeout-s", "1")
    assert codes == {1: 2}
    assert "error: doctor: every rank must reach the store of rank 0" in err[1]
    assert "MASTER_ADDR" in err[1]
