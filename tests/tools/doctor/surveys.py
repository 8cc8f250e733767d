"""Surveys of machines as the doctor's script prints them.

The matrices are what `nvidia-smi topo -m` printed on two real machines: 8 A100, where two GPUs and
two HCAs share a PCIe switch and two more HCAs serve storage; 8 H200 with one HCA each, and a bond
of Ethernet ports. The GPU states are what nvidia-smi prints for H100 and H200.
"""

from collections.abc import Callable, Mapping


def gpu_line(index: int, **changes: str) -> str:
    """A line of nvidia-smi --query-gpu; `changes` by field."""
    fields = {
        "index": str(index), "name": "NVIDIA H200", "driver": "570.86.15", "total": "143771",
        "used": "1", "max": "1980", "throttles": "0x0000000000000001", "errors": "0",
        "mig": "Disabled", "mode": "Default",
    }  # fmt: skip
    return ", ".join((fields | changes).values())


def matrix(nvlinks: int, nics: list[str], relation: Callable[[int, int], str]) -> str:
    """What nvidia-smi topo -m prints for 8 GPUs; `relation` of a GPU and a NIC."""
    gpus = [f"GPU{i}" for i in range(8)]
    labels = [f"NIC{i}" for i in range(len(nics))]
    head = "\t".join(["", *gpus, *labels, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
    lines = [f"\t\x1b[4m{head.strip()}\x1b[0m"]
    for i, gpu in enumerate(gpus):
        cells = [" X " if i == j else f"NV{nvlinks}" for j in range(8)]
        cells += [relation(i, nic) for nic in range(len(nics))]
        lines.append("\t".join([gpu, *cells, "0-55", "0", "\tN/A"]))
    for nic, label in enumerate(labels):
        cells = [relation(i, nic) for i in range(8)]
        cells += [" X " if nic == other else "SYS" for other in range(len(nics))]
        lines.append("\t".join([label, *cells]))
    legend = [f"  {label}: {name}" for label, name in zip(labels, nics, strict=True)]
    words = ["", "Legend:", "", "  X    = Self", "  NV#  = Connection traversing NVLinks", ""]
    return "\n".join([*lines, *words, "NIC Legend:", "", *legend])


def on_a100(gpu: int, nic: int) -> str:
    """Two GPUs share a switch with two HCAs; the last two HCAs are far from all GPUs."""
    return "PXB" if gpu // 2 == nic // 2 else "SYS"


def on_h200(gpu: int, nic: int) -> str:
    """One HCA per GPU; the bond hangs off the first socket."""
    if nic == gpu:
        return "PIX"
    socket_of_nic = 0 if nic in (0, 1, 2, 3, 8) else 1
    return "NODE" if socket_of_nic == gpu // 4 else "SYS"


A100_NICS = [f"mlx5_{i}" for i in range(10)]
H200_NICS = ["mlx5_0", *(f"mlx5_{i}" for i in range(3, 10)), "mlx5_bond_0"]


def hca_line(name: str, state: str = "4: ACTIVE", layer="InfiniBand", rate="400 Gb/sec (4X NDR)"):
    return f"{name}|1|{state}|{layer}|{rate}|"


def h200(**changes: str) -> str:
    """A whole survey; `changes` replaces sections."""
    sections: dict[str, str] = {
        "gpus": "\n".join(gpu_line(i) for i in range(8)),
        "topology": matrix(18, H200_NICS, on_h200),
        "hcas": "\n".join(
            [
                *(hca_line(name) for name in H200_NICS[:-1]),
                hca_line("mlx5_bond_0", layer="Ethernet", rate="100 Gb/sec (4X EDR)"),
            ]
        ),
        "route": "default via 10.1.0.1 dev bond0 proto static",
        "shm": "1056575324",
        "memlock": "unlimited",
        "nofile": "1048576",
        "end": "",
    }
    return text_of(sections | changes)


def text_of(sections: Mapping[str, str]) -> str:
    """The script's output."""
    return "".join(f"== {name}\n{text}\n" for name, text in sections.items())
