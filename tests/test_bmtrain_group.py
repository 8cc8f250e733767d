"""The example for BMTrain, on a stand-in that follows BMTrain's documentation."""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import torch.distributed as dist

from tests.ranks import run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
STAND_IN = '''
"""Communicators, here the ranks in their order, and a gathering over one of them."""

import os
from types import SimpleNamespace

import torch
import torch.distributed as dist

config = {}


def init_distributed():
    config["comm"] = list(range(int(os.environ["WORLD_SIZE"])))


def all_gather(x, comm):
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, x)
    return torch.stack([everyones[rank] for rank in comm])


distributed = SimpleNamespace(all_gather=all_gather)
'''


def stand_in(folder: Path) -> str:
    (folder / "bmtrain.py").write_text(STAND_IN)
    return str(folder)


def groups_of_communicators(rank, folder):
    """Ranks of the groups of this rank's communicators, and the messages of refusals."""
    sys.path[:0] = [folder, str(EXAMPLES)]
    torch_group = import_module("bmtrain_group").torch_group
    found = []
    for communicators in (([0, 1, 2, 3],), ([0, 1], [2, 3]), ([1, 3], [0, 2])):
        (mine,) = (ranks for ranks in communicators if rank in ranks)
        group = torch_group(mine)
        same = [None] * len(mine)
        dist.all_gather_object(same, rank, group)
        assert dist.get_process_group_ranks(group) == same
        found.append(same)
    try:
        torch_group([3, 2, 1, 0])
    except ValueError as error:
        return found, str(error)


def test_a_group_has_the_ranks_of_its_communicator_in_their_order(tmp_path):
    results = run_ranks(groups_of_communicators, 4, stand_in(tmp_path))
    for rank, (groups, refusal) in enumerate(results):
        pair, column = [rank - rank % 2, rank - rank % 2 + 1], [rank % 2, rank % 2 + 2]
        assert groups == [[0, 1, 2, 3], pair, column]
        assert "got [3, 2, 1, 0]" in refusal


def test_the_example_runs(tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    path = os.pathsep.join([stand_in(tmp_path), str(EXAMPLES.parent)])
    done = subprocess.run(
        [sys.executable, *torchrun, str(EXAMPLES / "bmtrain_group.py")],
        env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # both ranks write to one pipe, where lines of unbuffered output run into one another
    printed = sorted(re.findall(r"rank \d of \d: out \([\d, ]+\)", done.stdout))
    assert printed == [f"rank {rank} of 2: out (1, 2048, 8, 64)" for rank in range(2)]
