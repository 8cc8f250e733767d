"""Next tokens of sharded and packed samples, against loops over positions; and their uses.

Guards against a next token from another document, from padding, or from the wrong rank or chunk; a
label for a document's last token; ranks that wait for each other after one has refused.
"""

import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_burst import linear_cross_entropy, next_tokens, token_log_probs
from megatron_burst import shards as shards_module
from megatron_burst.errors import BurstError
from megatron_burst.loss import next_tokens as module
from megatron_burst.masks.sample import Sample
from megatron_burst.schedule.layout import Layout
from tests.loss.oracle import PLAIN, Problem, oracle, relative_error
from tests.loss.packed import Packed, random_packed
from tests.ranks import preload, run_ranks

pytestmark = pytest.mark.numeric
preload("megatron_burst.loss.linear", "tests.loss.packed", "tests.loss.oracle")
LAYOUTS = [str(layout) for layout in Layout]


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**6), size=st.integers(1, 8), layout=st.sampled_from(LAYOUTS),
    whole=st.booleans(), dtype=st.sampled_from([torch.int32, torch.int64]),
)  # fmt: skip
def test_labels_are_the_next_tokens_of_documents(seed, size, layout, whole, dtype):
    packed = random_packed(seed, size, layout)
    truth = packed.labels()
    shards = torch.cat([packed.ids[packed.places(rank)] for rank in range(size)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards_module, "announce", lambda *arguments, **options: None)
        for of in (shards_module, module):
            patch.setattr(of, "group_or_default", lambda group, who: group)
            patch.setattr(of, "state_of", lambda group: SimpleNamespace(sharded=None))
        patch.setattr(module, "_gather", lambda ids, *_: (shards.long(), torch.tensor(True)))
        for rank in range(size):
            group = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: size)
            mine = packed.ids if whole else packed.ids[packed.places(rank)]
            got = next_tokens(
                mine.to(dtype), group=group, layout=layout, whole_sample=whole,
                **packed.boundaries,
            )  # fmt: skip
            assert torch.equal(got, truth[packed.places(rank)]), (rank, packed)
            if packed.ids.dim() == 2:
                same = next_tokens(mine.t(), group=group, layout=layout, whole_sample=whole, dim=1)
                assert torch.equal(same, got.t())


def log_prob_errors(
    packed: Packed, rank: int, cp, tp=None, sequence_parallel=False, device="cpu"
) -> float:
    """Errors of this rank's log-probabilities, entropies, mask and gradients."""
    generator = torch.Generator().manual_seed(len(packed.ids))
    hidden = torch.randn(*packed.ids.shape, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(40, 8, generator=generator, dtype=torch.float64)
    truth = Problem(hidden, weight, packed.labels()).leaves()
    loss, _, entropy = oracle(truth, PLAIN, "none")
    places, at = packed.places(rank), 0 if tp is None else tp.rank()
    (2 * entropy - loss)[places].sum().backward()
    parts = 1 if tp is None else tp.size()

    def leaf(x):
        return x.to(device, copy=True).requires_grad_()

    share = hidden[places]
    mine = leaf(share.chunk(parts)[at] if sequence_parallel else share)
    part = leaf(weight.chunk(parts)[at])
    boundaries = {name: x.to(device) for name, x in packed.boundaries.items()}
    ids = packed.ids[places].to(device)
    labels = next_tokens(ids, group=cp, layout=packed.layout, **boundaries)
    got = token_log_probs(mine, part, labels, tp_group=tp, sequence_parallel=sequence_parallel)
    (2 * got.entropy + got.log_probs).sum().backward()
    grad = truth.hidden.grad[places]
    assert torch.equal(got.mask.cpu(), packed.labels()[places] != -100)
    assert got.log_probs[~got.mask].eq(0).all() and got.entropy[~got.mask].eq(0).all()
    pairs = (
        (got.log_probs, -loss[places]),
        (got.entropy, entropy[places]),
        (mine.grad, grad.chunk(parts)[at] if sequence_parallel else grad),
        (part.grad, truth.weight.grad.chunk(parts)[at]),
    )
    return max(relative_error(x.cpu(), true) for x, true in pairs)


def on_four_ranks(rank: int) -> dict:
    """Errors of a sample on 4 ranks, and on 2 x 2 with a sharded vocabulary."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    tp, cp = pairs[rank // 2], pairs[2 + rank % 2]
    found = {}
    for layout in LAYOUTS:
        for seed in range(3):
            packed = random_packed(seed, 4, layout)
            found[layout, seed, "cp4"] = log_prob_errors(packed, rank, dist.group.WORLD)
            packed = random_packed(seed, 2, layout)
            parallel = len(packed.ids) % 4 == 0  # tp shards a shard's rows equally
            found[layout, seed, "tp2cp2"] = log_prob_errors(packed, rank // 2, cp, tp, parallel)
    return found


def test_log_probabilities_of_sharded_documents_are_those_of_the_whole_sample():
    for found in run_ranks(on_four_ranks, 4, timeout_s=300):
        assert len(found) == 24
        assert max(found.values()) < 1e-12, found


def test_the_loss_takes_the_same_labels():
    packed = random_packed(5, 1, "zigzag")
    assert packed.spans
    hidden = torch.randn(len(packed.ids), 8, dtype=torch.float64)
    weight = torch.randn(40, 8, dtype=torch.float64)
    labels = next_tokens(packed.ids, **packed.boundaries)
    truth = oracle(Problem(hidden, weight, packed.labels()))[0]
    assert relative_error(linear_cross_entropy(hidden, weight, labels), truth) < 1e-14


# ---- bad input ------------------------------------------------------------------------------

IDS, TWO = torch.arange(8), torch.zeros(8, 2, dtype=torch.long)
CU = torch.tensor([0, 3, 8])
REFUSED = {
    "layout": ((IDS,), {"layout": "zigzg"}, "layout must be one of zigzag.*got 'zigzg'"),
    "no integers": ((IDS.float(),), {}, "must be integers.*got torch.float32 of shape"),
    "a list": ((IDS.tolist(),), {}, r"tokens must be a dense tensor.*got \[0, 1.*; pass a d"),
    "ignored": ((IDS,), {"ignore_index": 1.5}, "ignore_index must be an integer.*got 1.5"),
    "too many axes": ((TWO.view(2, 4, 2),), {}, r"\[t\] or \[s, b\].*got torch.int64 of shape"),
    "a batch": ((TWO,), {"cu_seqlens": CU}, r"batch size 1.*got tokens \(8, 2\) and 1 ranks"),
    "no boundaries": ((IDS,), {"layout": "zigzag-documents"}, "cu_seqlens must be given"),
    "decreasing": ((IDS,), {"cu_seqlens": CU.flip(0)}, "begin with 0 and not decrease.*got 8, 3"),
    "too long": ((IDS,), {"cu_seqlens": CU * 2}, "end within the sample of 8.*got an end at 16"),
    "float": ((IDS,), {"cu_seqlens": CU.float()}, "cu_seqlens must be a tensor of int32 or int64"),
    "padding alone": ((IDS,), {"cu_seqlens_padded": CU}, "cu_seqlens must come with cu_seqlens_pa"),
    "padding": ((IDS,), {"cu_seqlens": CU, "cu_seqlens_padded": CU // 2}, "longer than with its"),
}  # fmt: skip


@pytest.mark.parametrize(("inputs", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses_in_one_sentence(inputs, options, message):
    with pytest.raises(BurstError, match=f"^next tokens: .*{message}"):
        next_tokens(*inputs, **options)


def refusals(rank: int) -> list[str]:
    """What each rank is told, and whether it still works afterwards."""
    world, said = dist.group.WORLD, []
    calls = (
        dict(tokens=IDS[:4], cu_seqlens=CU if rank else torch.tensor([0, 4, 8])),
        dict(tokens=IDS[: 4 + 2 * rank]),
        dict(tokens=IDS[:4], cu_seqlens=CU.flip(0) if rank else CU),
        dict(tokens=IDS[:4], layout="contiguous" if rank else "zigzag"),
        dict(tokens=IDS[:5]),
        dict(tokens=IDS[:4], layout="zigzag-documents", cu_seqlens=CU),
        dict(tokens=None if rank else IDS[:4]),
        dict(tokens=IDS[:4].to_sparse() if rank else IDS[:4]),
    )
    for call in calls:
        with pytest.raises(BurstError) as raised:
            next_tokens(group=world, **call)
        said.append(str(raised.value))
    rows = [0, 1, 6, 7] if rank == 0 else [2, 3, 4, 5]
    assert next_tokens(IDS[rows], group=world).tolist() == (
        [1, 2, 7, -100] if rank == 0 else [3, 4, 5, 6]
    )
    return said


def test_what_is_wrong_or_differs_on_one_rank_is_refused_on_all():
    for said in run_ranks(refusals, 2):
        boundaries, rows, wrong, layout, odd, lengths, nothing, sparse = said
        assert "cu_seqlens=[0, 4, 8]" in boundaries and "cu_seqlens=[0, 3, 8]" in boundaries
        assert "(4,)" in rows and "(6,)" in rows and "pass the same shapes" in rows
        assert "must begin with 0 and not decrease" in wrong and "cp ranks [1]" in wrong
        assert "layout=zigzag" in layout and "layout=contiguous" in layout
        assert "a multiple of 4 tokens" in odd and "tokens (5,) and 2 ranks" in odd
        assert "each document must be padded to a multiple of 4" in lengths
        assert "tokens must be a dense tensor" in nothing and "got None" in nothing
        assert "tokens must be a dense tensor" in sparse and "torch.sparse_coo" in sparse


def differing(rank: int, device: str = "cpu") -> tuple:
    """Boundaries that differ, where waiting is not allowed."""
    from megatron_burst.loss import checks

    if device == "cpu":
        checks._stays_on_gpu = lambda x: True
        shards_module.announce = lambda *arguments, **options: None
    cu_seqlens = torch.tensor([0, 3 + rank, 8], device=device)
    tokens = IDS[:4].to(device)
    labels = next_tokens(tokens, group=dist.group.WORLD, cu_seqlens=cu_seqlens)
    hidden, weight = torch.randn(4, 8, device=device), torch.randn(40, 8, device=device)
    return bool(token_log_probs(hidden, weight, labels).log_probs.isnan().all()), len(labels)


def test_on_a_gpu_boundaries_that_differ_between_ranks_make_all_losses_nan():
    assert run_ranks(differing, 2) == [(True, 4)] * 2


def test_a_digest_tells_boundaries_apart():
    """Even those whose sums and weighted sums are equal."""
    draw = random.Random(0)
    many = {tuple(sorted(draw.choices(range(12), k=4))) for _ in range(2000)}
    samples = (Sample(torch.tensor((0, *found)), None, None) for found in many)
    digests = {int(module._digest(sample, IDS)) for sample in samples}
    assert len(digests) == len(many) > 500
