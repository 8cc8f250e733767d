"""Megatron-Bridge's data iterators with micro-batches that end together, by the example in
examples/frameworks; the released package, on CPU processes.

Guards against a data set that Bridge builds before it knows the job, rows that Bridge shards a
second time, and a loss of other documents.
"""

import importlib
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.integrations import balanced
from tests.mcore.gpt import (
    VOCAB,
    Parallel,
    Run,
    _complete_grads,
    _sum_over_cp,
    relative_errors,
)
from tests.ranks import run_ranks

bridge = pytest.importorskip("tests.integrations.test_bridge")  # skips where Bridge is missing

STEP, MICRO_BATCHES = 16, 4
DOCUMENT_LENGTHS = 7, 3, 61, 12, 30, 5, 1, 18, 9, 44, 2, 25, 11, 6, 16, 8


def write_documents(path):
    """One of Megatron's data sets."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=np.int32)
    for number, length in enumerate(DOCUMENT_LENGTHS):
        generator = torch.Generator().manual_seed(number)
        builder.add_document(torch.randint(0, VOCAB, (length,), generator=generator), [length])
    builder.finalize(f"{path}.idx")


def one_by_one(folder):
    """Loss and gradients of a step without burst, each document on its own."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    bridge.start(Parallel())
    gpt = bridge.built(bridge.gpt_provider(Parallel()))
    loss = torch.zeros((), dtype=torch.float64)
    for document in IndexedDataset(f"{folder}/documents"):
        tokens = torch.as_tensor(document).long()[None]
        logits = gpt(tokens, torch.arange(tokens.shape[1])[None], attention_mask=None)
        loss += F.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="sum")
    loss.backward()
    return Run(loss.detach(), _complete_grads(gpt))


def iterator_of(data, gpt, provider):
    """Bridge's data iterator, for a run that begins."""
    from megatron.bridge.data.loaders import setup_data_iterators
    from megatron.bridge.data.utils import get_dataset_provider
    from megatron.bridge.training.callbacks import CallbackContext
    from megatron.core import parallel_state

    train = SimpleNamespace(
        num_epochs=None, train_samples=None, train_iters=1, global_batch_size=STEP,
        micro_batch_size=STEP // MICRO_BATCHES, exit_signal=None,
        exit_signal_handler_for_dataloader=False,
    )  # fmt: skip
    validation = SimpleNamespace(
        eval_interval=None, eval_iters=0, eval_global_batch_size=None,
        eval_micro_batch_size=None, skip_train=False,
    )  # fmt: skip
    cfg = SimpleNamespace(dataset=data, model=provider, train=train, validation=validation)
    state = SimpleNamespace(cfg=cfg, train_state=SimpleNamespace(consumed_train_samples=0))
    sys.modules["balance_bridge"].Resume().on_data_init_start(CallbackContext(state, [gpt]))
    return setup_data_iterators(
        cfg, state.train_state, 1, get_dataset_provider(data),
        parallel_state.get_data_parallel_group(),
    )[0]  # fmt: skip


def balanced_step(rank, folder, sizes):
    """Errors of a step's loss and gradients, and the context-parallel sizes that ran: Bridge's data
    iterator and loss, the example's forward step."""
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    sys.path.insert(0, str(balanced.EXAMPLES))
    example = importlib.import_module("balance_bridge")
    importlib.import_module("megatron_burst.auto")
    truth = one_by_one(folder)
    bridge.start(bridge.CP2)
    provider = bridge.gpt_provider(bridge.CP2)
    provider.calculate_per_token_loss = True
    gpt = bridge.built(provider)
    init_num_microbatches_calculator(rank, None, STEP, STEP // MICRO_BATCHES, 1)
    data = example.BalancedDocuments(
        path=f"{folder}/documents", costs=f"{folder}/plan.json", token_limit=64, cp_sizes=sizes
    )
    iterator, loss, ran = iterator_of(data, gpt, provider), 0.0, set()
    for _ in range(MICRO_BATCHES):
        output, loss_of = example.forward_step(Seen(iterator, ran), gpt)
        one, *_ = loss_of(output)
        one.backward()
        loss += one.detach()
    run = Run(_sum_over_cp(loss.double()), _complete_grads(gpt))
    return relative_errors(run, truth), ran


class Seen:
    """An iterator that notes the sizes of micro-batches."""

    def __init__(self, iterator, sizes):
        self._iterator, self._sizes = iterator, sizes

    def __next__(self):
        batch = next(self._iterator)
        self._sizes.add(getattr(batch["packed_seq_params"], "local_cp_size", None) or 2)
        return batch


def test_bridges_micro_batches_are_those_of_the_balance(tmp_path):
    """The loss of a token is Megatron's, in float32 (6e-8 a rounding, some four in a row), and
    Bridge sums 250 of them."""
    balanced.write(tmp_path / "plan.json", transfer=1e-4)
    write_documents(tmp_path / "documents")
    sizes = set()
    for errors, ran in run_ranks(balanced_step, 2, str(tmp_path), (1, 2)):
        assert errors.pop("loss") <= 250 * 6e-8
        assert max(errors.values()) <= 4 * 6e-8, errors
        sizes |= ran
    assert sizes == {1, 2}


def pretrained(folder, ranks) -> list[list[float]]:
    """Loss and gradient norm of each step of Bridge's pretrain(), from its log."""
    script = balanced.ROOT / "tests" / "integrations" / "bridge_pretrain.py"
    paths = os.pathsep.join(map(str, (balanced.EXAMPLES, balanced.ROOT)))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone",
         f"--nproc-per-node={ranks}", str(script), str(folder)],
        capture_output=True, text=True, cwd=folder,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.findall(r"lm loss: (\S+) .*? grad norm: (\S+)", done.stdout + done.stderr)
    return [[float(value) for value in step] for step in found]


def test_bridges_pretrain_has_the_steps_of_one_rank(tmp_path):
    """To float32 rounding of losses near 5, and the three digits of gradient norms in its log."""
    balanced.write(tmp_path / "plan.json", transfer=1e-4)
    write_documents(tmp_path / "documents")
    two, one = pretrained(tmp_path, 2), pretrained(tmp_path, 1)
    assert len(one) == 2 and one[1][0] < one[0][0]
    for (loss, norm), (true_loss, true_norm) in zip(two, one, strict=True):
        assert loss == pytest.approx(true_loss, abs=2e-6)
        assert norm == pytest.approx(true_norm, abs=1.1e-3)
