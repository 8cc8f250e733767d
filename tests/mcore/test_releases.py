"""Each hook point is as one of the table's rows describes it, whatever Megatron is installed.

`make test-matrix` runs this with every release. Guards against a release that moved a hook point.
"""

import re
from argparse import Namespace

import pytest

from megatron_burst.errors import BurstError
from megatron_burst.installed import LAST, find_megatron, minor
from megatron_burst.mcore import patches, refusals
from megatron_burst.mcore.patches import TABLE
from megatron_burst.tools import cpu_rows
from tests.mcore import gpt  # noqa: F401  (its processes start with Megatron loaded)
from tests.ranks import run_ranks


def misfits(rank):
    """What does not fit, of all rows for this release, and how many fit."""
    rows = [*patches.rows(), *patches.there(cpu_rows.TABLE)]
    return [row.misfit() for row in rows if row.misfit()], len(rows)


def test_every_place_has_a_known_form():
    ((found, count),) = run_ranks(misfits, 1)
    assert found == [] and count > 30


def test_a_release_is_known_by_its_first_two_numbers():
    assert minor("0.16.1") == (0, 16) and minor("1.2.0rc3") == (1, 2)
    assert minor("unknown") == LAST  # its functions are compared one by one


def test_rows_about_releases_are_of_places_in_the_table():
    places = {patch.place for patch in TABLE}
    assert set(patches.RELEASES) | set(patches.OTHER_FORMS) <= places
    for row in TABLE:
        assert row.parameters not in row.others and row.releases[0] <= row.releases[1]


@pytest.mark.parametrize(
    "release, model, spec",
    [
        ("0.17.1", "mamba", 0),
        ("0.18.2", "hybrid", 0),
        ("0.19.2", "hybrid", 1),
        ("2.0", "hybrid", 1),
    ],
)
def test_rows_are_those_that_the_release_has(release, model, spec, monkeypatch):
    """A newer release is assumed to have what the latest known one has."""
    there = find_megatron()
    monkeypatch.setattr(
        patches, "find_megatron",
        lambda: type(there)(release, there.folder, there.folder),
    )  # fmt: skip
    assert len(patches.rows("spec")) == spec
    places = [row.place for row in patches.there(cpu_rows.TABLE)]
    assert (cpu_rows.FREE_OUTPUT in places) == (minor(release) < (0, 18))
    assert [row.target.split(".")[-3] for row in patches.rows("loss")] == [
        "gpt_model", f"{model}_model",
    ]  # fmt: skip


def moved(rank):
    """The message for the first model of a Megatron that moved a function."""
    from megatron.core.transformer.attention import Attention, CoreAttentionBuilder

    CoreAttentionBuilder.__call__ = lambda self, config, sequence_ids: None
    Attention.__init__ = lambda self, config, sequence_ids: None
    said = []
    for group in ("attention", "hook points"):
        with pytest.raises(BurstError) as refused:
            patches.apply(group)
        said.append(str(refused.value))
    return said


def test_a_seam_that_moved_is_named_in_one_sentence():
    (said,) = run_ranks(moved, 1)
    places = ("Attention.__init__", "CoreAttentionBuilder.__call__")
    for text, place in zip(said, places, strict=True):
        assert f"attention.{place} must have the parameters ('self'" in text
        assert re.search(r"; got \(.*'sequence_ids'\) in megatron-core [\d.]+; install", text)


@pytest.mark.parametrize("feature", ["run", "attention", "recompute", "keep", "loss", "built"])
def test_an_argument_that_a_release_does_not_have_is_no_reason_to_refuse(feature):
    """Every row is checked against arguments that contain only what all releases have."""
    always = dict(context_parallel_size=2, cp_comm_type=["burst"], recompute_granularity="full")
    refusals.refuse(feature, Namespace(**always), "this test")
