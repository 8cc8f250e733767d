"""Runs a function on several processes that form a process group."""

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

Variables = tuple[tuple[str, str], ...]
_ALWAYS = ["torch", "torch.distributed", "megatron_burst.attention", "tests.oracle"]
# What modules of tests import: a process without it starts 0.12 s of a core later; and what torch
# imports with the first checkpoint, optimizer or profile: 1.4 s.
_ALWAYS += ["pytest", "hypothesis", "torch._dynamo", "tests.dynamo_table"]
# What modules of tests ask for, and what burst loads in a process's first call: 0.05 s.
_PRELOAD = [f"megatron_burst.kernels.{name}" for name in (
    "fa4", "flash_attn", "reference", "torch_cpu", "torch_gpu", "triton",
)]  # fmt: skip
_PRELOAD += ["megatron_burst.desync.hops", "megatron_burst.comm.symmetric"]
_PRELOAD += ["megatron_burst.desync.verdict", "megatron_burst.masks.slices"]
# The process's only cache: GPU crews, by their settings, the latest last. A CUDA context, NCCL
# and compiled kernels take 10 s per process, so tests share them; and up to 2 GiB of a GPU, so only
# a few processes stay.
_CREWS: dict[tuple, "Crew"] = {}
_MOST = 4  # processes of a worker


def preload(*modules: str) -> None:
    """Let every process without a GPU start with modules imported; call it at the top of a test
    module. With TransformerEngine some of Megatron's modules initialise CUDA when imported, and no
    process forked after that could use it."""
    _PRELOAD.extend(module for module in modules if module not in _PRELOAD)


def preloaded(backend: str = "gloo") -> list[str]:
    """The modules that processes with this backend start with."""
    return _ALWAYS + (_PRELOAD if backend == "gloo" else [])


def run_ranks(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    backend: str = "gloo",
    timeout_s: int = 300,
    environment: dict[str, str] | None = None,
    nodes: int = 1,
    fresh: bool = False,
) -> list[Any]:
    """Run `function(rank, *args)` on `world` processes in a process group.

    Args:
        function: of a module, with a picklable result.
        world: number of processes.
        args: passed to the function.
        backend: of the process group; with "nccl" processes are used again by later tests.
        timeout_s: how long all of it may take.
        environment: variables to set in each process before anything else.
        nodes: make NCCL believe that the ranks span this many nodes. More ranks than GPUs share
            them, at other NCCL host IDs: then pass `BurstConfig.nodes` too.
        fresh: start processes of its own for a function that changes what later ones would see.

    Returns:
        the results in rank order.

    Raises:
        AssertionError: if a rank fails, with the traceback of the first that did, or hangs.
    """
    given = backend, _variables(world, backend, nodes, environment or {})
    shared = backend == "nccl" and not fresh
    crew = _CREWS.pop(given, None) if shared else None
    if backend == "nccl" and not crew:
        end_crews(_MOST - world)
    crew = crew or Crew(*given)
    try:
        results = crew.run(function, args, timeout_s)
        if shared:
            crew.wait(timeout_s)
            _CREWS[given], crew = crew, None
        return results
    finally:
        if crew:
            crew.end()


class Crew:
    """Processes that run one function after another, each in a new process group.

    Args:
        backend: of the process groups.
        variables: of each process, to set before anything else.
    """

    def __init__(self, backend: str, variables: tuple[Variables, ...]) -> None:
        context = multiprocessing.get_context("forkserver")  # forks from a process without threads
        context.set_forkserver_preload(preloaded(backend))
        self._pipes, self._processes = [], []
        for rank, environment in enumerate(variables):
            pipe, theirs = context.Pipe()
            work = (theirs, rank, len(variables), backend, dict(environment))
            self._processes.append(context.Process(target=_serve, args=work, daemon=True))
            self._processes[-1].start()
            theirs.close()
            self._pipes.append(pipe)

    def run(
        self, function: Callable[..., Any], args: tuple, timeout_s: int, mortal: int = -1
    ) -> list[Any]:  # fmt: skip
        """The function's results in rank order; `mortal`: a rank whose process may end: None."""
        self._store = new_store()
        for pipe in self._pipes:
            pipe.send((function, self._store.port, args))
        return _collect(self._pipes, timeout_s, mortal)

    def wait(self, timeout_s: int) -> None:
        """Wait until the processes have cleaned up after a function; one that cannot is not
        reused."""
        _collect(self._pipes, timeout_s)

    def end(self) -> None:
        """Kill the processes, whatever they do: all at once, as each that outlives another says
        that its connection broke."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def new_store(port: int = 0) -> Any:
    """The server of a store, or a client of the one at a port. Ranks that wait for a key are told
    at once; in a file they would look every 10 ms."""
    import torch.distributed as dist

    where = "127.0.0.1", port
    return dist.TCPStore(*where, None, is_master=not port, wait_for_workers=False)


def end_crews(most: int = 0) -> None:
    """End the oldest crews, until at most so many processes stay."""
    while _CREWS and sum(len(ranks) for _, ranks in _CREWS) > most:
        _CREWS.pop(next(iter(_CREWS))).end()


def _variables(
    world: int, backend: str, nodes: int, environment: dict[str, str]
) -> tuple[Variables, ...]:
    """The variables of each rank; equal for numbers of nodes that make no difference to NCCL, as
    all ranks share one GPU."""
    in_turn = turns(world, backend)
    places = [(rank * nodes // world, rank * in_turn // world) for rank in range(world)]
    every = []
    for place in places:
        its = {name: x for name, x in environment.items() if os.environ.get(name) != x}
        if nodes > 1 or in_turn > 1:
            its["NCCL_HOSTID"] = f"pretended-{places.index(place)}"
            its["NCCL_SOCKET_IFNAME"] = "lo"
            its["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        every.append(tuple(sorted(its.items())))
    return tuple(every)


def turns(world: int, backend: str) -> int:
    """How many ranks share a GPU: 1 if there are enough."""
    import torch

    return -(-world // torch.cuda.device_count()) if backend == "nccl" else 1


def _collect(pipes: list, timeout_s: int, mortal: int = -1) -> list[Any]:
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
                ok, results[rank] = rank == mortal, None if rank == mortal else "the process died"
            assert ok, f"rank {rank} failed:\n{results[rank]}"
    return [results[rank] for rank in range(len(pipes))]


def _serve(pipe, rank, world, backend, environment) -> None:
    gc.freeze()  # imports stay: scanning them takes 0.5 s per collection
    os.environ.update(environment)
    if backend == "gloo":
        from conformance.on_cpu import share_one_device

        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CPU mode refuses to run where a GPU is visible
        # with the 64 groups of three Megatron layouts, their threads take a quarter of a core for
        # four ranks
        share_one_device()
    while True:
        try:
            function, port, args = pipe.recv()
        except EOFError:
            return
        _run_one(pipe, function, rank, world, backend, port, args)


def _run_one(pipe, function, rank, world, backend, port, args) -> None:
    import torch.distributed as dist

    try:
        if backend == "nccl":
            import torch

            torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.set_debug_level_from_env()  # torch read it at import
        dist.init_process_group(
            backend,
            store=new_store(port),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=180),
        )
        result = function(rank, *args)
        pipe.send((True, result))
        dist.barrier()  # nobody leaves while another still needs its connections
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise
    if backend == "nccl":
        del result
        gc.collect()
        torch.cuda.empty_cache()
    pipe.send((True, "ready"))
