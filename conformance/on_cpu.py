"""Runs Megatron's test programs on CPU processes over gloo: replaces what they assume of GPUs."""

import functools
import os
import sys

import torch
import torch.distributed as dist


def install() -> None:
    """Send Megatron's CUDA calls to the CPU and its "nccl" groups to gloo; one device a process."""
    from megatron_burst.tools import cpu_mode

    for name in ("transformer_engine", "transformer_engine_torch"):
        sys.modules[name] = None  # it has no kernels for CPUs, and Megatron runs without
    cpu_mode.install()
    torch.cuda.set_device = lambda device: None
    torch.cuda.device_count = lambda: int(os.environ.get("WORLD_SIZE", "1"))
    # Megatron's tests leave 10 groups a case behind: four processes had thousands of threads
    share_one_device(threads=1)
    init = dist.init_process_group

    @functools.wraps(init)
    def over_gloo(backend=None, *args, **options):
        return init("gloo", *args, **options)

    dist.init_process_group = over_gloo


def share_one_device(threads: int = 2) -> None:
    """Let all gloo groups of this process share one device, whose thread wakes 100 times a second.

    `threads` that each group has to run what it is asked for; 2 is torch's own number.
    """
    make, device = dist.ProcessGroupGloo.__init__, dist.ProcessGroupGloo.create_default_device()

    def on_one_device(self, store, rank, size, timeout, **added):
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout, options._threads = [device], timeout, threads
        for name in added.keys() & set(dir(options)):  # 2.15: enable_reconfigure
            setattr(options, name, added[name])
        make(self, store, rank, size, options)

    dist.ProcessGroupGloo.__init__ = on_one_device
