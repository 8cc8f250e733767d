"""conformance/upstream: what its scripts find here, without a GPU, is what the reports say."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_burst.arguments import CallArgs
from megatron_burst.call import call_of
from megatron_burst.kernels.backends import backends
from megatron_burst.kernels.fa4 import FlashAttention4
from megatron_burst.mcore.offsets import rope_fits
from megatron_burst.schedule.mask import DOCUMENTS
from tests.mcore.lacking import needs

UPSTREAM = Path(__file__).parents[1] / "conformance" / "upstream"
REPORT = (UPSTREAM / "README.md").read_text()


def said(script: str, *arguments: str, ranks: int = 0) -> str:
    """What a script prints, itself or in torchrun's processes."""
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *start, str(UPSTREAM / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_heads_that_fa4_is_not_used_for_are_those_whose_rows_leave_their_tile(monkeypatch):
    monkeypatch.syspath_prepend(UPSTREAM)
    from fa4_narrow_values import rows_past_a_tile

    past = {dim: rows_past_a_tile(dim) for dim in range(32, 257, 32)}
    wrong = FlashAttention4.capability.wrong_pairs_on[9]
    assert {dim for _, dim in wrong} == {dim for dim, rows in past.items() if rows and dim < 256}
    assert all(rows_past_a_tile(dim, tile=64) == 0 for dim in past)  # causal
    told = re.findall(r"^\| ([\d, ]+) \| \d+ \| \d+ \| (\d+) \|$", REPORT, re.MULTILINE)
    assert {int(dim): int(rows) for dims, rows in told for dim in dims.split(",")} == past


def test_kernels_are_refused_where_the_report_found_their_gradients_wrong(monkeypatch):
    monkeypatch.syspath_prepend(UPSTREAM)
    from attention_32_bits import DIM, DOCUMENT, HEADS

    row = r"^\| (cudnn|varlen|batch) \| (\d+) \| ([\d.]+) \| (.*) \|$"
    rows = re.findall(row, REPORT, re.MULTILINE)
    few, documents = frozenset(), frozenset({DOCUMENTS})
    masks = {"cudnn": ("cudnn", few), "varlen": ("flash", documents), "batch": ("flash", few)}
    one = torch.empty(1, 1, 1, 1, dtype=torch.bfloat16)
    for kind, tokens, share, found in rows:
        name, needs = masks[kind]
        sizes = (int(tokens) // DOCUMENT, DOCUMENT) if kind == "batch" else (1, int(tokens))
        q = one.expand(*sizes, HEADS, DIM)
        asked = replace(call_of((q, q, q), CallArgs()).problem, device="cuda", arch=9, needs=needs)
        errors = [float(error) for error in re.findall(r"d[qkv] ([\d.]+)", found)] or [1.0]
        refused = backends()[name].capability.refusal(asked) is not None
        padded = sizes[0] * -(-sizes[1] // 128) * 128
        assert refused == (padded * HEADS * DIM > 1 << 31) == (max(errors) > 0.1)
        assert share == f"{int(tokens) * HEADS * DIM / 2**31:.2f}"
    assert len(rows) == 6


def test_fused_rope_is_refused_where_the_report_found_it_wrong(monkeypatch):
    """Both kernels count elements of Q, K and V; the refusal, and what the script measured."""
    monkeypatch.syspath_prepend(UPSTREAM)
    from fused_rope_32_bits import WIDTHS

    rows = re.findall(r"^\| (te|mla) \| (\d+) \| ([\d.]+) \| (.*) \|$", REPORT, re.MULTILINE)
    heads = {"te": 40, "mla": 128}
    for kind, tokens, share, found in rows:
        options = SimpleNamespace(
            seq_length=int(tokens), micro_batch_size=1, context_parallel_size=1,
            tensor_model_parallel_size=1, num_attention_heads=heads[kind], kv_channels=128,
            multi_latent_attention=kind == "mla", rope_type="yarn", qk_head_dim=128,
            qk_pos_emb_head_dim=64, v_head_dim=64, position_embedding_type="rope",
            qk_layernorm=False, group_query_attention=False,
        )  # fmt: skip
        assert share == f"{int(tokens) * WIDTHS[kind] / 2**31:.2f}"
        right = found in ("off by 0.0075", "exact")
        assert rope_fits(True, options) == right == (float(share) < 1)
    assert len(rows) == 4


@pytest.mark.whole
@needs("documents anywhere")
def test_megatrons_rope_turns_as_many_rows_wrongly_as_the_report_says():
    lines = [line for line in said("inter_document_rope.py").splitlines() if "sharded" in line]
    assert len(lines) == 3 and all(line in REPORT for line in lines), lines


@pytest.mark.whole
@needs("training")
def test_megatrons_restart_forgets_its_arguments():
    lines = said("restarted_arguments.py").splitlines()[-2:]
    assert "\n".join(lines) in REPORT, lines


@pytest.mark.whole
@needs("documents anywhere")
@pytest.mark.parametrize("ranks, attention", [(1, "burst"), (2, "burst"), (2, "by-document")])
def test_losses_are_those_of_the_report(ranks, attention):
    lines = said("inter_document_masking.py", "--attention", attention, ranks=ranks).splitlines()
    (line,) = (line for line in lines if "loss" in line)
    loss = re.search(r"loss (\d+\.\d+)", line)[1]
    told = r"On CPUs.*`burst` has (\d+\.\d+) at CP 1 and 2, and `by-document` (\d+\.\d+)"
    burst, by_document = re.search(told, REPORT).groups()
    assert loss == (burst if attention == "burst" else by_document)
