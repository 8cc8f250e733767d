"""verl's micro-batches, by the example in examples/frameworks: the released package on the CPU.

Guards against a choice that verl no longer makes where the example is put, lost sequences, and
micro-batches that do not fit.
"""

import importlib.util
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.integrations import balanced

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed: make test-integrations", allow_module_level=True)


def micro_batches_of_verl() -> dict:
    """Sequences of each rank after the driver's choice, and a rank's micro-batches, both with and
    without the example; as indices."""
    from tensordict import TensorDict
    from verl import DataProto
    from verl.trainer.ppo import ray_trainer
    from verl.utils import seqlen_balancing
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine.utils import prepare_micro_batches

    mask = torch.zeros(len(balanced.LENGTHS), max(balanced.LENGTHS), dtype=torch.long)
    for row, length in zip(mask, balanced.LENGTHS, strict=True):
        row[:length] = 1
    batch = DataProto.from_dict({"attention_mask": mask, "at": torch.arange(len(mask))})
    trainer = SimpleNamespace(_get_dp_size=lambda *_: 4, actor_rollout_wg=None)
    ray_trainer.RayPPOTrainer._balance_batch(trainer, batch, metrics={})
    rows = [torch.ones(n, dtype=torch.long) for n in balanced.LENGTHS]
    ids = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    data = TensorDict({"input_ids": ids}, batch_size=len(rows))
    tu.assign_non_tensor(data, max_token_len_per_gpu=balanced.LIMIT, sp_size=2)
    _, ours = prepare_micro_batches(data)
    seqlen_balancing.calculate_workload = lambda n: 24576 * n + n**2  # verl's own
    theirs = sys.modules["balance_verl"].rearrange_micro_batches(data, 2 * balanced.LIMIT)[1]
    return {"driver": batch.batch["at"].tolist(), "ours": ours, "theirs": theirs}


def test_verls_micro_batches_are_those_of_the_balance(tmp_path):
    found = balanced.in_a_new_process(
        micro_batches_of_verl, tmp_path / "plan.json", VERL_USE_EXTERNAL_MODULES="balance_verl"
    )
    every, longest = list(range(len(balanced.LENGTHS))), {}
    for name in ("ours", "theirs"):
        assert sorted(at for one in found[name] for at in one) == every
        some = [[balanced.LENGTHS[at] for at in one] for one in found[name]]
        assert all(sum(one) <= 2 * balanced.LIMIT for one in some)
        longest[name] = max(balanced.seconds(one) for one in some)
    assert len(found["ours"]) <= len(found["theirs"])
    assert longest["ours"] * len(found["ours"]) <= longest["theirs"] * len(found["theirs"])
    assert sorted(found["driver"]) == every
    ranks = np.array([balanced.LENGTHS[at] for at in found["driver"]]).reshape(4, 16)
    assert balanced.spread([[one] for one in ranks]) < 1.01
