"""Megatron's pretrain() in nvidia-resiliency-ext's in-process restart; a rank fails in its third
step.

Flags are those of examples/pretrain_gpt.py. HOW is "raise", or "kill" for SIGKILL.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import nvidia_resiliency_ext.inprocess as inprocess
import pretrain_gpt
from megatron.core.enums import ModelType
from megatron.training import inprocess_restart, training
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from megatron_burst.mcore import patches

FAILS = os.environ["RANK"] == "1"  # as it started: a spare one gets this rank later
STEP = 3


class Finalize(inprocess.finalize.Finalize):
    """Megatron's, in this thread: that of nvidia-resiliency-ext needs a GPU."""

    def __init__(self, timeout, fn):
        self.fn = fn

    def __call__(self, state):
        self.fn()
        return state


def without_gpus() -> None:
    """Leave out what looks at GPUs."""
    inprocess.finalize.ThreadedFinalize = Finalize
    for check in vars(inprocess.health_check).values():
        base = inprocess.health_check.HealthCheck
        if isinstance(check, type) and issubclass(check, base) and check is not base:
            check.__call__ = lambda self, state: state


def fail_once() -> None:
    real, steps = training.train_step, []

    def train_step(*given, **options):
        steps.append(1)
        if FAILS and len(steps) == STEP:
            if os.environ["HOW"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("a fault of this rank")
        return real(*given, **options)

    training.train_step = train_step


def train(store=None, wrapper: inprocess.CallWrapper | None = None) -> None:
    """All that a restart repeats. Arguments are parsed here, because Megatron forgets them, and
    the wrapper has its own type, because it is passed by that."""
    args = parse_and_validate_args(pretrain_gpt.add_arguments)
    pretrain_gpt.datasets_provider.is_distributed = True
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    training.pretrain(
        config, pretrain_gpt.datasets_provider, ModelType.encoder_or_decoder,
        pretrain_gpt.forward_step, store=store, inprocess_call_wrapper=wrapper,
    )  # fmt: skip


if __name__ == "__main__":
    without_gpus()
    fail_once()
    patches.apply("helpers")
    now = time.time()
    training.set_startup_timestamps(program_start=now, main_entry=now)
    restarted, store = inprocess_restart.maybe_wrap_for_inprocess_restart(train)
    restarted(store=store)
