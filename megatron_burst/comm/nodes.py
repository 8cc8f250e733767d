"""Finds which ranks of a group share a node, or an NVLink domain, and that each has its own GPU."""

import ctypes
import json
import os
from collections import Counter
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
    """The GPU that a rank runs on."""

    node: str  # identifies the node
    fabric: str | None  # the NVLink domain beyond the node, if there is one
    gpu_index: int  # on the node


def check_devices(group: dist.ProcessGroup, consensus: StoreConsensus) -> None:
    """Raise BurstError if two ranks share a GPU: NCCL would fail or hang. As in NCCL, ranks with
    different NCCL_HOSTID may share a GPU; tests use that."""
    if backend_of(group) != "nccl":
        return
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    named = os.environ.get("NCCL_HOSTID", "")
    ranks_of: dict[str, list[int]] = {}
    for cp_rank, gpu in enumerate(consensus.all_gather(f"{uuid} {named}".rstrip(), WHO)):
        ranks_of.setdefault(gpu, []).append(cp_rank)
    for gpu, cp_ranks in ranks_of.items():
        if len(cp_ranks) > 1:
            raise BurstError(
                f"{WHO}: each rank must have a GPU of its own, because NCCL moves data between "
                f"GPUs; got cp ranks {cp_ranks} on GPU {gpu}; call "
                "torch.cuda.set_device(LOCAL_RANK) first, and start no more processes than GPUs"
            )


def find_topology(size: int, config: BurstConfig, consensus: StoreConsensus) -> Topology:
    """The nodes of a group of `size` ranks: those that `config.nodes` pretends, or as ranks report
    them; raises BurstError if the ranks cannot be divided among the pretended nodes."""
    if config.nodes is not None:
        return pretend_nodes(size, config.nodes)
    texts = consensus.all_gather(json.dumps(asdict(my_location())), WHO)
    return topology_of_locations([RankLocation(**json.loads(text)) for text in texts])


def my_location() -> RankLocation:
    """The location of this process."""
    if not torch.cuda.is_available():
        return RankLocation(host_name(), None, local_rank())
    index = torch.cuda.current_device()
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    # if each process sees one GPU, its index is 0 everywhere
    gpu_index = index if torch.cuda.device_count() > 1 else local_rank()
    return RankLocation(host_name(), fabric_of(uuid) if spans_nodes() else None, gpu_index)


def topology_of_locations(locations: Sequence[RankLocation]) -> Topology:
    """The topology of ranks at these locations; uneven nodes are flattened with a warning."""
    nodes = [location.node for location in locations]
    gpus = [(nodes.index(location.node), location.gpu_index) for location in locations]
    return topology_of(nvlink_domains(locations), gpus)


def nvlink_domains(locations: Sequence[RankLocation]) -> list[str]:
    """What counts as a rank's node: its NVLink domain if that spans nodes, else its node."""
    nodes = Counter(fabric for fabric, _ in {(x.fabric, x.node) for x in locations})
    wide = {fabric for fabric, count in nodes.items() if fabric and count > 1}
    return [f"NVLink {x.fabric}" if x.fabric in wide else x.node for x in locations]


# ---- NVLink between nodes, as the driver reports it ----

_COMPLETED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED


class _FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_v2_t of nvml.h (CUDA 12.4 and newer)."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("cluster_uuid", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique_id", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
        ("health_mask", ctypes.c_uint),
    )


def fabric_of(gpu_uuid: str) -> str | None:
    """The NVLink domain of a GPU, such as a rack of GB200 NVL72; None if it ends at the node. It
    is what NCCL compares: cluster UUID (all-zero on ordinary nodes) and clique."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")  # comes with the driver
        if nvml.nvmlInit_v2():
            return None
        try:
            return _query_fabric(nvml, f"GPU-{gpu_uuid.removeprefix('GPU-')}")
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):  # no driver, or one without fabric support
        return None


def _query_fabric(nvml: ctypes.CDLL, uuid: str) -> str | None:
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
