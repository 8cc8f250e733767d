"""Finds which ranks of a group share a node, and checks that each has its own GPU."""

import ctypes
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from megatron_burst.comm.store import WHO, StoreConsensus, backend_of
from megatron_burst.config import BurstConfig
from megatron_burst.environment import host_name, local_rank, spans_nodes
from megatron_burst.errors import BurstError
from megatron_burst.schedule.topology import Topology, pretend_nodes, topology_of


@dataclass(frozen=True, slots=True)
class RankLocation:
    """Where a rank runs."""

    node: str  # identifies its node
    fabric: str | None  # the NVLink domain beyond the machine, if there is one
    place: int  # its GPU's index on the node


def check_devices(group: dist.ProcessGroup, board: StoreConsensus) -> None:
    """Make sure that no two ranks share a GPU: NCCL would fail or hang.

    As in NCCL, ranks with different NCCL_HOSTID may share one; tests use that.
    """
    if backend_of(group) != "nccl":
        return
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    named = os.environ.get("NCCL_HOSTID", "")
    ranks_of: dict[str, list[int]] = {}
    for cp_rank, gpu in enumerate(board.all_gather(f"{uuid} {named}".rstrip(), WHO)):
        ranks_of.setdefault(gpu, []).append(cp_rank)
    for gpu, cp_ranks in ranks_of.items():
        if len(cp_ranks) > 1:
            raise BurstError(
                f"{WHO}: each rank must have a GPU of its own, because NCCL moves data between "
                f"GPUs; got cp ranks {cp_ranks} on GPU {gpu}; call torch.cuda.set_device("
                "LOCAL_RANK) before, and start no more processes than GPUs"
            )


def find_topology(group: dist.ProcessGroup, config: BurstConfig, board: StoreConsensus) -> Topology:
    """The nodes of a group's ranks: pretended, or as the ranks report.

    Raises:
        BurstError: if the nodes do not fit.
    """
    if config.nodes is not None:
        return pretend_nodes(group.size(), config.nodes)
    homes = [
        RankLocation(**json.loads(text))
        for text in board.all_gather(json.dumps(asdict(my_location())), WHO)
    ]
    return topology_of_locations(homes)


def my_location() -> RankLocation:
    """Where this process runs."""
    if not torch.cuda.is_available():
        return RankLocation(host_name(), None, local_rank())
    index = torch.cuda.current_device()
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    # if each process sees one GPU, its index is 0 everywhere
    place = index if torch.cuda.device_count() > 1 else local_rank()
    return RankLocation(host_name(), fabric_of(uuid) if spans_nodes() else None, place)


def topology_of_locations(homes: Sequence[RankLocation]) -> Topology:
    """The topology of ranks with these homes; uneven nodes are flattened with a warning."""
    first = {home.node: rank for rank, home in reversed(list(enumerate(homes)))}
    return topology_of(nvlink_domains(homes), [(first[x.node], x.place) for x in homes])


def nvlink_domains(homes: Sequence[RankLocation]) -> list[str]:
    """What counts as the node of each rank: its NVLink domain where that spans machines."""
    nodes_in = {home.fabric: {h.node for h in homes if h.fabric == home.fabric} for home in homes}
    wide = {fabric for fabric, nodes in nodes_in.items() if fabric and len(nodes) > 1}
    return [f"NVLink {h.fabric}" if h.fabric in wide else h.node for h in homes]


# ---- NVLink between nodes, as the driver reports it ----

_COMPLETED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED
_UUID_BYTES = 16


class _FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_v2_t of nvml.h (CUDA 12.4 and newer)."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("cluster_uuid", ctypes.c_ubyte * _UUID_BYTES),
        ("status", ctypes.c_uint),
        ("clique_id", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
        ("health_mask", ctypes.c_uint),
    )


def fabric_of(gpu_uuid: str) -> str | None:
    """The NVLink domain beyond one node that a GPU belongs to (a rack of GB200 NVL72 is one).

    GPUs with the same answer reach each other by NVLink: NCCL uses the same two numbers (cluster
    UUID and clique). GPUs of ordinary nodes have an all-zero cluster UUID, hence None.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")  # comes with the driver
        if nvml.nvmlInit_v2():
            return None
        try:
            return _ask(nvml, f"GPU-{gpu_uuid.removeprefix('GPU-')}")
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):  # no driver, or one without fabric support
        return None


def _ask(nvml: ctypes.CDLL, uuid: str) -> str | None:
    device = ctypes.c_void_p()
    if nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)):
        return None
    info = _FabricInfo(version=ctypes.sizeof(_FabricInfo) | 2 << 24)
    if nvml.nvmlDeviceGetGpuFabricInfoV(device, ctypes.byref(info)):
        return None
    cluster = bytes(info.cluster_uuid)
    if info.state != _COMPLETED or info.status or not any(cluster):
        return None
    return f"{cluster.hex()}.{info.clique_id}"
