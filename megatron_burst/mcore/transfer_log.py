"""Attention's time, exposed communication and bytes in Megatron's log, and what ranks wait for each
other, with `--burst-log`.

What each number means is in docs/how-to/profiling.md. Nothing synchronizes here: when Megatron
logs, it has already waited for the step.
"""

import inspect
from collections.abc import Callable
from math import isnan
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training import global_vars
from megatron.training.utils import print_rank_last

from megatron_burst.engine.ranges import METER
from megatron_burst.mcore import imbalance
from megatron_burst.schedule.topology import Link

TIMERS = {"": "burst-attention", "exposed": "burst-attention-exposed"}  # by `Clock.seconds`'s name
BYTES = {link: f"burst-attention-sent-{link}-bytes" for link in Link}


def count_in_step(train_step, /, *args, **options) -> Any:
    """`train_step` that counts attention passes, and times them if Megatron logs the step."""
    arguments = _arguments(train_step, args, options)
    iteration = arguments.get("iteration")
    METER.begin_step(timed=iteration is not None and _is_logged(iteration + 1))
    try:
        with imbalance.PART.of_step(arguments.get("config")):
            return train_step(*args, **options)
    finally:
        METER.end_step()


def log_transfers(training_log, /, *args, **options) -> Any:
    """`training_log` that then logs attention's transfers in the step."""
    result = training_log(*args, **options)
    iteration = _arguments(training_log, args, options)["iteration"]
    if _is_logged(iteration):
        _log_times(iteration)
        _log_bytes(iteration)
        _log_imbalance(iteration)
    return result


def _is_logged(iteration: int) -> bool:
    return iteration % global_vars.get_args().log_interval == 0


def _arguments(function: Callable, args: tuple, options: dict) -> dict[str, Any]:
    return inspect.signature(function).bind(*args, **options).arguments


def _log_times(iteration: int) -> None:
    """Log times through Megatron's timers, which all ranks read together."""
    args, timers, seconds = global_vars.get_args(), global_vars.get_timers(), METER.seconds()
    for name, timer in TIMERS.items():
        timers(timer, log_level=0).set_elapsed(seconds.get(name, 0.0))
    names = list(TIMERS.values())
    if args.tensorboard_dir:
        timers.write(names, global_vars.get_tensorboard_writer(), iteration, reset=False)
    if getattr(args, "wandb_project", None):
        timers.write(names, global_vars.get_wandb_writer(), iteration, reset=False)
    timers.log(names)
    if not seconds:
        print_rank_last("burst attention: no times in this step: it is the first step, a profiler "
                        "is running, or it has passes with a shape or mask that the previous step "
                        "did not have")  # fmt: skip


def _log_bytes(iteration: int) -> None:
    """Log the bytes of the last rank, which prints and has the writers."""
    sent = METER.sent_bytes()
    inside, outside = (sent[link] / 2**20 for link in (Link.INTRA, Link.INTER))
    print_rank_last(f"burst attention: in this step the last rank sent {inside:.3f} MiB inside its "
                    f"node and {outside:.3f} MiB to other nodes")  # fmt: skip
    for link, name in BYTES.items():
        _write(name, sent[link], iteration)


def _log_imbalance(iteration: int) -> None:
    """Log what the ranks of the last pipeline stage waited for the slowest of them."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    seconds = imbalance.of_all(imbalance.PART.seconds(), group)
    if len(seconds) > 1 and not isnan(lost_s := imbalance.lost(seconds)):
        print_rank_last(imbalance.line_of(seconds, dist.get_process_group_ranks(group)))
        _write(imbalance.TIMER, lost_s, iteration)


def _write(name: str, value: float, iteration: int) -> None:
    """A scalar of this rank, if it has writers."""
    if writer := global_vars.get_tensorboard_writer():
        writer.add_scalar(name, value, iteration)
    if wandb_writer := global_vars.get_wandb_writer():
        wandb_writer.log({name: value}, iteration)
