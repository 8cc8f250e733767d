"""Time and bytes of attention's transfers in Megatron's log (`--burst-log`); see docs/how-to/profiling.md.

Nothing waits for a GPU here: Megatron has, for the time of the steps, when it logs.
"""

import inspect
from typing import Any

from megatron_burst.engine.times import METER
from megatron_burst.schedule.topology import Link

TIMERS = {  # Megatron's name of each, by `Clock.seconds`'s
    "": "burst-attention",
    "exposed": "burst-attention-exposed",
    Link.INTRA: "burst-attention-transfers-intra",
    Link.INTER: "burst-attention-transfers-inter",
}
BYTES = {link: f"burst-attention-sent-{link}-bytes" for link in Link}


def count_in_step(train_step, /, *args, **options) -> Any:
    """`train_step` whose passes of attention are counted, and timed if Megatron logs the step."""
    from megatron.training.global_vars import get_args

    iterations_before = _argument(train_step, args, options, "iteration")
    logged = iterations_before is not None and _is_logged(iterations_before + 1, get_args())
    METER.begin_step(logged)
    try:
        return train_step(*args, **options)
    finally:
        METER.end_step()


def log_transfers(training_log, /, *args, **options) -> Any:
    """`training_log` that goes on to log attention's transfers in the step."""
    from megatron.training.global_vars import get_args

    result = training_log(*args, **options)
    iteration = _argument(training_log, args, options, "iteration")
    if _is_logged(iteration, get_args()):
        _log_times(iteration)
        _log_bytes(iteration)
    return result


def _is_logged(iteration: int, args: Any) -> bool:
    return iteration % args.log_interval == 0


def _argument(function, args: tuple, options: dict, name: str) -> Any:
    return inspect.signature(function).bind(*args, **options).arguments.get(name)


def _log_times(iteration: int) -> None:
    """Through Megatron's timers, over all ranks, which call this together."""
    from megatron.training.global_vars import get_args, get_timers
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    args, timers, seconds = get_args(), get_timers(), METER.seconds()
    for name, timer in TIMERS.items():
        timers(timer, log_level=0).set_elapsed(seconds.get(name, 0.0))
    names = list(TIMERS.values())
    if args.tensorboard_dir:
        timers.write(names, get_tensorboard_writer(), iteration, reset=False)
    if getattr(args, "wandb_project", None):
        timers.write(names, get_wandb_writer(), iteration, reset=False)
    timers.log(names)


def _log_bytes(iteration: int) -> None:
    """Of the last rank, which has the writers and prints."""
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer
    from megatron.training.utils import print_rank_last

    sent = {BYTES[link]: count for link, count in METER.sent_bytes().items()}
    words = ", ".join(f"{count / 2**20:.3f} MiB ({name})" for name, count in sent.items())
    print_rank_last(f"burst attention of the last rank in iteration {iteration}: {words}")
    writer, wandb_writer = get_tensorboard_writer(), get_wandb_writer()
    for name, count in sent.items():
        if writer:
            writer.add_scalar(name, count, iteration)
        if wandb_writer:
            wandb_writer.log({name: count}, iteration)
