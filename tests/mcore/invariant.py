"""A GPT whose token log-probabilities have the same bits on any number of ranks, on any device.

Import it at the top of a test module, as tests.mcore.gpt.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_burst.config import BurstConfig
from tests.mcore.gpt import Parallel, config_of, sharded, whole_batch
from tests.ranks import preload

preload("megatron_burst.mcore.fused_loss", "megatron_burst.mcore.specs")
SIZES = (1, 2, 4)


def model_of(parallel: Parallel, burst: BurstConfig, spec, **options):
    """Build the GPT; if `burst` is invariant in Megatron's batch-invariant mode."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.enums import AttnBackend

    from tests.mcore.gpt import SEQ, VOCAB

    if burst.invariant:
        options |= dict(batch_invariant_mode=True, flash_attention_version=4)
    options |= dict(cp_comm_type="burst", attention_backend=AttnBackend.flash)
    config = config_of(parallel, **options)
    config.burst = burst
    torch.manual_seed(1234)
    return GPTModel(
        config, spec, VOCAB, SEQ, position_embedding_type="rope", parallel_output=False,
        share_embeddings_and_output_weights=False,
    )  # fmt: skip


def token_values(gpt, device: str = "cpu") -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities and entropies [2, b, s], of the whole batch, on every rank; and complete
    gradients of the sum of all log-probabilities."""
    from megatron.core import parallel_state

    from megatron_burst.mcore.fused_loss import log_probs_and_entropy

    group = parallel_state.get_context_parallel_group()
    batch = {name: x.to(device) for name, x in sharded(whole_batch(), group).items()}
    found = gpt(
        batch["tokens"], batch["position_ids"], None, output_processor=log_probs_and_entropy
    )
    found.log_probs.sum().backward()
    mine = torch.stack((found.log_probs, found.entropy)).detach()
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    places = [torch.empty_like(batch["position_ids"]) for _ in parts]
    dist.all_gather(parts, mine.contiguous(), group)
    dist.all_gather(places, batch["position_ids"].contiguous(), group)
    whole = torch.empty(*mine.shape[:2], mine.shape[2] * len(parts), dtype=mine.dtype)
    for part, place in zip(parts, places, strict=True):
        whole[:, :, place[0].cpu()] = part.cpu()
    grads = {}
    for name, parameter in gpt.named_parameters():
        grads[name] = parameter.grad.float()
        dist.all_reduce(grads[name], group=group)
    return whole, {name: grad.cpu() for name, grad in grads.items()}


@contextmanager
def paths_taken() -> Iterator[set]:
    """What runs meanwhile: of each kind of call the mode of attention, and whether its bits are
    promised; and the loss's "tiles", and whether they are the same for any number of rows. Bits
    alone do not tell: on some CPUs those of other paths are the same."""
    from megatron_burst import attention
    from megatron_burst.loss import linear

    resolve, make, taken = attention.resolve, linear.Head, set()

    def resolved(spec):
        found = resolve(spec)
        taken.add((found[0].intra, found[0].invariant))
        return found

    def made(options, tp, tiles, *rest):
        taken.add(("tiles", tiles.fixed))
        return make(options, tp, tiles, *rest)

    with patch.object(attention, "resolve", resolved), patch.object(linear, "Head", made):
        yield taken


def path_of(size: int) -> set:
    """The one that is promised to have the same bits on any number of ranks."""
    return {("a2a" if size > 1 else "ring", True), ("tiles", True)}


def spread(grads: dict, of_one: dict) -> float:
    """The largest relative difference, in norm, of a parameter's gradient."""
    pairs = ((grads[name], one) for name, one in of_one.items())
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


@contextmanager
def invariant_products():
    """As Megatron's batch-invariant kernels, which need CUDA: rows by themselves, in float32."""
    library = torch.library.Library("aten", "IMPL")

    def product(a, b):
        wide = torch.promote_types(a.dtype, torch.float32)
        columns = b.t().contiguous().to(wide)
        rows = [(row * columns).sum(-1) for row in a.contiguous().to(wide)]
        return torch.stack(rows).to(a.dtype)

    library.impl("mm", product, "CPU")
    try:
        yield
    finally:
        library._destroy()
