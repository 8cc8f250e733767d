"""Which layers keep: by number, or by budget.

Guards against layers that keep though nothing recomputes them, stages that exceed the budget, and
ranks of one sequence that choose differently.
"""

from fractions import Fraction

import torch

from megatron_burst.config import BurstConfig
from tests.mcore import pipeline
from tests.mcore.gpt import (
    BLOCK_RECOMPUTE,
    FULL_RECOMPUTE,
    HEADS,
    SELECTIVE_RECOMPUTE,
    SEQ,
    Parallel,
    config_of,
    start,
)
from tests.mcore.lacking import needs, why_not
from tests.mcore.pipeline import LAYERS, Setting, build, config_for, relative_error, run_step
from tests.ranks import run_ranks

ALL = BurstConfig(keep="all")
TWO, VPP = Setting(pp=2, cp=2), Setting(pp=2, vp=2, cp=2)


def layers_and_recomputations(rank: int) -> tuple:
    """By kind of recomputation, a stage's layers and which keep if two may; attention calls of
    recomputed calls within budgets."""
    from megatron_burst.mcore import patches
    from megatron_burst.mcore.keep.recompute import resolved
    from megatron_burst.mcore.keep.stage import stage_layers

    numbers, keeping = [], []
    for setting in (TWO, VPP):
        pipeline.start(setting)
        for options in (FULL_RECOMPUTE, BLOCK_RECOMPUTE, SELECTIVE_RECOMPUTE):
            config = config_for(setting, num_layers=8, **options)
            numbers.append(stage_layers(config))
            two = BurstConfig(keep="all", keep_layers=2)
            of_layer = (resolved(two, config, number, None, None, 0.75) for number in range(1, 9))
            keeping.append([number for number, got in enumerate(of_layer, 1) if got.keep == "all"])
    setting, recomputed = Setting(mtp=True, micro_batches=1), []
    pipeline.start(setting)
    plain = run_step(setting, build(setting, config_for(setting)))
    patches.switch_on_keep(ALL)
    layer_gib = SEQ * HEADS * (16 + 1) * 8 / 2**30  # out and lse
    for layers in range(1, LAYERS + 2):
        burst = BurstConfig(keep="auto", keep_budget_gib=layers * layer_gib, keep_host_gib=1e-6)
        chunks = build(setting, config_for(setting, burst, **FULL_RECOMPUTE))
        recomputed.append(run_step(setting, chunks).kernels - plain.kernels)
    return numbers, keeping, recomputed


@needs("MTP")
@needs("recomputed MTP")
def test_auto_counts_layers_that_are_recomputed_and_those_of_multi_token_prediction():
    (first, first_keep, recomputed), *_, (second, second_keep, _) = run_ranks(
        layers_and_recomputations, 4
    )
    assert first == [[1, 2, 3, 4], [1], [1, 2, 3, 4], [1, 2, 5, 6], [1, 5], [1, 2, 5, 6]]
    assert second == [[5, 6, 7, 8], [5], [5, 6, 7, 8], [3, 4, 7, 8], [3, 7], [3, 4, 7, 8]]
    assert first_keep == [layers[:2] for layers in first]
    assert second_keep == [layers[:2] for layers in second]
    # five layers, two of which have number 1, or MTP's 5
    assert recomputed == ([5, 4, 3, 2, 0] if why_not("MTP layers from 1") else [5, 3, 2, 1, 0])


def free_memory_differs(rank: int) -> tuple:
    """For a step on two stages whose second context-parallel rank lacks host memory: error, share
    of kernel calls that is repeated, and hops of recomputation. For layers on 2 x 2 ranks: options,
    how often they asked, and how often they had when PyTorch gave its cache back."""
    from megatron_burst.comm.store import StoreConsensus
    from megatron_burst.mcore.keep.recompute import resolved
    from megatron_burst.mcore.keep.stage import stage_of
    from megatron_burst.recompute import offload
    from megatron_burst.recompute.auto import budget as keep
    from megatron_burst.recompute.auto.first_step import FirstStep

    keep.hides_copy = lambda tokens, rates: True
    offload.available_host_bytes = lambda: (rank % 2 == 0) << 30
    pipeline.start(TWO)
    plain = run_step(TWO, build(TWO, config_for(TWO)))
    layer_gib = SEQ // 2 * HEADS * (16 + 1) * 8 / 2**30
    burst = BurstConfig(keep="auto", keep_budget_gib=2 * layer_gib)
    got = run_step(TWO, build(TWO, config_for(TWO, burst, **FULL_RECOMPUTE)))
    again = Fraction(got.kernels - plain.kernels, plain.kernels)  # ranks call it unlike often
    step = relative_error(got, plain), again, got.hops - plain.hops

    start(Parallel(cp=2, tp=2))
    config = config_of(Parallel(cp=2, tp=2), num_layers=4, **FULL_RECOMPUTE)
    offload.available_host_bytes, kept, asked = lambda: (rank + 1) << 30, [], []
    released = []
    FirstStep.release_cache = lambda first: released.append(len(asked))
    share = StoreConsensus.all_gather
    StoreConsensus.all_gather = lambda *args: asked.append(1) or share(*args)
    for tokens in (1 << 8, 1 << 22, 1 << 23):  # 5 KiB, 80 and 160 MiB a layer of out and lse
        heads = torch.empty(tokens, 1, 1, 8, dtype=torch.bfloat16, device="meta")
        layer_gib = tokens * (8 * 2 + 4) / 2**30
        burst = BurstConfig(keep="auto", keep_budget_gib=2 * layer_gib)
        stage_of(burst, heads.device).first.is_over = True  # the host is not used before
        found = resolved(burst, config, 1, heads, heads, 0.0)
        kept.append((found.keep, found.keep_offload))
    return step, kept, len(asked), released


def test_ranks_with_unlike_free_memory_choose_alike():
    found = run_ranks(free_memory_differs, 4)
    for first, last in (found[:2], found[2:]):
        assert first[0][1:] == last[0][1:] and max(first[0][0], last[0][0]) <= 1e-12
    assert found[0][0][1] > 0  # what does not fit on the host is recomputed
    for _, kept, asked, released in found:  # the first rank has 512 MiB for four layers
        assert kept == [("all", "results"), ("all", "results"), ("all", "none")]
        assert asked == 5  # before the first step; after it replicas too
        assert released == [1]  # before anything is measured for all of them
