"""How this process was launched: by torchrun and its like, or by srun."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_burst.errors import BurstError

_PORTS = range(20000, 30000)  # for srun, which names none


@dataclass(frozen=True, slots=True)
class Launch:
    """What the launcher told this process."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str  # where ranks meet
    port: int
    joins: bool = False  # somebody else (torchrun's agent) keeps the store
    nodes: tuple[str, ...] = ()  # node names in order, where the launcher knows them

    def node_of(self, rank: int) -> str:
        """What is known of the node where a rank should be."""
        node = rank // self.local_size
        return self.nodes[node] if node < len(self.nodes) else f"node {node}"


def launch_of(environ: Mapping[str, str]) -> Launch | None:
    """The launch in the environment, or None if there is none.

    torchrun's variables count before Slurm's: it may itself have been started by srun.

    Raises:
        BurstError: if a variable is missing or no number.
    """
    if "RANK" in environ:
        size, address = _number(environ, "WORLD_SIZE"), environ.get("MASTER_ADDR", "localhost")
        local = _number(environ, "LOCAL_RANK", 0), _number(environ, "LOCAL_WORLD_SIZE", size)
        joins = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        port = _number(environ, "MASTER_PORT")
        return Launch(_number(environ, "RANK"), size, *local, address, port, joins)
    if "SLURM_STEP_NUM_TASKS" in environ and "SLURM_PROCID" in environ:
        return _srun(environ)
    return None


def _srun(environ: Mapping[str, str]) -> Launch:
    nodes = expand_nodes(environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", "")))
    rank, size = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_STEP_NUM_TASKS")
    per_node = re.match(r"\d+", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    local_size = int(per_node[0]) if per_node else max(1, size // max(1, len(nodes)))
    address = environ.get("MASTER_ADDR") or (nodes[0] if nodes else "localhost")
    usual_port = _PORTS[_number(environ, "SLURM_JOB_ID", 0) % len(_PORTS)]
    port = _number(environ, "MASTER_PORT", usual_port)
    local_rank = _number(environ, "SLURM_LOCALID", 0)
    return Launch(rank, size, local_rank, local_size, address, port, nodes=nodes)


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not text.isdigit():
        raise BurstError(
            f"doctor: {name} must be a number, because ranks find each other by it; got {text!r}; "
            "start it with torchrun or srun, or unset RANK to look at this machine alone"
        )
    return int(text)


def expand_nodes(text: str) -> tuple[str, ...]:
    """The node names of a Slurm list such as "gpu[01-03,7],login"."""
    parts = re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", text)
    return tuple(name for part in parts for name in _expand(part))


def _expand(part: str) -> list[str]:
    match = re.match(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if not match:
        return [part]
    head, ranges, tail = match.groups()
    numbers = []
    for piece in ranges.split(","):
        first, _, last = piece.partition("-")
        numbers += [f"{n:0{len(first)}d}" for n in range(int(first), int(last or first) + 1)]
    return [f"{head}{number}{rest}" for number in numbers for rest in _expand(tail)]
