"""Modules whose outputs are kept, and the last linear layer of a checkpoint, in Megatron's layers.

Every gradient of two steps is bitwise that of full recomputation. Guards against modules that are
called again, and against those that are not although backward reads what follows them.
"""

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from tests.mcore import gpt
from tests.mcore.gpt import FULL_RECOMPUTE, Model, Parallel, config_of
from tests.mcore.lacking import why_not
from tests.ranks import run_ranks
from tests.sampling import whole

DENSE = ("linear_qkv", "linear_proj", "linear_fc1")
LATENT = ("linear_q_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj", "linear_fc1")
EXPERTS = dict(
    num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=64, moe_router_load_balancing_type=
    "aux_loss", moe_aux_loss_coeff=1e-2, moe_token_dispatcher_type="allgather",
)  # fmt: skip
ALLTOALL = dict(moe_token_dispatcher_type="alltoall")


@dataclass(frozen=True)
class Case:
    """A model, how it is recomputed, and which of its modules are called again.

    Attributes:
        modules: whose outputs are kept.
        again: calls of `linear_fc2` in the recomputations of a second step, as a share of all.
        options: of the configuration.
    """

    modules: tuple[str, ...] = DENSE
    model: Model = Model()
    again: float = 0.0
    options: dict = field(default_factory=dict)


PAIRS = FULL_RECOMPUTE | dict(recompute_num_layers=2)
CASES = {
    "dense": Case(),
    "nothing but attention": Case(()),
    "biases": Case(options=dict(add_bias_linear=True)),
    # on a CPU torch's dropout saves a mask of floats, which may be read
    "dropout": Case(again=1.0, options=dict(hidden_dropout=0.1)),
    "two layers a checkpoint": Case(again=0.5, options=PAIRS),
    "latent": Case(LATENT, Model(latent=True)),
    "experts": Case(options=EXPERTS),
    # whose counts the CPU waits for
    "routed experts": Case(("router", *DENSE), options=EXPERTS | ALLTOALL),
    "scores": Case(("router",), options=EXPERTS | ALLTOALL | dict(
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
        moe_input_jitter_eps=0.1, moe_z_loss_coeff=1e-3, hidden_dropout=0.1,
    ), again=1.0),
    "shared experts": Case(options=EXPERTS | dict(moe_shared_expert_intermediate_size=32)),
    "selective": Case((), options=dict(
        recompute_granularity="selective", recompute_method=None, recompute_num_layers=None,
        recompute_modules=["core_attn", "mlp"],
    )),
}  # fmt: skip
SPREAD = {  # over ranks that have other experts
    "routed experts": CASES["routed experts"],
    "tokens of other ranks": Case(("router", "token_dispatch"), options=EXPERTS | ALLTOALL),
}
# what is counted, of these
COUNTED = {"copies": "router", "all-to-alls": "token_dispatch"}
TP, SOME = Parallel(tp=2), ["dense", "two layers a checkpoint", "experts"]


def why_lacks(name: str) -> str:
    """Why this Megatron has no such model without TransformerEngine."""
    case = (CASES | SPREAD)[name]
    experts = "num_moe_experts" in case.options
    return why_not("MLA" if case.model.latent else "experts" if experts else None)


def here(names) -> list[str]:
    """Those of the cases that this Megatron has."""
    return [name for name in names if not why_lacks(name)]


def spec_of(case: Case):
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )

    experts = case.options.get("num_moe_experts")
    if "moe_layer_freq" in case.options:
        config = config_of(model=case.model, **case.options)
        return get_gpt_decoder_block_spec(config, False, normalization="RMSNorm", pp_rank=0)
    spec = get_gpt_layer_local_spec(
        num_experts=experts, moe_grouped_gemm=False, normalization="RMSNorm",
        multi_latent_attention=case.model.latent,
    )  # fmt: skip
    if case.model.latent:
        spec.submodules.self_attention.submodules.core_attention = gpt.core_for_latent()
    return spec


def two_steps(
    case: Case, parallel: Parallel, burst: BurstConfig, between: Callable[[], object] = int
) -> tuple[dict, list[Counter]]:
    """Gradients of both steps by parameter, and calls of linear layers by name in each step;
    `between`: called before each backward."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, random
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.moe.router import TopKRouter

    config = config_of(parallel, case.model, **(FULL_RECOMPUTE | case.options))
    config.burst = burst
    model = gpt.build(config, spec_of(case))
    random.model_parallel_cuda_manual_seed(5)
    names = {module: name.rpartition(".")[2] for name, module in model.named_modules()}
    grads, calls = {}, []

    def counting(forward):
        def call(self, *args, **options):
            calls[-1][names[self]] += 1
            return forward(self, *args, **options)

        return call

    def copied(x, **options):
        calls[-1]["copies"] += 1
        return copy(x, **options)

    def sent(*args, **options):
        calls[-1]["all-to-alls"] += 1
        return send(*args, **options)

    copy, send = token_dispatcher.maybe_move_tensor_to_cpu, token_dispatcher.all_to_all
    kinds = ColumnParallelLinear, RowParallelLinear, TopKRouter
    patches = [mock.patch.object(x, "forward", counting(x.forward)) for x in kinds]
    patches.append(mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", copied))
    patches.append(mock.patch.object(token_dispatcher, "all_to_all", sent))
    for patch in patches:
        patch.start()
    batch = gpt.whole_batch()
    for step in range(2):
        calls.append(Counter())
        logits = model(batch["tokens"], batch["position_ids"], attention_mask=None)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        between()
        loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                grads[step, name] = parameter.grad.clone()
                parameter.grad = None
    for patch in patches:
        patch.stop()
    return grads, calls


def differing(truth: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that have other bits."""
    return [name for name, x in truth.items() if not torch.equal(x, got[name])]


def compare(rank: int, parallel: Parallel, names: list[str]) -> dict:
    """By case: parameters whose gradients differ, and calls without and with keeping."""
    from megatron_burst.mcore import patches
    from megatron_burst.tools import cpu_mode

    gpt.start(parallel)
    cpu_mode.install()  # also the streams of an all-to-all of tokens
    found = {}
    for name in names:
        case = (CASES | SPREAD)[name]
        truth, plain = two_steps(case, parallel, BurstConfig())
        burst = BurstConfig(keep="all", keep_modules=case.modules)
        patches.switch_on_keep(burst)
        got, kept = two_steps(case, parallel, burst)
        assert got.keys() == truth.keys() and got
        wrong = differing(truth, got)
        if name == "dense":  # in host memory, but for the last layer's
            there = replace(burst, keep_offload="results", keep_host_gib=0.01)
            got, also = two_steps(case, parallel, there)
            wrong += differing(truth, got)
            assert also == kept
        found[name] = wrong, plain, kept
    return found


@pytest.fixture(scope="module")
def one_rank():
    return run_ranks(compare, 1, Parallel(), here(CASES))


@pytest.fixture(scope="module")
def tensor_parallel():
    return run_ranks(compare, 2, TP, here(SOME))


def recorded_bytes() -> int:
    """Bytes of all recordings that are alive."""
    from megatron_burst.recompute.recording import Recording

    gc.collect()
    return sum(each.num_bytes for each in gc.get_objects() if type(each) is Recording)


def within_budgets(rank: int, parallel: Parallel, names: list[str]) -> dict:
    """By case and share of what all modules take: in how many layers each module is kept; bytes
    that recordings of modules have, and those that were counted; parameters whose gradients
    differ."""
    from megatron_burst.mcore import patches
    from megatron_burst.mcore.keep import recompute
    from megatron_burst.mcore.keep.module_costs import shared_shape

    gpt.start(parallel)
    counted, chosen, found = [], [], {}

    def modules_within(burst, config, stage, x, costs, may_be_whole):
        counted.append((shared_shape(config, x), x.itemsize, costs))
        chosen.append(recompute.modules_within(burst, config, stage, x, costs, may_be_whole))
        return chosen[-1]

    for name in names:
        case, budget = CASES[name], 1.0
        truth, _ = two_steps(case, parallel, BurstConfig())
        for share in (1.0, 0.5, 0.0):
            burst = BurstConfig(keep="auto", keep_budget_gib=budget, keep_host_gib=1e-6)
            burst = burst if share else BurstConfig(keep="all")
            patches.switch_on_keep(burst)
            with mock.patch(
                "megatron_burst.mcore.keep.kept_modules.modules_within", modules_within
            ):
                got, _ = two_steps(case, parallel, burst)
                config = config_of(parallel, case.model, **(FULL_RECOMPUTE | case.options))
                config.burst = burst
                model, batch = gpt.build(config, spec_of(case)), gpt.whole_batch()
                logits = model(batch["tokens"], batch["position_ids"], attention_mask=None)
            num_bytes = recorded_bytes()
            del logits, model
            (rows, batch), itemsize, costs = counted[-1]
            layers = {key: placed.device for key, placed in chosen[-1].items()} if share else {}
            assert not any(placed.host for placed in chosen[-1].values())
            heads = config.num_attention_heads // parallel.tp
            told = 2 * rows * batch * heads * (16 + 1) * itemsize
            wrong = differing(truth, got)
            of_modules = sum(each.num_bytes * layers.get(each.name, 0) for each in costs)
            found[name, share] = layers, num_bytes, of_modules, wrong
            rest = sum(each.num_bytes for each in costs)  # of the second of two layers
            budget = (told + 0.5 * rest) / 2**30
    return found


def check(results, name, ep=1):
    if why := why_lacks(name):
        pytest.skip(why)
    case = (CASES | SPREAD)[name]
    for wrong, plain, kept in (found[name] for found in results):
        assert not wrong
        last = {key: number for key, number in plain[1].items() if key != "output_layer"}
        assert set(case.modules) <= {*last, *map(COUNTED.get, last)}
        for module, number in last.items():
            forward = number // 2 if case.options.get("recompute_granularity") != "selective" else (
                number // (2 if module in ("linear_fc1", "linear_fc2") else 1))  # fmt: skip
            if COUNTED.get(module, module) in case.modules:
                assert kept[1][module] == forward, module
            elif module == "linear_fc2":
                assert kept[1][module] == forward * (1 + case.again), module
            elif module == "all-to-alls" and ep > 1:  # of tokens, their weights and results
                assert kept[1][module] == number - forward // 3
            else:
                assert kept[1][module] == number, module


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_bitwise_those_of_full_recomputation(one_rank, name):
    check(one_rank, name)


@pytest.mark.parametrize("name", SOME)
def test_so_they_are_with_tensor_parallelism(tensor_parallel, name):
    check(tensor_parallel, name)


@pytest.fixture(scope="module")
def expert_parallel():
    return run_ranks(compare, 2, Parallel(ep=2), here(SPREAD))


@pytest.mark.parametrize("name", SPREAD)
def test_so_they_are_with_expert_parallelism(expert_parallel, name):
    check(expert_parallel, name, ep=2)


AUTO = {"one rank": (1, Parallel(), here(["dense", "latent", "experts"])), "TP": (2, TP, ["dense"])}


@pytest.mark.parametrize("where", AUTO)
def test_auto_keeps_modules_within_its_budget_and_counts_their_bytes(where):
    world, parallel, names = AUTO[where]
    for found in run_ranks(within_budgets, world, parallel, names):
        for (name, share), (layers, kept, counted, wrong) in found.items():
            assert not wrong
            alone = found[name, 0.0][1]  # with attention's results alone
            sums = 36 * layers.get("router", 0)  # over all tokens
            assert kept - alone == counted + sums, (name, share, layers)
            some, each = sum(layers.values()), len(CASES[name].modules) + (name == "experts")
            assert some == 2 * each if share == 1.0 else each <= some < 2 * each or not share


def where_layers_differ(rank: int) -> tuple:
    """Parameters whose gradients differ; calls of linear layers with full recomputation and with
    "auto"; bytes of recordings after each forward; what the budget has for modules beside the
    running layer's, which are those of the largest one at most."""
    from megatron_burst.mcore import patches
    from megatron_burst.mcore.keep import recompute

    gpt.start(Parallel())
    options = dict(num_layers=6, moe_layer_freq=[0, 0, 0, 0, 1, 1], ffn_hidden_size=16)
    case, counted, held = Case(options=EXPERTS | options), [], []
    truth, plain = two_steps(case, Parallel(), BurstConfig())
    burst = BurstConfig(keep="auto", keep_budget_gib=7e-4, keep_host_gib=1e-6)
    patches.switch_on_keep(burst)

    def modules_within(burst, config, stage, x, costs, may_be_whole):
        results = 6 * x[..., 0].numel() * config.num_attention_heads * (16 + 1) * x.itemsize
        running = sum(each.num_bytes for each in costs)
        counted.append(burst.keep_budget_gib * 2**30 - results + running)
        return recompute.modules_within(burst, config, stage, x, costs, may_be_whole)

    with mock.patch("megatron_burst.mcore.keep.kept_modules.modules_within", modules_within):
        got, calls = two_steps(
            case, Parallel(), burst, between=lambda: held.append(recorded_bytes())
        )
    wrong = differing(truth, got)
    return wrong, plain, calls, held, max(counted)


def test_auto_stays_within_its_budget_where_only_some_layers_have_experts():
    """Each layer chose as if all were like it. Until all have run, no module is kept."""
    if why := why_lacks("experts"):
        pytest.skip(why)
    ((wrong, plain, calls, (first, second), budget),) = run_ranks(where_layers_differ, 1)
    assert not wrong
    assert calls[0]["linear_fc1"] == plain[0]["linear_fc1"]
    assert calls[1]["linear_fc1"] < plain[1]["linear_fc1"]
    assert 0 < second - first <= budget, (first, second, budget)


def end_step() -> None:
    """Some optimizer's step."""
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], lr=0.0).step()


def after_a_first_step(rank: int, parallel: Parallel) -> tuple:
    """Without a budget: what was called again in a step before the optimizer's and in one after
    it; what says so in the log. With room on the host: where modules went. Parameters whose
    gradients differ, of both."""
    from megatron_burst.logs import log_message
    from megatron_burst.mcore import patches
    from megatron_burst.mcore.keep import recompute, stage

    gpt.start(parallel)
    case, said, placed, wrong = Case(options=dict(num_layers=6)), [], {}, []
    truth, plain = two_steps(case, parallel, BurstConfig())
    burst = BurstConfig(keep="auto", keep_host_gib=1e-6)
    patches.switch_on_keep(burst)
    log = lambda text: said.append(text) or log_message(text)  # noqa: E731
    with mock.patch.object(stage, "log_message", log):
        got, early = two_steps(case, parallel, burst)
        wrong += differing(truth, got)
        end_step()
        got, late = two_steps(case, parallel, burst)
    wrong += differing(truth, got)

    stage._STAGES.clear()
    made = recompute.choose_modules
    with (
        mock.patch.object(stage, "host_gbs", return_value=1e6),
        mock.patch.object(
            recompute, "choose_modules", lambda *args: placed.update(made(*args)) or placed
        ),
    ):
        budget = BurstConfig(keep="auto", keep_budget_gib=3e-4, keep_host_gib=0.01)
        two_steps(case, parallel, budget)
        wrong += [f"{name} on the host in the first step" for name, x in placed.items() if x.host]
        end_step()
        got, _ = two_steps(case, parallel, budget)
    wrong += differing(truth, got)
    from megatron_burst.recompute.offload import host_memory

    taken = host_memory(torch.device("cpu"), 0.01).taken_bytes
    return wrong, [calls[1] for calls in (plain, early, late)], said, placed, taken


@pytest.mark.parametrize("world", [1, 2])
def test_auto_without_a_budget_keeps_from_the_second_step_on_and_offloads_where_copies_hide(world):
    for wrong, calls, said, placed, taken in run_ranks(
        after_a_first_step, world, Parallel(tp=world)
    ):
        assert not wrong
        plain, early, late = ({name: each[name] for name in DENSE} for each in calls)
        assert early == plain  # twice in each layer
        assert late == {name: number // 2 for name, number in plain.items()}
        assert len(said) in (0, 3) and all("recompute nothing in 6" in text for text in said[2:])
        assert max(each.host for each in placed.values()) > 1 and taken > 0, placed


def without_gradients(rank: int) -> list[float]:
    """Tokens that each layer's router has counted in a forward without gradients, in training."""
    from megatron_burst.mcore import patches
    from megatron_burst.tools import cpu_mode

    gpt.start(Parallel())
    cpu_mode.install()
    case, burst = CASES["scores"], BurstConfig(keep="all", keep_modules=("router",))
    patches.switch_on_keep(burst)
    config = config_of(model=case.model, **(FULL_RECOMPUTE | case.options))
    config.burst = burst
    model = gpt.build(config, spec_of(case))
    with torch.no_grad():
        gpt.logits_of(model, gpt.whole_batch())
    return [float(layer.mlp.router.local_tokens_per_expert.sum()) for layer in model.decoder.layers]


def test_a_forward_without_gradients_counts_no_tokens():
    """Megatron would move its experts' biases by them."""
    if why := why_lacks("scores"):
        pytest.skip(why)
    assert run_ranks(without_gradients, 1) == [[0, 0]]


def with_a_step_in_between(rank: int) -> list[str]:
    """Parameters whose gradients differ where another optimizer's step ends the first step between
    a forward and its backward. Outputs of modules have one size, so could be taken for others'."""
    from megatron_burst.mcore import patches
    from megatron_burst.mcore.keep import stage

    gpt.start(Parallel())
    case = Case(options=dict(num_layers=6, ffn_hidden_size=64))
    truth, _ = two_steps(case, Parallel(), BurstConfig())
    burst = BurstConfig(keep="auto", keep_budget_gib=5e-4, keep_host_gib=3e-4)
    patches.switch_on_keep(burst)
    acts = iter((int, end_step))
    with mock.patch.object(stage, "host_gbs", return_value=1e6):
        got, _ = two_steps(case, Parallel(), burst, between=lambda: next(acts)())
    return [key for key, x in truth.items() if key not in got or not torch.equal(x, got[key])]


def test_a_recomputation_chooses_as_its_first_pass_did():
    assert run_ranks(with_a_step_in_between, 1) == [[]]


def losses_of(rank: int, steps: int) -> tuple[list[float], list[float]]:
    """Losses of steps of Adam with full recomputation, and with what "auto" keeps of it."""
    from megatron.core.parallel_state import get_context_parallel_group
    from megatron.core.tensor_parallel import random

    from megatron_burst import burst_spec
    from megatron_burst.mcore import patches

    gpt.start(Parallel(cp=2))
    batch, found = gpt.sharded(gpt.whole_batch(), get_context_parallel_group()), []
    for burst in (BurstConfig(), BurstConfig(keep="auto", keep_host_gib=0.01)):
        patches.switch_on_keep(burst)
        config = config_of(Parallel(cp=2), **FULL_RECOMPUTE)
        config.burst = burst
        random.model_parallel_cuda_manual_seed(5)
        model, losses = gpt.build(config, burst_spec(spec_of(CASES["dense"]))), []
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(steps):
            logits = gpt.logits_of(model, batch)
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
    return tuple(found)


@pytest.mark.parametrize("steps", [12, *whole(50)])
def test_losses_of_many_steps_are_bitwise_those_of_full_recomputation(steps):
    for full, kept in run_ranks(losses_of, 2, steps):
        assert len(set(full)) == steps and kept == full


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (dict(keep="none", keep_modules=DENSE), "keep_modules must come with keep"),
        (dict(keep="auto", keep_budget_gib=1.0, keep_modules=DENSE), "must not be combined with"),
    ],
)
def test_options_that_say_nothing_are_refused(options, wanted):
    with pytest.raises(BurstError, match=wanted):
        BurstConfig(**options)


def named_wrong(rank):
    from megatron_burst.mcore import patches

    gpt.start(Parallel())
    burst = BurstConfig(keep="all", keep_modules=("linear_qkv", "linear_fc2"))
    patches.switch_on_keep(burst)
    with pytest.raises(BurstError, match=r"keep_modules, because only some modules .*; got"):
        two_steps(CASES["dense"], Parallel(), burst)


def test_a_name_that_is_no_module_is_refused_before_anything_is_computed():
    run_ranks(named_wrong, 1)
