"""verl's packed trees as slices: the files verl/utils/prefix_tree of its draft #6689 (7aeb42a).

VERL_TREES names a clone of verl at that pull request's head; the package needs engines. So the
parts of its files that build tries and lay them out run on their own.
"""

import ast
import logging
import os
from pathlib import Path
from random import Random

import pytest
import torch

from megatron_burst import slices
from tests.oracle import seen_by_slices

if "VERL_TREES" not in os.environ:
    pytest.skip("VERL_TREES must be a clone of verl's draft #6689", allow_module_level=True)
OF_DYNAMIC = {"greedy_build_tries", "convert_trie_to_tree_node", "build_tree_dynamic",
              "_trie_seq_ids", "build_subtrie_view"}  # fmt: skip


def of_verl():
    """What verl's files define, without what they import of verl."""
    found = {"_log": logging.getLogger(__name__)}
    for name, wanted in (("tree", None), ("utils", None), ("dynamic", OF_DYNAMIC)):
        path = Path(os.environ["VERL_TREES"]) / f"verl/utils/prefix_tree/{name}.py"
        kept = [node for node in ast.parse(path.read_text()).body if _is_kept(node, wanted)]
        code = "from __future__ import annotations\n" + "\n".join(map(ast.unparse, kept))
        exec(compile(code, str(path), "exec", dont_inherit=True), found)
    return found


def _is_kept(node, wanted):
    if isinstance(node, ast.ImportFrom):
        return not (node.module or "").startswith(("verl", "__future__"))
    return isinstance(node, ast.Import) or wanted is None or getattr(node, "name", "") in wanted


def test_each_query_of_verls_trees_sees_the_beginning_of_its_sample():
    """The tokens that it sees, in the order of their positions, spell it."""
    theirs, random, nodes = of_verl(), Random(0), set()
    for _ in range(100):
        samples = [
            torch.tensor([7, *(random.randint(0, 2) for _ in range(random.randint(1, 9)))])
            for _ in range(random.randint(2, 7))
        ]
        tree = theirs["build_tree_dynamic"](samples)
        params = theirs["build_layout_from_tree_node"](samples, tree)
        made = slices.of_ranges(params.q_ranges, params.k_ranges, params.mask_types)
        seen = seen_by_slices(made.tolist(), params.total_seqlen_q)
        beginnings = {tuple(s[:n].tolist()) for s in samples for n in range(1, len(s) + 1)}
        found = set()
        for query, place in enumerate(params.tree_packed_position_ids.tolist()):
            keys = seen[query].nonzero().flatten()
            order = params.tree_packed_position_ids[keys].argsort()
            spelt = params.tree_packed_tokens[keys[order]].tolist()
            assert len(spelt) == place + 1 and keys[order][-1] == query
            found.add(tuple(spelt))
        assert found == beginnings and params.total_seqlen_q == len(beginnings)
        nodes.add(len(tree.nodes))
    assert max(nodes) > 6
