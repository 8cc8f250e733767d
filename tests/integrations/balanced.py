"""What the examples in examples/frameworks choose in a framework, in a process that starts as a
user's does."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "frameworks"
TOKEN, PAIR, FIXED = 1e-4, 2e-8, 0.01
LIMIT = 1024  # tokens of a rank
_DRAWN = np.random.default_rng(3).lognormal(5.0, 1.0, 64)
LENGTHS = [8 * int(n / 8) for n in _DRAWN.clip(8, 2 * LIMIT)]  # two ranks hold the longest


def seconds(lengths: Iterable[int], cp: int = 1) -> float:
    """Of a micro-batch of documents, by the formula of the documentation."""
    some = list(lengths)
    area = sum(n * (n + 1) / 2 for n in some)
    return FIXED + (TOKEN * sum(some) + PAIR * area) / cp


def spread(micro_batches: Sequence[Sequence[Sequence[int]]], cp: int = 1) -> float:
    """Seconds of the slowest rank over their mean; micro-batches as lists of lengths, by rank."""
    ranks = [sum(seconds(one, cp) for one in each) for each in micro_batches]
    return max(ranks) / (sum(ranks) / len(ranks))


def spread_of_step(ranks: Sequence[Sequence[Sequence[int]]], number: int) -> float:
    """The spread of a step on ranks of context parallelism 2, micro-batches as lists of indices;
    each of its 32 documents is in one of them, and none is over the limit."""
    documents = sorted(at for each in ranks for one in each for at in one)
    assert documents == list(range(32 * number, 32 * number + 32))
    lengths = [[[LENGTHS[at] for at in one] for one in each] for each in ranks]
    assert all(sum(one) <= 2 * LIMIT for each in lengths for one in each)
    return spread(lengths, cp=2)


def write(plan: Path, transfer: float = 0.0) -> None:
    """Write costs as a plan has them; `transfer`: seconds that a token takes more on two ranks."""
    costs = {"token": TOKEN, "pair": PAIR, "fixed": FIXED, "transfer": {"2": transfer}}
    plan.write_text(json.dumps({"micro_batch_s": costs}))


def in_a_new_process(function: Callable[[], Any], plan: Path, **environment: str) -> Any:
    """The result of a function of a module, which can be written as JSON, in a process of its own;
    `plan`: where the costs are written."""
    write(plan)
    module, name = function.__module__, function.__name__
    code = f"import json; from {module} import {name}; print('found', json.dumps({name}()))"
    paths = EXAMPLES, ROOT, os.environ.get("PYTHONPATH", "")
    variables = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "BALANCE_COSTS": str(plan)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | variables | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.split("found ")[-1])
