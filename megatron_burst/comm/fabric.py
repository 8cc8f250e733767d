"""The NVLink domain of a GPU, which may span nodes: a rack of GB200 NVL72 is one."""

import ctypes
from collections.abc import Callable

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


def load_nvml() -> ctypes.CDLL:
    """The library that comes with the driver.

    Raises:
        OSError: if there is none.
    """
    return ctypes.CDLL("libnvidia-ml.so.1")


def fabric_of(gpu_uuid: str, load: Callable[[], ctypes.CDLL] = load_nvml) -> str | None:
    """The NVLink domain beyond one node that a GPU belongs to, or None if it belongs to none.

    GPUs with the same answer reach each other by NVLink: NCCL goes by the same two numbers
    (cluster UUID and clique). GPUs of ordinary nodes have a cluster UUID of zeros.

    Args:
        gpu_uuid: with or without the prefix "GPU-".
        load: loads NVML.
    """
    try:
        nvml = load()
        if nvml.nvmlInit_v2():
            return None
        try:
            return _ask(nvml, f"GPU-{gpu_uuid.removeprefix('GPU-')}")
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):  # no driver, or one that knows of no fabric
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
