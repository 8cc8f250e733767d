"""`--burst-plan`: a plan's decisions reach the run; explicit burst options win; other runs are
refused."""

import json
from argparse import ArgumentParser, Namespace

import pytest

from megatron_burst.config import BurstConfig, Force
from megatron_burst.errors import BurstError
from megatron_burst.mcore.args import wants_fused_loss
from megatron_burst.mcore.launch import validate_flags, with_flags
from megatron_burst.mcore.options import environment_args, with_environment
from megatron_burst.mcore.plan_file import check_plan, rates_of, read_plan
from megatron_burst.rates import Rates

FLAGS = {
    "--tensor-model-parallel-size": 2,
    "--context-parallel-size": 8,
    "--pipeline-model-parallel-size": 1,
    "--seq-length": 1048576,
    "--context-parallel-impl": "burst",
    "--hierarchical-context-parallel-sizes": [4, 2],
    "--no-create-attention-mask-in-dataloader": True,
    "--swiglu": True,
    "--burst-intra": "gather",
    "--burst-tune": "force.heads_per_round=2",
    "--burst-keep": "all",
    "--burst-keep-offload": "results",
    "--burst-invariant": False,
    "--burst-fused-loss": True,
}
RUN = """--tensor-model-parallel-size 2 --context-parallel-size 8 --seq-length 1048576 --swiglu
    --context-parallel-impl burst --hierarchical-context-parallel-sizes 4 2
    --no-create-attention-mask-in-dataloader"""


def megatron_arguments(parser):
    """Some of Megatron's flags, as in its parser."""
    for name, default in (("tensor-model", 1), ("context", 1), ("pipeline-model", 1)):
        flag = f"--{name}-parallel-size"
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--seq-length", type=int)
    parser.add_argument("--hierarchical-context-parallel-sizes", type=int, nargs="+")
    parser.add_argument("--max-position-embeddings", type=int)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--recompute-granularity")
    parser.add_argument("--swiglu", action="store_true")
    parser.add_argument(
        "--no-create-attention-mask-in-dataloader", action="store_false",
        dest="create_attention_mask_in_dataloader",
    )  # fmt: skip
    return parser


def parsed(words):
    """Arguments, without a Megatron that is patched when they are parsed."""
    return with_flags(megatron_arguments, ArgumentParser(), lambda args: None).parse_args(words)


def run_with(path, more="", run=RUN):
    return parsed([*run.split(), "--burst-plan", str(path), *more.split()])


@pytest.fixture
def plan(tmp_path):
    """Writes a plan with changed flags; None removes one."""

    def write(**changes):
        flags = FLAGS | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
        path = tmp_path / "plan.json"
        path.write_text(json.dumps({"flags": {f: v for f, v in flags.items() if v is not None}}))
        return path

    return write


def test_options_of_a_plan_reach_the_configuration(plan, caplog):
    args = run_with(plan())
    assert BurstConfig.from_args(args) == BurstConfig(
        intra="gather", force=Force(heads_per_round=2), keep="all", keep_offload="results"
    )
    assert args.burst_fused_loss is True
    said = caplog.text
    assert "adds --pipeline-model-parallel-size 1 --burst-intra gather --burst-tune" in said


def test_what_a_plan_adds_is_said_once(plan, caplog):
    """Megatron parses its arguments up to three times."""
    path = plan()
    for _ in range(3):
        run_with(path)
    assert caplog.text.count(f"{path} adds") == 1


def test_written_arguments_are_the_command_lines_and_the_scripts_own(tmp_path):
    """Also what a script sets with set_defaults, but not the parser's other defaults."""
    parser = with_flags(megatron_arguments, ArgumentParser(), lambda args: None)
    parser.set_defaults(seq_length=1024, dropout=0.0)
    path = tmp_path / "args.json"
    with pytest.raises(SystemExit) as end:
        parser.parse_args(["--seq-length", "2048", "--swiglu", "--burst-dump-args", str(path)])
    assert end.value.code == 0
    found = json.loads(path.read_text())["megatron_arguments"]
    assert found == {"seq_length": 2048, "dropout": 0.0, "swiglu": True}


def test_speeds_are_the_plans_or_the_usual_ones(tmp_path):
    path = tmp_path / "plan.json"

    def rates(found):
        path.write_text(json.dumps({"flags": {}} | found))
        return rates_of(Namespace(burst_plan=str(path)))

    assert rates_of(Namespace(burst_plan=None)) == rates({}) == Rates()
    assert rates({"rates": {"host_gbs": 50}}) == Rates(host_gbs=50)
    for wrong in ({"host_gbs": -1}, {"gbs": 1}, {"host_gbs": "fast"}):
        with pytest.raises(BurstError, match=r"plan.json: rates.* must .*; got .*; make"):
            rates({"rates": wrong})


def test_what_is_given_wins(plan):
    args = run_with(plan(), "--burst-intra ring --burst-tune force.heads_per_round=4")
    config = BurstConfig.from_args(args)
    assert (config.intra, config.force.heads_per_round, config.keep) == ("ring", 4, "all")
    zero = run_with(plan(burst_loss_z_loss=0.1), "--burst-loss-z-loss 0")
    assert zero.burst_loss_z_loss == 0.0


def test_without_a_plan_nothing_happens():
    args = parsed(RUN.split())
    plain, _ = megatron_arguments(ArgumentParser()).parse_known_args(RUN.split())
    check_plan(args)
    assert vars(args) == vars(args) | vars(plain)


def test_a_run_takes_every_flag_that_its_plan_has(plan):
    """The run need not repeat its plan, whatever the flags' kinds and defaults."""
    more = {"dropout": 0, "recompute_granularity": False, "max_position_embeddings": 1048576}
    args = run_with(plan(**more), run="")
    assert (args.tensor_model_parallel_size, args.context_parallel_size) == (2, 8)
    assert args.hierarchical_context_parallel_sizes == [4, 2] and args.seq_length == 1 << 20
    assert args.create_attention_mask_in_dataloader is False and args.swiglu is True
    assert args.context_parallel_impl == "burst" and args.burst_keep == "all"
    assert args.dropout == 0.0 and args.recompute_granularity is None


@pytest.mark.parametrize(
    "more",
    [
        "--tensor-model-parallel-size 2", "--tensor-model-parallel-size=2", "--dropout 0.0",
        "--swiglu", "--max-position-embeddings 2097152",
    ],
)  # fmt: skip
def test_what_is_said_twice_alike_or_matters_to_no_figure_is_taken(plan, more):
    path = plan(dropout=0, max_position_embeddings=1048576)
    args = run_with(path, more, run="")
    assert (args.max_position_embeddings == 2097152) == ("2097152" in more)


def test_a_default_that_is_given_is_not_taken_for_none(plan):
    """A plan never changes what the command line says, even where that equals Megatron's
    default."""
    for more in ("--tensor-model-parallel-size 1", "--tensor-model-parallel-size=1"):
        with pytest.raises(BurstError, match="size 2 in the plan and 1 in the run; leave --tensor"):
            run_with(plan(), more, run="")
    path = plan(recompute_granularity=False)
    with pytest.raises(BurstError, match="no --recompute-granularity in the plan and full in"):
        run_with(path, "--recompute-granularity full", run="")


def test_the_job_of_a_plan_is_checked_before_megatron_validates(plan):
    path = plan()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"job": {"gpus": 64}}))
    args = run_with(path)
    args.world_size = 16
    with pytest.raises(BurstError, match="world_size 64 in the plan and 16 in the run"):
        validate_flags(lambda args, defaults: args, args)


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"tensor_model_parallel_size": 4},
         "got --tensor-model-parallel-size 4 in the plan and 2 in the run; leave --tensor-model"),
        ({"context_parallel_size": 16}, "--context-parallel-size 16 in the plan and 8 in the run"),
        ({"seq_length": 4096}, "--seq-length 4096 in the plan and 1048576 in the run"),
        ({"hierarchical_context_parallel_sizes": [2, 4]}, r"sizes 2 4 in the plan and \[4, 2\]"),
        ({"swiglu": False}, "got no --swiglu in the plan and --swiglu in the run"),
        ({"no_create_attention_mask_in_dataloader": False},
         "no --no-create-.* in the plan and --no-create-attention-mask-in-dataloader in the run"),
        ({"context_parallel_impl": "megatron"}, "--context-parallel-impl megatron in the plan"),
        ({"burst_intr": "ring"}, "got --burst-intr; write --burst-intra"),
        ({"burst_plan": "x"}, "must name existing flags.*got --burst-plan"),
        ({"seq_len": 4}, "got --seq-len; write --seq-length"),
        ({"zzz": 4}, "got --zzz; leave it out"),
        ({"burst_intra": "nested"}, "must have values that its flags accept.*invalid choice"),
        ({"burst_tune": "force.pieces=no"}, "must have values.*got 'force.pieces=no'"),
        ({"burst_intra": {"a": 1}}, r"flags.--burst-intra must be.*got {'a': 1}; make"),
    ],
)  # fmt: skip
def test_plans_of_other_runs_and_with_other_flags_are_refused(plan, changes, match):
    with pytest.raises(BurstError, match=match):
        run_with(plan(**changes))


@pytest.mark.parametrize(
    "text, match",
    [
        ("{", "must be JSON.*line 1"),
        ("[]", r"must be a table.*got \[\]; make"),
        ('{"flag": {}, "job": {}}', "must hold flags.*got no 'flags'; make"),
        ("{}", "got no 'flags'; make"),
        ('{"flags": [1]}', r"flags must be a table.*got \[1\]; make"),
        ('{"flags": {"a": 1}}', "must map flags to values.*got a; make"),
    ],
)
def test_files_that_are_no_plans_are_refused(tmp_path, text, match):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(BurstError, match=match):
        read_plan(tmp_path / "plan.json")
    with pytest.raises(BurstError, match="nowhere.json must be a readable file.*No such file"):
        read_plan(tmp_path / "nowhere.json")


def test_a_framework_takes_a_plan_from_the_environment(tmp_path, monkeypatch):
    """Burst's own flags; what the variable names besides wins, tuning by tuning; the speeds too."""
    path = tmp_path / "a plan.json"  # the variable is read once for each text of it
    path.write_text(json.dumps({"flags": FLAGS, "rates": {"host_gbs": 31}}))
    monkeypatch.setenv("MEGATRON_BURST", f"plan={path}")
    taken = environment_args()
    assert BurstConfig.from_args(taken) == BurstConfig(
        intra="gather", keep="all", keep_offload="results", force=Force(heads_per_round=2)
    )
    assert wants_fused_loss(taken)
    assert rates_of(with_environment(Namespace())).host_gbs == 31.0
    monkeypatch.setenv(
        "MEGATRON_BURST",
        f"keep=half,fused_loss=0,plan={path},force.heads_per_round=4,overlap=false",
    )
    taken = environment_args()
    assert BurstConfig.from_args(taken) == BurstConfig(
        intra="gather",
        keep="half",
        keep_offload="results",
        force=Force(heads_per_round=4),
        overlap=False,
    )
    assert not wants_fused_loss(taken)


def test_a_run_follows_one_plan(plan, tmp_path, monkeypatch):
    path = plan()
    monkeypatch.setenv("MEGATRON_BURST", f"plan={path}")
    assert with_environment(Namespace(burst_plan=str(path))).burst_plan == str(path)
    with pytest.raises(BurstError, match="a run follows one plan; got .* and other.json"):
        with_environment(Namespace(burst_plan="other.json"))
    monkeypatch.setenv("MEGATRON_BURST", f"plan={tmp_path / 'none.json'}")
    with pytest.raises(BurstError, match="must be a readable file"):
        environment_args()
