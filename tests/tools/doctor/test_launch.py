"""What the doctor reads from launchers' variables, and who of a job's ranks is missing or without a
GPU; no processes."""

import pytest
import torch.distributed as dist

from megatron_burst.errors import BurstError
from megatron_burst.tools.doctor import job
from megatron_burst.tools.doctor.job import check_attendance, check_seats
from megatron_burst.tools.doctor.meeting import Launch, launch_of
from megatron_burst.tools.doctor.report import Status

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
            "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}  # fmt: skip
SRUN = {"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "MASTER_ADDR": "n0",
        "MASTER_PORT": "29501"}  # fmt: skip


def test_ranks_need_a_gpu_each():
    assert check_seats({0: "x", 1: "y"}).status is Status.OK
    for gpus, ranks in (({0: "x", 1: "y", 4: "x"}, [0, 4]), ({0: "x", 1: ""}, [1])):
        found = check_seats(gpus)
        assert found.status is Status.FAIL
        assert found.what == f"ranks {ranks} have no GPU of their own"
    assert check_seats({0: "", 1: ""}).status is Status.SKIP


def test_missing_ranks_are_named_with_their_node():
    launch = Launch(0, 6, 0, 2, "n0", 29500)
    assert check_attendance(launch, dict.fromkeys(range(6)), 60.0).status is Status.OK
    missing = check_attendance(launch, dict.fromkeys(range(4)), 60.0)
    assert missing.status is Status.FAIL and missing.where == "node 2"
    assert missing.what == "ranks [4, 5] of 6 did not come within 60 s"
    assert "n0:29500" in missing.change


def test_launches():
    launch = launch_of(TORCHRUN)
    assert launch == Launch(5, 16, 1, 4, "n0", 29500)
    assert launch_of(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).joins
    assert launch_of(SRUN) == Launch(9, 16, 1, 8, "n0", 29501)
    assert launch_of(SRUN | TORCHRUN) == launch  # torchrun started by srun
    assert launch_of({}) is None
    # a batch script itself is not a step with many tasks
    assert launch_of({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}) is None


@pytest.mark.parametrize(
    "broken", [{"WORLD_SIZE": "many"}, {"MASTER_PORT": ""}, {"RANK": "-1"}, {"LOCAL_RANK": "x"}]
)
def test_launches_that_are_none_are_refused(broken):
    with pytest.raises(BurstError, match=f"{next(iter(broken))} must be a number"):
        launch_of(TORCHRUN | broken)


def test_srun_needs_a_port():
    with pytest.raises(BurstError, match="MASTER_PORT must be a number.*srun after export MASTER"):
        launch_of({name: value for name, value in SRUN.items() if name != "MASTER_PORT"})


def test_a_rank_that_came_too_late_ends_in_a_sentence(monkeypatch):
    store = dist.HashStore()
    store.set("doctor/facts by/0", "[0]")
    store.set("doctor/facts/0", "{}")
    monkeypatch.setattr(job, "open_store", lambda launch, timeout_s: store)
    monkeypatch.setattr(job, "_my_facts", lambda launch, timeout_s: {})
    with pytest.raises(BurstError, match="all ranks must arrive in time.*got rank 1 after rank 0"):
        job.check_job(Launch(1, 2, 1, 2, "localhost", 0), 0.1, print)
