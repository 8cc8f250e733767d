"""Options that contradict each other are refused where they are given."""

import pytest

from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError

REFUSALS = {
    "a2a around a ring": (
        {"inter": "a2a", "intra": "ring"},
        "must be a2a or auto.*intra=ring",
    ),
    "a2a around gather": ({"inter": "a2a", "intra": "gather"}, "intra must be a2a or auto"),
    "flat around gather": ({"inter": "flat", "intra": "gather"}, "intra must be ring or auto"),
    "no pieces, some heads": ({"pieces": False, "heads_per_round": 2}, "must not come together"),
    "unknown": ({"inter": "exchange"}, "inter must be one of auto, ring, a2a, flat"),
}


@pytest.mark.parametrize("options, words", REFUSALS.values(), ids=REFUSALS)
def test_contradictions_are_refused(options, words):
    with pytest.raises(BurstError, match=words):
        BurstConfig(**options)


@pytest.mark.parametrize("intra", ["auto", "ring", "gather", "a2a"])
def test_a_ring_between_hosts_goes_around_anything(intra):
    assert BurstConfig(inter="ring", intra=intra).intra == intra
