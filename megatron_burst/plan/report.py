"""What the planner found, as JSON and back."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

from megatron_burst.errors import BurstError
from megatron_burst.plan.hardware_file import nearest
from megatron_burst.plan.search import Candidate, loses
from megatron_burst.plan.strategy import Job, Strategy, megatron_flags

VERSION = 1
_WHO = "plan file"


@dataclass(frozen=True, slots=True)
class PlanFile:
    """What a plan file says of the best strategy.

    Attributes:
        strategy: how the job is dealt out.
        flags: of Megatron, one with its value an entry.
        seq: tokens of a sequence.
        gpus: of the job.
    """

    strategy: Strategy
    flags: tuple[str, ...]
    seq: int
    gpus: int


def as_json(job: Job, found: Sequence[Candidate], most: int = 50) -> str:
    """The job, the best strategy with its flags, and others with what speaks against them.

    Args:
        job: the job.
        found: of `search`, in its order; or one candidate.
        most: candidates to write down.
    """
    best = found[0]
    flags = megatron_flags(job, best.strategy, best.memory.host)
    described = {
        "version": VERSION,
        "job": {
            "model": asdict(job.model), "seq": job.seq, "gpus": job.gpus,
            "gpus_per_host": job.gpus_per_host, "batch": job.batch, "hardware": job.hardware.name,
        },
        "best": {**_describe(best, best), "flags": list(flags)},
        "others": [_describe(one, best) for one in found[1:most]],
    }  # fmt: skip
    return json.dumps(described, indent=1) + "\n"


def _describe(one: Candidate, best: Candidate) -> dict[str, Any]:
    described = {
        "strategy": asdict(one.strategy),
        "fits": one.fits,
        "memory_gib": {name: round(gib, 3) for name, gib in one.memory.in_gib().items()},
        "why": loses(one, best),
    }
    if one.time:
        described["step_s"] = one.time.seconds
        described["tokens_per_s_per_gpu"] = one.time.tokens_per_gpu
        described["mfu"] = one.time.mfu
        described["parts_s"] = dict(one.time.parts)
    return described


def read_plan(path: Path) -> PlanFile:
    """The best strategy of a file that `megatron-burst plan --json` wrote.

    Raises:
        BurstError: if the file cannot be read, or is none of those.
    """
    try:
        return parse_plan(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        _refuse(str(path), "must be a readable file", str(error))


def parse_plan(text: str, name: str) -> PlanFile:
    """The best strategy of a plan as text; `name` of the file is for complaints.

    Raises:
        BurstError: if it is not what `as_json` writes.
    """
    try:
        plan = json.loads(text)
    except json.JSONDecodeError as error:
        _refuse(f"{name}, line {error.lineno},", "must be JSON", error.msg)
    for key in ("version", "job", "best"):
        if not isinstance(plan, dict) or key not in plan:
            _refuse(name, f"must be an object with a {key!r}", "none")
    if plan["version"] != VERSION:
        _refuse(name, f"must have version {VERSION}", repr(plan["version"]))
    try:
        values = plan["best"]["strategy"]
        flags = tuple(plan["best"]["flags"])
        seq, gpus = plan["job"]["seq"], plan["job"]["gpus"]
    except (KeyError, TypeError) as error:
        _refuse(name, "must say strategy, flags, seq and gpus", f"no {error}")
    return PlanFile(_strategy(values, name), flags, seq, gpus)


def _strategy(values: dict[str, Any], name: str) -> Strategy:
    known = {field.name: field.type for field in fields(Strategy)}
    for key, value in values.items():
        if key not in known:
            _refuse(name, f"must hold only {', '.join(known)}", f"{key!r}{nearest(key, known)}")
        kind = known[key]
        if get_origin(kind) is None:
            good = type(value) is kind and (kind is bool or value > 0)
            must = "a positive whole number" if kind is int else "true or false"
        else:
            good, must = value in get_args(kind), f"one of {', '.join(get_args(kind))}"
        if not good:
            _refuse(f"{name}: {key}", f"must be {must}", repr(value))
    return Strategy(**values)


def _refuse(who: str, must: str, got: str) -> NoReturn:
    raise BurstError(
        f"{_WHO}: {who} {must}, because a run reads its strategy there; got {got}; write it anew "
        "with megatron-burst plan --json FILE"
    )
