"""The functions of frameworks that compute log-probabilities from Megatron's logits: one table.

Loads no framework, nor Megatron. A row is applied when the framework imports its module, before
other modules import the function by name.
"""

import functools
import sys

from megatron_burst.imports import when_imported
from megatron_burst.mcore import patches
from megatron_burst.patching import Patch, on_undo

_OWN = "megatron_burst.mcore.log_probs.replacements"
_SLIME = "slime.backends.megatron_utils.loss"
_NEMO = "nemo_rl.distributed.model_utils"
_ROLL = "roll.distributed.strategy.megatron_strategy:MegatronInferStrategy"
_TERMINAL = "computes log-probabilities from logits"
_HIDDEN = "computes log-probabilities from hidden states"
_ROWS = "says of which rows log-probabilities are taken, so that others are skipped"


def _rows(*rows: tuple[str, str, str, str, str]) -> tuple[Patch, ...]:
    """Patches of (framework, place, becomes, parameters, why)."""
    return tuple(
        Patch(name, place, f"{_OWN}:{becomes}", tuple(parameters.split()), why, package=name)
        for name, place, becomes, parameters, why in rows
    )


TABLE: tuple[Patch, ...] = _rows(
    ("verl", "verl.models.mcore.model_forward_fused:fused_output_processor", "of_verl",
     "hidden_states output_layer output_weight labels context config _ignored", _HIDDEN),
    ("ms-swift", "swift.megatron.trainers.vocab_parallel_utils:"
     "compute_logps_and_entropy_from_logits", "of_ms_swift",
     "logits labels compute_entropy entropy_chunk_size", _TERMINAL),
    ("slime", "slime.utils.ppo_utils:calculate_log_probs_and_entropy", "of_slime",
     "logits tokens tp_group with_entropy chunk_size log_prob_keep_mask with_entropy_grad",
     _TERMINAL),
    ("slime", f"{_SLIME}:_build_shifted_tokens", "labels_of_slime",
     "T device unconcat_tokens total_lengths response_lengths allgather_cp", _ROWS),
    ("nemo-rl", f"{_NEMO}:DistributedLogprob.apply", "of_nemo_rl", "args kwargs", _TERMINAL),
    ("nemo-rl", f"{_NEMO}:ChunkedDistributedLogprob.apply", "of_nemo_rl", "args kwargs",
     _TERMINAL),
    ("roll", "mcore_adapter.parallel_functions.vocab_parallel:vocab_parallel_logprobs", "of_roll",
     "vocab_parallel_logits target use_fused_kernel", _TERMINAL),
    ("roll", "roll.third_party.megatron.tensor_parallel:vocab_parallel_entropy",
     "entropy_of_roll", "vocab_parallel_logits used_fp32 use_fused_kernel", _TERMINAL),
    ("roll", f"{_ROLL}.op_compute_log_probs", "rows_of_roll",
     "self logits input_ids attention_mask", _ROWS),
    ("roll", f"{_ROLL}.op_compute_entropy", "rows_of_roll", "self logits attention_mask", _ROWS),
)  # fmt: skip


def replace_functions() -> None:
    """Have models defer their logits and frameworks take deferred ones, as both are imported. A
    function with other parameters than the table's is skipped with a log line."""
    patches.apply_when_imported("log probs")
    for patch in TABLE:
        on_undo(when_imported(patch.module, functools.partial(patches.try_apply, patch)))


def takes_deferred() -> bool:
    """Whether a function that takes deferred logits has been replaced."""
    terminal = (patch for patch in TABLE if patch.why is _TERMINAL)
    return any(patch.module in sys.modules and patch.live for patch in terminal)
