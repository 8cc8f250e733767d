"""Packed samples in Megatron-Core models: loss and gradients equal those of separate documents.

The reference never packs: Megatron's own attention runs each document as a sequence. Guards against
keys of another document or of padding, rows ordered differently than Megatron's, positions that
continue across documents, and results kept for another sample.
"""

from dataclasses import dataclass, field

import pytest

from megatron_burst.config import BurstConfig
from tests.mcore.gpt import Model, Parallel, build, config_of, relative_errors, start
from tests.mcore.lacking import parameters, present, why_not
from tests.mcore.packed_sample import SAMPLE, one_by_one, packed, params_of, shard, spec_of
from tests.ranks import run_ranks

# Float64: 2.2e-16 a rounding, sums of 4096 terms (64 tokens by 64 channels), some 20 of them in a
# row, and a gradient ten times smaller than its terms.
TOLERANCE = 1e-9
GQA = Model(groups=4)


@dataclass(frozen=True)
class Case:
    parallel: Parallel
    model: Model = GQA
    burst: BurstConfig = BurstConfig()
    mask: str = "causal"
    options: dict = field(default_factory=dict)

    @property
    def truth(self) -> tuple:
        """What the reference depends on."""
        own = {"causal": "causal", "padding_causal": "causal"}.get(self.mask, "no_mask")
        return self.parallel.tp, self.model.latent, own, tuple(self.options.items())


CP2, CP4, TP2_CP2 = Parallel(cp=2), Parallel(cp=4), Parallel(cp=2, tp=2)
WINDOW = dict(window_size=(6, 0))
RECOMPUTED = Model(groups=4, recompute=True)
CASES = {
    "CP2": Case(CP2, mask="padding_causal"),
    "CP4": Case(CP4),
    "one rank": Case(Parallel()),
    "full": Case(CP4, mask="padding"),
    "TP2 CP2": Case(TP2_CP2),
    # Megatron pads values to the queries' width, and would cut wider ones
    "MLA": Case(CP2, Model(latent=True), options=dict(qk_head_dim=16)),
    "kept": Case(CP4, RECOMPUTED, BurstConfig(keep="all")),
    "kept by half": Case(CP2, RECOMPUTED, BurstConfig(keep="half")),
    "kept as it fits": Case(CP2, RECOMPUTED, BurstConfig(keep="auto", keep_budget_gib=1.0)),
    "windows in every second layer": Case(CP2, options=WINDOW | dict(window_attn_skip_freq=2)),
}


def why(case: Case) -> str:
    """Why this Megatron cannot run it."""
    return why_not("MLA" if case.model.latent else None)


HERE = present(CASES, why)


def run_case(case: Case):
    from megatron_burst import burst_spec

    config = config_of(case.parallel, case.model, **case.options)
    config.burst = case.burst
    gpt = build(config, burst_spec(spec_of(case.model, case.mask)))
    whole = SAMPLE.batch()
    return packed(gpt, shard(whole), params_of(whole))


def compare_all(rank: int) -> dict:
    """By case: errors of loss and gradients."""
    truths, results = {}, {}
    for tp in (1, 2):
        start(Parallel(tp=tp))
        for case in HERE.values():
            if case.parallel.tp == tp and case.truth not in truths:
                truths[case.truth] = one_by_one(
                    SAMPLE, Parallel(tp=tp), case.model, case.truth[2], **case.options
                )
    for parallel in dict.fromkeys(case.parallel for case in HERE.values()):
        start(parallel)
        for name, case in HERE.items():
            if case.parallel == parallel:
                results[name] = relative_errors(run_case(case), truths[case.truth])
    return results


@pytest.fixture(scope="module")
def comparisons(once):
    return once(compared)


def compared():
    return run_ranks(compare_all, 4)


@pytest.mark.parametrize("name", parameters(CASES, why))
def test_loss_and_every_gradient_are_those_of_the_documents_alone(comparisons, name):
    for errors in comparisons:
        assert len(errors[name]) >= 14
        assert max(errors[name].values()) <= TOLERANCE, errors[name]
