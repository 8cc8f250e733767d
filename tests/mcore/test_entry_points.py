"""The entry points of burst: the flag, the patch module, --spec, burst_spec. Each runs burst or
refuses.

Guards against a flag that is accepted but has no effect, checks that only some entry points have,
and an unsupported or mixed Megatron release that is accepted.
"""

import copy
import importlib
import io
import os
import subprocess
import sys
from argparse import Namespace
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

import pytest

from megatron_burst import installed
from megatron_burst.errors import BurstError
from megatron_burst.installed import Megatron, find_megatron, require_megatron, version_of
from megatron_burst.tools.doctor.report import Status
from megatron_burst.tools.doctor.software import check_hook_points, software
from tests.mcore.gpt import SEQ, VOCAB, Parallel, config_of
from tests.mcore.gpt import start as start_groups
from tests.mcore.lacking import needs
from tests.mcore.test_arguments import BURST, STOCK, parse
from tests.ranks import run_ranks
from tests.said import hearing

ROOT = Path(__file__).parents[2]
CP2 = f"{STOCK} --context-parallel-size 2"
BY_SPEC = f"{CP2} --cp-comm-type burst --attention-dropout 0"
NO_MASK = "--no-create-attention-mask-in-dataloader"


# ---- names that a script has bound before the patch -------------------------------------------


def names_bound_before(rank):
    """What a script's early `from ... import` gets, once it has imported the patch module."""
    own = ModuleType("own_script")
    sys.modules[own.__name__] = own
    exec("from megatron.training.arguments import parse_args, validate_args as check", vars(own))
    os.environ |= {"WORLD_SIZE": "4", "RANK": "0"}
    sys.argv = ["own_script.py", *BURST.split()]
    importlib.import_module("megatron_burst.patch")
    args = own.parse_args()
    with redirect_stdout(io.StringIO()):
        own.check(args, {})
    with pytest.raises(BurstError, match="cannot run with --use-kitchen-attention"):
        own.check(Namespace(**vars(args) | {"use_kitchen_attention": True}), {})
    return args.cp_comm_type, args.create_attention_mask_in_dataloader, args.transformer_impl


@needs("training")
def test_names_that_were_bound_before_the_patch_are_rebound():
    """As in training/initialize.py of 0.17; the last two are burst's and the CPU mode's."""
    assert run_ranks(names_bound_before, 1) == [(["burst"], False, "local")]


def patch_module_too_late(rank):
    """A script that made Megatron ignore unknown flags."""
    from megatron.training import global_vars

    global_vars._GLOBAL_ARGS = Namespace(**parse(CP2, validate=False)[0])
    sys.argv = ["own_script.py", *BURST.split()]
    with pytest.raises(BurstError, match=r"\.patch: .*got --context-parallel-impl in arg"):
        importlib.import_module("megatron_burst.patch")


@needs("training")
def test_the_patch_module_must_come_before_arguments_are_parsed():
    run_ranks(patch_module_too_late, 1)


def flag_without_its_check(rank):
    """The message when models are built where the flag was parsed but not validated."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import build_module

    from megatron_burst.mcore.launch import prepare

    start_groups(Parallel(cp=2))
    early = get_gpt_layer_local_spec(normalization="RMSNorm")
    prepare([])
    parse(f"{CP2} --context-parallel-impl burst", validate=False)
    late = get_gpt_layer_local_spec(normalization="RMSNorm")
    said = []
    for spec, kind in ((early, "p2p"), (late, "p2p"), (late, None)):
        config = config_of(Parallel(cp=2), cp_comm_type=kind)
        with pytest.raises(BurstError) as refused:
            build_module(spec, config=config, layer_number=1)
        said.append(str(refused.value))
    config = config_of(Parallel(cp=2), cp_comm_type="burst")
    layers = [build_module(spec, config=config, layer_number=1) for spec in (early, late)]
    whole, encoder = config_of(Parallel(), cp_comm_type=None), copy.deepcopy(late)
    build_module(late, config=whole, layer_number=1)  # a tower
    start_groups(Parallel())
    encoder.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.no_mask
    build_module(encoder, config=whole, layer_number=1)
    with pytest.raises(BurstError, match=r"; got cp_comm_type=None; set it in your own Trans"):
        build_module(late, config=whole, layer_number=1)
    return said, [type(layer.self_attention.core_attention).__name__ for layer in layers]


@needs("training")
def test_a_flag_that_was_parsed_and_never_checked_does_not_stay_off():
    """validate_args may be bound where no patch finds it: in a dict, a closure, a class. At a
    context parallel size of 1 too, but not of towers."""
    for said, cores in run_ranks(flag_without_its_check, 2):
        assert ["got cp_comm_type=p2p; " in text for text in said] == [True, True, False]
        assert "got cp_comm_type=None; " in said[2] and cores == ["BurstCoreAttention"] * 2
        assert not any("when instantiating" in text for text in said)


def layers_that_cannot_run_burst(rank):
    """The message about T5's layers under the flag."""
    from megatron.core.models.T5 import t5_spec
    from megatron.core.transformer.spec_utils import build_module

    from megatron_burst.mcore import patches

    start_groups(Parallel(cp=2))
    patches.apply("attention")
    said = []
    for spec in (
        t5_spec.encoder_model_with_local_spec(),
        t5_spec.decoder_model_with_local_spec(),
    ):
        with pytest.raises(BurstError) as refused:
            build_module(spec, config=config_of(Parallel(cp=2)), layer_number=1)
        said.append(str(refused.value))
    return said


def test_what_burst_cannot_run_is_not_sent_to_burst_spec():
    """T5: encoder masks; keys of another sequence in the decoder."""
    for encoder, decoder in run_ranks(layers_that_cannot_run_burst, 2):
        assert encoder.endswith("got attn_mask_type=arbitrary; train this model without burst")
        assert "DotProductAttention" in decoder or "attention_type=cross" in decoder


def attention_without_the_flag(rank):
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_burst.mcore.launch import prepare
    from megatron_burst.tools import cpu_mode

    cpu_mode.install()
    start_groups(Parallel(cp=2))
    prepare([])
    layer = dict(layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self")
    with pytest.raises(AssertionError):
        DotProductAttention(config=config_of(Parallel(cp=2), cp_comm_type="p2p"), **layer)
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank)}
    return [parse(f"{flags} --transformer-impl local")[1] for flags in (CP2, STOCK, BY_SPEC)]


@needs("training")
def test_context_parallelism_that_needs_the_flag_says_so():
    """Megatron asserts that only TransformerEngine has it; a CPU has no TransformerEngine."""
    hint = "got --context-parallel-size 2; pass --context-parallel-impl burst"
    first, second = run_ranks(attention_without_the_flag, 2)
    assert [hint in said for said in first] == [True, False, False]
    assert not any(hint in said for said in second)


# ---- by spec ------------------------------------------------------------------------------------


def built_by_spec(flags: str, spec=None, **overrides):
    """Core attentions of a model that Megatron builds under these flags, and the messages."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import global_vars
    from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig

    from megatron_burst.spec import layer_spec

    global_vars._GLOBAL_ARGS = Namespace(**parse(flags, validate=False)[0])
    config = config_of(Parallel(cp=2), transformer_impl="local", **overrides)
    model_config = GPTModelConfig(
        transformer=config, transformer_layer_spec=spec or layer_spec, vocab_size=VOCAB,
        seq_length=SEQ, position_embedding_type="rope", parallel_output=False,
    )  # fmt: skip
    with hearing() as lines:
        model = GPTModelBuilder(model_config).build_model(
            ProcessGroupCollection.use_mpu_process_groups()
        )
    cores = [layer.self_attention.core_attention for layer in model.decoder.layers]
    return [type(core).__name__ for core in cores], lines


REFUSED_BY_SPEC = {
    "--reset-attention-mask": "reset_attention_mask=True; pass --dataloader-inter-document-mask",
    "--dataloader-inter-document-masking --mtp-num-layers 1": "dataloader_inter_document_masking=",
    "--hybrid-context-parallel": "hybrid_context_parallel=True; leave it out",
    "--cuda-graph-impl local --cuda-graph-scope full_iteration": "cuda_graph_impl=local; capture",
    "--flash-attention-version 3": "flash_attention_version=3; leave it out",
}


def refused_by_spec(rank):
    start_groups(Parallel(cp=2))
    for flags, got in REFUSED_BY_SPEC.items():
        with pytest.raises(BurstError, match=f"^burst core attention: .*got {got}"):
            built_by_spec(f"{BY_SPEC} {NO_MASK} {flags}")
    with pytest.raises(BurstError, match=f"mask_in_dataloader=True; pass {NO_MASK}$"):
        built_by_spec(BY_SPEC)
    with pytest.raises(BurstError, match="got --mtp-num-layers 1; start the script with python -m"):
        built_by_spec(f"{BY_SPEC} {NO_MASK}", mtp_num_layers=1)
    with pytest.raises(BurstError, match=r"with --cuda-graph-impl.*full_iteration; capture layers"):
        built_by_spec(f"{BY_SPEC} {NO_MASK}", cuda_graph_impl="full_iteration")
    os.environ["WORLD_SIZE"] = "2"
    with pytest.raises(AssertionError, match=r"multiple of 2 \* context-parallel-size"):
        parse(f"{BY_SPEC} {NO_MASK} --seq-length 62")
    # pretrain_vlm.py sets seq_length to its encoder's tokens before it builds the model
    flags = f"{BY_SPEC} {NO_MASK} --seq-length"
    return [built_by_spec(f"{flags} {length}") for length in (577, 64)]


@needs("--spec")
def test_by_spec_the_same_is_refused_as_by_the_flag():
    """When the model is built: before anything is computed, and on every rank."""
    first, other = run_ranks(refused_by_spec, 2)
    core = ["BurstCoreAttention"] * 2
    assert [cores for cores, _ in (*first, *other)] == [core] * 4
    assert not other[0][1] + other[1][1] + first[1][1]
    assert not first[0][1]  # logged when the first refused model was built


def release_said(rank):
    """Messages while a process's first model is built, and the second."""
    from megatron.training import global_vars

    start_groups(Parallel(cp=2))
    flags = f"{BY_SPEC} {NO_MASK} --spec megatron_burst.spec layer_spec"
    lines = [built_by_spec(flags)[1] for _ in range(2)]
    assert global_vars.get_args().spec is None  # as checkpoints save it, for --use-checkpoint-args
    built_by_spec(f"{BY_SPEC} {NO_MASK} --spec own.specs spec_of_mine")
    assert global_vars.get_args().spec == ["own.specs", "spec_of_mine"]
    return lines


@needs("--spec")
def test_a_run_says_once_which_megatron_it_runs():
    megatron = find_megatron()
    line = f"burst attention: Megatron-Core {megatron.version} in {megatron.folder}"
    assert run_ranks(release_said, 2) == [[[line], []], [[], []]]


def spec_and_flag(rank):
    """Models of --spec with the flag, of a spec passed through burst_spec twice; of MTP."""
    from megatron_burst import burst_spec
    from megatron_burst.mcore.launch import prepare
    from megatron_burst.spec import layer_spec

    start_groups(Parallel(cp=2))
    prepare([])
    flags = f"{BY_SPEC} {NO_MASK}"
    found = [built_by_spec(flags, lambda config: burst_spec(layer_spec(config)))[0]]
    flags += " --context-parallel-impl burst"
    found.append(built_by_spec(flags)[0])
    found.append(built_by_spec(flags, mtp_num_layers=1)[0])
    return found


@needs("MTP")
@needs("--spec")
def test_burst_twice_is_burst():
    assert run_ranks(spec_and_flag, 2) == [[["BurstCoreAttention"] * 2] * 3] * 2


# ---- Megatron's release -------------------------------------------------------------------------


def tree(folder: Path, release: str | None, packages=("core", "training")) -> Path:
    """A checkout of Megatron-LM without pip's metadata: just enough to tell its release."""
    for name in packages:
        (folder / "megatron" / name).mkdir(parents=True)
        (folder / "megatron" / name / "__init__.py").write_text("raise ImportError('too far')")
    if release and "core" in packages:
        info = folder / "megatron" / "core" / "package_info.py"
        info.write_text(f"__version__ = {release!r}\n__version__ += '+1a2b3c4'\n")
    return folder


def python(*arguments: str, path: str) -> subprocess.CompletedProcess:
    """A Python with more on its path, outside this folder."""
    environment = os.environ | {"PYTHONPATH": f"{path}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd="/"
    )


ENTRY_POINTS = {
    "python -m megatron_burst": None,
    "import megatron_burst.patch": "import megatron_burst.patch",
    "megatron_burst.spec": "import megatron_burst.spec",
    "megatron_burst.spec ": "from megatron_burst import burst_spec",
}


@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_another_release_is_refused_at_every_entry_point(entry, tmp_path):
    """Before any of it is imported; without metadata too."""
    folder = tree(tmp_path / "Megatron-LM", "0.15.3")
    (folder / "pretrain_gpt.py").write_text("import megatron.core")
    script = ["-m", "megatron_burst", str(folder / "pretrain_gpt.py"), "--distributed-backend=gloo"]
    code, path = ENTRY_POINTS[entry], str(folder)
    done = python("-c", code, path=path) if code else python(*script, path="")
    said = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and said.count("Megatron-Core") == 2
    assert f"{entry.strip()}: Megatron-Core must be 0.16 or newer, " in said
    assert f"; got Megatron-Core 0.15.3 in {folder}/megatron; " in said
    assert code or len(done.stderr.splitlines()) == 1  # the launcher's own: no traceback


@pytest.mark.parametrize("release", [None, "0.21.0rc1", "1.4"])
def test_a_release_that_is_not_known_is_tried(release, tmp_path):
    """Its functions are compared one by one: see test_patching.py."""
    code = "from megatron_burst.installed import require_megatron; print(require_megatron('this'))"
    done = python("-c", code, path=str(tree(tmp_path / "a", release)))
    assert done.stdout.startswith(f"Megatron-Core {release or 'unknown'} in {tmp_path}/a")


def test_parts_of_two_megatrons_are_refused(tmp_path):
    one = tree(tmp_path / "one", "0.19.1", ["core"])
    other = tree(tmp_path / "other", None, ["training"])
    done = python("-c", "import megatron_burst.spec", path=f"{one}:{other}")
    said = done.stderr.splitlines()[-1]
    assert f"; got {one}/megatron and {other}/megatron; put one of them first" in said


def test_without_megatron_every_entry_point_says_so():
    code = "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]; import {}"
    done = python("-c", code.format("megatron_burst.spec"), path="")
    said = done.stderr.splitlines()[-1]
    assert "megatron.core must be importable, " in said and "; got none on sys.path; " in said


SCRIPT = """
import megatron.core, megatron.training
print(megatron.core.__file__)
print(megatron.training.__file__)
"""


@needs("training")
def test_a_checkouts_script_runs_with_its_own_megatron(tmp_path):
    """From another folder, next to an installed wheel: nothing of the wheel is mixed in."""
    (tmp_path / "megatron").symlink_to(find_megatron().folder)
    (tmp_path / "pretrain_own.py").write_text(SCRIPT)
    script = str(tmp_path / "pretrain_own.py")
    done = python("-m", "megatron_burst", script, "--distributed-backend", "gloo", path="")
    assert done.stdout.split() == [
        f"{tmp_path}/megatron/core/__init__.py", f"{tmp_path}/megatron/training/__init__.py",
    ], done.stderr[-2000:]  # fmt: skip


def test_versions_are_told_without_metadata(monkeypatch):
    assert version_of("no-such-package") == "unknown"
    assert version_of("megatron-core") == find_megatron().version == software()["megatron-core"]
    require_megatron("this test")
    monkeypatch.setattr(installed, "_place_of", lambda package: None)
    assert find_megatron() is None and version_of("megatron-core") == "unknown"
    assert "megatron-core" not in software()


@pytest.mark.parametrize("release", ["0.15.3"])
def test_doctor_tells_a_megatron_that_is_refused(release, monkeypatch):
    other = Megatron(release, Path("/checkout/megatron"), Path("/checkout/megatron"))
    monkeypatch.setattr(installed, "find_megatron", lambda: other)
    found = check_hook_points()
    assert found.status is Status.FAIL and found.change
    assert found.what.endswith(f"got Megatron-Core {release} in /checkout/megatron")
