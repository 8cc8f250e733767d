"""Prefix trees on simulated ranks: each query sees its own segment and its ancestors'.

Guards against visible siblings or descendants, ancestors that a mode leaves out, gradients of one
tree depth that overwrite another's, and keys that are multiplied more than once.
"""

import re
import subprocess
import sys
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from random import Random
from threading import Lock
from unittest.mock import patch

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_burst.attention import burst_attention
from megatron_burst.errors import BurstError
from megatron_burst.kernels.masks.parts import Parts
from megatron_burst.kernels.reference import Reference
from megatron_burst.masks.documents import Documents
from megatron_burst.masks.sample import Sample
from megatron_burst.masks.slice_calls import Calls
from megatron_burst.masks.slice_parts import Bands
from megatron_burst.masks.tree import slices_of_tree
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.modes import EMITTERS
from megatron_burst.schedule.spec import Circulate
from megatron_burst.schedule.topology import pretend_nodes
from megatron_burst.slices import CAUSAL
from tests.attention.engine import Way, assert_exact, problem, run_engine, truth
from tests.options import burst_config
from tests.oracle import rows_of, seen_by, seen_by_slices
from tests.ranks import run_ranks
from tests.sampling import seeds, whole

pytestmark = pytest.mark.numeric
ROOT = Path(__file__).parents[2]
MASK = Mask(right=0, documents=True)
TREES = {  # parents, and segment lengths
    "one segment": ((-1,), (9,)),
    "a chain": ((-1, 0, 1), (3, 5, 2)),
    "a star": ((-1, 0, 0, 0, 0), (11, 3, 1, 4, 2)),
    "two prompts": ((-1, 0, 0, -1, 3, 3, 3), (5, 2, 3, 4, 1, 2, 1)),
    "nested branches": ((-1, 0, 1, 1, 0, 4, 4, 6, 6, 0), (4, 3, 2, 1, 3, 2, 2, 1, 2, 3)),
    "a fork behind a chain": ((-1, 0, 1, 2, 2), (2, 3, 1, 4, 4)),
    "empty segments": ((-1, 0, 1, 1, 0, 4, 4), (0, 4, 0, 3, 2, 0, 3)),
    "an empty prompt": ((-1, 0, 0), (0, 5, 6)),
    "no tree": ((-1, -1, -1), (4, 5, 6)),
}
GROUPS = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (1, 5), (3, 2)]


def edges_of(lengths, size):
    """Where segments begin, scaled so that each of `size` ranks has tokens; and tokens per rank."""
    edges = tuple(accumulate(lengths, initial=0))
    return edges, 2 * -(-max(edges[-1], 2) // (2 * size))


def ways(nodes, ranks):
    """(heads, mode) of each mode that the group supports."""
    one_kv = {"mode": "gather", "heads_per_round": 1}
    yield (4, 2), Way("ring", Circulate.KV)
    yield (2, 2), Way("ring", Circulate.Q, rectangular=False)
    if nodes * ranks > 1:
        yield (4, 2), Way(**one_kv, circulate=Circulate.KV, pulls=nodes == 1)
        yield (2, 2), Way(**one_kv, circulate=Circulate.Q, rectangular=False)
        size = nodes * ranks
        yield (2 * size, size), Way("a2a", Circulate.KV, backend="torch-cpu")


@pytest.mark.parametrize("nodes, ranks", [*GROUPS, *whole((1, 7), (2, 4))])
def test_each_tree_is_exact(nodes, ranks):
    """One of the group's modes each, so that each mode has about two trees."""
    size, every = nodes * ranks, list(ways(nodes, ranks))
    for number, (parents, lengths) in enumerate(TREES.values()):
        edges, tokens = edges_of(lengths, size)
        heads, way = every[(number + size) % len(every)]
        layout = [Layout.ZIGZAG, Layout.CONTIGUOUS][number // 2 % 2]
        way = replace(way, mask=MASK, edges=edges, parents=parents, layout=layout)
        tensors = problem(size, tokens, heads, (4, 3), number, batch=1)
        assert_exact(pretend_nodes(size, nodes), tensors, way, number)


def tree(random, most=9):
    """A random tree, depth first."""
    parents, path = [], []
    for segment in range(random.randint(1, most)):
        del path[random.randint(0, len(path)) :]  # to the parent, or to a new root
        parents.append(path[-1] if path else -1)
        path.append(segment)
    return tuple(parents)


@pytest.mark.parametrize("seed", seeds(20, 2, 6))
def test_any_tree_is_exact(seed):
    random = Random(seed)
    for number in range(20):
        nodes, ranks = random.choice(GROUPS)
        size, parents = nodes * ranks, tree(random)
        edges, tokens = edges_of([random.randint(0, 7) for _ in parents], size)
        heads, way = random.choice(list(ways(nodes, ranks)))
        way = replace(
            way, mask=MASK, edges=edges, parents=parents,
            layout=random.choice([Layout.ZIGZAG, Layout.CONTIGUOUS]),
            backend=random.choice(["reference", "torch-cpu"]),
        )  # fmt: skip
        tensors = problem(size, tokens, heads, random.choice([(4, 4), (6, 3)]), number, batch=1)
        assert_exact(pretend_nodes(size, nodes), tensors, way, number)


def test_a_chain_is_one_causal_document():
    (chain,) = slices_of_tree((0, 3, 8, 8, 19), (-1, 0, 1, 2)).tolist()
    assert chain == [0, 19, 0, 19, CAUSAL]


class Counted:
    """Counts query-key pairs given to kernels."""

    def __init__(self):
        self.pairs, self.lock = {"forward": 0, "backward": 0}, Lock()

    def of(self, name):
        plain = getattr(Reference, name)

        def run(backend, q, k, v, scale, visible, *args, **options):
            rows = q.shape[1] if name == "forward" else q.q.shape[1]
            each = (Parts(part[None]) for part in visible.parts.table)
            seen = sum(int(x.seen(slice(0, rows), k.shape[1], k.device).sum()) for x in each)
            with self.lock:  # ranks are threads
                self.pairs[name] += seen
            return plain(backend, q, k, v, scale, visible, *args, **options)

        return patch.object(Reference, name, run)


@pytest.mark.parametrize("mode", EMITTERS)
@pytest.mark.parametrize("name", TREES)
def test_each_key_is_multiplied_once_with_each_query_that_sees_it(name, mode):
    """Forward runs twice in `run_engine`."""
    parents, lengths = TREES[name]
    edges, tokens = edges_of(lengths, 2)
    tensors = problem(2, tokens, (2, 2), (4, 4), 0, batch=1)
    way = Way(mode, mask=MASK, edges=edges, parents=parents, heads_per_round=2 - (mode == "a2a"))
    counted = Counted()
    with counted.of("forward"), counted.of("backward"):
        run_engine(pretend_nodes(2, 1), tensors, way)
    seen = int(seen_by(MASK, edges, 2 * tokens, parents).sum())
    ranks = 1 if mode != "a2a" else 2  # each rank has all pairs of one head
    assert counted.pairs == {"forward": 2 * ranks * seen, "backward": ranks * seen}


def documents(parents, edges=(0, 4, 6, 9), tokens=10, **options):
    sample = Sample(torch.tensor(edges), None, None, parents)
    return Documents(sample, (tokens, 1), Layout.ZIGZAG, torch.device("cpu"), **options)


def test_a_tree_is_at_most_two_slices_for_each_segment():
    for parents, lengths in TREES.values():
        edges = list(accumulate(lengths, initial=0))
        made = slices_of_tree(edges, parents)
        seen = seen_by(MASK, edges, edges[-1], parents)
        assert torch.equal(seen_by_slices(made.tolist(), edges[-1]), seen)
        assert len(made) <= max(1, 2 * sum(length > 0 for length in lengths) - 1)


def test_depth_decides_how_many_calls_there_are_not_the_number_of_segments():
    """Of a kernel that takes no parts."""
    for (parents, lengths), calls in zip(TREES.values(), (1, 1, 2, 2, 4, 2, 2, 1, 1), strict=True):
        edges, tokens = edges_of(lengths, 1)
        slices, every = slices_of_tree(edges, parents).numpy(), (range(tokens),)
        parts = Parts(Bands(slices).parts(every, every))
        assert len(Calls(parts, torch.device("cpu"), together=True).calls) == calls


REFUSED = {  # parents, and words of the message
    "its own parent": ([-1, 1, 0], "an earlier segment.*got parent 1 of segment 1; number"),
    "a cycle": ([1, 0, 0], "an earlier segment.*got parent 1 of segment 0"),
    "behind its child": ([-1, 2, 0], "an earlier segment.*got parent 2 of segment 1"),
    "below -1": ([-1, -2, 0], "an earlier segment.*got parent -2 of segment 1"),
    "breadth first": (
        [-1, -1, 0], "depth first.*got segment 2 not directly after segment 0 and its descendants"
    ),
    "too few": ([-1, 0], "a parent for each segment.*got 2 parents for 3 segments"),
    "none": ([], "a parent for each segment.*got 0 parents for 3 segments"),
    "no integers": ([-1, 0.0, 0], "integers on the CPU.*got float, int; pass a list of int"),
    "booleans": ([-1, True, 0], "integers on the CPU.*got bool, int"),
    "nested": ([[-1], [0], [0]], "integers on the CPU.*got list"),
    "dtype": (torch.tensor([-1.0, 0, 0]), "got torch.float32 of shape"),
    "two axes": (torch.tensor([[-1, 0, 0]]), r"with one axis.*got torch.int64 of shape \(1, 3\)"),
    "device": (torch.tensor([-1, 0, 0], device="meta"), "on the CPU.*got meta; pass .*cpu"),
    "a number": (3, "a list or tensor.*got int; pass one"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_parents_that_make_no_tree_are_refused(name):
    parents, words = REFUSED[name]
    with pytest.raises(BurstError, match=f"^burst attention: .*{words}"):
        documents(parents)


def test_padding_in_a_tree_is_refused():
    lengths = torch.tensor([0, 3, 5]), torch.tensor([0, 4, 8])
    with pytest.raises(
        BurstError, match="no padding between.*got cu_seqlens_padded; pass cu_seqlens"
    ):
        Documents(Sample(*lengths, None, [-1, 0]), (8, 1), Layout.ZIGZAG, torch.device("cpu"))


def test_trees_are_told_apart():
    told = [documents(parents).text for parents in ([-1, 0, 0], [-1, 0, 1])]
    assert told[0]["cu_seqlens"] == told[1]["cu_seqlens"]
    assert told[0]["prefix_tree"].startswith("[-1, 0, 0] (")
    assert told[0]["prefix_tree"] != told[1]["prefix_tree"]


STAR = (-1, 0, 0, 0, 3, 3), (0, 9, 12, 13, 17, 19, 22)  # 22 of 24 tokens; the last answer forks
WAYS = (
    {}, {"intra": "gather", "heads_per_round": 1}, {"intra": "a2a"}, {"inter": "a2a"},
    {"nodes": 2}, {"nodes": 2, "circulate": "q"}, {"deterministic": True, "backend": "reference"},
    {"keep": "all"}, {"keep": "half"},
)  # fmt: skip


def errors_of_ways(rank, world):
    """The largest error of each mode of a call, over out, lse, dq, dk and dv."""
    parents, edges = STAR
    tokens = 24 // world
    tensors = problem(world, tokens, (4, 2), (4, 3), 5, batch=1)
    truth_ = truth(*tensors, MASK, 4**-0.5, edges, parents)
    q, k = (x.transpose(1, 2) for x in tensors[:2])
    hidden = ~seen_by(MASK, edges, 24, parents)
    scores = (q @ k.repeat_interleave(2, dim=1).mT * 4**-0.5).masked_fill(hidden, -torch.inf)
    sums = scores.logsumexp(-1)
    starts, found = torch.tensor(edges, dtype=torch.int32), {}
    forms = [list(parents), torch.tensor(parents), torch.tensor(parents, dtype=torch.int32)]
    for number, way in enumerate(WAYS):
        layout = ["zigzag", "contiguous"][number % 2]
        rows = rows_of(Layout(layout), rank, world, tokens)
        q, k, v = (x[:, rows].clone().requires_grad_() for x in tensors[:3])

        def attend(q, k, v, way=way, layout=layout, tree=forms[number % 3]):
            return burst_attention(
                q, k, v, layout=layout, config=burst_config(**way), cu_seqlens=starts,
                prefix_tree=tree, max_seqlen=9 + 3 * ("nodes" in way), return_lse=True,
            )  # fmt: skip

        if "keep" in way:
            (out, _) = checkpoint(attend, q, k, v, use_reentrant=False)
        else:
            out, lse = attend(q, k, v)
            assert torch.allclose(lse, sums[:, :, rows], rtol=0, atol=1e-12)
        grads = torch.autograd.grad(out, (q, k, v), tensors[3][:, rows])
        got = zip((out.detach(), *grads), truth_, strict=True)
        found[str(way)] = max(float((a - b[:, rows]).abs().max()) for a, b in got)
    return found


def test_real_processes_have_every_way():
    for found in run_ranks(errors_of_ways, 2, 2):
        assert len(found) == len(WAYS)
        assert all(error <= 1e-12 for error in found.values()), found


CALLS = {  # arguments besides q, k and v, and words of the message
    "no boundaries": ({"prefix_tree": [-1, 0]}, "cu_seqlens must come with prefix_tree.*got no cu"),
    "not causal": (
        {"prefix_tree": [-1, 0], "causal": False}, "must be causal and without a window.*False"
    ),
    "a window": ({"prefix_tree": [-1, 0], "window": (3, 0)}, "without a window.*window=.3, 0."),
    "layout": (
        {"prefix_tree": [-1, 0], "layout": "zigzag-documents"},
        "sharded as one sample.*got layout zigzag-documents; shard the sample in zigzag",
    ),
    "striped": ({"prefix_tree": [-1, 0], "layout": "striped"}, "in contiguous chunks.*got layout"),
    "no tree": ({"prefix_tree": [0, -1]}, "parent 0 of segment 0; number segments"),
    "max_seqlen": ({"prefix_tree": [-1, 0], "max_seqlen": 3}, "max_seqlen must be at least"),
}  # fmt: skip


def sentences(rank, world):
    q = torch.randn(1, 4, 2, 4)
    starts, found = torch.tensor([0, 3, 8]), {}
    for name, (options, _) in CALLS.items():
        given = {} if name == "no boundaries" else {"cu_seqlens": starts}
        with pytest.raises(BurstError) as error:
            burst_attention(q, q, q, **given, **options)
        found[name] = str(error.value)
    with pytest.raises(BurstError) as error:  # a tree on one rank only, or different trees
        burst_attention(q, q, q, cu_seqlens=starts, **({"prefix_tree": [-1, 0]} if rank else {}))
    found["one rank"] = str(error.value)
    with pytest.raises(BurstError) as error:
        burst_attention(q, q, q, cu_seqlens=starts, prefix_tree=[-1, rank - 1])
    found["other trees"] = str(error.value)
    good = burst_attention(q, q, q, cu_seqlens=starts, prefix_tree=[-1, 0])
    return found, bool(good.isfinite().all())


def test_what_trees_cannot_have_is_one_sentence_on_both_ranks():
    words = {name: said for name, (_, said) in CALLS.items()}
    words |= {"one rank": "prefix_tree=", "other trees": r"prefix_tree=\[-1, .*prefix_tree=\[-1, "}
    for found, good in run_ranks(sentences, 2, 2):
        assert good and found.keys() == words.keys()
        for name, said in words.items():
            assert re.search(said, found[name]), found[name]
            assert "\n" not in found[name] and found[name].count("; got") == 1


def test_the_example_says_what_the_prompt_once_saves():
    command = [sys.executable, "examples/rollouts.py", "--prompt", "48", "--answer", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    once, repeated, difference = done.stdout.splitlines()
    assert once == "prompt once: 112 tokens, 4,480 pairs of query and key"
    assert repeated == "prompt with each answer: 448 tokens, 12,544 pairs of query and key"
    assert float(difference.rpartition(" ")[2]) < 1e-5
