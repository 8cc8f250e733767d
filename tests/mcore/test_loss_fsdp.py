"""The fused loss under torch's FSDP2 and under Megatron-FSDP, on two and four CPU processes.

The truth is the same model without FSDP and without the fused loss. Guards against a weight that is
read while it is sharded, gradients that FSDP does not reduce, or reduces twice, a second
micro-batch that sees freed weights, and a head that is gathered more than once.
"""

from collections.abc import Collection
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from megatron_burst.errors import BurstError
from tests.mcore.fsdp import fsdp_group, gradients, gradients_without_fsdp, losses_of, wrapped
from tests.mcore.gpt import FULL_RECOMPUTE
from tests.mcore.lacking import needs, no_option, parameters, present, why_not
from tests.mcore.loss_model import FORWARD, Case, batch_of, begin, model_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.numeric
PER_TOKEN = {"calculate_per_token_loss": True}
DETACHED = {"mtp_detach_heads": True}


@dataclass(frozen=True)
class Sharded:
    """A model, and how FSDP shards it.

    Attributes:
        case: the model.
        strategy: of Megatron-FSDP; "": FSDP2.
        unit: whether the head is sharded on its own, as FSDP2 does with TransformerEngine's layers,
            or with the root, which stays gathered throughout the model's forward.
    """

    case: Case
    strategy: str = ""
    unit: bool = True


def megatrons(*sizes, strategy="optim_grads_params", unit=False, **options) -> Sharded:
    """Megatron-FSDP, which has no float64; by itself it does not make the head a unit."""
    return Sharded(Case(*sizes, ddp=True, **options), strategy, unit)


CASES = {  # by the number of ranks
    2: {
        "FSDP2": Sharded(Case(masked=True)),
        "FSDP2, gradients in forward": Sharded(Case(masked=True, fused=FORWARD)),
        "FSDP2, CP2, MTP": Sharded(Case(1, 2, mtp=2, masked=True)),
        "Megatron-FSDP": megatrons(masked=True),
        "Megatron-FSDP, tied, gradients in forward": megatrons(tied=True, fused=FORWARD),
        "Megatron-FSDP, CP2, MTP, tied, per-token loss": megatrons(
            1, 2, mtp=1, tied=True, masked=True, options=PER_TOKEN
        ),
        "Megatron-FSDP, MTP, detached heads": megatrons(mtp=1, options=DETACHED),
        "Megatron-FSDP, CP2, tied, states sharded": megatrons(1, 2, tied=True, strategy="optim"),
    },
    4: {
        "FSDP2, CP2, head with the root": Sharded(Case(1, 2, masked=True), unit=False),
        "FSDP2, TP2 SP": Sharded(Case(2, sp=True, masked=True)),
        "FSDP2, TP2 CP2, full recompute": Sharded(Case(2, 2, options=FULL_RECOMPUTE)),
        "Megatron-FSDP, CP2, head as a unit": megatrons(1, 2, masked=True, unit=True),
        "Megatron-FSDP, TP2 SP, tied": megatrons(2, sp=True, tied=True),
        "Megatron-FSDP, TP2 CP2, full recompute": megatrons(2, 2, options=FULL_RECOMPUTE),
    },
}
ALL = CASES[2] | CASES[4]
SELDOM = (  # with --all only: others have the same parts
    "Megatron-FSDP, tied, gradients in forward", "FSDP2, TP2 SP",
    "Megatron-FSDP, TP2 CP2, full recompute",
)  # fmt: skip


def build(sharded: Sharded):
    """A fused model under FSDP."""
    from megatron.core.models.common.embeddings import language_model_embedding as embedding
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_burst import fuse_loss
    from megatron_burst.tools import cpu_mode

    cpu_mode.install()
    model = fuse_loss(model_of(sharded.case), sharded.case.fused)
    head = [type(model.output_layer)] * sharded.unit
    if not sharded.strategy:
        head.append(embedding.LanguageModelEmbedding)
    elif sharded.strategy != "optim_grads_params":
        return wrapped(model, sharded.strategy)
    return wrapped(model, sharded.strategy, TransformerLayer, *head)


def compare(sharded: Sharded) -> dict[str, float]:
    """Relative errors, by parameter, and of the losses."""
    from megatron_burst import fuse_loss

    begin(sharded.case)
    batch = batch_of(sharded.case)
    bare = model_of(sharded.case)
    if sharded.case.mtp and sharded.case.cp > 1:  # Megatron's own are wrong: test_megatron_loss.py
        fuse_loss(bare)
    losses, summed = losses_of(bare, batch), sharded.case.options is PER_TOKEN
    truth = gradients_without_fsdp(bare, summed)
    begin(sharded.case)
    model = build(sharded)
    ours = losses_of(model, batch)
    model.finish_grad_sync()
    found = gradients(model)
    errors = {n: float((found[n] - g).abs().max() / g.abs().max()) for n, g in truth.items()}
    return errors | {
        f"loss {n}": float((a - b).abs() / b)
        for n, (a, b) in enumerate(zip(ours, losses, strict=True))
    }


def why(sharded: Sharded) -> str:
    """Why this Megatron cannot run it."""
    case = sharded.case
    needed = "Megatron-FSDP" if sharded.strategy else "torch FSDP2"
    return why_not(needed) or no_option(case.options) or why_not("MTP" if case.mtp else None)


def compare_all(rank: int, left: Collection[str]) -> dict:
    """Run the cases of one arrangement after the other: see `begin`."""
    cases = present(CASES[dist.get_world_size()], why, left)
    names = sorted(cases, key=lambda name: (cases[name].case.tp, cases[name].case.cp))
    return {name: compare(cases[name]) for name in names}


@pytest.fixture(scope="module")
def comparisons(once, request):
    def compared():
        left = () if request.config.getoption("--all") else SELDOM
        ends = [run_ranks(compare_all, world, left, timeout_s=500) for world in CASES]
        return {name: [errors[name] for errors in ranks] for ranks in ends for name in ranks[0]}

    return once(compared)


@pytest.mark.parametrize("name", parameters(ALL, why, SELDOM))
def test_losses_and_gradients_are_those_without_fsdp_and_fused_loss(comparisons, name):
    tolerance = 2e-5 if ALL[name].strategy else 3e-6  # Megatron's loss is in float32
    for errors in comparisons[name]:
        assert max(errors.values()) < tolerance, errors


def other_uses(rank: int) -> dict[str, float]:
    """Errors of what a fused model under FSDP2 computes besides a training step, by name."""
    from megatron_burst.mcore.fused_loss import log_probs_and_entropy

    begin(Case())
    bare, batch = model_of(Case()), batch_of(Case())
    inputs, labels = (batch["tokens"], batch["position_ids"], None), batch["labels"]
    begin(Case())
    model = build(Sharded(Case()))
    logits, found = bare(*inputs), {}
    truth = torch.distributions.Categorical(logits=logits)
    rl = model(*inputs, labels=labels, output_processor=log_probs_and_entropy)
    found["log-probabilities"] = float((rl.log_probs - truth.log_prob(labels)).abs().max())
    (truth.log_prob(labels) + truth.entropy()).sum().backward()
    (rl.log_probs + rl.entropy).sum().backward()
    grad = gradients(model)["output_layer.weight"] * fsdp_group().size()  # of both ranks
    dist.all_reduce(bare.output_layer.weight.grad)
    found["their gradients"] = float(
        (grad - bare.output_layer.weight.grad).abs().max() / grad.max()
    )
    with torch.no_grad():
        found["logits"] = float((model(*inputs) - logits).abs().max())
        losses = model(*inputs, labels=labels)
        found["evaluation"] = float((losses + truth.log_prob(labels)).abs().max())
    gathered = []
    model.module.output_layer.register_forward_pre_hook(lambda *_: gathered.append(1))
    model(*inputs, labels=labels).sum().backward()
    assert len(gathered) == 1
    return found


def detached_heads(rank: int) -> list[dict[str, float]]:
    """What Megatron logs of a head of MTP that reads the weight outside of the output layer's call,
    without and with FSDP2. Only forward: torch's prefetch of this backward fails on CPUs."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    case, found = Case(mtp=1, options=DETACHED), []
    for fused in (False, True):
        begin(case)
        model, batch = build(Sharded(case)) if fused else model_of(case), batch_of(case)
        model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        tracked = MTPLossLoggingHelper.tracker.items()
        found.append({name: float(x) for name, x in tracked if torch.is_tensor(x)})
    return found


def tied(rank: int) -> str:
    """What is said where Megatron's own output layer fails with the sharded weight."""
    begin(Case(tied=True))
    model, batch = build(Sharded(Case(tied=True))), batch_of(Case(tied=True))
    with pytest.raises(BurstError) as raised:
        model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return str(raised.value)


@needs("torch FSDP2")
@needs("output_processor")
def test_logits_evaluation_and_log_probabilities_with_one_gather_of_the_head():
    for found in run_ranks(other_uses, 2):
        assert max(found.values()) < 3e-6, found


@needs("torch FSDP2")
@needs("MTP")
@pytest.mark.skipif(bool(no_option(DETACHED)), reason=no_option(DETACHED))
def test_a_detached_weight_is_gathered_too():
    for truth, got in run_ranks(detached_heads, 2):
        assert truth and got == pytest.approx(truth, rel=3e-6)


@needs("torch FSDP2")
def test_refuses_tied_embeddings_under_fsdp2():
    for said in run_ranks(tied, 2):
        assert said.startswith("--burst-fused-loss: cannot run with tied embeddings under FSDP2")
