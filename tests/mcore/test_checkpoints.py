"""Checkpoints on disk: saved with burst and loaded without, and vice versa, at other sizes.

Guards against parameters or parameter names that burst adds or removes, and optimizer or data
states that are not resumed. The reference is an uninterrupted run. Megatron needs psutil to write
torch_dist.
"""

from dataclasses import dataclass
from functools import cache

import pytest

from tests.mcore.lacking import needs
from tests.mcore.pretraining import Pretrained, assert_same, pretrain
from tests.sampling import whole

pytestmark = [pytest.mark.numeric, needs("training")]
BURST = "--context-parallel-impl burst --context-parallel-size 2"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
PIPELINE = "--pipeline-model-parallel-size 2"
STEPS = 5
VALUES = ("iteration", "lm loss", "grad norm")
# --make-vocab-size-divisible-by is for one tensor-parallel rank, so it would be another vocabulary
COMMON = f"--train-iters {STEPS} --make-vocab-size-divisible-by 64"


@dataclass(frozen=True)
class Resumed:
    """A run that resumes from a checkpoint, and saves another one step later.

    Attributes:
        ranks: of it.
        flags: how it runs.
        origin: the run whose checkpoint it loads.
        step: of that checkpoint.
    """

    ranks: int
    flags: str
    origin: str
    step: int


RUNS = {  # each after the one that it loads
    "torch_dist": {
        "burst CP2": Resumed(2, BURST, "whole", 2),
        "without, from burst CP2": Resumed(1, "", "whole", 2),
        "burst CP2 TP2, from without": Resumed(
            4, f"{BURST} {TENSOR}", "without, from burst CP2", 3
        ),
        "without PP2, from burst CP2 TP2": Resumed(2, PIPELINE, "burst CP2 TP2, from without", 4),
        "burst CP2 PP2, from burst CP2": Resumed(4, f"{BURST} {PIPELINE}", "whole", 2),
        "burst CP4, from burst CP2": Resumed(4, BURST.replace("2", "4"), "whole", 2),
    },
    "torch": {  # its tensor and pipeline parallel sizes cannot change
        "burst CP2": Resumed(2, BURST, "whole", 2),
        "without, from burst CP2": Resumed(1, "", "whole", 2),
        "burst CP2, from without": Resumed(2, BURST, "without, from burst CP2", 3),
    },
}
BITWISE = "burst CP2"  # differs from the whole run only by the interruption
SELDOM = [("torch_dist", f"burst CP{of}, from burst CP2") for of in ("4", "2 PP2")]
SELDOM += [("torch", run) for run in RUNS["torch"]]
CASES = [case for name in RUNS for run in RUNS[name] if (case := (name, run)) not in SELDOM]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """A run of a checkpoint format, after those that it goes on from; "whole" is uninterrupted."""
    folder_of = cache(tmp_path_factory.mktemp)

    @cache
    def of_format(name: str, run: str) -> Pretrained:
        flags = f"{COMMON} --ckpt-format {name}"
        if run == "whole":
            return pretrain(folder_of(name), 2, f"{flags} {BURST} --save whole --save-interval 2")
        of = RUNS[name][run]
        of_format(name, of.origin)
        needed = any(other.origin == run for other in RUNS[name].values())
        saves = f"--save '{run}' --save-interval {of.step + 1}" if needed else ""
        load = f"--load '{of.origin}' --ckpt-step {of.step}"
        return pretrain(folder_of(name), of.ranks, f"{flags} {of.flags} {load} {saves}")

    return of_format


@pytest.mark.parametrize("name, run", [*CASES, *whole(*SELDOM)])
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(run_of, name, run):
    uninterrupted, got, step = run_of(name, "whole"), run_of(name, run), RUNS[name][run].step
    assert [step["iteration"] for step in uninterrupted.steps] == [1, 2, 3, 4, 5]
    rest = Pretrained(uninterrupted.steps[step:], uninterrupted.evaluated)
    if run == BITWISE:
        assert values_of(got) == values_of(rest)
        assert got.evaluated == rest.evaluated
    else:
        assert_same(got, rest)


def values_of(run: Pretrained) -> list[list]:
    return [[step[value] for value in VALUES] for step in run.steps]
