"""The largest score of each head in Megatron's models, what `clip_qk` makes of it, and capped
scores.

The reference is attention by definition, of the whole sequence on one rank, in the same model.
Guards against scores of one rank, of one batch or of keys that nobody sees, against heads in
another order, scores that are not tracked where results are kept, and a step that leaves some to
the next one.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from megatron_burst.config import BurstConfig
from tests.mcore.gpt import (
    VOCAB,
    Model,
    Parallel,
    Run,
    build,
    config_of,
    logits_of,
    loss_and_grads,
    relative_errors,
    sharded,
    start,
    whole_batch,
)
from tests.mcore.lacking import needs, parameters, present, why_not
from tests.oracle import full_attention, largest_of
from tests.ranks import run_ranks

CP4, TP2_CP2, ALONE = Parallel(cp=4), Parallel(cp=2, tp=2), Parallel()
CLIP, LOG = "qk_clip", "log_max_attention_logit"
CAP = 2.0  # scores reach 2.9 with weights that are drawn this wide
WIDE = dict(init_method_std=0.1)


@dataclass(frozen=True)
class Case:
    """A model, its groups, and what is asked of it.

    Attributes:
        flag: of Megatron's, that asks for the largest scores; "": none.
        threshold: of QK-clip; some heads are above it, some below.
        batches: of a step.
    """

    model: Model = Model()
    parallel: Parallel = CP4
    burst: BurstConfig = BurstConfig()
    flag: str = CLIP
    threshold: float = 2.6
    softcap: float = 0.0
    batches: int = 1


KEPT = {keep: BurstConfig(keep=keep) for keep in ("all", "half", "none")}
RECOMPUTED, LATENT = Model(recompute=True), Model(latent=True)
CAPPED = dict(softcap=CAP, threshold=1.72)
CASES = {
    "GQA": Case(),
    "two nodes": Case(burst=BurstConfig(nodes=2)),
    "one rank": Case(parallel=ALONE),
    "MLA": Case(LATENT, threshold=1.8),
    "MLA, tensor parallel": Case(LATENT, TP2_CP2, threshold=1.8),
    # only logged: Megatron's clip_qk of GQA fails with tensor parallelism, up to 0.19 at least,
    # because it views a rank's part of the weight as if it were the whole
    "tensor parallel": Case(parallel=TP2_CP2, flag=LOG),
    "logged": Case(flag=LOG),
    "two batches": Case(batches=2),
    "all kept": Case(RECOMPUTED, burst=KEPT["all"], batches=2),
    "half kept": Case(RECOMPUTED, burst=KEPT["half"], batches=2),
    "none kept": Case(RECOMPUTED, burst=KEPT["none"], batches=2),
    "capped": Case(**CAPPED),
    "capped, one rank": Case(parallel=ALONE, **CAPPED),
    "capped, half kept": Case(RECOMPUTED, burst=KEPT["half"], **CAPPED),
    "neither flag": Case(flag=""),
}
CLIPPED = {name: case for name, case in CASES.items() if case.flag == CLIP}
LOGGED = {name: case for name, case in CASES.items() if case.flag == LOG}
SCORED = {**CLIPPED, **LOGGED}


def why(case: Case) -> str:
    """Why this Megatron cannot run it."""
    return why_not("MLA" if case.model.latent else None)


class ByDefinition(torch.nn.Module):
    """A core attention of whole sequences that computes all scores at once."""

    def __init__(self, config, *args, softmax_scale=None, **options):
        super().__init__()
        self.config, self.softmax_scale = config, softmax_scale
        self.current_max_attn_logits = None

    def forward(self, query, key, value, *args, **options):
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        scale = self.softmax_scale or q.shape[-1] ** -0.5
        cap = self.config.attn_logit_softcapping
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril()
        scores, before = largest_of(q, k, scale, seen, cap).detach(), self.current_max_attn_logits
        self.current_max_attn_logits = scores if before is None else before.maximum(scores)
        return full_attention(q, k, v, True, scale, softcap=cap).transpose(0, 1).flatten(2)


def model_of(case: Case, parallel: Parallel, with_burst: bool):
    """A case's model; the reference is not context parallel."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megatron_burst import burst_spec

    asked = {case.flag: True, "qk_clip_threshold": case.threshold} if case.flag else {}
    config = config_of(parallel, case.model, **WIDE, **asked)
    config.burst, config.attn_logit_softcapping = case.burst, case.softcap
    latent = case.model.latent
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", multi_latent_attention=latent)
    if with_burst:
        return build(config, burst_spec(spec))
    spec.submodules.self_attention.submodules.core_attention = ByDefinition
    return build(config, spec)


def second_batch() -> dict:
    """A rank's part of another batch."""
    from megatron.core import parallel_state

    batch = whole_batch()
    batch["tokens"] = (batch["tokens"] + 1) % VOCAB
    return sharded(batch, parallel_state.get_context_parallel_group())


@dataclass
class Step:
    """What becomes of the largest scores in a step.

    Attributes:
        scores: of each head, layer after layer; [] if none are tracked.
        value: what `clip_qk` returns.
        clipped: names of the parameters that it changes.
        left: the scores that it leaves to the next step.
    """

    scores: list[float]
    value: float | None
    clipped: list[str]
    left: list[float]


def tracked(gpt) -> torch.Tensor:
    """The largest scores that a model's layers hold."""
    cores = (layer.self_attention.core_attention for layer in gpt.decoder.layers)
    held = [core.current_max_attn_logits for core in cores]
    return torch.cat([x for x in held if x is not None] or [torch.empty(0)])


def step_of(case: Case, gpt) -> tuple[Step, Run, dict[str, torch.Tensor]]:
    """A step of a model without an optimizer; loss and gradients of its first batch, and the
    weights afterwards."""
    from megatron.core.optimizer.qk_clip import clip_qk

    run = loss_and_grads(gpt)
    if case.batches == 2:
        logits_of(gpt, second_batch()).sum().backward()
    scores, value = tracked(gpt).tolist(), None
    weights = {name: x.detach() for name, x in gpt.named_parameters()}
    before = {name: x.clone() for name, x in weights.items()}
    if case.flag:
        chunk = SimpleNamespace(module=SimpleNamespace(module=gpt))  # in Megatron's wrappers
        value = clip_qk([chunk], log_max_only=case.flag == LOG)
    clipped = [name for name, x in weights.items() if not torch.equal(x, before[name])]
    return Step(scores, value, clipped, tracked(gpt).tolist()), run, weights


@dataclass
class Comparison:
    """A step with burst and by definition; relative errors of loss and gradients, and the largest
    difference of a weight afterwards."""

    ours: Step
    truth: Step
    errors: dict[str, float]
    difference: float


def compared(case: Case, parallel: Parallel, reference: tuple) -> Comparison:
    """A step with burst, on the ranks of Megatron's groups."""
    ours, run, weights = step_of(case, model_of(case, parallel, with_burst=True))
    truth, true_run, true_weights = reference
    differences = [float((x - true_weights[path]).abs().max()) for path, x in weights.items()]
    return Comparison(ours, truth, relative_errors(run, true_run), max(differences))


def compare_all(rank: int) -> dict[str, Comparison]:
    """By case."""
    cases, references, results = present(CASES, why), {}, {}
    for tp in (1, 2):
        start(Parallel(tp=tp))
        for name, case in cases.items():
            if case.parallel.tp == tp:
                references[name] = step_of(case, model_of(case, Parallel(tp=tp), with_burst=False))
    for parallel in (CP4, TP2_CP2, ALONE):
        start(parallel)
        for name, case in cases.items():
            if case.parallel == parallel:
                results[name] = compared(case, parallel, references[name])
    return results


@pytest.fixture(scope="module")
def comparisons(once):
    return once(lambda: run_ranks(compare_all, 4))


@pytest.mark.parametrize("name", parameters(SCORED, why))
def test_each_heads_score_is_the_largest_of_the_definition(comparisons, name):
    """Before `clip_qk` reduces anything: every rank has the scores of its heads over the whole
    sequence. MLA's scale is its layer's own."""
    for result in (results[name] for results in comparisons):
        layers, heads = 2, 4 // SCORED[name].parallel.tp
        assert len(result.ours.scores) == layers * heads
        assert result.ours.scores == pytest.approx(result.truth.scores, rel=1e-12, abs=0)
        assert result.ours.value == max(result.ours.scores)
        assert result.truth.value == max(result.truth.scores)


@pytest.mark.parametrize("name", parameters(CLIPPED, why))
def test_clip_qk_clips_the_same_weights_as_without_context_parallelism(comparisons, name):
    """Heads below the threshold stay as they are, and the next step begins without scores."""
    kinds = "linear_qkv", "linear_q_proj", "linear_kv_up_proj"
    for result in (results[name] for results in comparisons):
        ours, truth = result.ours, result.truth
        assert 0 < min(truth.scores) < CLIPPED[name].threshold < max(truth.scores)
        assert ours.clipped == truth.clipped and ours.clipped
        assert {path.split(".")[-2] for path in ours.clipped} <= {*kinds}
        assert result.difference <= 1e-14 and ours.left == []


@pytest.mark.parametrize("name", parameters(LOGGED, why))
def test_what_is_only_logged_changes_no_weight(comparisons, name):
    for result in (results[name] for results in comparisons):
        assert result.ours.clipped == result.truth.clipped == [] and result.difference == 0


@needs("logged scores of a step")
@pytest.mark.parametrize("name", LOGGED)
def test_what_is_only_logged_is_of_one_step(comparisons, name):
    for result in (results[name] for results in comparisons):
        assert result.ours.left == []


def test_a_step_has_the_scores_of_all_its_batches(comparisons):
    """Otherwise its last batch alone would say how to clip. What is recomputed or kept has the
    same."""
    for results in comparisons:
        one, two = (results[name].ours.scores for name in ("GQA", "two batches"))
        larger = [b > a for a, b in zip(one, two, strict=True)]
        assert [max(pair) for pair in zip(one, two, strict=True)] == two
        assert any(larger) and not all(larger)  # each batch has the largest score of some heads
        for keep in KEPT:
            assert results[f"{keep} kept"].ours.scores == pytest.approx(two, rel=1e-12, abs=0)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("capped")])
def test_capped_scores_are_tracked_as_they_are_capped(comparisons, name):
    """The first layer has the queries and keys of the model without a cap."""
    for results in comparisons:
        capped, plain = (results[case].ours.scores for case in (name, "GQA"))
        first = CAP * (torch.tensor(plain[:4], dtype=torch.float64) / CAP).tanh()
        assert capped[:4] == pytest.approx(first.tolist(), rel=1e-12, abs=0)
        assert max(capped) <= CAP < max(plain)


@pytest.mark.parametrize("name", parameters(CASES, why))
def test_loss_and_every_gradient_are_those_of_the_definition(comparisons, name):
    """Asked for scores or not, capped or not: a cap that some kernel ignores changes them."""
    for result in (results[name] for results in comparisons):
        assert len(result.errors) >= 14 and max(result.errors.values()) <= 1e-9, result.errors


def test_without_a_flag_nothing_is_tracked(comparisons):
    """It would cost a reduction in each call."""
    for ours in (results["neither flag"].ours for results in comparisons):
        assert ours.scores == ours.left == []
