"""What counts as one node: names, boots, overrides, NVLink domains. Guards against racks split into
nodes, containers of the same name merged into one node, and given groups that cross nodes."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_burst import environment
from megatron_burst.comm import nodes
from megatron_burst.comm.communicator import communicator_of
from megatron_burst.comm.nodes import (
    RankLocation,
    _FabricInfo,
    check_devices,
    fabric_of,
    nvlink_domains,
    topology_of_locations,
)
from megatron_burst.config import BurstConfig
from megatron_burst.environment import host_name, local_rank, spans_nodes
from megatron_burst.errors import BurstError
from tests.ranks import run_ranks

RACK = "8c7b1a2f"


def test_a_rack_of_nvlink_is_one_node_and_single_nodes_keep_their_names():
    rack = [RankLocation(f"tray{i // 4}", f"{RACK}.1", i % 4) for i in range(8)]
    assert str(topology_of_locations(rack)) == "1 node x 8 ranks"
    two = [*rack, *(RankLocation(f"other{i // 4}", f"{RACK}.2", i % 4) for i in range(8))]
    assert str(topology_of_locations(two)) == "2 nodes x 8 ranks"
    assert topology_of_locations(two).grid == (tuple(range(8)), tuple(range(8, 16)))
    alone = [RankLocation("a", f"{RACK}.3", 0), RankLocation("b", None, 0)]
    assert nvlink_domains(alone) == ["a", "b"]


def test_rows_follow_places_so_that_rings_between_nodes_keep_to_a_rail():
    homes = [
        RankLocation("a", None, 1),
        RankLocation("b", None, 0),
        RankLocation("b", None, 1),
        RankLocation("a", None, 0),
    ]
    assert topology_of_locations(homes).grid == ((3, 0), (1, 2))


class FakeNvml:
    """Answers like the driver's library, for one GPU."""

    def __init__(self, cluster: bytes, clique: int, state: int, status: int = 0, version: int = 2):
        self.fields = cluster, clique, state, status
        self.asked, self.version, self.open = [], version, 0

    def nvmlInit_v2(self):
        self.open += 1
        return 0

    def nvmlShutdown(self):
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, device):
        self.asked.append(uuid.decode())
        return 0

    def nvmlDeviceGetGpuFabricInfoV(self, device, pointer):
        info = ctypes.cast(pointer, ctypes.POINTER(_FabricInfo)).contents
        assert info.version == ctypes.sizeof(_FabricInfo) | self.version << 24
        cluster, info.clique_id, info.state, info.status = self.fields
        info.cluster_uuid[:] = list(cluster)
        return 0


@pytest.mark.parametrize(
    "nvml, domain",
    [
        (FakeNvml(bytes(range(16)), 7, state=3), bytes(range(16)).hex() + ".7"),
        (FakeNvml(bytes(16), 0, state=3), None),  # an HGX H100 node: zeros
        (FakeNvml(bytes(range(16)), 7, state=2), None),  # still in progress
        (FakeNvml(bytes(range(16)), 7, state=3, status=1), None),
    ],
)
def test_the_fabric_of_a_gpu(monkeypatch, nvml, domain):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml)
    assert fabric_of("1234") == domain
    assert nvml.asked == ["GPU-1234"] and nvml.open == 0


def test_no_driver_and_an_old_one_have_no_fabric(monkeypatch):
    def missing(name):
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    class Old:
        nvmlInit_v2 = nvmlShutdown = staticmethod(lambda: 0)
        nvmlDeviceGetHandleByUUID = staticmethod(lambda uuid, device: 0)

    for load in (missing, lambda name: Old()):
        monkeypatch.setattr(ctypes, "CDLL", load)
        assert fabric_of("1234") is None


def test_a_node_is_told_by_name_and_boot_or_as_nccl_is_told(monkeypatch, tmp_path):
    for name in ("NCCL_HOSTID", "GROUP_RANK", "SLURM_NODEID", "NCCL_MNNVL_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(environment.socket, "gethostname", lambda: "node")
    assert host_name().startswith("node ") and len(host_name()) > len("node ") + 30
    assert spans_nodes()

    def unreadable(self):
        raise OSError

    monkeypatch.setattr(environment.Path, "read_text", unreadable)
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert host_name() == "node node 2"
    monkeypatch.setenv("SLURM_NODEID", "5")
    assert host_name() == "node node 5"
    monkeypatch.setenv("NCCL_HOSTID", "x")
    assert host_name() == "x" and not spans_nodes()
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert local_rank() == 3


def alternating(rank):
    import os

    os.environ["NCCL_HOSTID"] = "ab"[rank % 2]
    return communicator_of(dist.group.WORLD, BurstConfig()).topology.grid


def test_rings_follow_the_nodes():
    assert run_ranks(alternating, 4) == [((0, 2), (1, 3))] * 4


class Seat:
    """What a rank tells of the others: GPUs by number, and their nodes."""

    def __init__(self, *seats: tuple[int, str]):
        self.seats = seats

    def all_gather(self, mine, who):
        assert mine == "7 here"
        return [f"{gpu} {node}" for gpu, node in self.seats]


def test_ranks_of_a_node_may_not_share_a_gpu_and_those_of_emulated_nodes_may(monkeypatch):
    monkeypatch.setenv("NCCL_HOSTID", "here")
    monkeypatch.setattr(nodes, "backend_of", lambda group: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    own = SimpleNamespace(uuid=7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: own)
    check_devices(None, Seat((7, "here"), (8, "here"), (7, "there"), (8, "there")))
    with pytest.raises(BurstError, match=r"GPU of its own.*cp ranks \[0, 2\] on GPU 7 here"):
        check_devices(None, Seat((7, "here"), (8, "here"), (7, "here")))
    monkeypatch.delenv("NCCL_HOSTID")  # a container has a host name of its own: no reason to share
    monkeypatch.setattr(Seat, "all_gather", lambda self, mine, who: [mine] * 2)
    with pytest.raises(BurstError, match=r"cp ranks \[0, 1\] on GPU 7;"):
        check_devices(None, Seat())
