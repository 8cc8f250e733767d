"""Megatron's GPTModel at CP=4 with burst against CP=1 with its own attention: loss, every gradient.

Guards against any mismatch between Megatron and the ring: token layout, RoPE slice, softmax scale,
ranks of groups, gradients lost in recomputation or sequence parallelism.
"""

from dataclasses import dataclass
from unittest import mock

import pytest

from megatron_burst.comm.communicator import Communicator
from megatron_burst.config import BurstConfig, Force
from megatron_burst.schedule.spec import Cargo
from megatron_burst.schedule.topology import Link
from tests.mcore.gpt import (
    Model,
    Parallel,
    Run,
    build,
    config_of,
    loss_and_grads,
    megatrons_own,
    relative_errors,
    start,
)
from tests.mcore.lacking import parameters, present, why_not
from tests.ranks import run_ranks

FLAT = Parallel(cp=4)
TP_AND_CP, ALONE = Parallel(cp=2, tp=2), Parallel()


@dataclass(frozen=True)
class Case:
    """A model, its groups, and burst's options for it."""

    model: Model = Model()
    parallel: Parallel = FLAT
    burst: BurstConfig = BurstConfig()


KV, Q = (BurstConfig(nodes=2, force=Force(circulate=way)) for way in ("kv", "q"))
CASES = {
    "flat": Case(),
    "two nodes": Case(burst=BurstConfig(nodes=2)),
    "kv circulates": Case(burst=KV),
    "q circulates": Case(burst=Q),
    "MHA, kv": Case(Model(groups=4), FLAT, KV),
    "MHA, q": Case(Model(groups=4), FLAT, Q),
    "MQA, kv": Case(Model(groups=1), burst=KV),
    "MQA, q": Case(Model(groups=1), burst=Q),
    "full recompute": Case(Model(recompute=True)),
    "full recompute, kv": Case(Model(recompute=True), FLAT, KV),
    "full recompute, q": Case(Model(recompute=True), FLAT, Q),
    "tied embeddings": Case(Model(tied=True), burst=BurstConfig(nodes=2)),
    "tied embeddings, full recompute": Case(Model(tied=True, recompute=True)),
    "tensor and sequence parallel": Case(parallel=TP_AND_CP),
    "tensor parallel, MQA": Case(Model(groups=1), TP_AND_CP, Q),
    "tensor parallel, full recompute": Case(Model(recompute=True), TP_AND_CP, BurstConfig(nodes=2)),
    "one rank": Case(Model(tied=True), ALONE),
    "one rank, MLA": Case(Model(latent=True), ALONE),
    "one rank, half kept": Case(Model(recompute=True), ALONE, BurstConfig(keep="half")),
    "sinks": Case(Model(sinks="learnable")),
    "sinks, all kept": Case(
        Model(sinks="learnable", recompute=True), FLAT, BurstConfig(nodes=2, keep="all")
    ),
    "sinks, half kept": Case(
        Model(sinks="learnable", recompute=True), TP_AND_CP, BurstConfig(keep="half")
    ),
    "softmax off by one": Case(Model(sinks="off-by-one")),
    "MLA, kv": Case(Model(latent=True), FLAT, KV),
    "MLA, q": Case(Model(latent=True), burst=Q),
}


def why(case: Case) -> str:
    """Why this Megatron cannot run it."""
    return why_not("MLA" if case.model.latent else None)


# with --all only: each half of these is in another case, and tests/attention has heads x circulate
SELDOM = (
    "MHA, kv", "MQA, q", "full recompute, kv", "full recompute, q",
    "tied embeddings, full recompute", "tensor parallel, full recompute", "MLA, kv",
)  # fmt: skip


def with_burst(case: Case) -> tuple[Run, set, set]:
    """The run with burst, the rings that it used, and the sizes of its sends of data to read."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megatron_burst import burst_spec

    spec = get_gpt_layer_local_spec(
        normalization="RMSNorm", multi_latent_attention=case.model.latent
    )
    config = config_of(case.parallel, case.model)
    config.burst = case.burst
    hops, send = [], Communicator.send

    def noted(self, link, cargo, sends, recvs):
        hops.extend((link, cargo, x.nbytes) for _, x in sends)
        return send(self, link, cargo, sends, recvs)

    with mock.patch.object(Communicator, "send", noted):
        run = loss_and_grads(build(config, burst_spec(spec), case.model.tied))
    sizes = {size for link, cargo, size in hops if (link, cargo) == (Link.INTER, Cargo.READ)}
    return run, {link for link, *_ in hops}, sizes


def compare_all(rank: int, seldom: tuple[str, ...]) -> dict:
    """By case: errors of loss and gradients, attention calls, links and sizes of hops between
    nodes."""
    results, truths, cases = {}, {}, present(CASES, why, seldom)
    for tp in (1, 2):
        start(Parallel(tp=tp))
        for model in dict.fromkeys(c.model for c in cases.values() if c.parallel.tp == tp):
            truths[model, tp] = megatrons_own(model, Parallel(tp=tp))
    for parallel in (FLAT, TP_AND_CP, ALONE):
        start(parallel)  # the third finds the second's groups left over
        for name, case in cases.items():
            if case.parallel == parallel:
                truth, (got, *sent) = truths[case.model, parallel.tp], with_burst(case)
                results[name] = relative_errors(got, truth), got.attention_calls, *sent
    return results


@pytest.fixture(scope="module")
def comparisons(once, request):
    def compared():
        return run_ranks(compare_all, 4, () if request.config.getoption("--all") else SELDOM)

    return once(compared)


@pytest.mark.parametrize("name", parameters(CASES, why, SELDOM))
def test_loss_and_every_gradient_equal_those_without_context_parallelism(comparisons, name):
    case = CASES[name]
    for errors, calls, links, sizes in (results[name] for results in comparisons):
        assert len(errors) >= 14, errors.keys()
        assert max(errors.values()) <= 1e-9, errors
        assert calls == (4 if case.model.recompute else 2)
        assert links == links_of(case)
        if case.burst.force.circulate != "auto":  # k and v are always read in forward
            assert len(sizes) == {"kv": 1, "q": 2}[case.burst.force.circulate], sizes


def links_of(case: Case) -> set[Link]:
    """The links that the case must use."""
    nodes = case.burst.nodes or 1
    inter = {Link.INTER} if nodes > 1 else set()
    return inter | ({Link.INTRA} if case.parallel.cp > nodes else set())
