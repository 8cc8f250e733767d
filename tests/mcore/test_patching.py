"""Patches of Megatron and the entry points that apply them: `python -m megatron_burst`, the patch
module.

Guards against a patch that is applied twice or to a wrong Megatron, and a command line that fails
with a traceback instead of one message.
"""

import contextlib
import dataclasses
import importlib
import io
import os
import re
import runpy
import sys
from types import ModuleType
from unittest import mock

import pytest

from megatron_burst.errors import BurstError
from megatron_burst.mcore import patches
from megatron_burst.mcore.patches import TABLE
from megatron_burst.patching import Patch, _owner_of, undo_all
from megatron_burst.recompute.checkpoints import CHECKPOINTS
from megatron_burst.tools import cpu_rows
from tests.mcore import gpt
from tests.mcore.test_arguments import STOCK
from tests.ranks import run_ranks

BY_FLAG = f"""{STOCK} --context-parallel-size 2 --context-parallel-impl burst
    --attention-dropout 0 --transformer-impl local --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-rope-fusion"""


def doubled(original, a, b=1):
    return 2 * original(a, b)


def patch_of(place="stub_of_megatron:add", parameters=("a", "b")):
    return Patch("a test", place, f"{__name__}:doubled", parameters, "a test")


@pytest.fixture
def stub(monkeypatch):
    """A module that stands in for one of Megatron's."""

    def add(a, b=1):
        """Sum."""
        return a + b

    module = ModuleType("stub_of_megatron")
    module.add, module.Adder = add, type("Adder", (), {"add": staticmethod(add)})
    module.Heir = type("Heir", (module.Adder,), {})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield module
    undo_all()


def test_a_patch_is_applied_once(stub):
    patch = patch_of()
    assert not patch.live and stub.add(1) == 2
    for _ in range(3):
        patch.apply()
        assert patch.live and stub.add(1) == 4 and stub.add(1, b=4) == 10
    assert stub.add.__name__ == "add" and stub.add.__doc__ == "Sum."
    assert patch_of().live  # another object for the same patch


@pytest.mark.parametrize("owner", ["Adder", "Heir"])
def test_a_patch_may_replace_a_static_method(stub, owner):
    """It remains static, callable on class and instances. What was inherited stays inherited."""
    patch = patch_of(f"stub_of_megatron:{owner}.add")
    patch.apply()
    assert patch.target == f"stub_of_megatron.{owner}.add" and patch.live
    adder = getattr(stub, owner)
    assert adder.add(1) == adder().add(1) == 4 and stub.add(1) == 2
    assert isinstance(vars(adder)["add"], staticmethod)
    assert stub.Adder.add(1) == (4 if owner == "Adder" else 2)
    undo_all()
    assert not patch.live and adder.add(1) == adder().add(1) == 2
    assert "add" in vars(stub.Adder) and "add" not in vars(stub.Heir)


def test_names_that_modules_have_for_a_function_are_rebound_and_given_back(stub, monkeypatch):
    """`from stub_of_megatron import add`, before the patch and after it."""
    early, late = ModuleType("early"), ModuleType("late")
    early.plus, early.own, original = stub.add, lambda a: a, stub.add
    monkeypatch.setitem(sys.modules, "early", early)
    monkeypatch.setitem(sys.modules, "late", late)
    patch = patch_of()
    for _ in range(2):
        patch.apply()
        late.add = stub.add
        assert early.plus is stub.add is not original and early.own(3) == 3
        undo_all()
        assert early.plus is late.add is stub.add is original and not patch.live


def negated(original, a, b=1):
    return -original(a, b)


def subtract(a, b=1):
    return a - b


def test_one_patch_may_lie_over_another(stub):
    """Both are active, each once, in whatever order they are reapplied; both are undone."""
    lower, upper = (
        Patch("a test", "stub_of_megatron:add", f"{__name__}:{name}", ("a", "b"), "a test")
        for name in ("doubled", "negated")
    )
    original = stub.add
    lower.apply()
    assert lower.live and not upper.live
    for patch in (upper, lower, upper):
        patch.apply()
        assert lower.live and upper.live and stub.add(1) == -4
    undo_all()
    assert not lower.live and not upper.live and stub.add is original


def test_what_takes_a_place_itself_takes_no_other(stub, monkeypatch):
    """One of torch's own functions, say, which has other names: they stay."""
    early = ModuleType("early")
    early.plus, original = stub.add, stub.add
    monkeypatch.setitem(sys.modules, "early", early)
    patch = Patch("a test", "stub_of_megatron:add", f"={__name__}:subtract", ("a", "b"), "a test")
    patch.apply()
    assert patch.live and stub.add is subtract and early.plus is original
    early.minus = subtract
    undo_all()
    assert not patch.live and stub.add is early.plus is original and early.minus is subtract
    assert globals()["subtract"] is subtract


def test_what_is_only_relied_on_is_checked_and_left(stub):
    original = stub.add
    Patch("a test", "stub_of_megatron:add", "", ("a", "b"), "a test").apply()
    assert stub.add is original
    with pytest.raises(BurstError, match=r"\('a',\).*got \('a', 'b'\)"):
        Patch("a test", "stub_of_megatron:add", "", ("a",), "a test").apply()


def test_what_cannot_be_imported_is_told_and_not_live():
    patch = Patch("a test", "no_such_module:add", "", (), "a test")
    assert "no_such_module" in patch.misfit() and not patch.live


def test_what_somebody_bound_over_a_patch_stays_theirs(stub):
    patch_of().apply()
    theirs = stub.add = lambda a, b=1: -a
    undo_all()
    assert stub.add is theirs


@pytest.mark.parametrize("parameters", [("a",), ("b", "a"), ("a", "b", "c")])
def test_a_patch_refuses_a_function_with_other_parameters(stub, parameters):
    """Megatron moves parameters between releases; a wrapper would pass them on wrongly."""
    message = r"stub_of_megatron\.add must have.*got \('a', 'b'\) in megatron-core \d.*; install"
    with pytest.raises(BurstError, match=message):
        patch_of(parameters=parameters).apply()
    assert stub.add(1) == 2


def test_a_patch_takes_a_wrapper_that_passes_on_any_options(stub):
    """mcore-bridge replaces Megatron's apply_rotary_pos_emb with such a wrapper."""
    own = stub.add
    stub.add = lambda a, b=1, **options: own(a, b, **options)
    patch_of().apply()
    assert patch_of().live and stub.add(1) == 4


@pytest.mark.parametrize("found", [None, 3])
def test_a_patch_refuses_what_is_no_function(stub, found):
    stub.add = found
    with pytest.raises(BurstError, match=r"stub_of_megatron\.add must have.*got None in megatron"):
        patch_of().apply()


def test_a_missing_function_is_refused_and_not_live(stub):
    del stub.add
    assert not patch_of().live
    with pytest.raises(BurstError, match=r"because a patch replaces it; got None"):
        patch_of().apply()


def test_a_patch_of_what_has_no_metadata_is_refused_in_one_sentence(stub):
    """For example a checkout on PYTHONPATH, unknown to pip."""
    patch = dataclasses.replace(patch_of(parameters=("a",)), package="no-such-package")
    with pytest.raises(BurstError, match=r"got \('a', 'b'\) in no-such-package unknown; install"):
        patch.apply()


def places():
    """Current values where Megatron and torch can be patched."""
    rows = [*patches.rows(), *patches.there(cpu_rows.TABLE)]
    places = [_owner_of(patch.place) for patch in rows if patch.becomes and not patch.te]
    return [vars(owner)[name] for owner, name in places]


def patched_and_given_back(rank):
    """Patches live after undo_all; whether each place has its old value, of the same kind."""
    before = places()
    for patch in [*patches.rows(), *patches.there(cpu_rows.TABLE)]:
        patch.apply()
    then = places()
    undo_all()
    live = [patch.target for patch in (*TABLE, *cpu_rows.TABLE) if patch.live]
    kinds = [type(x) is type(y) for x, y in zip(before, then, strict=True)]
    same = [x is y for x, y in zip(before, places(), strict=True)]
    return live, [x is y for x, y in zip(before, then, strict=True)], kinds, same


def test_all_patches_are_given_back_by_one_call():
    """CPU mode's too; some wrap others."""
    ((live, during, kinds, after),) = run_ranks(patched_and_given_back, 1)
    assert live == [] and not any(during) and all(after) and len(after) > 30
    assert sum(not kind for kind in kinds) <= 1  # torch.cuda.device_count has a cache


def other_signatures(rank):
    """Patches that do not fit a Megatron whose attention takes one more argument."""
    from megatron.core.transformer.attention import Attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    found = {}
    for owner, name in ((DotProductAttention, "forward"), (Attention, "__init__")):
        original = getattr(owner, name)

        def changed(self, sequence_ids, *arguments, **options):
            raise AssertionError

        setattr(owner, name, changed)
        misfits = {patch.target: patch.misfit() for patch in patches.rows()}
        found |= {target: text for target, text in misfits.items() if text}
        setattr(owner, name, original)
    return found


def test_a_patch_is_compared_with_what_it_was_written_for():
    """Names read off the function itself would always fit."""
    ((found),) = run_ranks(other_signatures, 1)
    assert {target.split("transformer.")[-1] for target in found} == {
        "dot_product_attention.DotProductAttention.forward",
        "attention.Attention.__init__",
    }
    assert all("('self', 'sequence_ids', " in text.split("got")[1] for text in found.values())


def composable_checkpoint(rank):
    """How often attention runs under torch's composable checkpoint, imported before `keep`."""
    import torch
    from torch.distributed._composable import checkpoint

    from megatron_burst import keep

    calls = []

    def attention(x):
        calls.append(1)
        return x.sin()

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            self.attend = keep(attention)

        def forward(self, x):
            return self.attend(self.linear(x)).exp()

    layer = checkpoint(Layer())
    layer(torch.ones(2, 4, requires_grad=True)).sum().backward()
    return len(calls)


def test_a_checkpoint_that_was_imported_by_name_runs_no_attention_again():
    assert run_ranks(composable_checkpoint, 1) == [1]


def live_patches(rank):
    """Which patches are live: at first, after `prepare`, and once burst is requested."""
    from megatron_burst.mcore import launch

    def live():
        return [patch.target for patch in patches.rows() if patch.live]

    found = [live()]
    launch.prepare([])
    found.append(live())
    for patch in patches.rows():
        patch.apply()
    return [*found, live()], [(patch.target, patch.why) for patch in patches.rows()]


def test_all_patches_are_listed_with_a_reason_and_fit_the_installed_megatron():
    """apply() would refuse if Megatron's parameters differed."""
    ((at_first, prepared, asked), listed), = run_ranks(live_patches, 1)  # fmt: skip
    flags = [
        "megatron.training.arguments.add_megatron_arguments",
        "megatron.training.arguments.validate_args",
        "megatron.core.datasets.utils.compile_helpers",
    ]
    assert at_first == [] and prepared == flags
    dispatcher = "megatron.core.transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher"
    heterogeneous = "megatron.core.transformer.heterogeneous.heterogeneous_config"
    assert asked == [
        *flags,
        "megatron.core.transformer.attention.Attention.__init__",
        "megatron.core.transformer.multi_latent_attention.MultiLatentAttention.__init__",
        f"{heterogeneous}.HeterogeneousTransformerConfig.get_config_for_layer",
        "megatron.core.transformer.transformer_config.TransformerConfig.__post_init__",
        "megatron.core.transformer.attention.Attention.__init__",
        "megatron.core.utils._get_batch_on_this_cp_rank_per_document_balancing",
        "megatron.core.models.common.embeddings.rope_utils.apply_rotary_pos_emb",
        "megatron.core.models.common.embeddings.rotary_pos_embedding.RotaryEmbedding.get_rotary_seq_len",
        "torch.utils.checkpoint.CheckpointFunction.forward",
        CHECKPOINTS[1].target,
        "megatron.core.tensor_parallel.random.CheckpointFunction.forward",
        "megatron.core.transformer.dot_product_attention.DotProductAttention.forward",
        "megatron.core.transformer.transformer_layer.TransformerLayer.forward",
        "megatron.core.recompute.checkpointed_forward",
        f"{dispatcher}._maybe_dtoh_and_synchronize",
        "megatron.core.tensor_parallel.checkpoint",
        "megatron.core.models.gpt.gpt_model.GPTModel.__init__",
        "megatron.core.models.hybrid.hybrid_model.HybridModel.__init__",
        "megatron.core.models.gpt.gpt_model.GPTModel.__init__",
        "megatron.core.models.hybrid.hybrid_model.HybridModel.__init__",
        "megatron.training.training.train_step",
        "megatron.training.training.training_log",
    ]
    relied_on = [
        "megatron.core.transformer.attention.CoreAttentionBuilder.__call__",
        "megatron.training.models.gpt.default_layer_spec",
    ]
    assert [target for target, _ in listed if target not in relied_on] == asked
    assert all(why for _, why in listed) and len(listed) == len(asked) + len(relied_on)


LAUNCHED = {  # with a checkout the helpers are made, with TransformerEngine it shards documents
    "megatron.training.arguments.add_megatron_arguments",
    "megatron.training.arguments.validate_args",
    "megatron.core.datasets.utils.compile_helpers",
    "megatron.core.transformer.attention.Attention.__init__",
    "megatron.core.transformer.multi_latent_attention.MultiLatentAttention.__init__",
    "megatron.core.utils._get_batch_on_this_cp_rank_per_document_balancing",
}


def names_of_others() -> dict:
    """All names in Megatron's and torch's loaded modules and classes, and their values."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("megatron", "torch"):
            continue
        for key, value in list(vars(module).items()):
            found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                found |= {f"{name}.{key}.{inner}": x for inner, x in list(vars(value).items())}
    return found


def rebound(before: dict) -> set[str]:
    """Functions that names referred to then but not now: where they are defined."""
    now = names_of_others()
    changed = [
        value for name, value in before.items()
        if callable(value) and name in now and now[name] is not value
    ]  # fmt: skip
    return {f"{value.__module__}.{value.__qualname__}" for value in changed}


def launched(rank):
    """What is rebound while the flag is parsed and checked and a model is built and run."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megatron_burst.mcore import launch

    gpt.start(gpt.Parallel(cp=2))
    arguments = importlib.import_module("megatron.training.arguments")
    parse = importlib.import_module("tests.mcore.test_arguments").parse
    before = names_of_others()
    launch.prepare([])
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank)}
    with mock.patch.object(arguments, "get_device_arch_version", return_value=10):
        parse(BY_FLAG)
    model = gpt.build(
        gpt.config_of(gpt.Parallel(cp=2)), get_gpt_layer_local_spec(normalization="RMSNorm")
    )
    gpt.loss_and_grads(model)
    core = type(model.decoder.layers[0].self_attention.core_attention).__name__
    return core, rebound(before)


def test_a_launched_run_binds_six_names_anew():
    assert run_ranks(launched, 2) == [("BurstCoreAttention", LAUNCHED)] * 2


def by_spec(rank):
    """The same for a model that --spec builds, without a launcher."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig

    gpt.start(gpt.Parallel(cp=2))
    before = names_of_others()
    from megatron_burst.spec import layer_spec

    config = GPTModelConfig(
        transformer=gpt.config_of(gpt.Parallel(cp=2), transformer_impl="local"),
        transformer_layer_spec=layer_spec, vocab_size=gpt.VOCAB, seq_length=gpt.SEQ,
        position_embedding_type="rope", parallel_output=False,
    )  # fmt: skip
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = GPTModelBuilder(config).build_model(groups).double()
    gpt.loss_and_grads(model)
    core = type(model.decoder.layers[0].self_attention.core_attention).__name__
    return core, rebound(before)


def test_by_spec_nothing_is_bound_anew():
    assert run_ranks(by_spec, 2) == [("BurstCoreAttention", set())] * 2


def import_the_patch_module(rank):
    sys.argv = ["own_script.py", "--context-parallel-impl", "burst", "--burst-tune", "nodes=2"]
    importlib.import_module("megatron_burst.patch")
    from megatron.training import arguments

    args = arguments.parse_args()
    return args.context_parallel_impl, args.burst_tune


def test_importing_the_patch_module_adds_the_flags():
    assert run_ranks(import_the_patch_module, 1) == [("burst", ["nodes=2"])]


def make_is_run(rank, folder):
    """Whether Megatron's compile_helpers is reached: as installed, and with a Makefile."""
    from megatron.core.datasets import utils

    from megatron_burst.mcore import launch

    calls = []

    def compile_helpers():
        calls.append(utils.__file__)

    utils.compile_helpers = compile_helpers
    launch.prepare([])
    utils.compile_helpers()
    utils.__file__ = f"{folder}/utils.py"
    utils.compile_helpers()
    return calls == [utils.__file__]


def test_helpers_are_compiled_only_where_there_is_a_makefile(tmp_path):
    """The wheel has none, and Megatron's make would end the process; a checkout has one."""
    (tmp_path / "Makefile").touch()
    assert run_ranks(make_is_run, 1, str(tmp_path)) == [True]


def run_as_module(rank, arguments):
    """What `python -m megatron_burst ARGUMENTS` prints, and its exit status or message."""
    sys.argv = ["megatron_burst", *arguments]
    status = 0
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            runpy.run_module("megatron_burst", run_name="__main__", alter_sys=True)
        except SystemExit as exit:
            status = exit.code
    return printed.getvalue(), status


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_usage_names_the_flags(arguments):
    ((printed, status),) = run_ranks(run_as_module, 1, arguments)
    assert status == 0 and printed.startswith("usage: ")
    for flag in ("impl {megatron,burst}", "--burst-intra", "--burst-backend", "--burst-tune"):
        assert flag in printed


SCRIPT = """
import sys
from megatron.core.models.backends import LocalSpecProvider
from megatron.training import arguments
import neighbour
print(__name__, neighbour.WHO, sys.argv[1:], LocalSpecProvider().core_attention().__name__)
print("burst_tune" in vars(arguments.parse_args()))
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "neighbour.py").write_text("WHO = 'beside the script'\n")
    path = tmp_path / "pretrain_own.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["no/such.py"], "error: .*argument must be a script.*got 'no/such.py', which does not ex"),
        (["/"], "error: .*got '/', which is not a file; pass the"),
        (["--burst-intra", "ring"], "error: .*must be a script.*got '--burst-intra'"),
        ([None, "--bf16"], "error: .*a CUDA GPU must be visible.*add --distributed-backend gloo"),
    ],
)
def test_a_wrong_command_line_ends_in_one_sentence(script, arguments, message):
    """sys.exit with a text prints it to stderr and ends with status 1."""
    arguments = [script if argument is None else argument for argument in arguments]
    ((printed, status),) = run_ranks(run_as_module, 1, arguments)
    assert printed == "" and "\n" not in status and re.match(message, status)


@pytest.mark.parametrize("local_rank, waits", [("0", []), ("1", [15])])
def test_what_all_ranks_refuse_is_said_by_the_first(local_rank, waits, monkeypatch):
    """torchrun ends the others while they wait; what the first does not refuse, they say."""
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr(sys, "argv", ["megatron_burst", "no/such.py"])
    monkeypatch.setitem(os.environ, "LOCAL_RANK", local_rank)
    with pytest.raises(SystemExit, match="^error: .*no/such.py"):
        runpy.run_module("megatron_burst", run_name="__main__", alter_sys=False)
    assert slept == waits


@pytest.mark.parametrize(
    "gloo", [["--distributed-backend", "gloo"], ["--distributed-backend=gloo"]]
)
def test_a_script_runs_as_python_would_run_it_and_keeps_megatrons_attention(script, gloo):
    ((printed, status),) = run_ranks(run_as_module, 1, [script, *gloo])
    assert status == 0
    assert printed.splitlines() == [
        f"__main__ beside the script {gloo} DotProductAttention",
        "True",
    ]
