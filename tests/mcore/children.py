"""Child processes in which Megatron writes checkpoints, for ranks that are daemons."""

import multiprocessing


def let_children_write() -> None:
    """Let this rank have children, which a daemon must not have, and a queue of theirs: Megatron's
    own process for it would import everything again."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    multiprocessing.current_process()._config["daemon"] = False
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()


def end_children() -> None:
    """End those that Megatron leaves to the interpreter."""
    for child in multiprocessing.active_children():
        child.kill()  # beside CUDA some do not end when they are asked to
        child.join()
