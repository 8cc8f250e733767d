"""slime, at 624b824 (main, 38 commits after v0.3.1, which asks for a Megatron before 0.17): its
hook, called by its own `init`, and its packed samples.

Run by `SLIME=clone make test-integrations FRAMEWORKS=slime`: slime is in no package registry. Of
what its `init` does before the hook, only its check of NumPy runs here; SGLang, which it imports,
is left out. Guards against a hook that runs too late or gets other arguments, and rows ordered
differently than burst assumes.
"""

import os
import sys
from types import ModuleType
from unittest import mock

import pytest
import torch

from megatron_burst import next_tokens
from tests.integrations.packed import (
    LENGTHS,
    TOLERANCE,
    boundaries,
    core_of,
    documents,
    one_by_one,
    run_of,
)
from tests.mcore.gpt import Model, Parallel, build, config_of, relative_errors, start
from tests.mcore.packed_sample import spec_of
from tests.mcore.test_arguments import CP4
from tests.ranks import run_ranks

if "SLIME" not in os.environ:
    pytest.skip("SLIME must be a clone of slime: it is in no registry", allow_module_level=True)

TYPED = f"""{CP4} --custom-megatron-init-path megatron_burst.auto.init --cp-comm-type burst
    --attention-dropout 0 --rollout-batch-size 4 --actor-num-gpus-per-node 4"""
RESPONSES = [length // 2 for length in LENGTHS]


SGLANG = {
    "arguments": ("sglang_parse_args", "validate_args"),
    "external": ("apply_external_engine_info_to_args",),
}


def slime_args(typed: str):
    """What Megatron's parser makes of a command line with slime's flags, through slime's
    function."""
    for name, needed in SGLANG.items():
        module = ModuleType(f"slime.backends.sglang_utils.{name}")
        vars(module).update(dict.fromkeys(needed))
        sys.modules[module.__name__] = module
    from slime.backends.megatron_utils.arguments import megatron_parse_args
    from slime.utils.arguments import get_slime_extra_args_provider

    sys.argv = ["train.py", *typed.split()]
    return megatron_parse_args(get_slime_extra_args_provider(), skip_hf_validate=True)


def init_by_slime(args) -> None:
    from slime.backends.megatron_utils import initialize

    before = (
        "set_args", "_initialize_distributed", "_set_random_seed", "_build_tokenizer",
        "init_num_microbatches_calculator",
    )  # fmt: skip
    with mock.patch.multiple(initialize, **{name: lambda *_: None for name in before}):
        initialize.init(args)


def hooked(rank):
    """cp_comm_type of Megatron's layers after slime's `init`, and which patches are live."""
    sys.path.insert(0, os.environ["SLIME"])
    from megatron_burst.errors import BurstError
    from megatron_burst.mcore import patches

    args = slime_args(TYPED)
    assert not any(patch.live for patch in patches.rows("attention"))
    args.enable_experimental = args.deterministic_mode = args.tp_comm_overlap = False
    args.data_parallel_size = 1  # as validate_args sets
    init_by_slime(args)
    live = [patch.live for patch in patches.rows("attention")]
    args.attention_dropout = 0.1
    with pytest.raises(BurstError, match=r"^megatron_burst\.auto\.init: .*attention_dropout=0\.1"):
        init_by_slime(args)
    return args.cp_comm_type, live, args.create_attention_mask_in_dataloader


def test_slimes_init_calls_the_hook_before_models_are_built():
    assert run_ranks(hooked, 1) == [(["burst"], [True, True], False)]


def packed_by_slime(rank):
    """Layers, errors of loss and gradients, and whether slime's response labels equal burst's."""
    sys.path.insert(0, os.environ["SLIME"])
    from megatron.core import parallel_state
    from slime.backends.megatron_utils import data, loss

    start(Parallel())
    truth = one_by_one(build(config_of(), spec_of(Model())))
    import megatron_burst.auto  # noqa: F401

    start(Parallel(cp=2))
    gpt = build(config_of(Parallel(cp=2)), spec_of(Model()))
    given = {
        "tokens": documents(), "loss_masks": [torch.ones(length) for length in RESPONSES],
        "total_lengths": list(LENGTHS), "response_lengths": RESPONSES,
    }  # fmt: skip
    iterator = data.DataIterator(given, [list(range(len(LENGTHS)))])
    with mock.patch.object(data.accelerator, "device", return_value=torch.device("cpu")):
        batch = data.get_batch(iterator, list(given), pad_multiplier=16)
    params = batch["packed_seq_params"]
    tail = len(params.cu_seqlens_q) - 1 - len(LENGTHS)  # slime's own padding, as a document
    labels = next_tokens(
        batch["tokens"][0], group=parallel_state.get_context_parallel_group(),
        layout="zigzag-documents", cu_seqlens_padded=params.cu_seqlens_q,
        cu_seqlens=torch.cat([boundaries(), boundaries()[-1:].expand(tail)]),
    )  # fmt: skip
    own = loss._build_shifted_tokens(
        len(labels), labels.device, documents(), list(LENGTHS), RESPONSES, False
    )
    logits = gpt(batch["tokens"], None, None, packed_seq_params=params)
    errors = relative_errors(run_of(gpt, logits, labels), truth)
    return core_of(gpt), tail, errors, torch.equal(own[own > 0], labels[own > 0]), sum(own > 0)


def test_slimes_rows_and_labels_are_bursts():
    found = run_ranks(packed_by_slime, 2)
    for core, tail, errors, same, _ in found:
        assert core == "BurstCoreAttention" and tail == 1 and same
        assert max(errors.values()) < TOLERANCE, errors
    assert sum(int(labels) for *_, labels in found) == sum(RESPONSES)
