"""The doctor in a job, on CPU processes: missing nodes; odd, stuck or unreachable ranks. Guards
against a doctor that hangs with the job, or sees no problem."""

import json
import multiprocessing
import os
import socket
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

from megatron_burst.tools.doctor.meeting import Launch, Meeting
from tests.ranks import preload, preloaded

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


def stuck():
    """This rank never starts a transfer."""
    import torch.distributed as dist

    dist.batch_isend_irecv = lambda operations: time.sleep(600)


def hasty(until=""):
    """This rank gives up transfers after a second in the stage of that name, and waits for all else
    as long as it is told to."""
    from megatron_burst.tools.doctor import job

    class Hasty(threading.Thread):
        def join(self, timeout=None):
            transfers = self._target.__self__
            while self.is_alive() and until not in transfers.stage:
                time.sleep(0.01)
            super().join(1.0)

    job.Thread = Hasty


def hasty_in_the_shift():
    hasty("shift")


def hasty_in_the_shift_and_stuck():
    hasty_in_the_shift()
    stuck()


def sure_who_comes():
    """This rank waits for the first four ranks, and no more for others, as if its time was over."""
    from megatron_burst.tools.doctor.meeting import Meeting

    real = Meeting.collect

    def collect(self, topic, ranks, patience=1.0):
        if topic == "facts" and len(ranks) > 4:
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


def test_a_healthy_job_and_only_rank_0_reports(tmp_path):
    port = free_port()
    ranks = {rank: torchrun(rank, 4, port, "ab"[rank // 2]) for rank in range(4)}
    codes, out, err = doctor(tmp_path, ranks, "--json", "--timeout-s", "60")
    assert set(codes.values()) == {0}, err
    assert [out[rank] for rank in (1, 2, 3)] == ["", "", ""]
    found = checks_of(out[0])
    assert found["attendance", "ok"]["what"] == "all 4 ranks are there"
    assert found["transfers", "ok"]["what"] == "4 ranks reach each other along all rings"
    assert found["hook points", "ok"]["where"] == "all 2 nodes"


def test_who_says_nothing_is_waited_for_until_the_time_is_over():
    meeting = Meeting(Launch(0, 3, 0, 3, "localhost", 0), dist.HashStore(), timeout_s=0.1)
    began = time.monotonic()
    assert meeting.gather("facts", "first") == {0: "first"}
    assert time.monotonic() - began >= 0.1
    began = time.monotonic()
    assert meeting.collect("facts", [2], patience=3.0) == {} and time.monotonic() - began >= 0.3


def test_a_missing_node_is_named_and_the_others_are_checked(tmp_path):
    port = free_port()
    ranks = {rank: torchrun(rank, 6, port, "ab"[rank // 2]) for rank in (0, 1, 2, 3)}
    options = ("--json", "--timeout-s", "60")
    codes, out, err = doctor(tmp_path, ranks, *options, tamper={0: sure_who_comes})
    assert set(codes.values()) == {1}, err
    found = checks_of(out[0])
    missing = found["attendance", "fail"]
    assert missing["what"] == "ranks [4, 5] of 6 did not come within 60 s"
    assert missing["where"] == "node 2" and f"127.0.0.1:{port}" in missing["change"]
    assert found["hook points", "ok"]["where"] == "all 2 nodes" and json.loads(out[0])["breaks"]


def test_a_stuck_rank_is_named_instead_of_waited_for(tmp_path):
    port = free_port()
    ranks = {rank: torchrun(rank, 3, port, "a", local_size=3) for rank in range(3)}
    tamper = {0: hasty_in_the_shift, 1: hasty_in_the_shift_and_stuck, 2: hasty_in_the_shift}
    codes, out, err = doctor(tmp_path, ranks, "--json", "--timeout-s", "60", tamper=tamper)
    assert set(codes.values()) == {1}, err
    late = checks_of(out[0])["transfers", "fail"]
    assert "1" in late["what"].partition("]")[0] and "rank 1 on a" in late["where"]
    assert "did not finish the shift over intra links within 60 s" in late["what"]


def test_a_rank_that_cannot_be_reached_says_why(tmp_path):
    port = free_port()
    ranks = {rank: torchrun(rank, 2, port, "ab"[rank], local_size=1) for rank in range(2)}
    ranks[1]["GLOO_SOCKET_IFNAME"] = "nosuch0"
    tamper = {0: hasty, 1: hasty}
    codes, out, err = doctor(tmp_path, ranks, "--json", "--timeout-s", "60", tamper=tamper)
    assert set(codes.values()) == {1}, err
    closed = checks_of(out[0])["transfers", "fail"]
    assert "ranks [0, 1] did not finish starting the process group" in closed["what"]
    assert "rank 1 on b: " in closed["what"] and "nosuch0" in closed["what"]


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
            "SLURM_STEP_TASKS_PER_NODE": "2", "MASTER_PORT": port,
        }
        for rank in range(2)
    }  # fmt: skip
    codes, out, err = doctor(tmp_path, ranks, "--timeout-s", "60")
    assert set(codes.values()) == {0}, err
    assert "all 2 ranks are there" in out[0] and "a run would start" in out[0] and not out[1]


def test_a_rank_without_a_store_says_so_in_a_sentence(tmp_path):
    ranks = {1: torchrun(1, 2, free_port(), "a")}
    codes, _, err = doctor(tmp_path, ranks, "--timeout-s", "1")
    assert codes == {1: 2}
    assert "error: doctor: every rank must reach the store of rank 0" in err[1]
    assert "MASTER_ADDR" in err[1]
