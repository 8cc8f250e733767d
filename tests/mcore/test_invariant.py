"""`--burst-invariant` in Megatron's batch-invariant mode: bits of token log-probabilities on one,
two and four ranks. tests/gpu/test_invariant.py has Megatron's own kernels.

Guards against an assertion that stays, a choice that depends on the number of ranks, and tiles of
the loss that depend on the rows of a rank.
"""

import pytest
import torch

from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from tests.mcore.gpt import Parallel, config_of, start
from tests.mcore.invariant import (
    SIZES,
    invariant_products,
    model_of,
    path_of,
    paths_taken,
    spread,
    token_values,
)
from tests.ranks import run_ranks
from tests.sampling import whole

pytestmark = pytest.mark.numeric


def values_on(rank, dtype):
    """By number of ranks: values, the path that they took, and how far gradients are from those of
    one rank."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megatron_burst import burst_spec
    from megatron_burst.mcore import patches

    patches.apply("invariant")
    found, one, burst = {}, None, BurstConfig(invariant=True)
    for size in SIZES:
        start(Parallel(cp=size))
        spec = burst_spec(get_gpt_layer_local_spec(normalization="RMSNorm"))
        gpt = model_of(Parallel(cp=size), burst, spec, params_dtype=dtype).to(dtype)
        with invariant_products(), paths_taken() as taken:
            values, grads = token_values(gpt)
        one = one or grads
        found[size] = values, taken, spread(grads, one)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, *whole(torch.float32)])
def test_log_probabilities_have_the_same_bits_on_any_number_of_ranks(dtype):
    for found in run_ranks(values_on, 4, dtype):
        for size, (values, taken, gradients) in found.items():
            print(size, gradients)
            assert torch.equal(values, found[1][0]) and taken == path_of(size)
            assert gradients <= 4 * torch.finfo(dtype).eps


def asserted(rank):
    """What constructing a configuration says: without burst's patch, with it, and without burst."""
    from megatron.core.transformer.enums import AttnBackend

    from megatron_burst.mcore import patches

    start(Parallel(cp=2))
    wanted = dict(batch_invariant_mode=True, flash_attention_version=4)
    wanted["attention_backend"] = AttnBackend.flash

    def said(**options):
        try:
            return config_of(Parallel(cp=2), **wanted | options).batch_invariant_mode
        except (AssertionError, BurstError) as error:
            return f"{type(error).__name__}: {error}"

    before = said()
    patches.apply("invariant")
    auto, unpinned = said(attention_backend=AttnBackend.auto), said(flash_attention_version=None)
    return before, said(), said(cp_comm_type="p2p"), auto, unpinned


def test_megatrons_assertion_is_lifted_for_burst_alone():
    before, with_burst, without, auto, unpinned = run_ranks(asserted, 2)[0]
    assert before.startswith("AssertionError: Batch invariant mode does not support context")
    assert with_burst is True and without == before
    assert auto.startswith("BurstError") and "--attention-backend flash" in auto
    assert unpinned.startswith("BurstError") and "--flash-attention-version 4" in unpinned


def flagged(rank):
    """Whether the assertion's patch is applied, without the flag and with it."""
    from megatron_burst.mcore import patches
    from tests.mcore.test_arguments import BURST, parse
    from tests.mcore.test_arguments import start as start_command

    start_command()
    (row,) = patches.rows("invariant")
    found = []
    for flags in ("", " --burst-invariant"):
        parse(f"{BURST}{flags}")
        found.append(row.live)
    return found


def test_the_flag_applies_it():
    assert run_ranks(flagged, 1) == [[False, True]]
