"""NeMo-RL's micro-batches, by the example in examples/frameworks: NeMo-RL at 7ea279a, from a clone.

Guards against a packer that NeMo-RL no longer makes by that name, and bins of other ranks.
"""

import importlib
import os
import sys

import pytest
import torch

from tests.integrations import balanced

if "NEMO_RL" not in os.environ:
    pytest.skip("NEMO_RL must be a clone of NeMo-RL, in no registry", allow_module_level=True)


def shards_of_nemo_rl() -> dict:
    """NeMo-RL's micro-batches of two global batches on 2 ranks, without and with the example, as
    lists of indices by rank and global batch."""
    sys.path.insert(0, os.environ["NEMO_RL"])
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    lengths = torch.tensor(balanced.LENGTHS)
    given = dict(
        algorithm="modified_first_fit_decreasing", max_tokens_per_microbatch=2 * balanced.LIMIT,
        input_key="at", input_lengths_key="lengths", sequence_length_pad_multiple=4,
    )  # fmt: skip
    found = {}
    for name in ("theirs", "ours"):
        if name == "ours":
            importlib.import_module("balance_nemo_rl")
        data = BatchedDataDict(at=torch.arange(len(lengths)), lengths=lengths)
        shards, _ = data.shard_by_batch_size(2, batch_size=32, sequence_packing_args=given)
        found[name] = [
            [
                [batch["at"][start:stop].tolist() for start, stop in batch.micro_batch_indices[0]]
                for batch in map(shard.get_batch, range(2))
            ]
            for shard in shards
        ]
    return found


def test_nemo_rls_micro_batches_are_those_of_the_balance(tmp_path):
    """Each global batch has its own sequences, and ranks end it together."""
    found = balanced.in_a_new_process(shards_of_nemo_rl, tmp_path / "plan.json", BALANCE_CP="2")
    spreads = {}
    for name, ranks in found.items():
        for number in range(2):
            some = [each[number] for each in ranks]
            assert len(some[0]) == len(some[1])
            spreads[name, number] = balanced.spread_of_step(some, number)
    assert max(spreads["ours", 0], spreads["ours", 1]) < 1.01 < spreads["theirs", 0], spreads
