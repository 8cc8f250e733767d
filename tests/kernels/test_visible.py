"""Bands and segments: each CPU backend against a dense mask in float64; which supports what."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_burst.errors import BurstError
from megatron_burst.kernels.backends import backends, choose_backend
from megatron_burst.kernels.interface import Problem, QuerySide
from megatron_burst.kernels.visible import Visible
from megatron_burst.schedule.mask import DOCUMENTS, WINDOWS, Mask
from megatron_burst.tools.speeds import problem_of
from tests.kernels.bands import Band, errors_of

pytestmark = pytest.mark.numeric
BOUND = st.none() | st.integers(0, 12) | st.just(2**40)


@st.composite
def bands(draw, windows: bool, longest=9, most=5):
    length = st.integers(0, longest)
    segments = draw(st.lists(st.tuples(length, length), min_size=1, max_size=most))
    packed = draw(st.booleans())
    queries, keys = zip(*(segments if packed else segments[:1]), strict=True)
    left, right = (
        (draw(BOUND), draw(BOUND)) if windows else draw(st.sampled_from([(None, 0), (None, None)]))
    )
    heads_kv = draw(st.integers(1, 2))
    return Band(
        queries, keys, left, right, packed, heads_kv * draw(st.integers(1, 3)), heads_kv,
        dim_qk=draw(st.integers(1, 9)), dim_v=draw(st.integers(1, 9)),
        batch=1 if packed else draw(st.integers(1, 2)), strided=draw(st.booleans()),
        softcap=draw(st.sampled_from((0.0, 0.0, 0.6))),
    )  # fmt: skip


def check(name, band, into, with_delta):
    backend = backends()[name]
    with_delta = with_delta and backend.capability.takes_delta
    errors = errors_of(backend, band, into=into, with_delta=with_delta)
    assert all(error <= 1e-12 for error in errors.values()), errors


@settings(max_examples=150, deadline=None)
@given(bands(windows=True), st.booleans(), st.booleans())
def test_the_reference_sees_what_the_definition_sees(band, into, with_delta):
    check("reference", band, into, with_delta)


@settings(max_examples=100, deadline=None)
@given(bands(windows=False).filter(lambda band: band.packed or square(band)), st.booleans())
def test_the_cpu_kernel_sees_what_the_definition_sees(band, into):
    check("torch-cpu", band, into, False)


def square(band):
    return band.right is None or band.queries == band.keys


def test_the_reference_in_blocks_of_rows():
    """Guards against rows and keys counted from the wrong block: windows over more rows than a
    block."""
    check("reference", Band((1100, 30, 1500), (1300, 700, 1100), 90, 40, dim_qk=4), False, True)


ASKED = {f"it has no {need}": {"needs": frozenset({need})} for need in (WINDOWS, DOCUMENTS)}


@pytest.mark.parametrize("said, asked", ASKED.items(), ids=ASKED)
def test_who_cannot_is_refused_and_told_who_can(said, asked):
    problem = Problem("cuda", torch.bfloat16, 64, 64, arch=9, **asked)
    with pytest.raises(BurstError, match=f"cudnn must.*{said}; choose among .*reference"):
        choose_backend(problem, "cudnn")


@pytest.mark.parametrize("name", ["cudnn", "torch-cpu"])
def test_a_kernel_that_was_chosen_for_another_problem_is_not_silently_wrong(name):
    backend, q = backends()[name], torch.zeros(1, 4, 2, 8)
    given = [Visible(3, 0), Band((4,), (4,)).visible()]
    for visible in given[: 1 if name == "torch-cpu" else 2]:
        side = QuerySide(q, q, q[..., 0].mT, None, q)
        for run, tensors in ((backend.forward, (q, q, q)), (backend.backward, (side, q, q))):
            with pytest.raises(BurstError, match=f"{name} must be given full or causal calls"):
                run(*tensors, 1.0, visible)


def test_a_problem_is_what_a_call_asks_for():
    q = torch.zeros(1, 4, 2, 8)
    masks = Mask.FULL, Mask.CAUSAL, Mask(None, 3), Mask(None, 0, documents=True)
    asked = [problem_of(q, q, q, mask=mask) for mask in masks]
    found = [problem.needs for problem in asked]
    assert found == [frozenset(), frozenset(), {WINDOWS}, {DOCUMENTS}]
