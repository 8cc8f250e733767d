"""ms-swift's micro-batches, by the example in examples/frameworks: the released package on the CPU.

Guards against a data loader that ms-swift makes elsewhere, documents of another epoch, and runs
that resume with others.
"""

from types import SimpleNamespace

import pytest

from tests.integrations import balanced
from tests.mcore.gpt import Parallel, start
from tests.ranks import run_ranks

swift = pytest.importorskip("tests.integrations.test_ms_swift")  # skips where it is missing

STEP, MICRO_BATCHES = 16, 2


def loaded_by_swift(rank, plugin):
    """The documents of each micro-batch of an epoch, and of the second half of it for a run that
    resumes, from ms-swift's data loader on 2 ranks."""
    import datasets
    from swift.megatron.trainers.base import BaseMegatronTrainer

    start(Parallel())
    args = swift.arguments(f"--external_plugins {plugin}")
    vars(args).update(
        micro_batch_size=STEP // (2 * MICRO_BATCHES), global_batch_size=STEP,
        num_microbatches=MICRO_BATCHES, streaming=False, rlhf_type=None, data_seed=5,
        dataloader_num_workers=0,
    )  # fmt: skip
    rows = {"lengths": balanced.LENGTHS, "at": list(range(len(balanced.LENGTHS)))}
    trainer = object.__new__(type("Trainer", (BaseMegatronTrainer,), {"forward_step": None}))
    trainer.args, trainer.data_collator = args, lambda rows: [row["at"] for row in rows]
    found = []
    for consumed in (0, 2 * STEP):
        trainer.state = SimpleNamespace(consumed_train_samples=consumed)
        loader, _ = trainer._prepare_dataloader(datasets.Dataset.from_dict(rows))
        found.append(list(loader))
    return found


def test_swifts_micro_batches_are_those_of_the_balance(tmp_path):
    """Each document is in an epoch once, ranks end a step together, and a run resumes."""
    plan, plugin = tmp_path / "plan.json", balanced.EXAMPLES / "balance_ms_swift.py"
    balanced.write(plan)
    given = {"BALANCE_COSTS": str(plan), "BALANCE_TOKENS": str(2 * balanced.LIMIT)}
    ranks = run_ranks(loaded_by_swift, 2, str(plugin), environment=given, fresh=True)
    epoch = [each for each, _ in ranks]
    assert sorted(at for each in epoch for one in each for at in one) == list(range(64))
    for step in range(len(balanced.LENGTHS) // STEP):
        some = slice(step * MICRO_BATCHES, (step + 1) * MICRO_BATCHES)
        lengths = [[[balanced.LENGTHS[at] for at in one] for one in each[some]] for each in epoch]
        assert balanced.spread(lengths) < 1.03
    for whole, rest in ranks:
        assert rest == whole[2 * MICRO_BATCHES :]
