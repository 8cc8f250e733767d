"""NeMo-RL's log-probabilities, packed and not, with burst's and its own.

Run with `NEMO_RL=clone`, as test_nemo_rl, of whose working tree the functions are. Guards against
classes that NeMo-RL looks up elsewhere, other targets, and logits that are made nevertheless.
"""

import os
import sys

import pytest
import torch

from tests.integrations.log_probs import (
    LENGTHS,
    TEMPERATURE,
    TOLERANCE,
    documents,
    errors_of,
    small_gpt,
)
from tests.ranks import run_ranks

te_on_cpu = pytest.importorskip("tests.integrations.te_on_cpu")  # skips without Bridge
if "NEMO_RL" not in os.environ:
    pytest.skip("NEMO_RL must be a clone of NeMo-RL", allow_module_level=True)

PADDED = (16, 24, 8)  # for two ranks


def packed(cp_rank: int, cp: int, shard):
    """All tokens, this rank's, and the boundaries, as NeMo-RL packs."""
    from megatron.core.packed_seq_params import PackedSeqParams

    pairs = zip(documents(), PADDED, strict=True)
    rows = [torch.nn.functional.pad(row, (0, length - len(row))) for row, length in pairs]
    parts = [shard(row[None], cp_rank, cp, seq_dim=1) for row in rows]
    ends = torch.tensor((0, *PADDED)).cumsum(0).int()
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, cu_seqlens_q_padded=ends,
        cu_seqlens_kv_padded=ends, max_seqlen_q=max(PADDED), max_seqlen_kv=max(PADDED),
    )  # fmt: skip
    return torch.cat(rows)[None], torch.cat(parts, 1), ends, params


def trained(rank, tp, cp, chunk_size):
    """Errors of log-probabilities of one pack, as a whole and by sequence, and of gradients."""
    te_on_cpu.install()
    sys.path.insert(0, os.environ["NEMO_RL"])
    from megatron.core import parallel_state as mpu
    from nemo_rl.distributed import model_utils as nemo

    def run(model):
        tp_group, cp_group = mpu.get_tensor_model_parallel_group(), mpu.get_context_parallel_group()
        tokens, mine, ends, params = packed(
            mpu.get_context_parallel_rank(), cp, nemo._get_tokens_on_this_cp_rank
        )
        logits = model(mine, None, None, packed_seq_params=params).to(torch.float32)
        logits.div_(TEMPERATURE)  # nemo_rl/models/megatron/train.py:203
        first = mpu.get_tensor_model_parallel_rank() * logits.shape[-1]
        options = dict(
            vocab_start_index=first, vocab_end_index=first + logits.shape[-1], cp_group=cp_group,
            chunk_size=chunk_size,
        )  # fmt: skip
        whole = nemo.from_parallel_logits_to_logprobs_packed_sequences(
            logits, tokens, ends, max(PADDED), group=tp_group, **options
        )
        by_sequence = []
        # as SequencePackingLossWrapper does
        for start, row in zip(ends.tolist()[:-1], documents(), strict=True):
            length = -(-len(row) // 8) * 8
            part = logits.narrow(1, start // cp, length // cp)
            by_sequence.append(
                nemo.from_parallel_logits_to_logprobs(part, row[None], tp_group=tp_group, **options)
            )
        values = {"whole": torch.cat([x[: n - 1] for x, n in zip(whole, LENGTHS, strict=True)]),
                  "by_sequence": torch.cat(by_sequence, 1)[0]}  # fmt: skip
        weights = torch.linspace(-1, 1, len(values["whole"]))
        return values | {"loss": (values["whole"] * weights + values["by_sequence"]).sum()}

    return errors_of(lambda: small_gpt(tp, cp), run)


@pytest.mark.parametrize("tp, cp, chunk_size", [(1, 1, None), (2, 1, 16), (1, 2, None)])
def test_log_probabilities_of_nemo_rl_make_no_logits(tp, cp, chunk_size):
    for errors in run_ranks(trained, tp * cp, tp, cp, chunk_size):
        assert max(errors.values()) < TOLERANCE, errors
