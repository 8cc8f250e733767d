"""Runs a function on several processes that form a process group."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

_PRELOAD = ["torch", "torch.distributed", "megatron_burst.attention", "tests.oracle"]


def preload(*modules: str) -> None:
    """Let every process start with modules imported; call it where a test module is imported."""
    _PRELOAD.extend(module for module in modules if module not in _PRELOAD)


def run_ranks(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    backend: str = "gloo",
    timeout_s: int = 120,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """Run `function(rank, *args)` on `world` processes in a process group.

    Args:
        function: of a module, with a picklable result.
        world: number of processes.
        args: passed to the function.
        backend: of the process group.
        timeout_s: how long all of it may take.
        environment: variables to set in each process before anything else.

    Returns:
        the results in rank order.

    Raises:
        AssertionError: if a rank fails, with the traceback of the first that did, or hangs.
    """
    context = multiprocessing.get_context("forkserver")  # forks from a process without threads
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        store, pipes, processes = Path(folder) / "store", [], []
        for rank in range(world):
            receiver, sender = context.Pipe(duplex=False)
            work = (sender, function, rank, world, str(store), backend, environment or {}, args)
            processes.append(context.Process(target=_enter, args=work, daemon=True))
            processes[-1].start()
            sender.close()
            pipes.append(receiver)
        try:
            return _collect(pipes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list, timeout_s: int) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        pending = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(pending, timeout_s)
        missing = [rank for rank in range(len(pipes)) if rank not in results]
        assert ready, f"ranks {missing} said nothing for {timeout_s} s"
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                ok, results[rank] = pipe.recv()
            except EOFError:
                ok, results[rank] = False, "the process died"
            assert ok, f"rank {rank} failed:\n{results[rank]}"
    return [results[rank] for rank in range(len(pipes))]


def _enter(sender, function, rank, world, store, backend, environment, args) -> None:
    os.environ.update(environment)
    import torch.distributed as dist

    try:
        if backend == "gloo":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CPU mode refuses to run where a GPU is seen
        if backend == "nccl":
            import torch

            torch.cuda.set_device(rank)
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=60),
        )
        result = function(rank, *args)
        sender.send((True, result))
        dist.barrier()  # nobody leaves while another still needs its connections
        dist.destroy_process_group()
    except BaseException:
        sender.send((False, traceback.format_exc()))
        raise
