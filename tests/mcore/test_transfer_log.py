"""A Megatron run with --burst-log and --profile: what it logs and what its trace contains.

Guards against steps without logs, another step's numbers, counted evaluations, and logged bytes
that differ from those sent.
"""

import gzip
import json
import os
import sys
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from types import ModuleType

import pytest
import torch.distributed as dist

from megatron_burst.engine.ranges import METER
from megatron_burst.errors import BurstError
from megatron_burst.mcore.options import environment_args
from tests.mcore import pretraining
from tests.mcore.lacking import needs
from tests.ranks import run_ranks

pytestmark = needs("training")
LAYERS, MICRO_BATCHES, STEPS = 2, 2, 6
FLAGS = f"""{pretraining.FLAGS} --context-parallel-impl burst --context-parallel-size 2
    --train-iters {STEPS} --log-interval 2 --eval-interval 3 --burst-log --tensorboard-dir log
    --profile --use-pytorch-profiler --profile-step-start 4 --profile-step-end 5"""


class Writer:
    """Stands in for TensorBoard's writer, which need not be installed."""

    scalars: list = []  # of this process

    def __init__(self, **options):
        pass

    def add_scalar(self, name, value, step, **options):
        self.scalars.append((name, step, float(value)))

    def ignored(self, *args, **options):
        pass

    add_text = flush = close = ignored


def logged(rank, folder):
    """The writer's scalars, and bytes that this rank sent in training steps and elsewhere."""
    from megatron.core import timers

    stand_in = ModuleType("torch.utils.tensorboard")
    stand_in.SummaryWriter = timers.SummaryWriter = Writer
    sys.modules[stand_in.__name__] = stand_in
    sent, post = Counter(), dist.batch_isend_irecv

    def counted(ops):
        for op in ops:
            sent[METER.on] += op.tensor.nbytes if op.op is dist.isend else 0
        return post(ops)

    dist.batch_isend_irecv = counted
    with redirect_stdout(StringIO()) as printed:
        pretraining._main(rank, folder, FLAGS, documents=2000)
    return Writer.scalars, sent[True], sent[False], printed.getvalue()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What both ranks logged, and each one's trace."""
    folder = tmp_path_factory.mktemp("run")
    environment = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    found = run_ranks(logged, 2, str(folder), environment=environment)
    traces = [folder / "torch_profile" / f"rank-{rank}.json.gz" for rank in range(2)]
    return found, [json.loads(gzip.decompress(path.read_bytes())) for path in traces]


def test_steps_that_megatron_logs_have_times_and_the_bytes_that_were_sent(run):
    _, (scalars, in_steps, elsewhere, printed) = run[0]
    by_name = {}
    for name, step, value in scalars:
        by_name.setdefault(name, {})[step] = value
    assert elsewhere > 0  # in evaluations
    sent = by_name["burst-attention-sent-intra-bytes"]
    assert sent == dict.fromkeys((2, 4, 6), in_steps / STEPS) and in_steps > 0
    assert set(by_name["burst-attention-sent-inter-bytes"].values()) == {0}
    whole = by_name["burst-attention-time"]
    assert set(whole) >= {2, 6}  # nothing is timed under a profiler
    assert printed.count("no times in this step: ") == 3 - len(whole)
    lost = by_name["burst-imbalance-time"]
    assert set(lost) == {2, 4, 6} and printed.count("imbalance: ") == 3
    assert all(0 <= seconds < 60 for seconds in lost.values())
    exposed = by_name["burst-attention-exposed-time"]
    assert exposed.keys() == whole.keys() and min(exposed.values()) > 0
    assert exposed[6] < whole[6]


def test_the_trace_has_a_range_for_each_pass_of_the_steps_that_are_profiled(run):
    for trace in run[1]:
        names = [event.get("name", "") for event in trace["traceEvents"]]
        found = Counter(name for name in names if name.startswith("burst ") and "layer" in name)
        passes = {
            f"burst {direction}, layer {layer}, gather"
            for direction in ("forward", "backward")
            for layer in range(1, LAYERS + 1)
        }
        assert found.keys() == passes and set(found.values()) == {MICRO_BATCHES}
        assert any(name.startswith("burst Transfer intra read: ") for name in names)
        assert any(name.startswith("burst AttendBackward: ") for name in names)


def test_frameworks_without_megatrons_steps_are_told(monkeypatch):
    monkeypatch.setitem(os.environ, "MEGATRON_BURST", "log=1")
    with pytest.raises(BurstError, match="^MEGATRON_BURST: .*got 'log=1'; choose .* among plan"):
        environment_args()
