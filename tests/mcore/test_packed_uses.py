"""Packed samples with other features: pipelines that keep, micro-batches with their own groups,
documents that start at any token, the fused loss, multi-token prediction.

Guards against another micro-batch's boundaries in backward or recomputation, the layer's group
where the micro-batch has its own, and parts of Megatron that assume another row order.
"""

import copy
from argparse import Namespace
from itertools import cycle
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from megatron_burst.mcore import patches
from tests.mcore import pipeline
from tests.mcore.gpt import (
    FULL_RECOMPUTE,
    SELECTIVE_RECOMPUTE,
    SEQ,
    Model,
    Parallel,
    Run,
    build,
    config_of,
    relative_errors,
    start,
)
from tests.mcore.lacking import needs, why_not
from tests.mcore.packed_sample import (
    ANYWHERE,
    OTHER,
    SAMPLE,
    one_by_one,
    packed,
    params_of,
    shard,
    spec_of,
    with_sequence_parallel,
)
from tests.mcore.test_packed import GQA, RECOMPUTED, TOLERANCE
from tests.ranks import run_ranks

ALL = BurstConfig(keep="all")
NO_MTP = why_not("MTP") or why_not("MTP of an empty document")
TWO_GROUPS = Model()  # fewer KV heads than four ranks


def burst_model(parallel: Parallel, model: Model, burst=None, **options):
    from megatron_burst import burst_spec

    config = config_of(parallel, model, **options)
    config.burst = burst
    return build(config, burst_spec(spec_of(model)))


# ---- pipelines ------------------------------------------------------------------------------


def a_step(setting: pipeline.Setting, burst=None, **options) -> pipeline.Step:
    """A step of micro-batches with different documents, two of which are in flight at a time."""
    batches = cycle([SAMPLE.batch(), OTHER.batch()])

    def forward_step(_, model):
        whole = next(batches)
        mine = shard(dict(whole))
        out = model(mine["tokens"], mine["position_ids"], None, packed_seq_params=params_of(whole))

        def loss_of(logits):
            losses = F.cross_entropy(logits.flatten(0, 1), mine["labels"][0], reduction="none")
            total = (losses * mine["loss_mask"][0]).sum()
            return total, torch.tensor(losses.numel()), {"loss": total.detach()}

        return out, loss_of

    pipeline.start(setting)
    chunks = pipeline.build(setting, pipeline.config_for(setting, burst, **options), burst=True)
    step = pipeline.run_step(setting, chunks, step=forward_step)
    for grad in step.grads.values():
        summed_over_cp(grad)
    return step


def summed_over_cp(x: torch.Tensor) -> torch.Tensor:
    from megatron.core import parallel_state

    dist.all_reduce(x, group=parallel_state.get_context_parallel_group())
    return x


def pipelines(rank: int) -> float:
    truth = a_step(pipeline.Setting(pp=2), calculate_per_token_loss=True)
    kept = a_step(pipeline.Setting(pp=2, cp=2), ALL, **FULL_RECOMPUTE)
    return pipeline.relative_error(kept, truth)


def test_micro_batches_under_way_keep_their_own_documents():
    """Against one rank per sequence without recomputation, which test_packed.py compares."""
    assert max(run_ranks(pipelines, 4)) <= TOLERANCE


# ---- groups of a micro-batch's own ----------------------------------------------------------


def groups_of_size() -> dict[int, dist.ProcessGroup | None]:
    """By size: this rank's group, in rank order; None for this rank alone."""
    mine = {1: None, 4: dist.group.WORLD}
    for ranks in ([0, 1], [2, 3]):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine[2] = group
    return mine


def own_group(gpt, group, kind: str) -> Run:
    """A micro-batch on one group, as a script with dynamic context parallelism passes it."""
    whole = SAMPLE.batch()
    if kind == "sbhd":  # one document, whose positions Megatron shards over that group
        names = ("tokens", "labels", "loss_mask", "position_ids")
        whole = {name: whole[name] for name in names}
        from megatron.core.packed_seq_params import PackedSeqParams

        row = torch.tensor([0, SAMPLE.tokens])  # as pretrain_vlm.py passes it
        params = PackedSeqParams("sbhd", row, row, max_seqlen_q=SEQ, max_seqlen_kv=SEQ)
    else:
        params = params_of(whole)
    params.cp_group, params.local_cp_size = group, group.size() if group else 1
    mine = whole
    if group:
        mine = shard(dict(whole), group)
    run = packed(gpt, mine, params)
    for x in (run.loss, *run.grads.values()) if group else ():
        dist.all_reduce(x, group=group)
    return run


def own_groups(rank: int) -> dict:
    """Errors against the same model on this rank alone, by size and format."""
    start(Parallel())
    patches.apply("attention")  # with just a spec, layers ignore a micro-batch's group
    groups, errors = groups_of_size(), {}
    for kind in ("thd", "sbhd"):
        runs = {}
        for size, group in groups.items():
            gpt = burst_model(Parallel(), RECOMPUTED, ALL, cp_comm_type="burst")
            runs[size] = own_group(gpt, group, kind)
        truth = runs[1]
        if kind == "thd":
            truth = one_by_one(SAMPLE, Parallel(), GQA)
        errors |= {(kind, size): relative_errors(run, truth) for size, run in runs.items()}
    # only the core attention is recomputed, long after the layer's forward
    gpt = burst_model(Parallel(), GQA, cp_comm_type="burst", **SELECTIVE_RECOMPUTE)
    truth = one_by_one(SAMPLE, Parallel(), GQA)
    errors["selective", 2] = relative_errors(own_group(gpt, groups[2], "thd"), truth)
    return errors | evaluations(groups)


def evaluations(groups: dict) -> dict:
    """Errors of losses by group size, for a model at CP=4 whose groups are set for evaluations as
    Megatron-Bridge 0.6.2 does it (training/eval_context_parallel_rebinding.py)."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    parallel = Parallel(cp=4)
    start(Parallel())
    truth, errors = one_by_one(SAMPLE, Parallel(), GQA).loss, {}
    start(parallel)
    gpt = burst_model(parallel, GQA)
    for turn, size in enumerate((4, 2, 1, 4)):
        group = groups[size] or dist.new_group([dist.get_rank()], use_local_synchronization=True)
        gpt.config.context_parallel_size = size
        for module in gpt.modules():
            for name in ("cp_group", "pg_collection"):
                if hasattr(module, name) and turn:
                    own = getattr(module, name)
                    setattr(module, name, group if name == "cp_group" else replaced(own, group))
            if isinstance(module, RotaryEmbedding):
                module.forward.cache_clear()
        whole = SAMPLE.batch()
        mine = shard(dict(whole), group=group)
        with torch.no_grad():
            logits = gpt(mine["tokens"], mine["position_ids"], None,
                         packed_seq_params=params_of(whole))  # fmt: skip
        losses = F.cross_entropy(logits.flatten(0, 1), mine["labels"][0], reduction="none")
        loss = (losses * mine["loss_mask"][0]).sum()
        dist.all_reduce(loss, group=group)
        errors["evaluation", turn, size] = {"loss": float((loss / truth - 1).abs())}
    return errors


def twin_of_the_layers_group(rank: int) -> tuple[dict, bool]:
    """Errors where a micro-batch passes another group with the layer's ranks, in a layer that has
    RoPE over its own and chooses what it keeps; and whether the loss of an evaluation learns about
    another group."""
    from megatron_burst.mcore.fused_loss import _cp_group_of, fuse_loss

    parallel, keep = Parallel(cp=2), BurstConfig(keep="auto", keep_budget_gib=1.0)
    start(Parallel())
    truth = one_by_one(SAMPLE, Parallel(), GQA)
    start(parallel)
    gpt = burst_model(parallel, RECOMPUTED, keep)
    twin = dist.new_group([0, 1])
    whole = SAMPLE.batch()
    params = params_of(whole, cp_group=twin, local_cp_size=2)
    errors = relative_errors(packed(gpt, shard(dict(whole)), params), truth)
    fuse_loss(gpt)
    gpt.pg_collection = replaced(gpt.pg_collection, twin)
    return errors, _cp_group_of(gpt.compute_language_model_loss) is twin


def test_another_group_of_the_same_ranks_is_the_layers_and_the_losses_follows_the_model():
    for errors, follows in run_ranks(twin_of_the_layers_group, 2):
        assert max(errors.values()) <= TOLERANCE and follows, errors


def replaced(collection, group):
    """A collection of groups with another one for context parallelism."""
    other = copy.copy(collection)
    other.cp = group
    return other


def test_a_micro_batch_may_have_a_group_of_its_own():
    """And evaluations may have another one than training."""
    for errors in run_ranks(own_groups, 4, timeout_s=300):
        assert {size for *_, size in errors} == {1, 2, 4} and len(errors) == 11
        assert all(max(each.values()) <= TOLERANCE for each in errors.values()), errors


def test_what_takes_positions_of_the_layers_group_is_refused_with_another():
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_burst.mcore.checks import check_packed
    from megatron_burst.mcore.packed import check_rotated, follow_groups

    two, four = (SimpleNamespace(size=lambda size=size: size) for size in (2, 4))
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 8]), cp_group=two)
    params.local_cp_size, params.cu_seqlens_kv = 2, params.cu_seqlens_q
    fused = SimpleNamespace(multi_latent_attention=True, apply_rope_fusion=True)
    layer = torch.nn.Identity()
    layer.config, layer.pg_collection = fused, SimpleNamespace(cp=four)
    assert follow_groups(layer)
    with pytest.raises(BurstError, match=r"fused RoPE.*got a group of 2.*of 4; pass --no-rope-fu"):
        layer(torch.zeros(1), packed_seq_params=params)
    assert layer.pg_collection.cp is four
    with pytest.raises(BurstError, match=r"spec.*got a group of 2.*of 4; import megatron_burst.au"):
        check_rotated(params, four, follows=False)
    fused.apply_rope_fusion, layer.recompute_up_proj = False, True
    with pytest.raises(BurstError, match=r"recomputed in backward.*leave mla_up_proj out"):
        layer(torch.zeros(1), packed_seq_params=params)
    check_packed(params, "none", four)
    with pytest.raises(BurstError, match=r"multi-token prediction.*got mtp_num_layers=1 and a gr"):
        check_packed(params, "none", four, 1)


def test_a_layer_that_returns_to_its_own_group_in_forward_gets_the_micro_batchs():
    """As from Megatron's #6821 on: a group of one has no place in its parameters."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_burst.mcore import packed as module

    class Later(torch.nn.Module):
        def forward(self, x, packed_seq_params):
            self.pg_collection.cp = packed_seq_params.cp_group or self._build_time_cp_group
            return self.pg_collection.cp

    one, four = (SimpleNamespace(size=lambda size=size: size) for size in (1, 4))
    layer = Later()
    layer.config = SimpleNamespace(multi_latent_attention=False, apply_rope_fusion=False)
    layer.pg_collection, layer._build_time_cp_group = SimpleNamespace(cp=four), four
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 8]), local_cp_size=1)
    module.follow_groups(layer)
    with mock.patch.object(module, "group_of_one", return_value=one):
        assert layer(torch.zeros(1), packed_seq_params=params) is one
    assert layer.pg_collection.cp is four and layer._build_time_cp_group is four


def test_layers_with_cuda_graphs_have_no_hooks_which_megatron_forbids():
    from megatron.core.transformer.cuda_graphs import CudaGraphManager

    from megatron_burst.mcore.packed import follow_groups

    layer = torch.nn.Identity()
    layer.config = SimpleNamespace(cuda_graph_impl="local", multi_latent_attention=False)
    assert not follow_groups(layer)
    CudaGraphManager.call_ddp_preforward_hook(None, layer)  # asserts that there is none
    layer.config.cuda_graph_impl = "none"
    assert follow_groups(layer)
    with pytest.raises(AssertionError, match="hooks"):
        CudaGraphManager.call_ddp_preforward_hook(None, layer)


def test_documents_anywhere_are_refused_where_rope_is_megatrons_own(monkeypatch):
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_burst.mcore import packed

    group = SimpleNamespace(size=lambda: 2)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 8]))
    packed.check_rotated(params, group, follows=False)
    monkeypatch.setattr(packed, "shards_whole_sample", lambda: True)
    with pytest.raises(BurstError, match=r"got --dataloader-inter-document-masking; import"):
        packed.check_rotated(params, group, follows=False)
    packed.check_rotated(None, group, follows=False)


def test_a_whole_sample_is_refused_in_a_hybrid_whose_other_layers_need_documents(monkeypatch):
    """Where Megatron pads documents (#6912) it is not refused at start."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_burst.mcore import packed

    group, boundaries = SimpleNamespace(size=lambda: 2), torch.tensor([0, 8])
    args = Namespace(dataloader_inter_document_masking=True, hybrid_layer_pattern="M*-")
    monkeypatch.setattr(packed, "global_args", lambda: args)
    monkeypatch.setattr(packed.patches, "rows", lambda *groups: ())
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=boundaries)
    with pytest.raises(
        BurstError, match=r"Mamba, .*got a sample that is sharded as a whole; leave"
    ):
        packed.check_rotated(params, group, follows=True)
    params.cu_seqlens_q_padded = boundaries
    packed.check_rotated(params, group, follows=True)


def test_next_tokens_are_not_looked_up_in_contiguous_rows():
    from megatron_burst.mcore.fused_loss import log_probs_and_entropy

    two = SimpleNamespace(size=lambda: 2)
    loss = SimpleNamespace(__self__=SimpleNamespace(pg_collection=SimpleNamespace(cp=two)))
    config = SimpleNamespace(linear_cp_layout="contiguous")
    with pytest.raises(BurstError, match=r"need labels, .*got linear_cp_layout=contiguous without"):
        log_probs_and_entropy(
            hidden_states=None, output_layer=torch.nn.Identity(), output_weight=None, config=config,
            input_ids=torch.zeros(1, 8), compute_language_model_loss=loss,
        )  # fmt: skip


def test_rows_that_are_not_in_zigzag_are_refused():
    """Megatron's branch dev names them so; verl and ms-swift shard DeepSeek-V4's rows for it."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_burst.mcore.checks import check_packed

    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 8]))
    params.cp_partition_mode = "zigzag"
    check_packed(params, "none", SimpleNamespace(size=lambda: 2))
    params.cp_partition_mode = "contiguous"
    check_packed(params, "none", SimpleNamespace(size=lambda: 1))
    with pytest.raises(BurstError, match=r"zigzag order; got cp_partition_mode=contiguous; leave"):
        check_packed(params, "none", SimpleNamespace(size=lambda: 2))


# ---- documents anywhere, the loss, multi-token prediction -----------------------------------


def anywhere(rank: int) -> dict:
    """Errors by context parallel size, for a sample that is sharded as one sequence, and with the
    same flag for one whose documents are padded and sharded each on its own, as later versions of
    Megatron's pretrain_hybrid.py do (#6912)."""
    from megatron_burst.mcore import packed as module

    errors, args = {}, Namespace(dataloader_inter_document_masking=True)
    start(Parallel())
    truths = {each: one_by_one(each, Parallel(), TWO_GROUPS) for each in (ANYWHERE, SAMPLE)}
    for parallel in (Parallel(cp=2), Parallel(cp=4)):
        start(parallel)
        without = dict(cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None)
        with mock.patch.object(module, "global_args", return_value=args):
            patches.apply("attention")
            for sample, truth in truths.items():
                batch, each = sample.batch(), sample is SAMPLE
                gpt = burst_model(parallel, TWO_GROUPS)
                mine = shard(dict(batch), use_per_sequence_balancing=not each)
                got = packed(gpt, mine, params_of(batch, **{} if each else without))
                errors[parallel.cp, each] = relative_errors(got, truth)
    return errors


@needs("documents anywhere")
def test_documents_may_begin_anywhere_in_a_sample():
    """Megatron's --dataloader-inter-document-masking."""
    for errors in run_ranks(anywhere, 4):
        assert len(errors) == 4
        assert all(max(each.values()) <= TOLERANCE for each in errors.values()), errors


def with_loss(parallel: Parallel, mtp: int) -> Run:
    """The fused loss, with gradients in float64 like the model."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    from megatron_burst import burst_spec
    from megatron_burst.mcore.fused_loss import fuse_loss
    from tests.mcore.gpt import VOCAB, _complete_grads, _sum_over_cp

    start(parallel)
    MTPLossLoggingHelper.tracker.clear()
    options = dict(mtp_num_layers=mtp or None, calculate_per_token_loss=True)
    config, spec = config_of(parallel, GQA, **options), burst_spec(spec_of(GQA))
    block = burst_spec(get_gpt_mtp_block_spec(config, spec, False)) if mtp else None
    torch.manual_seed(1234)
    gpt = GPTModel(
        config, spec, VOCAB, SEQ, position_embedding_type="rope", mtp_block_spec=block,
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    gpt = fuse_loss(gpt.double())
    whole = SAMPLE.batch()
    whole["cu_seqlens"] = whole["cu_seqlens_padded"]  # as in pretrain_gpt.py; MTP's roll needs it
    if mtp:
        # Megatron divides MTP's loss by a rank's own count of tokens behind the roll: with every
        # other token each chunk has as many there as before, whatever the ranks are
        whole["loss_mask"] *= torch.arange(SAMPLE.tokens) % 2
    mine = shard(dict(whole))
    losses = gpt(
        mine["tokens"], mine["position_ids"], None, labels=mine["labels"],
        loss_mask=mine["loss_mask"], packed_seq_params=params_of(whole),
    )  # fmt: skip
    loss = (losses * mine["loss_mask"]).sum()
    loss.backward()
    return Run(_sum_over_cp(loss.detach().double()), _complete_grads(gpt))


def log_probs(parallel: Parallel, temperature: float) -> dict[str, float]:
    """Errors of next tokens' log-probabilities against separate documents, in Megatron's logits."""
    from megatron.core import parallel_state

    from megatron_burst.mcore import fused_loss

    whole = SAMPLE.batch()
    whole["labels"] = torch.arange(SAMPLE.tokens)[None]  # so each rank learns its positions
    start(Parallel(tp=parallel.tp))
    alone = build(config_of(Parallel(tp=parallel.tp), GQA), spec_of(GQA))
    truth, counts = torch.zeros(2, SAMPLE.tokens, dtype=torch.float64), torch.zeros(SAMPLE.tokens)
    for where in SAMPLE.documents():
        tokens, positions = (whole[name][:, where] for name in ("tokens", "position_ids"))
        logits = alone(*with_sequence_parallel(parallel, tokens, positions), attention_mask=None)
        every = (logits[0, : tokens.shape[1]] / temperature).log_softmax(-1).detach()
        last = where.stop - 1
        truth[0, where.start : last] = every[:-1].gather(1, tokens[0, 1:, None])[:, 0]
        truth[1, where.start : last] = -(every.exp() * every).sum(-1)[:-1]
        counts[where.start : last] = 1
    start(parallel)
    gpt, mine = burst_model(parallel, GQA), shard(dict(whole))
    rows = mine["labels"][0]
    with mock.patch.object(
        fused_loss, "parallel_state", None
    ):  # groups are the model's, not global
        found = gpt(
            mine["tokens"], mine["position_ids"], None, packed_seq_params=params_of(whole),
            output_processor=fused_loss.log_probs_and_entropy, output_processor_context=temperature,
        )  # fmt: skip
    assert torch.equal(found.mask[0], counts[rows] == 1)
    assert len(rows) * parallel_state.get_context_parallel_world_size() == SAMPLE.tokens
    got = torch.stack([found.log_probs[0], found.entropy[0]])
    return {str(parallel): float((got - truth[:, rows]).abs().max().detach())}


def losses(rank: int) -> dict:
    for parallel in () if why_not("output_processor") else (Parallel(cp=4), Parallel(cp=2, tp=2)):
        errors = log_probs(parallel, 0.7)
        assert max(errors.values()) <= TOLERANCE, errors
    errors = {}
    for tp in (1, 2):
        start(Parallel(tp=tp))
        truths = [one_by_one(SAMPLE, Parallel(tp=tp), GQA)]
        if not NO_MTP:
            truths.append(with_loss(Parallel(tp=tp), 1))
        for mtp, truth in enumerate(truths):
            for cp in (2,) if mtp or tp == 2 else (2, 4):
                run = with_loss(Parallel(cp=cp, tp=tp), mtp)
                errors[tp, cp, mtp] = relative_errors(run, truth)
    return errors


def test_the_fused_loss_and_multi_token_prediction():
    """The loss against separate documents; MTP against one rank, also packed."""
    for errors in run_ranks(losses, 4, timeout_s=300):
        assert len(errors) == (3 if NO_MTP else 5)
        for case, found in errors.items():
            assert max(found.values()) <= TOLERANCE, (case, found)
