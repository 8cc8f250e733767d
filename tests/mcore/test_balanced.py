"""Balanced micro-batches under Megatron's schedules: loss and gradients of documents one by one.

Guards against rows of another document, padding that is trained on, a group that is not the
micro-batch's, groups that pile up, and ranks that go through different steps.
"""

import re
from argparse import Namespace
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_burst.balance import BatchGrid, Costs, Sampler
from megatron_burst.errors import BurstError
from tests.mcore import pipeline
from tests.mcore.gpt import VOCAB
from tests.mcore.lacking import needs
from tests.mcore.packed_sample import with_sequence_parallel
from tests.ranks import preload, run_ranks

preload("megatron_burst.mcore.balanced")
TOLERANCE = 1e-12
COSTS = Costs(1e-4, 1e-6, 0.001, {2: 1e-4, 4: 2e-4})
STEP, LIMIT = 16, 48  # documents of a step, tokens of a rank
LENGTHS = np.array([7, 3, 61, 12, 30, 5, 1, 18, 9, 44, 2, 25, 11, 6, 16, 8] * 2 + [33, 4, 90, 21])
DP_AND_CP = pipeline.Setting(cp=4, micro_batches=3)
PIPELINE = pipeline.Setting(pp=2, cp=2, micro_batches=3)
INTERLEAVED = pipeline.Setting(pp=4, vp=2, cp=2, micro_batches=8)
TENSOR = pipeline.Setting(cp=2, tp=2, micro_batches=6)


def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCAB, (n,), generator=generator) for n in LENGTHS.tolist()]


def config_for(setting: pipeline.Setting, **options):
    """A pipeline's stages tell each other the shapes of what they send; Megatron's default
    dispatcher of MoE layers, which no model here has, refuses that."""
    given = dict(variable_seq_lengths=setting.pp > 1, moe_token_dispatcher_type="alltoall")
    given["num_layers"] = 4 if setting.vp == 1 else 8
    return pipeline.config_for(setting, **given | options)


def sampler_of(setting: pipeline.Setting, config, sizes, **options) -> Sampler:
    from megatron_burst import BalancedBatches

    grid = BalancedBatches.grid(config, setting.micro_batches, LIMIT)
    return Sampler(LENGTHS, grid, COSTS, STEP, cp_sizes=sizes, **options)


def losses_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")


def run(setting, chunks, iterators, found: list) -> pipeline.Step:
    """A step of micro-batches from an iterator for each chunk."""

    def forward_step(_, model):
        batch = next(iterators[[*map(id, chunks)].index(id(model))])
        params = batch["packed_seq_params"]
        out = model(batch["tokens"], batch["position_ids"], None, packed_seq_params=params)

        def loss_of(logits):
            losses = losses_of(logits, batch["labels"]) * batch["loss_mask"][0]
            found.append(losses.detach().sum())
            return losses.sum(), batch["loss_mask"].sum().int(), {"loss": found[-1]}

        return out, loss_of

    return pipeline.run_step(setting, chunks, step=forward_step)


def one_by_one(setting: pipeline.Setting, some: list[int]) -> tuple[torch.Tensor, pipeline.Step]:
    """The reference: each document as a micro-batch of its own, with Megatron alone and no context
    parallelism. Data-parallel ranks, of which there are more than with it, have equally many."""
    from megatron.core import parallel_state

    pipeline.start(setting := replace(setting, cp=1))
    ranks = parallel_state.get_data_parallel_world_size()
    mine = sorted(some)[parallel_state.get_data_parallel_rank() :: ranks]
    setting, every = replace(setting, micro_batches=len(some) // ranks), documents()
    assert len(mine) == setting.micro_batches
    chunks = pipeline.build(setting, config_for(setting))

    def batches():
        for index in mine:
            tokens = every[index][None]
            labels, mask = tokens.roll(-1, 1), torch.ones(tokens.shape)
            mask[:, -1] = 0
            names = "tokens", "labels", "loss_mask", "position_ids"
            rows = tokens, labels, mask, torch.arange(tokens.shape[1])[None]
            rows = with_sequence_parallel(setting, *rows)
            yield dict(zip(names, rows, strict=True), packed_seq_params=None)

    found: list[torch.Tensor] = []
    step = complete(run(setting, chunks, [batches() for _ in chunks], found), chunks)
    loss = torch.stack(found).sum() if found else torch.zeros(())
    return summed(loss.double()), step


def summed(x: torch.Tensor) -> torch.Tensor:
    """Over the ranks that share a step's documents."""
    from megatron.core import parallel_state

    dist.all_reduce(x, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return x


def complete(step: pipeline.Step, chunks) -> pipeline.Step:
    """Sum gradients over what Megatron's `finalize_model_grads` sums over. All in one message, as
    gloo needs milliseconds of a core for each."""
    from megatron.core import parallel_state

    grads, split = list(step.grads.values()), []
    for index, chunk in enumerate(chunks):
        split += [step.grads[f"{index}.{name}"] for name, parameter in chunk.named_parameters()
                  if getattr(parameter, "sequence_parallel", False)]  # fmt: skip
    replace_all(grads, summed(torch.cat([grad.flatten() for grad in grads])))
    if split:
        together = torch.cat([grad.flatten() for grad in split])
        dist.all_reduce(together, group=parallel_state.get_tensor_model_parallel_group())
        replace_all(split, together)
    return step


def replace_all(tensors: list[torch.Tensor], together: torch.Tensor) -> None:
    """Give tensors the values that lie one behind the other."""
    for tensor, values in zip(tensors, together.split([x.numel() for x in tensors]), strict=True):
        tensor.copy_(values.view_as(tensor))


def compared(rank: int, setting: pipeline.Setting, sizes) -> dict:
    """Errors of two steps, the sizes that ran, and after each of four steps the sizes so far with
    the number of this rank's groups."""
    from megatron.core import parallel_state

    from megatron_burst import BalancedBatches
    from megatron_burst.mcore import patches

    pipeline.start(setting)
    patches.apply("attention")
    config = config_for(setting)
    chunks = pipeline.build(setting, config, burst=True)
    iterators = [BalancedBatches(documents(), sampler_of(setting, config, sizes), config)
                 for _ in chunks]  # fmt: skip
    order, got, groups = sampler_of(setting, config, sizes), [], []
    widths: set[int] = set()
    for _ in range(4):
        widths |= {
            one.cp for one in next(order).of_rank(parallel_state.get_data_parallel_rank(), 0)
        }
        found: list[torch.Tensor] = []
        step = complete(run(setting, chunks, iterators, found), chunks)
        loss = summed(torch.stack(found).sum() if found else torch.zeros(()).double())
        got.append((loss, step))
        groups.append((tuple(sorted(widths)), len(dist.distributed_c10d._world.pg_map)))
    errors, order = {}, sampler_of(setting, config, sizes)
    for number, (loss, step) in enumerate(got[:2]):
        true_loss, truth = one_by_one(setting, next(order).documents.tolist())
        errors[number, "grads"] = pipeline.relative_error(step, truth)
        if loss:
            errors[number, "loss"] = float(abs(loss / true_loss - 1))
    return {"errors": errors, "groups": groups, "sizes": widths}


def check(setting: pipeline.Setting, world: int, sizes) -> None:
    found = run_ranks(compared, world, setting, sizes, timeout_s=400)
    for each in found:
        assert max(each["errors"].values()) <= TOLERANCE, each
        assert len(set(each["groups"])) == len(dict(each["groups"])) < 4, each  # made once a size
    assert set().union(*(each["sizes"] for each in found)) == set(sizes or (setting.cp,))
    assert len(found[-1]["errors"]) == 4


@pytest.mark.parametrize(
    "setting, world, sizes",
    [
        pytest.param(DP_AND_CP, 8, None, id="DP2 CP4", marks=pytest.mark.whole),
        pytest.param(PIPELINE, 8, None, id="PP2 DP2 CP2", marks=pytest.mark.whole),
        pytest.param(DP_AND_CP, 8, (1, 2, 4), id="DP2 CP 1, 2 and 4"),
        pytest.param(PIPELINE, 8, (1, 2), id="PP2 DP2 CP 1 and 2", marks=pytest.mark.whole),
        pytest.param(INTERLEAVED, 8, (1, 2), id="PP4 VP2 CP 1 and 2"),
        pytest.param(TENSOR, 4, (1, 2), id="TP2 CP 1 and 2"),
    ],
)
def test_loss_and_gradients_are_those_of_documents_one_by_one(setting, world, sizes):
    """The groups that micro-batches need are made once."""
    check(setting, world, sizes)


# ---- the rows of a hundred steps ------------------------------------------------------------

STEPS = 100


def rows(rank: int) -> list[tuple[int, int, int, float]]:
    """Token, label, position and mask of each row that this rank has in an epoch, where each token
    has a number of its own, from 1 on."""
    from megatron_burst import BalancedBatches

    setting = DP_AND_CP
    pipeline.start(setting)
    lengths = np.random.default_rng(1).integers(1, 24, STEPS * STEP)
    ends = np.cumsum(lengths)
    every = [np.arange(end - n, end) + 1 for n, end in zip(lengths, ends, strict=True)]
    config = config_for(setting)
    grid = sampler_of(setting, config, None).grid
    sampler = Sampler(lengths, grid, COSTS, STEP, cp_sizes=(1, 2, 4))
    batches, found = BalancedBatches(every, sampler, config), []
    for _ in range(STEPS * setting.micro_batches):
        batch = next(batches)
        names = "tokens", "labels", "position_ids", "loss_mask"
        flat = [batch[name][0].tolist() for name in names]
        found += [row for row in zip(*flat, strict=True) if row[0] or row[3]]
    return found


def test_a_hundred_steps_have_each_token_of_each_document_once():
    found = sorted(row for each in run_ranks(rows, 8) for row in each)
    lengths, true = np.random.default_rng(1).integers(1, 24, STEPS * STEP), []
    for n, end in zip(lengths.tolist(), np.cumsum(lengths).tolist(), strict=True):
        first = end - n + 1
        true += [(first + at, first + at + 1, at, 1.0) for at in range(n - 1)]
        true.append((end, 0, n - 1, 0.0))
    assert found == true


def test_labels_and_masks_of_a_data_set_are_taken():
    from megatron_burst import BalancedBatches

    ours = BalancedBatches.__new__(BalancedBatches)
    ours._sampler = Namespace(lengths=[3])
    ours._documents = [dict(tokens=[5, 6, 7], labels=[6, 7, 9], loss_mask=[0, 1, 1])]
    assert ours._read(0)["labels"].tolist() == [6, 7, 9]
    assert ours._read(0)["loss_mask"].tolist() == [0.0, 1.0, 1.0]
    ours._documents = [[5, 6, 7, 8]]
    with pytest.raises(BurstError, match=r"document 0 with shapes \[\(4,\)\], and a length of 3"):
        ours._read(0)
    ours._documents = [dict(tokens=[5, 6, 7], labels=[6, 7, 9], loss_mask=[0, 1, 1], cu_seqlens=0)]
    with pytest.raises(BurstError, match="document 0 with cu_seqlens"):
        ours._read(0)


# ---- what is refused ------------------------------------------------------------------------


def refused(rank: int) -> list[str]:
    """What is said where ranks differ, in one way after the other."""
    from megatron_burst import BalancedBatches

    pipeline.start(TENSOR)
    config, said = config_for(TENSOR), []
    BalancedBatches(documents(), sampler_of(TENSOR, config, None), config)  # later ones may differ
    for name in ("lengths", "seed", "consumed"):
        given = sampler_of(TENSOR, config, None)
        if rank == 2 and name == "lengths":
            given.lengths = given.lengths[::-1]
        elif rank == 2:
            setattr(given, name, 16)
        try:
            BalancedBatches(documents(), given, config)
        except BurstError as error:
            said.append(str(error))
    return said


def test_ranks_that_go_through_different_steps_hear_of_it_on_all_ranks():
    for said in run_ranks(refused, 4):
        terms = [re.search("got (.*?)=", sentence)[1] for sentence in said]
        assert terms == ["documents", "seed", "consumed"], said
        assert "each runs its part of the same steps" in said[0] and "rank 2" in said[0]


def test_jobs_that_would_be_wrong_are_refused():
    from megatron_burst.mcore import balanced

    grid = BatchGrid(dp=2, cp=2, micro_batches=3, token_limit=LIMIT, pp=2)
    sampler = Sampler(LENGTHS, grid, COSTS, STEP, cp_sizes=(1, 2))
    fine = dict(
        context_parallel_size=2, pipeline_model_parallel_size=2, expert_model_parallel_size=1,
        calculate_per_token_loss=True, variable_seq_lengths=True, mtp_num_layers=None,
        virtual_pipeline_model_parallel_size=None, cp_comm_type=["burst"],
    )  # fmt: skip
    flags = dict(global_batch_size=16, micro_batch_size=2, dataloader_type="external")

    def refusal(own=sampler, args=None, **changes) -> str:
        ours = balanced.BalancedBatches.__new__(balanced.BalancedBatches)
        ours._sampler, ours._config = own, Namespace(**fine | changes)
        dp = mock.patch.object(
            balanced.parallel_state, "get_data_parallel_world_size", return_value=2
        )
        given = args and Namespace(**args)
        with dp, mock.patch.object(balanced, "global_args", return_value=given):
            return balanced.unmet_needs("", ours._needs())

    assert not refusal()
    assert "the sampler's grid must have the job's sizes" in refusal(context_parallel_size=4)
    assert "pass --calculate-per-token-loss" in refusal(calculate_per_token_loss=False)
    fsdp2 = flags | dict(use_torch_fsdp2=True)
    assert "got --use-torch-fsdp2; pass" in refusal(args=fsdp2, calculate_per_token_loss=False)
    assert "got variable_seq_lengths=False" in refusal(variable_seq_lengths=False)
    two_chunks = dict(virtual_pipeline_model_parallel_size=2)
    assert "got 2 stages of 2 model chunks" in refusal(**two_chunks)
    assert "got context-parallel sizes [1, 2]; leave cp_sizes out" in refusal(mtp_num_layers=1)
    assert "got cp_comm_type='p2p' and context-parallel sizes [1, 2]" in refusal(cp_comm_type="p2p")
    assert not refusal(Sampler(LENGTHS, grid, COSTS, STEP), mtp_num_layers=1, cp_comm_type=None)
    three = Sampler(LENGTHS, grid, COSTS, 12)
    assert not refusal(three, flags | dict(global_batch_size=12))
    for change in (dict(), dict(global_batch_size=12, micro_batch_size=1),
                   dict(global_batch_size=12, dataloader_type="single"),
                   dict(global_batch_size=12, rampup_batch_size=[4, 4, 4])):  # fmt: skip
        assert "steps of 12 documents in 3 micro-batches a rank" in refusal(three, flags | change)


# ---- why Megatron's own --hybrid-context-parallel is refused --------------------------------


def hybrid(rank: int) -> list[tuple[int, int, int]]:
    """Of each sample that Megatron's loader gives this rank: its tokens, the ranks that it chose
    for it, and the rows that Megatron's function leaves on this rank."""
    from megatron.core import parallel_state
    from megatron.core.datasets.data_schedule import HybridCPDataLoaderWrapper
    from megatron.core.utils import get_batch_on_this_cp_rank

    from megatron_burst.tools import cpu_mode

    cpu_mode.install(training=False)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=4, hybrid_context_parallel=True)
    places = torch.arange(64)
    sample = dict(tokens=places, labels=places, loss_mask=torch.ones(64), position_ids=places)
    sample |= dict(cu_seqlens=torch.tensor([0, 16, 32, 64]).int(), max_seqlen=torch.tensor(32))
    settings = Namespace(max_seqlen_per_dp_cp_rank=16)
    samples, chosen = next(HybridCPDataLoaderWrapper(iter([[sample]]), settings))
    groups = [parallel_state.get_context_parallel_group()]
    groups.append(parallel_state.get_hybrid_data_context_parallel_groups)
    found = []
    for index, given in samples.items():
        ranks = sum(index in some[each] for some in chosen for each in range(4))
        batch = {name: x[None] for name, x in given.items()}
        batch = dict.fromkeys(("cu_seqlens", "attention_mask")) | batch
        batch["local_cp_size"] = torch.tensor([ranks])
        mine = get_batch_on_this_cp_rank(batch, True, *groups)
        found.append((given["tokens"].numel(), ranks, mine["tokens"].shape[1]))
    return found


@needs("hybrid groups in one function")
def test_megatrons_hybrid_samples_are_sharded_over_the_layers_group():
    """Once this fails, the refusal of --hybrid-context-parallel can go."""
    found = [each for ranks in run_ranks(hybrid, 4) for each in ranks]
    assert {ranks for _, ranks, _ in found} != {4}
    assert all(rows == tokens // 4 for tokens, _, rows in found), found
