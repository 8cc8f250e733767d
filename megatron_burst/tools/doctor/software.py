"""Versions, kernels, the Megatron functions that burst replaces, and GPUs that torch sees."""

import platform
from itertools import permutations

import torch

from megatron_burst.errors import BurstError
from megatron_burst.installed import find_megatron, require_megatron, version_of
from megatron_burst.kernels.backends import backends, describe_refusals
from megatron_burst.kernels.interface import Problem
from megatron_burst.tools.doctor.report import Check, fail, ok, skip, warn
from megatron_burst.version import __version__

_INSTALL = "pip install megatron-core==0.19.2"
_PACKAGES = {"megatron-core": "megatron-core", "te": "transformer-engine", "fa4": "flash-attn-4"}


def software() -> dict[str, str]:
    """Versions of what takes part, by name; all nodes of a job should have the same."""
    packages = {name: version_of(package) for name, package in _PACKAGES.items()}
    versions = {"burst": __version__, "python": platform.python_version()}
    versions["torch"] = torch.__version__
    versions |= {name: version for name, version in packages.items() if version != "unknown"}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def check_torch(gpus_listed: int) -> Check:
    """That torch sees the GPUs that nvidia-smi lists, and that they reach each other's memory."""
    seen = torch.cuda.device_count()
    if not seen and not gpus_listed:
        return skip("torch", "torch sees no GPU: a run would use the CPU, slowly")
    if not seen:
        change = "install a torch built for this driver's CUDA; look at CUDA_VISIBLE_DEVICES"
        return fail("torch", f"nvidia-smi lists {gpus_listed} GPUs, torch sees none", change)
    pairs = list(permutations(range(seen), 2))
    if apart := [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]:
        what = f"{len(apart)} of {len(pairs)} pairs of GPUs cannot read each other's memory"
        change = "keys are then sent by NCCL (force.transfer=send); check NVLink or PCIe access"
        return warn("torch", f"{what}, such as {apart[0]}", change)
    return ok("torch", f"torch sees {seen} GPUs, all with access to their peers")


def check_backends() -> Check:
    """Which attention kernels can be used here, for bf16 (on CPU fp32) and head dimension 128."""
    gpu = torch.cuda.is_available()
    arch = torch.cuda.get_device_capability()[0] if gpu else 0
    dtype = torch.bfloat16 if gpu else torch.float32
    problem = Problem("cuda" if gpu else "cpu", dtype, 128, 128, grouped=True, arch=arch)
    why = {n: b.capability.refusal(problem) or b.missing() for n, b in backends().items()}
    live = [name for name, refusal in why.items() if refusal is None]
    reasons = describe_refusals({name: refusal for name, refusal in why.items() if refusal})
    what = f"usable: {', '.join(live) or 'none'}" + (f"; {reasons}" if reasons else "")
    if not live:
        return fail("backends", what, "install a torch with attention kernels")
    if arch in (9, 10) and "fa4" not in live:
        change = "the fastest here: pip install -e '.[flash-attn-4]' in megatron_burst's checkout"
        return warn("backends", what, change)
    return ok("backends", what)


def check_hook_points() -> Check:
    """Whether the Megatron functions that burst replaces are as expected."""
    try:
        if find_megatron():
            require_megatron("burst's flags")
        from megatron_burst.mcore import patches

        hook_points = patches.rows()
    except BurstError as error:
        what, _, change = str(error).rpartition("; ")
        return fail("hook points", what, change)
    except ImportError as error:
        what = f"Megatron cannot be imported ({error}): burst_attention works, its flags do not"
        return warn("hook points", what, _INSTALL)
    if broken := [(patch, problem) for patch in hook_points if (problem := patch.misfit())]:
        what = "; ".join(f"{p.target} ({p.why}): {problem}" for p, problem in broken)
        return fail("hook points", what, _INSTALL)
    return ok("hook points", f"all {len(hook_points)} Megatron functions are as expected")
