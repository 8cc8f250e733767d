"""Burst's core attention in TransformerEngine specs, over a stand-in for TransformerEngine.

TransformerEngine itself needs a GPU. The stand-in has the signature of Megatron's wrapper, read
from Megatron's source, and answers "own". Guards against layers that run the wrong one of the two,
and arguments lost in between.
"""

import ast
import copy
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from megatron_burst.errors import BurstError
from megatron_burst.mcore import patches
from megatron_burst.mcore.patches import TABLE
from tests.mcore.gpt import Model, Parallel, config_of, start
from tests.ranks import run_ranks

WRAPPERS = "megatron.core.extensions.transformer_engine"
CP2 = Parallel(cp=2)
OPTIONS = dict(layer_number=1, attention_type="self", k_channels=8, v_channels=5, num_splits=1)


class StandIn(torch.nn.Module):
    """Records its arguments."""

    def __init__(
        self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None,
        softmax_scale=None, k_channels=None, v_channels=None, num_splits=None, cp_comm_type="p2p",
        pg_collection=None,
    ):  # fmt: skip
        super().__init__()
        self.given = {name: value for name, value in locals().items() if name != "self"}

    def forward(
        self, query, key, value, attention_mask, attn_mask_type, attention_bias=None,
        packed_seq_params=None, num_splits=None,
    ):  # fmt: skip
        return "own", attention_mask, num_splits

    def set_context_parallel_group(self, cp_group, cp_global_ranks, cp_stream, cp_comm_type="p2p"):
        self.rebound = cp_group, cp_global_ranks, cp_stream, cp_comm_type


def burst_class():
    """BurstTECoreAttention as defined where TransformerEngine is installed."""
    from megatron.core.extensions import transformer_engine

    from megatron_burst.mcore import core_attention, core_classes

    transformer_engine.HAVE_TE, transformer_engine.TEDotProductAttention = True, StandIn
    importlib.reload(core_attention)
    importlib.reload(core_classes)
    return core_attention


def signatures(rank):
    """Parameters of Megatron's wrapper, by method, from its source; burst's; the replacements."""
    module = burst_class()
    from megatron_burst.mcore.core_classes import burst_replacements

    path = Path(inspect.getfile(importlib.import_module("megatron.core.extensions")))
    tree = ast.parse(path.with_name("transformer_engine.py").read_text())
    (wrapper,) = [
        node for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "TEDotProductAttention"
    ]  # fmt: skip
    methods = {node.name: node for node in wrapper.body if isinstance(node, ast.FunctionDef)}
    theirs = {name: [a.arg for a in methods[name].args.args] for name in ("__init__", "forward")}
    ours = {
        name: list(inspect.signature(getattr(module.BurstTECoreAttention, name)).parameters)
        for name in theirs
    }
    stand_in = {name: list(inspect.signature(getattr(StandIn, name)).parameters) for name in theirs}
    replaced = [(a.__name__, b.__name__) for a, b in burst_replacements().items()]
    return theirs, ours, stand_in, replaced


def test_signatures_are_those_of_megatrons_wrapper():
    ((theirs, ours, stand_in, replaced),) = run_ranks(signatures, 1)
    assert stand_in == theirs and ours["forward"] == theirs["forward"]
    assert set(ours["__init__"]) - {"options"} < set(theirs["__init__"])  # the rest is passed on
    assert replaced == [
        ("DotProductAttention", "BurstCoreAttention"),
        ("StandIn", "BurstTECoreAttention"),
    ]


WITH_TE = [row for row in TABLE if row.te and row.place.startswith("megatron.")]


@pytest.mark.parametrize("row", WITH_TE, ids=lambda row: row.target)
def test_rows_that_need_transformer_engine_have_the_signatures_of_megatrons_source(row):
    """Elsewhere `Patch.misfit` compares; without TransformerEngine these rows are not checked."""
    module, _, path = row.place.partition(":")
    module = {"megatron.core.recompute": WRAPPERS}.get(module, module)  # imported from there
    (root,) = importlib.util.find_spec("megatron").submodule_search_locations
    nodes = ast.parse(Path(root, *module.split(".")[1:]).with_suffix(".py").read_text())
    for name in path.split("."):
        (nodes,) = [
            node for node in ast.walk(nodes)
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
        ]  # fmt: skip
    given = nodes.args
    names = [a.arg for a in (*given.args, given.vararg, given.kwarg) if a is not None]
    assert row.parameters == tuple(names)


def no_layer_named(rank):
    """A model of burst's spec in whose configuration no layer runs burst: the flag would be off."""
    core_attention, options = burst_class(), OPTIONS | dict(attn_mask_type=None)
    refused = []
    for kinds in (None, "p2p", ["p2p", "a2a"], ["p2p", "burst"]):
        config = config_of(Parallel(cp=2), cp_comm_type=kinds)
        try:
            core_attention.BurstTECoreAttention(config, cp_comm_type="p2p", **options)
        except BurstError as error:
            refused.append(str(error))
    core_attention.BurstTECoreAttention(config_of(cp_comm_type="p2p"), **options)  # CP=1: its own
    return refused


def test_a_model_in_which_no_layer_would_run_burst_is_refused():
    ((*refused,),) = run_ranks(no_layer_named, 1)
    assert [re.search(r"got cp_comm_type=(.*?); set it", text)[1] for text in refused] == [
        "None", "p2p", "['p2p', 'a2a']",
    ]  # fmt: skip


def layers(rank):
    """What layers of each cp_comm_type pass to TransformerEngine and return, at CP=2."""
    from megatron.core.transformer.enums import AttnMaskType

    parallel = Parallel(cp=2)
    start(parallel)
    core_attention, causal = burst_class(), AttnMaskType.causal
    options = OPTIONS | dict(attn_mask_type=causal, softmax_scale=0.5)
    query, key, value = (torch.randn(8, 2, 4, size) for size in (8, 8, 5))
    mask = torch.ones(1, 1, 8, 8)
    found = {}
    for comm_type in ("burst", "a2a", None):
        core = core_attention.BurstTECoreAttention(
            config_of(parallel), cp_comm_type=comm_type, **options
        )
        given = {name: core.given[name] for name in (*OPTIONS, "softmax_scale", "cp_comm_type")}
        if comm_type == "burst":
            plain = core_attention.BurstCoreAttention(
                config_of(parallel), 1, causal, "self", softmax_scale=0.5
            )
            out = core(query, key, value, None, causal)
            answer = torch.equal(out, plain(query, key, value, None, causal)), tuple(out.shape)
            with pytest.raises(BurstError, match=r"got one of shape \(1, 1, 8, 8\)"):
                core(query, key, value, mask, causal)
        else:
            own, passed_mask, num_splits = core(query, key, value, mask, causal, num_splits=3)
            answer = own, passed_mask is mask, num_splits
        found[comm_type] = given, answer
    with pytest.raises(BurstError, match=r"layer 1: .*got attention_dropout=0\.1"):
        config = config_of(parallel, attention_dropout=0.1)
        core_attention.BurstTECoreAttention(config, cp_comm_type="burst", **options)
    core_attention.BurstTECoreAttention(config, cp_comm_type="p2p", **options)
    whole = core_attention.BurstTECoreAttention(config_of(cp_comm_type="burst"), **options)
    answers = [whole(query, key, value, mask, causal)[0]]
    start(Parallel())  # without context parallelism Megatron passes no cp_comm_type
    for kinds, number in (("burst", 1), (["p2p", "burst"], 2), (["p2p", "burst"], 1), (None, 1)):
        config, options["layer_number"] = config_of(cp_comm_type=kinds), number
        core = core_attention.BurstTECoreAttention(config, **options)
        answers.append("own" if core.burst is None else core(query, key, value, None, causal).shape)
    return found, answers


def test_layers_run_burst_only_where_their_cp_comm_type_says_so():
    for found, (whole, *alone) in run_ranks(layers, 2):
        for comm_type, (given, _) in found.items():
            passed = "p2p" if comm_type == "burst" else comm_type
            assert given == OPTIONS | dict(softmax_scale=0.5, cp_comm_type=passed)
        assert found["burst"][1] == (True, (8, 2, 4 * 5))
        assert found["a2a"][1] == found[None][1] == ("own", True, 3)
        assert whole == "own"  # layers with whole sequences in a model with cp
        assert alone == [(8, 2, 4 * 5), (8, 2, 4 * 5), "own", "own"]


def without_a_transformer_layer(rank):
    """Whether attention built directly by a script runs burst, by its arguments besides the model's
    cp_comm_type."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    module = burst_class()
    importlib.reload(importlib.import_module("megatron_burst.mcore.specs"))
    patches.apply("attention")
    start(CP2)
    found = {}
    for latent in (False, True):
        spec = get_gpt_layer_local_spec(normalization="RMSNorm", multi_latent_attention=latent)
        own = spec.submodules.self_attention
        own.submodules.core_attention = StandIn
        config = config_of(CP2, Model(latent=latent), cp_comm_type=["a2a", "burst"])
        for number, given in ((1, {}), (2, {}), (1, dict(cp_comm_type="burst")),
                              (2, dict(cp_comm_type="a2a"))):  # fmt: skip
            built = own.module(config, own.submodules, number, AttnMaskType.causal, **given)
            core = built.core_attention
            runs_burst = isinstance(core, module.BurstTECoreAttention) and core.burst is not None
            found[latent, number, *given.values()] = runs_burst
    return found


def test_attention_without_a_transformer_layer_runs_what_it_names_or_what_the_model_does():
    """Only transformer layers pass on the cp_comm_type of their place in the model."""
    for found in run_ranks(without_a_transformer_layer, 2):
        for latent in (False, True):
            assert not found[latent, 1] and found[latent, 2]
            assert found[latent, 1, "burst"] and not found[latent, 2, "a2a"]


def rebound(rank):
    """A layer at CP=2 that evaluates on this rank alone, then trains on; what it told its base."""
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import AttnMaskType

    parallel, causal = Parallel(cp=2), AttnMaskType.causal
    start(parallel)
    module, options = burst_class(), OPTIONS | dict(attn_mask_type=causal)
    core = module.BurstTECoreAttention(config_of(parallel), cp_comm_type="burst", **options)
    torch.manual_seed(rank)
    given = *(torch.randn(8, 2, 4, size) for size in (8, 8, 5)), None, causal
    group = parallel_state.get_context_parallel_group()
    trained = core(*given)
    core.set_context_parallel_group(None, None, None)
    alone, told = core(*given), core.rebound
    query, key, value = (x.permute(1, 2, 0, 3) for x in given[:3])
    truth = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    errors = [float((alone - truth.permute(2, 0, 1, 3).flatten(-2)).abs().max())]
    core.set_context_parallel_group(group, [0, 1], "a stream", core.given["cp_comm_type"])
    errors.append(float((core(*given) - trained).abs().max()))
    with pytest.raises(BurstError, match=r"must be one group.*got a list of 2 groups; pass"):
        core.set_context_parallel_group([group, group], [0, 1], None)
    other = module.BurstTECoreAttention(config_of(parallel), cp_comm_type="a2a", **options)
    other.set_context_parallel_group(None, None, None)  # TransformerEngine's own
    return errors, told, float((alone - trained).abs().max())


def test_another_group_for_evaluations_reaches_burst():
    """Megatron-Bridge sets it (0.6.2, training/eval_context_parallel_rebinding.py:137)."""
    for errors, told, difference in run_ranks(rebound, 2):
        assert told == (None, None, None, "p2p")
        assert max(errors) < 1e-6 < difference


class Gemma(StandIn):
    """Like Gemma's in Megatron-Bridge: configures each layer itself."""

    def __init__(self, config, layer_number, *arguments, **options):
        config = copy.deepcopy(config)
        config.window_size = (2, 0) if layer_number == 1 else None
        super().__init__(config, layer_number, *arguments, **options)


class Ministral(StandIn):
    """Like Ministral's: scales queries by the positions that it assumes."""

    def forward(self, query, *arguments, **options):
        return super().forward(query * torch.arange(len(query)), *arguments, **options)


def sub_classes(rank):
    """Whether layers of a subclass have its windows; the messages about others."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import ModuleSpec

    parallel, causal = Parallel(cp=2), AttnMaskType.causal
    start(parallel)
    module = burst_class()
    specs = importlib.reload(importlib.import_module("megatron_burst.mcore.specs"))
    core = specs.burst_spec(ModuleSpec(module=Gemma)).module
    assert specs.burst_spec(ModuleSpec(module=core)).module is core
    assert issubclass(core, Gemma) and issubclass(core, module.BurstTECoreAttention)
    options = OPTIONS | dict(attn_mask_type=causal, cp_comm_type="burst")
    given = *(torch.randn(8, 2, 4, size) for size in (8, 8, 5)), None, causal
    same = []
    for number, window in ((1, (2, 0)), (2, None)):
        found = core(config_of(parallel), **options | dict(layer_number=number))(*given)
        config = config_of(parallel, window_size=window)
        truth = module.BurstTECoreAttention(config, **options)(*given)
        same.append(torch.equal(found, truth))
    said = []
    for ask in (
        lambda: specs.burst_spec(ModuleSpec(module=Ministral)),
        lambda: specs._check_core(Ministral, config_of(parallel), 1, causal, "self"),
    ):
        with pytest.raises(BurstError) as raised:
            ask()
        said.append(str(raised.value))
    return same, said


def test_sub_classes_of_transformer_engines_attention_run_burst_or_are_refused():
    for same, (spec, layer) in run_ranks(sub_classes, 2):
        assert same == [True, True]
        assert "got Ministral in ModuleSpec" in spec
        assert "that does not override forward" in layer and "got Ministral in layer 1" in layer
