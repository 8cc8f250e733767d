"""Facts that may differ between ranks' machines and decide how they run a call."""

from collections.abc import Callable

from torch import Tensor

from megatron_burst.config import BurstConfig
from megatron_burst.engine.setup import multiprocessors
from megatron_burst.errors import BurstError
from megatron_burst.kernels.backends import choose_backend, problem_of
from megatron_burst.schedule.mask import Mask


def facts_of(q: Tensor, k: Tensor, v: Tensor, config: BurstConfig, mask: Mask) -> dict[str, str]:
    """Facts by name; ranks with equal facts choose alike, whatever the batch and tokens.

    Args:
        q: [b, n, h, d_qk].
        k: [b, n, h_kv, d_qk].
        v: [b, n, h_kv, d_v].
        config: what the user asked for.
        mask: of the sequence.
    """
    problem = problem_of(q, k, v, config.deterministic, mask)
    facts = {
        "backend": _found(lambda: choose_backend(problem, config.backend)[0].capability.name),
    }
    in_rounds = config.intra != "ring" and not config.tuning.flat and config.tuning.pieces
    if in_rounds and config.tuning.heads_per_round is None:
        facts["multiprocessors (without heads_per_round)"] = f"{multiprocessors(q.device)}"
    return facts


def _found(find: Callable[[], str]) -> str:
    """What is found, or the text of the error: the other ranks must learn that too."""
    try:
        return find()
    except BurstError as error:
        return str(error)
