"""Under slices a transfer that no rank needs is not made: bytes counted by hand, from the pairs of
a mask, and results exact where much of what programs send is left out."""

from collections import Counter
from itertools import product
from random import Random

import pytest
import torch

from megatron_burst.masks.documents import Documents
from megatron_burst.masks.sample import Sample
from megatron_burst.masks.slices import Slices
from megatron_burst.schedule.chunks import NeededBy
from megatron_burst.schedule.layout import Layout, chunks_held
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.spec import Circulate
from megatron_burst.schedule.topology import pretend_nodes
from tests.attention.engine import Passes, SeenPairs, Way, assert_exact, problem
from tests.attention.simulated import run_simulated
from tests.masks.test_slices import drawn_way
from tests.oracle import rows_of, seen_by_slices
from tests.sampling import whole

CHUNK, WIDTH, HEADS = 3, 4, 2  # rows, numbers of a row and head, heads; in float64
ROW = 2 * HEADS * WIDTH * 8  # bytes of K and V of a row, or of their gradients


def drawn_slices(random, chunks, later=True):
    """Each chunk of queries sees itself, in a causal part, and at most one other chunk."""
    found = []
    for chunk in range(chunks):
        rows = chunk * CHUNK, (chunk + 1) * CHUNK
        found.append((*rows, *rows, 1))
        others = [n for n in range(chunks) if n < chunk or (later and n > chunk)]
        if others and random.random() < 0.6:
            other = random.choice(others)
            at = random.randrange(other * CHUNK, (other + 1) * CHUNK)
            found.append((*rows, at, at + 1, 0))
    return tuple(found)


def sent(way, size, tokens):
    """Bytes that each rank sends in forward, and in both passes."""
    tensors = problem(size, tokens, (HEADS, HEADS), (WIDTH, WIDTH), 0, 1)

    def one(rank, carrier):
        shard = [x[:, rows_of(way.layout, rank, size, tokens)] for x in tensors]
        passes, found = Passes(way, pretend_nodes(size, 1), shard, carrier), []
        passes.forward(*shard[:3])
        found.append(carrier.sent_bytes)
        passes.both(*shard)
        return [*found, carrier.sent_bytes - found[0]]

    return run_simulated(one, size, 0, way.pulls)[0]


def meets(way, size, tokens):
    """meets[r][c]: whether a query of rank r sees a key of chunk c."""
    seen = seen_by_slices(way.slices, size * tokens)
    rows = [seen[rows_of(way.layout, rank, size, tokens)] for rank in range(size)]
    return [torch.stack([x.any() for x in of.split(CHUNK, 1)]).tolist() for of in rows]


@pytest.mark.parametrize("seed", range(3))
def test_which_chunks_meet_is_known_exactly(seed):
    """Of random slices, in zigzag also for each of several documents, pair by pair."""
    random, found = Random(seed), Counter()
    for _ in range(60):
        (nodes, ranks), tokens, _, way = drawn_way(random)
        size = nodes * ranks
        documents = None
        if way.edges:
            sample = Sample(torch.tensor(way.edges), None, None, None)
            documents = Documents(sample, (tokens, size), way.layout, torch.device("cpu"))
        sizes, given = (tokens, size, 1, tokens), torch.tensor(way.slices)
        slices = Slices(given, False, sizes, way.layout, torch.device("cpu"), documents)
        truth = SeenPairs(way, size, [size * tokens] * 2)
        count = size * len(chunks_held(way.layout, 0, size))
        for one, other in product(range(count), repeat=2):
            between = NeededBy((one,), (other,))
            assert slices.is_seen(between) == truth[between]
            found[way.layout, truth[between]] += 1
    assert len(found) == 6 and min(found.values()) > 50  # layouts, meeting or not


LAYOUTS = Layout.ZIGZAG, Layout.CONTIGUOUS


@pytest.mark.parametrize("layout, pulls, seed", [*product(LAYOUTS, (False, True), range(3))])
def test_a_gather_sends_the_chunks_that_a_rank_sees(layout, pulls, seed):
    """And back a gradient for each."""
    size, held = 3, len(chunks_held(layout, 0, 3))
    slices = drawn_slices(Random(seed), size * held)
    way = Way("gather", layout=layout, mask=Mask(documents=True), pulls=pulls, slices=slices,
              heads_per_round=HEADS)  # fmt: skip
    found, tokens = meets(way, size, held * CHUNK), held * CHUNK
    for rank, (forward, both) in enumerate(sent(way, size, tokens)):
        own = chunks_held(layout, rank, size)
        given = sum(found[other][n] for other in range(size) for n in own if other != rank)
        taken = sum(sees for n, sees in enumerate(found[rank]) if n not in own)
        assert forward == given * CHUNK * ROW
        assert both == (2 * given + taken) * CHUNK * ROW


@pytest.mark.parametrize("layout, seed", [*product(LAYOUTS, range(3))])
def test_the_log_tells_how_much_of_other_ranks_keys_is_needed(layout, seed):
    size, held = 3, len(chunks_held(layout, 0, 3))
    way = Way("gather", slices=drawn_slices(Random(seed), size * held), layout=layout)
    found, tokens = meets(way, size, held * CHUNK), held * CHUNK
    sees = [
        sees
        for rank, of_rank in enumerate(found)
        for n, sees in enumerate(of_rank)
        if n not in chunks_held(layout, rank, size)
    ]
    given, sizes = torch.tensor(way.slices), (tokens, size, 1, tokens)
    told = Slices(given, False, sizes, layout, torch.device("cpu")).balance
    assert f" needs {sum(sees) / len(sees):.0%} of" in told


@pytest.mark.parametrize("layout, seed", [*product(LAYOUTS, range(3))])
def test_a_ring_sends_a_shard_up_to_its_last_reader_and_its_gradient_from_its_first(layout, seed):
    size, held = 4, len(chunks_held(layout, 0, 4))
    slices = drawn_slices(Random(seed), size * held)
    way = Way("ring", layout=layout, mask=Mask(documents=True), slices=slices)
    found, tokens = meets(way, size, held * CHUNK), held * CHUNK
    forward, gradients = [0] * size, [0] * size
    for owner in range(size):
        own = chunks_held(layout, owner, size)
        readers = [away for away in range(1, size)
                   if any(found[(owner + away) % size][n] for n in own)]  # fmt: skip
        for away in range(size):
            forward[(owner + away) % size] += away < max(readers, default=0)
            gradients[(owner + away) % size] += bool(readers) and away >= readers[0]
    for rank, (there, both) in enumerate(sent(way, size, tokens)):
        assert there == forward[rank] * tokens * ROW
        assert both == (2 * forward[rank] + gradients[rank]) * tokens * ROW


@pytest.mark.parametrize("mode, layout", [*product(("ring", "gather", "a2a"), LAYOUTS)])
def test_chunks_that_ranks_hold_are_not_sent(mode, layout):
    """As in chunked attention; only an all-to-all sends them, to the ranks that compute them."""
    size, held = 4, len(chunks_held(layout, 0, 4))
    slices = tuple((n * CHUNK, (n + 1) * CHUNK) * 2 + (1,) for n in range(size * held))
    way = Way(mode, layout=layout, mask=Mask(None, 0, True), slices=slices)
    tensors = problem(size, held * CHUNK, (4, 4), (WIDTH, WIDTH), 0, 1)
    assert_exact(pretend_nodes(size, 1), tensors, way)
    if mode != "a2a":
        assert sent(way, size, held * CHUNK) == [[0, 0]] * size


GROUPS = [(1, 3), (2, 2), (3, 1), (2, 3), (3, 2)]  # nodes, ranks of each
EVERY = Circulate, (*LAYOUTS, Layout.DOCUMENTS), (False, True), (False, True)


@pytest.mark.parametrize("nodes, ranks", [*GROUPS, *whole((1, 4), (4, 2))])
@pytest.mark.parametrize("mode", ["ring", "gather", "a2a"])
def test_sparse_masks_are_exact(mode, nodes, ranks, draw):
    for number, (circulate, layout, later, option) in draw(list(enumerate(product(*EVERY))), 2):
        random, size = Random(number), nodes * ranks
        chunks, edges = size * len(chunks_held(layout, 0, size)), ()
        if layout is Layout.DOCUMENTS:  # the second one is empty
            edges, chunks = (0, chunks * CHUNK, chunks * CHUNK, 2 * chunks * CHUNK), 2 * chunks
        leaves = mode == "a2a" or (mode == "gather" and nodes > 1 and circulate is Circulate.KV)
        way = Way(
            mode, circulate, left=option and leaves, layout=layout, mask=Mask(documents=True),
            backend=random.choice(["reference", "calls"]), edges=edges,
            pulls=option and nodes == 1 and mode != "ring",
            slices=drawn_slices(random, chunks, later),
        )  # fmt: skip
        tensors = problem(size, chunks // size * CHUNK, (2 * size, size), (4, 4), number, 1)
        assert_exact(pretend_nodes(size, nodes), tensors, way, number)
