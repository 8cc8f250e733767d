"""torch's checkpoints, which burst replaces where results are kept; loads no torch."""

from functools import partial

from megatron_burst.installed import minor, version_of
from megatron_burst.patching import Patch

_KEEP = "megatron_burst.recompute.keep"
_GENERATOR = "_checkpoint_without_reentrant_generator"
_IS_NEW = minor(version_of("torch")) >= (2, 15)  # torch calls another function there
_OPTIONS = "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"
_of_torch = partial(Patch, "checkpoints", package="torch")

CHECKPOINTS = (
    _of_torch("torch.utils.checkpoint:CheckpointFunction.forward", f"{_KEEP}:in_frames",
              ("ctx", "run_function", "preserve_rng_state", "args"),
              "reentrant checkpoints have no hook around the first pass and recomputation"),
    _of_torch(f"torch.utils.checkpoint:{_GENERATOR}{'_impl' * _IS_NEW}", f"{_KEEP}:with_contexts",
              ("fn", "args", "kwargs", *_OPTIONS, "respect_saved_tensors_hooks")
              if _IS_NEW else ("fn", *_OPTIONS, "args", "kwargs"),
              "other checkpoints have context_fn, which each caller would have to pass"),
)  # fmt: skip


def patch_checkpoints() -> None:
    """Replace them; refuses a torch that the rows were not written for. Idempotent."""
    for patch in CHECKPOINTS:
        patch.apply()
