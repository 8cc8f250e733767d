"""Windows and packed documents on simulated ranks: random masks, layouts, groups, dtypes and modes.

Guards against keys of another document or outside the window, a halo that is too short, and rows
returned to the wrong place. Unsupported combinations must be refused. The environment variable
MASKS sets the number of cases (e.g. 3000).
"""

from dataclasses import dataclass
from itertools import accumulate
from math import gcd, lcm
from random import Random

import pytest
import torch

from megatron_burst.errors import BurstError
from megatron_burst.masks.documents import Documents
from megatron_burst.masks.sample import Sample
from megatron_burst.schedule.layout import (
    Layout,
)
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.modes import EMITTERS
from megatron_burst.schedule.spec import Circulate
from megatron_burst.schedule.topology import pretend_nodes
from tests.attention.engine import Way, assert_exact, problem
from tests.sampling import seeds
from tests.schedule.cases import LAYOUTS

pytestmark = pytest.mark.numeric
GROUPS = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (2, 3)]
CASES = 30  # in each test
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Drawn:
    """A call drawn from a seed."""

    nodes: int
    ranks: int
    tokens: int
    heads: tuple[int, int]
    way: Way

    @property
    def refused(self) -> bool:
        """Whether docs/masks.md says that it is refused."""
        mask, one_node = self.way.mask, self.nodes == 1
        if self.nodes * self.ranks == 1:
            return False
        if self.way.layout is Layout.STRIPED and (mask.documents or self.way.mode != "ring"):
            return True
        if mask.documents and mask.windowed:
            gathers = self.way.mode == "gather" and mask.right == 0
            return not (self.way.mode == "a2a" or (one_node and gathers))
        return False


def drawn(random: Random) -> Drawn:
    nodes, ranks = random.choice(GROUPS)
    packed, size = random.random() < 0.7, nodes * ranks
    mode = random.choice(list(EMITTERS)) if size > 1 else "ring"
    mask = Mask(
        random.choice([None, None, 0, 1, 2, 5, 11]), random.choice([None, 0, 0, 0, 1, 3]), packed
    )
    layout = random.choice([*LAYOUTS, *([Layout.DOCUMENTS] * packed)])
    tokens, edges = 2 * random.randint(1, 6), ()
    if layout is Layout.DOCUMENTS:
        lengths = [2 * size * random.randint(0, 3) for _ in range(random.randint(1, 4))]
        edges = tuple(accumulate([0, *lengths, 2 * size]))
        tokens = edges[-1] // size
    elif packed:  # some end before the sample does
        inside = [random.randint(0, size * tokens) for _ in range(random.randint(0, 5))]
        edges = (0, *sorted([*inside, size * tokens - random.randint(0, 1)]))
    heads_kv = random.choice([1, 2, 3, 4, 8])
    sharing = size if mode == "a2a" else ranks
    per_rank = heads_kv // gcd(heads_kv, sharing)
    circulate = random.choice(list(Circulate))
    sharded = layout in (Layout.DOCUMENTS, Layout.ZIGZAG) and not mask.windowed
    whole = mode == "gather" and sharded and nodes == 1
    leaves = mode == "a2a" or (mode == "gather" and nodes > 1 and circulate is Circulate.KV)
    way = Way(
        mode, circulate, random.randint(1, per_rank), random.random() < 0.5,
        leaves and random.random() < 0.5, layout, mask, "reference", 0.7,
        random.choice([False, True, "one slot"]) if nodes == 1 and mode != "ring" else False,
        edges, sinks=random.random() < 0.3, whole_heads=random.randint(0, per_rank) * whole,
    )  # fmt: skip
    ranks_of_heads = sharing if mode == "a2a" or way.whole_heads else 1
    heads_q = lcm(heads_kv, ranks_of_heads) * random.choice([1, 2])
    return Drawn(nodes, ranks, tokens, (heads_q, heads_kv), way)


@pytest.mark.parametrize("seed", seeds(CASES, 3, 10))
def test_any_mask_is_exact_or_refused(seed):
    random, refused = Random(seed), 0
    for number in range(CASES):
        case = drawn(random)
        size, batch = case.nodes * case.ranks, 1 if case.way.mask.documents else 2
        dims, dtype = random.choice([(4, 4), (6, 3)]), random.choice(DTYPES)
        tensors = problem(size, case.tokens, case.heads, dims, number, batch)
        topology = pretend_nodes(size, case.nodes)
        if case.refused:
            refused += 1
            with pytest.raises(BurstError, match="burst attention: .*got .*; "):
                assert_exact(topology, tensors, case.way, number, dtype)
        else:
            assert_exact(topology, tensors, case.way, number, dtype)
    print(f"{CASES - refused} were exact, {refused} were refused")  # pytest -rP shows it
    assert refused < CASES - 5


def test_padding_is_no_document():
    """Padded queries see no keys, padded keys are seen by no query, and the same for what
    follows."""
    sample = Sample(torch.tensor([0, 3, 3, 5]), torch.tensor([0, 4, 6, 10]), None)
    documents = Documents(sample, (6, 2), Layout.ZIGZAG, torch.device("cpu"))
    whole = (range(12),)
    segments = documents.segments(whole, whole)
    seen = torch.zeros(12, 12, dtype=torch.bool)
    for q, k in zip(segments.cu_q.unfold(0, 2, 1), segments.cu_k.unfold(0, 2, 1), strict=True):
        seen[slice(*q.tolist()), slice(*k.tolist())] = True
    expected = torch.zeros(12, 12, dtype=torch.bool)
    expected[0:3, 0:3] = expected[6:8, 6:8] = True
    assert torch.equal(seen, expected)
    assert segments.cu_q[-1] == segments.cu_k[-1] == 12


@pytest.mark.parametrize("told", [None, 4])
def test_segments_behind_the_last_document_are_no_longer_than_kernels_are_told(told):
    """FlashAttention-2 writes no longer ones. `told`: boundaries on a GPU, not waited for."""
    sample = Sample(torch.tensor([0, 3, 7, 11]), None, told)
    documents = Documents(sample, (10, 2), Layout.ZIGZAG, torch.device("cpu"))
    if told:
        documents._longest, documents._tail_segments = told, 20 // told
    segments = documents.segments((range(20),), (range(20),))
    assert segments.cu_q.diff().max() <= segments.max_q
    assert segments.cu_k.diff().max() <= segments.max_k
    assert segments.cu_q[-1] == segments.cu_k[-1] == 20
    queries, keys = segments.cu_q.diff(), segments.cu_k.diff()
    assert (queries * keys).sum() == 3**2 + 4**2 + 4**2
