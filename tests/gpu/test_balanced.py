"""Balanced micro-batches on GPUs, at context-parallel sizes that change from one to the next.

Losses and gradients are those of the documents one by one, each on one rank. Guards against rows of
another document, and transfers of a group that run into those of its sub-groups.
"""

import pytest
import torch
import torch.distributed as dist

from megatron_burst.balance import BatchGrid, Costs, Sampler
from tests.gpu import needs_gpus
from tests.gpu.test_apex import CP, VOCAB, model_of
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, needs_gpus()]
LENGTHS = [700, 33, 260, 1, 512, 90, 401, 128, 64, 300, 17, 150]
MICRO_BATCHES, LIMIT = 4, 1024
COSTS = Costs(1e-6, 1e-9, 1e-4, {2: 1e-6})
SIZES = {"one size": None, "changing sizes": (1, 2)}
Found = dict[str, torch.Tensor]


def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB, (n,), generator=generator) for n in LENGTHS]


def one_by_one(rank: int, device: torch.device):
    """This rank's documents, each a micro-batch that no other rank has a part of."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_burst.mcore.packed import consecutive_part

    alone = consecutive_part(parallel_state.get_context_parallel_group(), 1)
    for tokens in documents()[rank::CP]:
        tokens, n = tokens.to(device), len(tokens)
        ends = torch.tensor([0, n], dtype=torch.int32, device=device)
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=n,
            max_seqlen_kv=n, cp_group=alone, local_cp_size=1,
        )  # fmt: skip
        mask = torch.ones(1, n, device=device)
        mask[:, -1] = 0  # nothing follows
        yield dict(
            tokens=tokens[None], labels=tokens.roll(-1)[None], loss_mask=mask,
            position_ids=torch.arange(n, device=device)[None], packed_seq_params=packed,
        )  # fmt: skip


def step(model, batches) -> Found:
    """The sum of losses, and gradients, over all ranks."""
    model.zero_grad_buffer()
    first = next(model.parameters())
    loss = torch.zeros((), device=first.device)
    for batch in batches:
        given = {name: batch[name] for name in ("labels", "packed_seq_params")}
        losses = model(batch["tokens"], batch["position_ids"], None, **given)
        total = (losses * batch["loss_mask"]).sum()
        total.backward()
        loss += total.detach()
    found = {"loss": loss} | {name: x.main_grad.clone() for name, x in model.named_parameters()}
    for x in found.values():
        dist.all_reduce(x)
    return found


def compare_all(rank: int) -> dict[str, tuple[dict[str, float], set[int]]]:
    """By case: relative errors in norm, and the sizes of this rank's micro-batches."""
    from megatron.core import parallel_state

    from megatron_burst import BalancedBatches
    from megatron_burst.mcore import patches

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=CP)
    patches.apply("attention")
    options = dict(cp_comm_type="burst", calculate_per_token_loss=True)
    model = model_of(False, False, **options)
    config, device = model.module.config, next(model.parameters()).device
    truth, found = step(model, one_by_one(rank, device)), {}
    grid: BatchGrid = BalancedBatches.grid(config, MICRO_BATCHES, LIMIT)
    for name, sizes in SIZES.items():
        given = [Sampler(LENGTHS, grid, COSTS, len(LENGTHS), cp_sizes=sizes) for _ in "ab"]
        widths = {one.cp for one in next(given[1]).of_rank(0, rank)}
        batches = BalancedBatches(documents(), given[0], config)
        got = step(model, (next(batches) for _ in range(MICRO_BATCHES)))
        errors = {n: float((got[n] - x).norm() / x.norm()) for n, x in truth.items()}
        found[name] = errors, widths
    return found


@pytest.fixture(scope="module")
def comparisons():
    return run_ranks(compare_all, CP, backend="nccl", timeout_s=300, fresh=True)


@pytest.mark.parametrize("name", SIZES)
def test_losses_and_gradients_are_those_of_documents_one_by_one(comparisons, name):
    """To what bf16 rounds."""
    for found in comparisons:
        errors, widths = found[name]
        print(name, max(errors.values()))
        assert errors.pop("loss") <= 1e-3 and max(errors.values()) <= 2e-2, errors
        assert widths == set(SIZES[name] or (CP,))
