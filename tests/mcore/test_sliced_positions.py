"""A prefix tree trains Megatron's GPT as its answers do that are sequences of their own, each with
its whole prompt: the loss of each answer and every gradient, at CP 1, 2 and 4; and what is refused.

Guards against positions that count through the sample, that a layer, a stage or a recomputation
does not get, or that a model ignores.
"""

import gc
import pickle
from argparse import Namespace
from dataclasses import dataclass
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.nn.functional as F

from megatron_burst import slices
from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from tests.mcore.gpt import (
    VOCAB,
    Model,
    Parallel,
    Run,
    _complete_grads,
    _sum_over_cp,
    build,
    config_of,
    relative_errors,
    start,
)
from tests.mcore.lacking import needs
from tests.mcore.packed_sample import megatron_alone, spec_of, with_sequence_parallel
from tests.oracle import seen_by_slices
from tests.ranks import run_ranks
from tests.sampling import whole

pytestmark = needs("model classes")
# A prompt with three answers, of which the second has two ends. A branch begins with the token that
# the segment above it ends before, so that each row predicts one token.
LENGTHS, PARENTS = [20, 10, 11, 8, 9, 6], [-1, 0, 0, 2, 2, 0]
SEQ = sum(LENGTHS)
PATHS = [[0, 1], [0, 2, 3], [0, 2, 4], [0, 5]]  # the sequences that the tree stores
YARN = dict(rope_type="yarn", rotary_scaling_factor=4, original_max_position_embeddings=16)


@dataclass(frozen=True)
class Way:
    """How a tree is trained.

    Attributes:
        parallel, model, burst: of the model.
        packed: whether two trees are a packed sample, of documents that are sharded one by one, or
            ("anywhere") as a whole.
        options: of Megatron's configuration.
    """

    parallel: Parallel = Parallel()
    model: Model = Model()
    burst: BurstConfig = BurstConfig()
    packed: str = ""
    options: tuple = ()


WAYS = {
    "one rank": Way(),
    "CP2 TP2": Way(Parallel(cp=2, tp=2)),
    "CP4, recomputed": Way(Parallel(cp=4), Model(recompute=True), BurstConfig(keep="all", nodes=2)),
    "CP2, MLA": Way(Parallel(cp=2), Model(latent=True)),
    "CP4, YaRN": Way(Parallel(cp=4), Model(latent=True, recompute=True), options=(*YARN.items(),)),
    "one rank, packed": Way(packed="documents"),
    "CP4, documents": Way(Parallel(cp=4), packed="documents"),
    "CP2, MLA, documents": Way(
        Parallel(cp=2), Model(latent=True), packed="documents", options=(("qk_head_dim", 16),)
    ),  # with narrower heads Megatron's MLA itself does not run packed samples
    "CP2, anywhere": Way(Parallel(cp=2), packed="anywhere"),
}
FEW = "one rank", "CP2 TP2", "CP4, recomputed", "CP4, YaRN", "CP4, documents"
MORE = [name for name in WAYS if name not in FEW]


def spans():
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    return [slice(end - length, end) for end, length in zip(ends, LENGTHS, strict=True)]


def trees():
    """Tokens and labels of two trees, [2, SEQ], and which rows each answer's loss is of."""
    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(0, VOCAB, (2, 2, SEQ), generator=generator)
    where = spans()
    for own, parent in zip(where, PARENTS, strict=True):
        if parent >= 0:
            siblings = [where[n].start for n, above in enumerate(PARENTS) if above == parent]
            tokens[:, own.start] = tokens[:, siblings[0]]
            labels[:, where[parent].stop - 1] = tokens[:, own.start]
        labels[:, own.start : own.stop - 1] = tokens[:, own.start + 1 : own.stop]
    answers = torch.zeros(len(PATHS), SEQ, dtype=torch.float64)
    for answer, path in zip(answers, PATHS, strict=True):
        for segment in path[1:]:
            answer[where[segment]] = 1
    return tokens, labels, answers


def losses_of(gpt, tokens, labels, places, **options):
    logits = gpt(tokens, places, None, **options)
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def one_by_one(way):
    """By Megatron alone: each answer behind its prompt as a sequence of its own."""
    alone = Parallel(tp=way.parallel.tp)
    start(alone)
    gpt = megatron_alone(alone, way.model, **dict(way.options))
    tokens, labels, _ = trees()
    found = []
    for path in PATHS:
        rows = torch.cat([torch.arange(SEQ)[spans()[segment]] for segment in path])
        mine, told = with_sequence_parallel(alone, tokens[:, rows], labels[:, rows])
        places = torch.arange(mine.shape[1]).expand_as(mine)
        loss = losses_of(gpt, mine, told, places)[:, LENGTHS[0] : len(rows)].sum(1)
        loss.sum().backward()
        found.append(loss.detach())
    return Run(torch.stack(found), _complete_grads(gpt))


def params_of(way):
    from megatron_burst import SlicedSeqParams

    if not way.packed:
        return SlicedSeqParams.of_tree(LENGTHS, PARENTS)
    starts = torch.tensor([0, SEQ, 2 * SEQ], dtype=torch.int32)
    own = slices.tree_positions(LENGTHS, PARENTS)
    return SlicedSeqParams(
        qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=SEQ,
        max_seqlen_kv=SEQ, positions=torch.cat((own, own)),
        slices=slices.packed([slices.tree(LENGTHS, PARENTS)] * 2, [SEQ, SEQ]),
    )  # fmt: skip


def as_trees(way):
    """By burst: two trees as a batch or a packed sample."""
    from megatron.core import parallel_state

    from megatron_burst import burst_spec, shard
    from megatron_burst.mcore import packed, patches

    start(way.parallel)
    config = config_of(way.parallel, way.model, **dict(way.options))
    config.burst = way.burst
    gpt = build(config, burst_spec(spec_of(way.model)))
    tokens, labels, answers = trees()
    group, how, params = parallel_state.get_context_parallel_group(), {}, params_of(way)
    if way.packed:
        tokens, labels, answers = tokens.view(1, -1), labels.view(1, -1), answers.repeat(1, 2)
    if way.packed == "documents":
        how = dict(layout="zigzag-documents", cu_seqlens=params.cu_seqlens_q)
    rows = shard(torch.arange(tokens.shape[1])[None], group=group, dim=1, **how)[0]
    tokens, labels, answers = (x[:, rows] for x in (tokens, labels, answers))
    args = Namespace(dataloader_inter_document_masking=way.packed == "anywhere")
    with mock.patch.object(packed, "global_args", return_value=args):
        if way.packed == "anywhere":
            patches.apply("anywhere")
        losses = losses_of(gpt, tokens, labels, tokens, packed_seq_params=params)
        (losses * answers.sum(0)).sum().backward()
    if way.packed:
        losses = torch.cat([losses.where(rows // SEQ == tree, 0) for tree in range(2)])
    return Run(_sum_over_cp(answers @ losses.detach().T), _complete_grads(gpt))


def compare(rank, names):
    """By way, the largest error."""
    truths, found = {}, {}
    for name in names:
        way = WAYS[name]
        of = way.parallel.tp, way.model.latent, way.options
        if of not in truths:
            truths[of] = one_by_one(way)
        found[name] = max(relative_errors(as_trees(way), truths[of]).values())
    return found


@pytest.mark.parametrize("names", [FEW, *whole((MORE,))])
def test_answers_of_a_tree_train_as_sequences_of_their_own(names):
    for found in run_ranks(compare, 4, names):
        assert len(found) == len(names)
        assert {way: error for way, error in found.items() if not error <= 1e-9} == {}


def test_a_position_counts_the_earlier_tokens_that_are_seen():
    for parents in (PARENTS, [-1, 0, -1, 1, 3, -1], [3, 5, 1, 1, -1, -1]):
        seen = seen_by_slices(slices.tree(LENGTHS, parents).tolist(), SEQ)
        assert torch.equal(slices.tree_positions(LENGTHS, parents), seen.sum(1) - 1)
    assert slices.tree_positions([2, 3], [-1, 0], [4, 0]).tolist() == [2, 3, 4, 0, 0, 1]
    with pytest.raises(BurstError, match="without a cycle"):
        slices.tree_positions([2, 3], [1, 0])


def refused(rank):
    """What each of two ranks is told of parameters that are wrong on rank 1 or on both, and of
    models that would not use the positions."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from megatron_burst import SlicedSeqParams, burst_spec
    from megatron_burst.mcore.sliced import check_placed

    class Other(RotaryEmbedding):
        def forward(self, *args, **options):
            return super().forward(*args, **options)

    parallel, mask = Parallel(cp=2), slices.tree(LENGTHS, PARENTS)
    start(parallel)
    gpt = build(config_of(parallel), burst_spec(spec_of(Model())))
    good = slices.tree_positions(LENGTHS, PARENTS)
    tokens = torch.zeros(2, SEQ // 2, dtype=torch.int64)

    def said(params, change=None):
        with pytest.raises(BurstError) as error, change or mock.patch.dict({}):
            mine = tokens.view(1, -1) if params.qkv_format == "thd" else tokens
            losses_of(gpt, mine, mine, mine, packed_seq_params=params)
        return str(error.value)

    of, other = SlicedSeqParams.of, Other(16, 1.0, use_cpu_initialization=True)
    found = {
        "tokens": said(of(mask, SEQ - 4)),
        "no tokens": said(SlicedSeqParams(qkv_format="sbhd", slices=mask)),
        "length": said(of(mask, SEQ, good[:-4])),
        "negative": said(of(mask, SEQ, good - 1)),
        "kind": said(of(mask, SEQ, good.float())),
        "on one rank": said(of(mask, SEQ, good[:-4] if rank == 1 else good)),
        "another": said(of(mask, SEQ, good), mock.patch.object(gpt, "rotary_pos_emb", other)),
        "none": said(
            of(mask, SEQ, good), mock.patch.object(gpt, "position_embedding_type", "none")
        ),
        "fused": said(params_of(Way(packed="documents")),
            mock.patch.object(gpt.config, "apply_rope_fusion", True)),
    }  # fmt: skip
    made = pickle.dumps(of(mask, SEQ, good))
    megatrons = RotaryEmbedding.get_rotary_seq_len.__wrapped__  # as in a process that made none
    with mock.patch.object(RotaryEmbedding, "get_rotary_seq_len", megatrons):
        sample = pickle.loads(made)
        losses_of(gpt, tokens, tokens, tokens, packed_seq_params=sample).sum().backward()
    gone = ref(sample)
    del sample
    gc.collect()
    assert gone() is None  # Megatron caches tables by their length
    check_placed(None)
    with pytest.raises(BurstError, match="must hold all segments of its tree"):
        SlicedSeqParams.of_tree(LENGTHS, PARENTS, SEQ - 1)
    assert SlicedSeqParams.of_tree(LENGTHS, PARENTS, SEQ + 8).positions.tolist()[SEQ:] == [0] * 8
    return found


def test_what_would_rotate_wrongly_is_refused_on_all_ranks():
    for rank, said in enumerate(run_ranks(refused, 2)):
        assert f"RoPE has a row for each; got {SEQ - 4} for a sequence of {SEQ}" in said["tokens"]
        assert f"got None for a sequence of {SEQ}" in said["no tokens"]
        assert f"[{SEQ}] from 0 on" in said["length"] and f"({SEQ - 4},)" in said["length"]
        assert "got negative ones" in said["negative"] and "got torch.float32" in said["kind"]
        assert rank == 1 or "cp rank 1" in said["on one rank"]
        assert "Megatron's own RotaryEmbedding" in said["another"] and "Other" in said["another"]
        assert "mrope come from the model's position_ids" in said["none"]
        assert "pass --no-rope-fusion" in said["fused"]
