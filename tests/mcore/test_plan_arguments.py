"""`--burst-plan`: options of a plan reach the run, what is given wins, other runs are refused."""

import json
from argparse import ArgumentParser

import pytest

from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from megatron_burst.mcore.arguments import validate_flags, with_flags
from megatron_burst.mcore.plan_arguments import apply_plan, read_plan

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
    "--burst-heads-per-round": 2,
    "--burst-keep": "all",
    "--burst-keep-offload": True,
    "--burst-deterministic": False,
    "--burst-fused-loss": True,
}
RUN = """--tensor-model-parallel-size 2 --context-parallel-size 8 --seq-length 1048576 --swiglu
    --context-parallel-impl burst --hierarchical-context-parallel-sizes 4 2
    --no-create-attention-mask-in-dataloader"""


def megatron_arguments(parser):
    """Some of Megatron's flags, as its parser has them."""
    for name, default in (("tensor-model", 1), ("context", 1), ("pipeline-model", 1)):
        flag = f"--{name}-parallel-size"
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--seq-length", type=int)
    parser.add_argument("--hierarchical-context-parallel-sizes", type=int, nargs="+")
    parser.add_argument("--swiglu", action="store_true")
    parser.add_argument(
        "--no-create-attention-mask-in-dataloader", action="store_false",
        dest="create_attention_mask_in_dataloader",
    )  # fmt: skip
    return parser


def run_with(path, more="", run=RUN):
    parser = with_flags(megatron_arguments)(ArgumentParser())
    args = parser.parse_args([*run.split(), "--burst-plan", str(path), *more.split()])
    apply_plan(args)
    return args


@pytest.fixture
def plan(tmp_path):
    """Writes a plan with changed flags; None takes one out."""

    def write(**changes):
        flags = FLAGS | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
        path = tmp_path / "plan.json"
        path.write_text(json.dumps({"flags": {f: v for f, v in flags.items() if v is not None}}))
        return path

    return write


def test_options_of_a_plan_reach_the_configuration(plan, caplog):
    args = run_with(plan())
    assert BurstConfig.from_args(args) == BurstConfig(
        intra="gather", heads_per_round=2, keep="all", keep_offload=True
    )
    assert args.burst_fused_loss is True
    assert "adds --burst-intra gather --burst-heads-per-round 2" in caplog.text


def test_what_is_given_wins(plan):
    args = run_with(plan(), "--burst-intra ring --burst-heads-per-round 4")
    config = BurstConfig.from_args(args)
    assert (config.intra, config.heads_per_round, config.keep) == ("ring", 4, "all")
    zero = run_with(plan(burst_loss_z_loss=0.1), "--burst-loss-z-loss 0")
    assert zero.burst_loss_z_loss == 0.0


def test_without_a_plan_nothing_happens():
    args = with_flags(megatron_arguments)(ArgumentParser()).parse_args(RUN.split())
    before = dict(vars(args))
    apply_plan(args)
    assert vars(args) == before


def test_it_is_read_before_options_are_checked(plan):
    parser = with_flags(megatron_arguments)(ArgumentParser())
    args = parser.parse_args(["--burst-plan", str(plan(seq_length=5))])
    with pytest.raises(BurstError, match="--burst-plan: the run must be the one"):
        validate_flags(lambda args, defaults: args)(args)


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"tensor_model_parallel_size": 4},
         "got --tensor-model-parallel-size 4 in the plan and 2 in the run; pass --tensor-model"),
        ({"context_parallel_size": 16}, "--context-parallel-size 16 in the plan and 8 in the run"),
        ({"seq_length": 4096}, "--seq-length 4096 in the plan and 1048576 in the run"),
        ({"hierarchical_context_parallel_sizes": [2, 4]}, r"sizes 2 4 in the plan and \[4, 2\]"),
        ({"swiglu": False}, "got no --swiglu in the plan and True in the run"),
        ({"no_create_attention_mask_in_dataloader": False}, "in the plan and True in the run"),
        ({"context_parallel_impl": "megatron"}, "--context-parallel-impl megatron in the plan"),
        ({"burst_intr": "ring"}, "got --burst-intr; write --burst-intra"),
        ({"burst_plan": "x"}, "must name flags that there are.*got --burst-plan"),
        ({"seq_len": 4}, "got --seq-len; write --seq-length"),
        ({"zzz": 4}, "got --zzz; leave it out"),
        ({"burst_intra": "nested"}, "must give values that its flags take.*invalid choice"),
        ({"burst_heads_per_round": "many"}, "must give values that its flags take.*invalid int"),
        ({"burst_intra": {"a": 1}}, 'must map flags to values.*got --burst-intra: {"a": 1}'),
    ],
)  # fmt: skip
def test_plans_of_other_runs_and_with_other_flags_are_refused(plan, changes, match):
    with pytest.raises(BurstError, match=match):
        run_with(plan(**changes))


@pytest.mark.parametrize(
    "text, match",
    [
        ("{", "must be JSON.*line 1"),
        ("[]", 'an object "flags".*got list'),
        ('{"flag": {}, "job": {}}', r"an object \"flags\".*got none, did you mean 'flag'\?; make"),
        ("{}", "got an empty object"),
        ('{"flags": [1]}', r"got flags: \[1\]"),
    ],
)
def test_files_that_are_no_plans_are_refused(tmp_path, text, match):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(BurstError, match=match):
        read_plan(tmp_path / "plan.json")
    with pytest.raises(
        BurstError, match="nowhere.json must be a file that can be read.*No such file"
    ):
        read_plan(tmp_path / "nowhere.json")
