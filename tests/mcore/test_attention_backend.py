"""Megatron's --attention-backend selects burst's kernels."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

from megatron_burst.config import BurstConfig, Force
from megatron_burst.errors import BurstError
from megatron_burst.kernels.backends import backends, choose_backend
from megatron_burst.kernels.interface import Problem
from megatron_burst.mcore import args
from megatron_burst.mcore.options import burst_config_of
from tests.mcore.gpt import config_of

MEANT = {
    AttnBackend.flash: ["fa4", "flash", "torch-cpu"],
    AttnBackend.fused: ["cudnn"],
    AttnBackend.unfused: ["reference"],
}


def with_attention_backend(burst: BurstConfig, backend: AttnBackend | None) -> BurstConfig:
    return args.with_attention_backend(burst, SimpleNamespace(attention_backend=backend))


@pytest.mark.parametrize("asked", MEANT)
def test_it_stands_for_a_family_of_kernels(asked):
    names = with_attention_backend(BurstConfig(), asked).backend.split(",")
    assert names == MEANT[asked]
    order = [*backends()]
    assert sorted(names, key=order.index) == names  # fastest first, as in auto
    narrower = BurstConfig(backend=names[-1])
    assert with_attention_backend(narrower, asked) == narrower


def test_every_name_of_megatrons_is_known():
    given = BurstConfig(backend="triton")
    assert with_attention_backend(given, AttnBackend.auto) == given
    assert with_attention_backend(given, None) == given
    with pytest.raises(BurstError, match="--attention-backend, .*; got attention_backend=local; "):
        with_attention_backend(given, AttnBackend.local)
    assert {*MEANT, AttnBackend.auto, AttnBackend.local} == set(AttnBackend)


@pytest.mark.parametrize("asked", MEANT)
def test_a_kernel_of_another_family_contradicts_it(asked):
    message = f"under --attention-backend {asked.name}.*got --burst-backend triton; leave one"
    with pytest.raises(BurstError, match=message):
        with_attention_backend(BurstConfig(backend="triton"), asked)


def test_layers_take_it_from_megatrons_configuration():
    """Through every entry point: it is set with or without a command line."""
    config = config_of(attention_backend=AttnBackend.unfused)
    assert burst_config_of(config) == BurstConfig(backend="reference")
    config.burst = BurstConfig(backend="reference", force=Force(circulate="q"))
    assert burst_config_of(config) == config.burst


@pytest.mark.parametrize("asked", [AttnBackend.flash, AttnBackend.unfused])
def test_on_cpu_there_is_one_of_the_family(asked):
    backend = with_attention_backend(BurstConfig(), asked).backend
    problem = Problem(device="cpu", dtype=torch.bfloat16, dim_qk=64, dim_v=64)
    _, choice = choose_backend(problem, backend)
    assert choice.value == MEANT[asked][-1] and choice.reason.startswith("asked for")


def test_a_family_that_cannot_do_a_call_is_refused_in_a_sentence():
    """Neither another family nor another dtype is used instead."""
    problem = Problem(device="cpu", dtype=torch.float32, dim_qk=64, dim_v=64)
    message = (
        r"backend cudnn must.*float32 on cpu with head dimensions 64/64, and it runs on cuda only; "
        r"choose among torch-cpu, reference, or auto \(.*--attention-backend\)"
    )
    with pytest.raises(BurstError, match=message):
        choose_backend(problem, with_attention_backend(BurstConfig(), AttnBackend.fused).backend)
    with pytest.raises(BurstError, match=r"and not fa4: it runs on.*not bruts: no such backend"):
        choose_backend(problem, "fa4,bruts")
