"""GPT under masks of slices: burst at CP 1, 2 and 4 against Megatron's own attention with a dense
mask, loss and every gradient; and what is refused.

Guards against a mask that a layer, a recomputation or another layout does not get.
"""

from functools import partial

import pytest
import torch

from megatron_burst import slices
from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from tests.mcore.gpt import (
    SEQ,
    Model,
    Parallel,
    build,
    config_of,
    loss_and_grads,
    relative_errors,
    start,
)
from tests.mcore.lacking import needs
from tests.mcore.pretraining import assert_same, pretrain
from tests.oracle import seen_by_slices
from tests.ranks import run_ranks
from tests.sampling import whole

pytestmark = [pytest.mark.numeric, needs("model classes")]
MASKS = {
    "prefix": slices.prefix_lm(21, SEQ),
    "frames": slices.block_causal([7, 16, 9, 32]),
    "images": slices.causal_with_spans([(3, 9), (40, 55)], SEQ),
    "chunks": slices.chunked(SEQ, 24),
    "tree": slices.tree([10, 20, 14, 20], [-1, 0, 0, 1]),
    "blocks": slices.blocks(
        torch.eye(8).bool() | (torch.arange(64).view(8, 8) * 7 % 10 < 3), 8, SEQ
    ),
}
WAYS = {
    "one rank": (Parallel(), Model(), BurstConfig()),
    "CP2 TP2": (Parallel(cp=2, tp=2), Model(), BurstConfig()),
    "CP4": (Parallel(cp=4), Model(), BurstConfig(intra="gather")),
    "CP4, all kept": (Parallel(cp=4), Model(recompute=True), BurstConfig(keep="all")),
    "CP4, recomputed, sinks": (
        Parallel(cp=4), Model(recompute=True, sinks="off-by-one"), BurstConfig(nodes=2)
    ),
}  # fmt: skip


def dense(mask, gpt, batch):
    """Logits of Megatron's own attention with a dense mask: True hides."""
    hidden = ~seen_by_slices(mask.tolist(), SEQ).view(1, 1, SEQ, SEQ)
    return gpt(batch["tokens"], batch["position_ids"], attention_mask=hidden)


def sliced(mask, gpt, batch):
    from megatron_burst import SlicedSeqParams

    given = SlicedSeqParams.of(mask, SEQ)
    places = batch["tokens"], batch["position_ids"]
    return gpt(*places, attention_mask=None, packed_seq_params=given)


def masks_of(way, every):
    """The masks of a way: every second one, from the first or the second on; `every`: all."""
    return list(MASKS) if every else list(MASKS)[list(WAYS).index(way) % 2 :: 2]


def runs(parallel, model, burst, call, masks):
    """By mask, loss and gradients."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_burst import burst_spec

    found = {}
    for name in masks:
        spec, config = get_gpt_layer_local_spec(normalization="RMSNorm"), config_of(parallel, model)
        if burst is None:
            spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.arbitrary
        else:
            config.burst, spec = burst, burst_spec(spec)
        found[name] = loss_and_grads(build(config, spec), partial(call, MASKS[name]))
    return found


def compare_all(rank, every):
    """By way and mask, the largest error."""
    truths, found = {}, {}
    for way, (parallel, model, burst) in WAYS.items():
        of, masks = (Parallel(tp=parallel.tp), model), masks_of(way, every)
        if new := [mask for mask in masks if (of, mask) not in truths]:
            start(of[0])
            truths |= {(of, mask): run for mask, run in runs(*of, None, dense, new).items()}
        start(parallel)
        for mask, run in runs(parallel, model, burst, sliced, masks).items():
            found[way, mask] = max(relative_errors(run, truths[of, mask]).values())
    return found


def test_loss_and_every_gradient_are_those_of_a_dense_mask(request):
    every = request.config.getoption("--all")
    for found in run_ranks(compare_all, 4, every):
        assert len(found) == len(WAYS) * len(MASKS) // (1 if every else 2)
        assert {case: error for case, error in found.items() if not error <= 1e-9} == {}


FSDP2 = "--use-torch-fsdp2 --no-gradient-accumulation-fusion --ckpt-format torch_dist"
BURST = "--context-parallel-impl burst --train-iters 3"


@pytest.mark.parametrize("mask", ["tree", *whole("prefix", "frames")])
def test_the_example_has_the_losses_of_one_rank(mask, tmp_path):
    """examples/pretrain_masks.py: answers to one prompt, a prefix-LM, block-causal as for a
    video."""
    flags = f"{BURST} --mask {mask}"
    truth, got = (
        pretrain(tmp_path / f"{ranks}", ranks, f"{flags} {more}", script="pretrain_masks")
        for ranks, more in ((1, ""), (4, "--context-parallel-size 4"))
    )
    losses = [step["lm loss"] for step in truth.steps]
    assert len(losses) == 3 and losses[2] < losses[0]
    assert_same(got, truth)


@pytest.mark.whole
def test_a_pipeline_goes_on_with_a_tree_as_one_rank_does(tmp_path):
    """Each stage makes a table of its own for the positions."""
    flags, spread = (
        f"{BURST} --mask tree --ckpt-format torch_dist",
        "--pipeline-model-parallel-size 2",
    )
    run = partial(pretrain, tmp_path, script="pretrain_masks")
    truth = run(1, f"{flags} --save saved --save-interval 1")
    del truth.steps[0]
    load = "--load saved --ckpt-step 1"
    assert_same(run(4, f"{flags} {spread} --context-parallel-size 2 {load}"), truth)


@pytest.mark.whole
def test_the_example_does_not_pass_what_fsdp2_lacks(tmp_path):
    flags = f"--mask prefix {BURST} {FSDP2} --context-parallel-size 2"
    got = pretrain(tmp_path, 2, flags, script="pretrain_masks")
    assert len(got.steps) == 3 and "--calculate-per-token-loss" not in " ".join(got.said)


def refused(rank):
    """What is said of a window in a layer, of other slices, and of multi-token prediction; and
    where rank 1 alone passes no whole numbers."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megatron_burst import SlicedSeqParams, burst_spec
    from megatron_burst.mcore.checks import check_packed, check_slices

    start(Parallel(cp=2))
    said, params = [], SlicedSeqParams.of(MASKS["prefix"], SEQ)
    gpt = build(
        config_of(Parallel(cp=2), window_size=(8, 0)),
        burst_spec(get_gpt_layer_local_spec(normalization="RMSNorm")),
    )
    plain = build(
        config_of(Parallel(cp=2)), burst_spec(get_gpt_layer_local_spec(normalization="RMSNorm"))
    )
    mine = MASKS["prefix"].float() if rank == 1 else MASKS["prefix"]
    for do in (
        partial(loss_and_grads, gpt, partial(sliced, MASKS["prefix"])),
        partial(loss_and_grads, plain, partial(sliced, slices.prefix_lm(3, SEQ + 1))),
        partial(loss_and_grads, plain, partial(sliced, mine)),
        partial(check_packed, params, "none", None, 1),
        partial(check_slices, params),
    ):  # fmt: skip
        with pytest.raises(BurstError) as error:
            do()
        said.append(str(error.value))
    check_slices(None)
    loss_and_grads(plain, partial(sliced, MASKS["prefix"]))  # the group still works
    return said


def test_what_no_layer_could_do_is_refused():
    for rank, said in enumerate(run_ranks(refused, 2)):
        window, outside, floats, mtp, other = said
        assert "slices must come without a window" in window
        assert f"slices must be within the {SEQ} queries and {SEQ} keys" in outside
        assert "slices must be a tensor of int32 or int64" in floats
        assert rank == 1 or "on cp rank 1, while" in floats
        assert "must come without multi-token prediction" in mtp
        assert "a mask of slices must go to layers that run burst" in other
