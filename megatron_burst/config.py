"""BurstConfig: the only place where flags and environment become values."""

import os
import socket
from argparse import Namespace
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args, get_origin

from megatron_burst.errors import BurstError

_CONTAINER_MEMORY = (  # of control groups 2 and 1: folder, bound, use
    ("sys/fs/cgroup", "memory.max", "memory.current"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


@dataclass(frozen=True, slots=True)
class BurstConfig:
    """How burst attention runs. All ranks of a context-parallel group must have the same.

    Attributes:
        intra: how keys come together inside a host: "ring" passes shards from rank to rank,
            "gather" collects them a few heads at a time, "a2a" exchanges heads for rows; "auto"
            gathers on GPUs.
        inter: how they come together between hosts: "ring" passes them from host to host while the
            ranks of each host work together, "a2a" exchanges heads over all ranks, "flat" runs one
            ring over all ranks as if there were one host, to measure what nesting brings; "auto"
            takes the ring or the exchange, by bytes between hosts.
        heads_per_round: key heads that are gathered, or that a rank computes, at a time (fewer in
            the last round); refused where there are fewer, and in a ring, which has no rounds; None
            takes what fills the GPU within a bounded buffer.
        pieces: go through the heads in rounds; False takes all in one, so that transfers between
            hosts are whole shards, to measure what cutting them brings.
        circulate: what travels round the rings in backward, of which gathering or exchanging on one
            host has none; "auto" takes what has fewer bytes.
        backend: the attention kernel by name; "auto" takes the fastest that can do the call.
        hardware: a machine whose speeds are known, by name ("h200", ...) or as a TOML file that
            `megatron-burst calibrate` wrote; what is "auto" then is what simulation finds fastest.
        deterministic: compute bitwise the same gradients every time.
        hosts: pretend that the group spans this many hosts of contiguous ranks; None: ask them.
        grad_wire: dtype of gradients between ranks: "accumulate" is max(float32, input dtype),
            whose error does not grow with the number of ranks; "input" halves bf16's bytes; "auto"
            is "input" where a sum makes one hop only, "accumulate" where it makes more. What a
            kernel itself rounds to the input dtype and nobody adds to travels so.
        resend: whether gathered K and V go between hosts again in backward: "always"; "never": they
            stay where they came in forward if backward follows it directly, which is refused where
            they cannot; "auto": never, where that takes no more memory than the queries and sends
            no more than circulating Q. What is exchanged over all ranks stays in any case.
        transfer: how gathered keys and their gradients move between the GPUs of a host: "send" by
            NCCL, "pull" by copy engines, which leave the multiprocessors to the kernels and know no
            rings; "auto" takes what was measured to be faster.
        nccl_ctas: most thread blocks that a transfer of NCCL's may take from the GPU's
            multiprocessors; None leaves it to NCCL.
        overlap: hide transfers between ranks behind kernels; False waits for each at once, to
            measure what hiding them brings.
        keep: which of attention's results (out, lse) stay for the replay of a recomputed layer, so
            that it need not compute them: "none", those of the later "half" of the sequence, "all";
            "auto" chooses within `keep_budget_gib`, under Megatron only.
        keep_layers: how many layers of a pipeline stage keep, from the first; None: all of them.
            Under Megatron only.
        keep_offload: put what is kept into pinned host memory until it is needed.
        keep_offload_inputs: the same for the layer inputs that full recomputation saves; under
            Megatron only.
        keep_host_gib: most host memory of a rank for that; None: half of what is available, shared
            by the ranks of the host.
        keep_budget_gib: device memory of a rank that "auto" may fill.
        keep_debug: compare a replay's inputs with the first pass's, bit by bit.
        timeout_s: seconds a rank waits for the others before it names who is missing.
    """

    intra: Literal["auto", "ring", "gather", "a2a"] = "auto"
    inter: Literal["auto", "ring", "a2a", "flat"] = "auto"
    heads_per_round: int | None = None
    pieces: bool = True
    circulate: Literal["auto", "kv", "q"] = "auto"
    backend: str = "auto"
    hardware: str | None = None
    deterministic: bool = False
    hosts: int | None = None
    grad_wire: Literal["auto", "accumulate", "input"] = "auto"
    resend: Literal["auto", "never", "always"] = "auto"
    transfer: Literal["auto", "send", "pull"] = "auto"
    nccl_ctas: int | None = None
    overlap: bool = True
    keep: Literal["none", "half", "all", "auto"] = "none"
    keep_layers: int | None = None
    keep_offload: bool = False
    keep_offload_inputs: bool = False
    keep_host_gib: float | None = None
    keep_budget_gib: float | None = None
    keep_debug: bool = False
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if get_origin(field.type) is Literal and value not in get_args(field.type):
                legal = ", ".join(get_args(field.type))
                raise BurstError(
                    f"burst attention: the option {field.name} must be one of {legal}, because a "
                    f"misspelt one would be silently ignored; got {value!r}; choose one of these"
                )
        for name in ("heads_per_round", "nccl_ctas"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BurstError(
                    f"burst attention: {name} must be at least 1, because nothing would move with "
                    f"none; got {value}; leave it out"
                )
        self._check_ways()
        self._check_keep()
        if self.timeout_s <= 0:
            raise BurstError(
                "burst attention: timeout_s must be positive, because a rank waits that long for "
                f"the others; got {self.timeout_s}; pass seconds"
            )

    def _check_ways(self) -> None:
        """Refuse ways inside and between hosts that exclude each other."""
        fits = {"a2a": ("auto", "a2a"), "flat": ("auto", "ring")}
        allowed = fits.get(self.inter, (self.intra,))
        if self.intra not in allowed:
            raise BurstError(
                f"burst attention: with inter={self.inter} intra must be {allowed[1]} or auto, "
                "because the same runs over all ranks, whatever their hosts; got "
                f"intra={self.intra}; leave one of them out"
            )
        if not self.pieces and self.heads_per_round is not None:
            raise BurstError(
                "burst attention: pieces=False and heads_per_round must not come together, because "
                "the one is a round of all heads, the other of some; got heads_per_round="
                f"{self.heads_per_round}; leave one of them out"
            )

    def _check_keep(self) -> None:
        """Refuse options of keeping that contradict each other or would be ignored."""
        who = "burst keep"
        if self.keep_layers is not None and self.keep_layers < 0:
            raise BurstError(
                f"{who}: keep_layers must not be negative, because it counts layers; got "
                f"{self.keep_layers}; leave it out"
            )
        for name in ("keep_host_gib", "keep_budget_gib"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise BurstError(
                    f"{who}: {name} must be positive, because it is room for what is kept; got "
                    f"{value}; pass GiB, or leave it out"
                )
        if (self.keep == "auto") != (self.keep_budget_gib is not None):
            raise BurstError(
                f"{who}: keep=auto and a budget must come together, because the one fills the "
                f"other; got keep={self.keep}, keep_budget_gib={self.keep_budget_gib}; pass "
                "--burst-keep auto --burst-keep-budget-gib GIB, or none of them"
            )
        for name in ("keep_layers", "keep_offload", "keep_debug"):
            if self.keep == "none" and getattr(self, name) not in (None, False):
                raise BurstError(
                    f"{who}: {name} must come with keep, because nothing is kept without it; got "
                    f"keep=none, {name}={getattr(self, name)}; pass --burst-keep all, or leave it "
                    "out"
                )
        if self.keep == "auto" and (self.keep_layers is not None or self.keep_offload):
            raise BurstError(
                f"{who}: keep=auto must come without keep_layers and keep_offload, as it chooses "
                f"them; got keep_layers={self.keep_layers}, keep_offload={self.keep_offload}; "
                "leave them out"
            )
        offloads = self.keep_offload or self.keep_offload_inputs or self.keep == "auto"
        if self.keep_host_gib is not None and not offloads:
            raise BurstError(
                f"{who}: keep_host_gib must come with something that waits on the host, because it "
                f"is room for that; got keep_host_gib={self.keep_host_gib} alone; pass "
                "--burst-keep-offload or --burst-keep-offload-inputs, or leave it out"
            )

    @classmethod
    def from_args(cls, args: Namespace) -> "BurstConfig":
        """The configuration in Megatron's parsed arguments (`--burst-*`)."""
        given = {f.name: getattr(args, f"burst_{f.name}", None) for f in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})


def available_host_bytes(root: Path = Path("/")) -> int:
    """Host memory that this rank may take: what is available, shared by the ranks of the host.

    A container's bound counts; what files occupy only until others need it does not.

    Args:
        root: where proc and sys are.
    """
    free = [_number(root / "proc/meminfo", after="MemAvailable:") * 1024]
    for folder, bound, used in _CONTAINER_MEMORY:
        if most := _number(root / folder / bound):
            files = _number(root / folder / "memory.stat", after="inactive_file")
            free.append(max(0, most - _number(root / folder / used) + files))
    return min(free) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _number(path: Path, after: str | None = None) -> int:
    """The first number of a file, or the one after a word; 0 if there is none."""
    words = path.read_text().split() if path.is_file() else []
    place = words.index(after) + 1 if after in words else 0
    found = words[place : place + 1] if after is None or place else []
    return int(found[0]) if found and found[0].isdigit() else 0


@dataclass(frozen=True, slots=True)
class FusedLossConfig:
    """How the fused LM head and loss run in Megatron (`--burst-fused-loss`).

    Attributes:
        grads: "recompute" computes logits again in backward and is right for any use of the losses;
            "forward" computes gradients along with the loss, a quarter less work, and needs losses
            that are multiplied with the loss mask and one number, as pretrain_gpt.py's are; other
            uses give NaN gradients.
        label_smoothing: as Megatron's vocab_parallel_cross_entropy has it.
        z_loss: weight of the squared log-sum-exp.
        softcap: bound of the logits; 0: none.
    """

    grads: Literal["recompute", "forward"] = "recompute"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0

    @classmethod
    def from_args(cls, args: Namespace) -> "FusedLossConfig":
        """The configuration in Megatron's parsed arguments (`--burst-loss-*`)."""
        given = {f.name: getattr(args, f"burst_loss_{f.name}", None) for f in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})


def host_name() -> str:
    """What tells this process's host from others.

    As NCCL has it: NCCL_HOSTID where set, else the host's name and the boot of its kernel, because
    containers on different machines may share a name. Where the boot is not to be read, the
    launcher's number of the node stands in.
    """
    named = os.environ.get("NCCL_HOSTID")
    if named:
        return named
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = f"node {_node()}"
    return f"{socket.gethostname()} {boot}"


def _node() -> int:
    """The node that a launcher put this process on; 0 without one."""
    given = os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID")
    if given:
        return int(given)
    return int(os.environ.get("RANK", "0")) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def local_rank() -> int:
    """This process's place on its host: what a launcher says, else 0."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0")


def spans_hosts() -> bool:
    """Whether NVLink may join hosts: NCCL's own switches count."""
    return not os.environ.get("NCCL_HOSTID") and os.environ.get("NCCL_MNNVL_ENABLE") != "0"


def share_kernel_cache() -> None:
    """Have FlashAttention-4 keep compiled kernels on disk, where all ranks find them.

    Must be called before it is imported. Its own variables, where set, count.
    """
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
