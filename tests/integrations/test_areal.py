"""AReaL's packed tries as slices: its file areal/models/tree_attn/tree.py (4aef98d) builds them.

AREAL names a clone; it is in no registry, and its package needs engines. So the parts of the file
that build tries run on their own.
"""

import ast
import os
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
import torch

from megatron_burst import slices
from tests.oracle import seen_by_slices

if "AREAL" not in os.environ:
    pytest.skip("AREAL must be a clone of AReaL: it is in no registry", allow_module_level=True)
WANTED = {"TrieNode", "_BuildNode", "_insert_sequence", "_compress_trie", "trie_to_parent_array"}


def of_areal():
    """The named parts of AReaL's file."""
    path = Path(os.environ["AREAL"]) / "areal/models/tree_attn/tree.py"
    nodes = [node for node in ast.parse(path.read_text()).body
             if getattr(node, "name", "") in WANTED]  # fmt: skip
    found = {"dataclass": dataclass, "field": field, "torch": torch}
    found["trace_perf"] = lambda name: lambda function: function
    code = "from __future__ import annotations\n" + "\n".join(map(ast.unparse, nodes))
    exec(compile(code, str(path), "exec", dont_inherit=True), found)
    return found


def test_tries_that_areal_packs_are_its_paths():
    theirs, random = of_areal(), Random(0)
    for _ in range(50):
        root, every = theirs["_BuildNode"](0, -1, -1), []
        for number in range(random.randint(1, 6)):
            tokens = [random.randint(0, 2) for _ in range(random.randint(1, 8))]
            theirs["_insert_sequence"](root, every, tokens, 0, number)
        trie, tokens = theirs["_compress_trie"](root), len(every)
        (parents,) = theirs["trie_to_parent_array"](trie, tokens).tolist()
        seen = torch.zeros(tokens, tokens, dtype=torch.bool)
        for token in range(tokens):
            ancestor = token
            while ancestor != -1:
                seen[token, ancestor] = True
                ancestor = parents[ancestor]
        assert torch.equal(seen_by_slices(slices.of_trie(trie).tolist(), tokens), seen)
