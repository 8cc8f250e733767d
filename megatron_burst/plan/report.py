"""What the planner found, as JSON: for a run (`--burst-plan`) and for other programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_burst.plan.flags import flag_values, model_flags
from megatron_burst.plan.search import Candidate, loses
from megatron_burst.plan.strategy import Job

VERSION = 1


def as_json(job: Job, found: Sequence[Candidate], most: int = 50) -> str:
    """The best strategy's flags, the job, that strategy, and others with what speaks against them.

    Args:
        job: the job.
        found: of `search`, in its order; or one candidate.
        most: candidates to write down.
    """
    best = found[0]
    described = {
        "version": VERSION,
        "flags": flag_values(job, best.strategy, best.memory.node),
        "model_flags": model_flags(job.model),
        "job": {
            "model": asdict(job.model), "seq": job.seq, "gpus": job.gpus,
            "gpus_per_node": job.gpus_per_node, "batch": job.batch, "hardware": job.hardware.name,
        },
        "best": _describe(best, best),
        "others": [_describe(one, best) for one in found[1:most]],
    }  # fmt: skip
    return json.dumps(described, indent=1) + "\n"


def _describe(one: Candidate, best: Candidate) -> dict[str, Any]:
    described = {
        "strategy": asdict(one.strategy),
        "fits": one.fits,
        "refused": one.refused,
        "memory_gib": {name: round(gib, 3) for name, gib in one.memory.in_gib().items()},
        "why": loses(one, best),
    }
    if one.time:
        described["step_s"] = one.time.seconds
        described["tokens_per_s_per_gpu"] = one.time.tokens_per_gpu
        described["mfu"] = one.time.mfu
        described["parts_s"] = dict(one.time.parts)
    return described
