"""The modes by name: how keys reach queries.

A new mode is a function from a spec to a program, a row of `MODES`, and what it refuses.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from megatron_burst.errors import BurstError, Need, require
from megatron_burst.schedule.a2a import a2a
from megatron_burst.schedule.gather import gather
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import check_mask
from megatron_burst.schedule.program import Program
from megatron_burst.schedule.ring import ring
from megatron_burst.schedule.spec import AttentionShape, Circulate, Spec
from megatron_burst.schedule.topology import Topology

_WHO = "burst attention"


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to run attention."""

    intra: str  # what runs among the ranks of a row, as in `Spec`
    emit: Callable[[Spec], Program]  # makes the program of a rank from its spec
    words: str  # how users read the mode; `{}` is the topology
    by_force: bool = False  # whether `auto` never chooses it


MODES = {  # a gather in forward with an all-to-all in backward is two of them
    "ring": Mode("ring", ring, "ring inside nodes, ring between them, on {}"),
    "gather": Mode("gather", gather, "gather on {}"),
    "gather and ring": Mode("gather", gather, "gather inside nodes, ring between them, on {}"),
    "a2a": Mode("a2a", a2a, "a2a on {}"),
    "a2a over all": Mode("a2a", a2a, "a2a over all ranks of {}"),
    "flat": Mode("ring", ring, "ring over all ranks of {}", by_force=True),
}
EMITTERS = {mode.intra: mode.emit for mode in MODES.values()}


def mode_of(spec: Spec) -> str:
    """The name in `MODES` of a resolved spec's mode.

    Raises:
        BurstError: if no mode is that combination.
    """
    intra = spec.intra or "ring"
    if spec.topology.inter_size == 1:
        return intra
    if spec.inter != "ring":
        return {"a2a": "a2a over all", "flat": "flat"}[spec.inter or ""]
    if intra == "a2a":
        raise BurstError(
            f"{_WHO}: an all-to-all must run over all ranks, because no ring between nodes "
            f"continues it; got intra=a2a and inter=ring on {spec.topology}; pass --burst-inter "
            "a2a (inter='a2a') or auto"
        )
    return {"ring": "ring", "gather": "gather and ring"}[intra]


def describe_mode(spec: Spec) -> str:
    """Mode and topology of a resolved spec, for users."""
    if spec.topology.inter_size == 1:
        backward = " in forward and a2a in backward" if spec.a2a_backward_heads else ""
        return f"{spec.intra}{backward} on {spec.topology}"
    return MODES[mode_of(spec)].words.format(spec.topology)


def max_heads(shape: AttentionShape, topology: Topology, intra: str) -> int:
    """The most KV heads that a round can have: all gathered ones, or all that a rank computes."""
    ranks = topology.intra_size if intra == "a2a" else 1
    return shape.replicated(ranks).heads_kv // ranks


@lru_cache(maxsize=64)
def program_of(spec: Spec) -> Program:
    """The program of a rank (`Spec.program_spec`); the same object for equal specs.

    Raises:
        BurstError: if the mode cannot run that spec.
    """
    return EMITTERS[spec.intra or "ring"](spec)


# ---- what was requested and cannot run -----------------------------------------------------------


def row_refusal(spec: Spec) -> str:
    """Why neither keys can be gathered nor rows be traded for heads; "" if they can."""
    if spec.mode_topology.spans_nodes and spec.inter != "a2a":
        reason = "a row of ranks must share a node, because keys or heads travel over NVLink"
        return f"{reason}; got {spec.mode_topology}"
    if spec.layout is Layout.STRIPED:
        return "the layout must not be striped, because whole sequences lie in order; got striped"
    return ""


def check_intra(spec: Spec) -> None:
    """Refuse what was requested for the ranks of a row, once `inter` is known.

    Raises:
        BurstError: if a gather or an all-to-all was requested across nodes, in the striped layout,
            or for keys of another length than the queries.
    """
    requested = "a2a" if spec.inter == "a2a" else spec.intra
    if spec.mode_topology.cp_size == 1 or requested not in ("gather", "a2a"):
        return
    if spec.shape.tokens_kv:
        raise BurstError(
            f"{_WHO}: queries and keys of different lengths must run in rings, because gather and "
            f"a2a pair a rank's queries with as many keys; got {spec.shape.tokens} queries and "
            f"{spec.shape.tokens_kv} keys on a rank with intra={spec.intra or 'a2a'}; pass "
            "--burst-intra ring (intra='ring') or auto, and no --burst-inter a2a or "
            "--burst-invariant"
        )
    if (refusal := row_refusal(spec)) and spec.inter != "flat":
        raise BurstError(
            f"{_WHO}: for intra={requested} {refusal}; pass --burst-intra ring (intra='ring') or "
            "auto, and no --burst-invariant"
        )


def check_supported(spec: Spec) -> None:
    """Refuse a choice of the user's that the mode would ignore.

    What is trivially satisfied is not refused: on one node nothing goes between nodes, one rank
    sends nothing, and a ring takes all heads at once anyway.

    Raises:
        BurstError: if there is one, if no mode is the combination, or if the mode does not support
            the mask.
    """
    mode_of(spec)
    if spec.topology.cp_size > 1:
        check_mask(spec.mask, spec.layout, spec.intra or "", spec.mode_topology.inter_size == 1)
        require(_WHO, _needs_of_rings(spec) if spec.intra == "ring" else _needs_of_heads(spec))
    if len(set(spec.topology.node_of)) > 1:
        require(_WHO, _needs_between_nodes(spec))


def _needs_of_rings(spec: Spec) -> Iterator[Need]:
    yield from (
        (not spec.heads_per_round,
         "heads_per_round must come with gather or a2a, because a ring has no rounds of heads",
         f"heads_per_round={spec.heads_per_round} and {describe_mode(spec)}",
         "leave it out, or pass --burst-intra gather (intra='gather') or a2a"),
        (not spec.pulled,
         "transfer=pull must come with gather or a2a, because shards of a ring are sent by NCCL",
         describe_mode(spec),
         "pass --burst-tune force.transfer=send or auto, or --burst-intra gather"),
    )  # fmt: skip


def _needs_of_heads(spec: Spec) -> Iterator[Need]:
    heads = spec.heads_per_round or 0
    most = max_heads(spec.shape, spec.mode_topology, spec.intra or "")
    # heads that cannot be sharded evenly are refused with their program
    uneven = spec.intra == "a2a" and spec.shape.heads_q % spec.mode_topology.intra_size
    does = "gathers" if spec.intra == "gather" else "computes"
    yield (
        heads <= most or uneven,
        f"heads_per_round must not exceed the KV heads that a rank {does}, because a round takes "
        "some of these heads", f"{heads} of {most}", "leave it out",
    )  # fmt: skip


def _needs_between_nodes(spec: Spec) -> Iterator[Need]:
    yield (
        spec.circulate is None or spec.inter != "a2a",
        "circulate must come with a ring between nodes, because nothing circulates in an "
        "all-to-all over all ranks", f"circulate={spec.circulate} and inter=a2a",
        "leave one of them out",
    )  # fmt: skip
    # An all-to-all over all ranks keeps what it receives anyway. Where results are kept, backward
    # does not directly follow a forward; where it does, keys are kept.
    gathers = spec.intra == "gather" and spec.mode_topology.inter_size > 1
    yield (
        not spec.saves_remote or spec.inter == "a2a"
        or (gathers and spec.circulate is not Circulate.Q),
        "resend=never must come with keys that are gathered inside nodes while K and V circulate "
        "between nodes, because only such keys can stay until backward",
        f"circulate={spec.circulate or 'auto'}" if gathers else describe_mode(spec),
        "leave it out, or pass --burst-intra gather (intra='gather') and no circulate=q",
    )  # fmt: skip
