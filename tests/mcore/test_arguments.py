"""Burst's flags in Megatron's own parser: meaning, refusals, implied settings.

Each test runs Megatron's parser in a separate process, so that patches cannot leak. Guards against
Megatron flags under which burst would be wrong or off, and any change to runs without burst.
"""

import contextlib
import io
import os
import re
import shlex
import sys
from argparse import ArgumentParser, Namespace
from functools import cache

import pytest

from megatron_burst.config import BurstConfig, Force
from megatron_burst.errors import BurstError
from megatron_burst.mcore import patches
from megatron_burst.mcore.args import add_flags, check_args
from megatron_burst.mcore.refusals import TABLE
from tests.mcore import gpt  # noqa: F401  (its processes start with Megatron loaded)
from tests.mcore.lacking import needs
from tests.ranks import run_ranks
from tests.said import hearing

pytestmark = needs("training")
STOCK = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --train-iters 3
    --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 --lr 1e-2
    --tokenizer-type NullTokenizer --vocab-size 127 --distributed-backend gloo"""
CP4 = f"{STOCK} --context-parallel-size 4"
ASKED = "--context-parallel-impl burst"
BURST = f"{CP4} {ASKED} --attention-dropout 0"


def parse(flags: str, validate: bool = True) -> tuple[dict, str]:
    """Megatron's arguments, and what was printed or logged meanwhile."""
    from megatron.training import arguments

    sys.argv = ["pretrain_gpt.py", *shlex.split(flags)]
    with contextlib.redirect_stdout(io.StringIO()) as printed, hearing() as lines:
        args = arguments.parse_args()
        if validate:
            arguments.validate_args(args, {})
    return vars(args), "\n".join([printed.getvalue(), *lines])


def start(rank: str = "0", patched: bool = True) -> None:
    """Act as rank `rank` of four, on the CPU, with or without burst's patches."""
    from megatron_burst.mcore import launch
    from megatron_burst.tools import cpu_mode

    os.environ |= {"WORLD_SIZE": "4", "RANK": rank}
    cpu_mode.install()
    if patched:
        launch.prepare([])


def values_of_flags(rank):
    start()
    every = "--burst-tune nodes=2,force.circulate=q --burst-backend reference"
    every += " --burst-tune deterministic=true"
    every += " --burst-intra gather --burst-tune force.heads_per_round=3,nccl_ctas=8"
    every += " --burst-inter ring"
    every += " --burst-tune force.transfer=send,force.grad_wire=input,timeout_s=12.5"
    every += " --burst-tune force.resend=never"
    configs = [BurstConfig.from_args(_namespace(f"{CP4} {flags}")) for flags in (every, "")]
    legal = {}
    flags = ("impl", "intra", "inter", "backend")
    for flag in (f"{'context-parallel' if f == 'impl' else 'burst'}-{f}" for f in flags):
        with contextlib.redirect_stderr(io.StringIO()) as said, pytest.raises(SystemExit) as exit:
            parse(f"{CP4} --{flag} bruts", validate=False)
        assert exit.value.code == 2
        choices = re.search(r"invalid choice: 'bruts' \(choose from (.*)\)", said.getvalue())
        legal[flag] = re.findall(r"\w+", choices[1])
    return configs, parse(CP4, validate=False)[0]["context_parallel_impl"], legal


def _namespace(flags):
    return Namespace(**parse(flags, validate=False)[0])


def test_flags_have_the_legal_values_and_become_a_config():
    ((given, default), impl, legal), = run_ranks(values_of_flags, 1)  # fmt: skip
    assert given == BurstConfig(
        intra="gather",
        inter="ring",
        force=Force(
            heads_per_round=3, circulate="q", grad_wire="input", transfer="send", resend="never"
        ),
        backend="reference",
        deterministic=True,
        nodes=2,
        nccl_ctas=8,
        timeout_s=12.5,
    )
    assert default == BurstConfig() and impl == "megatron"
    assert legal.pop("burst-backend")[:1] == ["auto"]
    assert legal == {
        "context-parallel-impl": ["megatron", "burst"],
        "burst-intra": ["auto", "ring", "gather", "a2a"],
        "burst-inter": ["auto", "ring", "a2a"],
    }


def arguments_without_burst(rank, patched):
    start(patched=patched)
    values, printed = parse(CP4)
    values = {name: repr(value) for name, value in values.items()}
    return values, printed.count("burst attention"), builds_burst()


def builds_burst():
    """Whether Megatron's layers would build burst if their configuration asks for it."""
    return [patch.live for patch in patches.rows("attention", "asked")]


def test_without_burst_no_argument_of_megatrons_is_changed():
    ((stock, _, attention),) = run_ranks(arguments_without_burst, 1, False)
    ((ours, said, ours_attention),) = run_ranks(arguments_without_burst, 1, True)
    parser = ArgumentParser(add_help=False)
    add_flags(parser)
    added = set(vars(parser.parse_args([])))
    assert "burst_intra" in added and added.isdisjoint(stock)
    assert {name: ours[name] for name in ours.keys() - added} == stock and len(stock) > 500
    assert attention == ours_attention == [False] * 3 and said == 0


def forced(rank, flags, as_rank):
    start(as_rank)
    values, printed = parse(flags)
    lines = [line for line in printed.splitlines() if line.startswith("burst attention")]
    names = ("cp_comm_type", "create_attention_mask_in_dataloader")
    return [values[n] for n in names], lines, builds_burst()


GIVEN = f"{BURST} --cp-comm-type burst --no-create-attention-mask-in-dataloader"


@pytest.mark.parametrize(
    "flags, as_rank, lines",
    [
        (BURST, "0", ["adds --cp-comm-type burst --no-create-attention-mask-in-dataloader"]),
        (f"{BURST} --cp-comm-type burst", "0", ["adds --no-create-attention-mask-in-dataloader"]),
        (f"{GIVEN} --cp-comm-type p2p", "0", ["replaces --cp-comm-type p2p by burst"]),
        (BURST, "1", []),
        (GIVEN, "0", []),
    ],
)
def test_what_follows_from_burst_is_set_and_said_once(flags, as_rank, lines):
    """Otherwise layers would run Megatron's ring, and the loader would make an s x s mask."""
    ((values, said, attention),) = run_ranks(forced, 1, flags, as_rank)
    assert values == [["burst"], False] and attention == [True] * 3
    assert said == [f"burst attention: {flags}" for flags in lines]


def kept(rank, flags):
    start()
    with hearing() as lines, contextlib.suppress(BurstError):  # of dropout: it is said before that
        parse(flags)
    return [line for line in lines if "not selected" in line]


@pytest.mark.parametrize(
    "flags, count",
    [(CP4, 1), (f"{CP4} --cp-comm-type burst", 0), (BURST, 0), (STOCK, 0)],
)
def test_what_is_kept_without_burst_is_said_to_be_megatrons(flags, count):
    (said,) = run_ranks(kept, 1, f"{flags} --burst-keep all")
    assert len(said) == count and all(ASKED in line for line in said)


def last_impl(rank):
    start()
    values, _ = parse(f"{BURST} --context-parallel-impl megatron", validate=False)
    off = values["context_parallel_impl"], builds_burst()
    values, _ = parse(f"{CP4} --context-parallel-impl megatron {ASKED}", validate=False)
    return [off, (values["context_parallel_impl"], builds_burst())]


def test_of_two_implementations_the_last_wins():
    """As of any repeated flag: a launcher's default and what is typed after it."""
    ((off, on),) = run_ranks(last_impl, 1)
    assert off == ("megatron", [False] * 3) and on == ("burst", [True] * 3)


REFUSED = {  # with the value shown in the message
    "--seq-length 60": "--seq-length 60 and --context-parallel-size 4",
    "--burst-tune nodes=3": "--burst-tune nodes=3 and --context-parallel-size 4",
    "--cp-comm-type a2a": "--cp-comm-type a2a",
    "--hierarchical-context-parallel-sizes 2 2": "--hierarchical-context-parallel-sizes 2 2",
    "--cp-comm-type p2p p2p": "--cp-comm-type p2p p2p",
    "--attention-dropout 0.1": "attention_dropout=0.1",
    "--reset-attention-mask": "reset_attention_mask=True",
    "--dataloader-inter-document-masking --mtp-num-layers 1": (
        "dataloader_inter_document_masking=True"
    ),
    "--hybrid-context-parallel": "hybrid_context_parallel=True",
    "--recompute-modules mlp --recompute-granularity selective": "--recompute-modules mlp",
    "--use-kitchen-attention": "use_kitchen_attention=True",
    "--cuda-graph-impl local --cuda-graph-scope full_iteration": "cuda_graph_impl=local",
    "--enable-cuda-graph --cuda-graph-scope full_iteration": "enable_cuda_graph=True",
    "--external-cuda-graph --cuda-graph-scope full_iteration": "external_cuda_graph=True",
    "--log-max-attention-logit --external-cuda-graph": "log_max_attention_logit=True",
    "--qk-clip --enable-cuda-graph": "qk_clip=True",
    "--burst-log --external-cuda-graph": "burst_log=True",
    "--cuda-graph-warmup-steps 0 --external-cuda-graph": "cuda_graph_warmup_steps=0",
    "--flash-attention-version 3": "flash_attention_version=3",
    "--experimental-attention-variant dsa": "experimental_attention_variant=dsa",
    "--hybrid-layer-pattern M-M-": "--hybrid-layer-pattern M-M-",
    "--batch-invariant-mode": "batch_invariant_mode=True",
    "--transformer-impl inference_optimized": "transformer_impl=inference_optimized",
}


@cache
def megatrons_flags() -> frozenset[str]:
    from megatron.training import arguments

    parser = arguments.add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    return frozenset(parser._option_string_actions)


def has_flag(flags: str) -> bool:
    """Whether this Megatron has the first of these flags."""
    return flags.split()[0] in megatrons_flags()


def refuse_all(rank):
    """Refuse each flag that this Megatron has on validation, before Megatron's own checks; of
    repeated flags the last counts."""
    start()
    there = [flags for flags in REFUSED if has_flag(flags)]
    for flags, got in ((flags, REFUSED[flags]) for flags in there):
        flag = flags.split()[0]
        message = rf"^--context-parallel-impl burst: .* {flag}, .*; got {re.escape(got)}; "
        with pytest.raises(BurstError, match=message):
            parse(f"{BURST} {flags}")
        with pytest.raises(BurstError):  # not only the first time
            parse(f"{BURST} {flags}")
        assert parse(f"{CP4} {flags}", validate=False)  # Megatron's flags stay legal without burst
    return there


@pytest.fixture(scope="module")
def refused():
    return run_ranks(refuse_all, 1)[0]


@pytest.mark.parametrize("flags", REFUSED)
def test_refuses_flags_under_which_burst_would_be_wrong_or_off(refused, flags):
    if flags not in refused:
        pytest.skip(f"this Megatron has no {flags.split()[0]}")


def test_every_flag_that_is_refused_has_a_case():
    """Some belong to layers only, or to frameworks' configurations: no flag sets them; one came
    after 0.19."""
    of_layers = {"attention_type", "attn_mask_type", "attention_cp_layout"}
    of_layers |= {"fp8_dot_product_attention", "fp8_multi_head_attention"}
    of_layers |= {"apply_rope_fusion", "mamba_state_dim"}  # refused by sizes: see below
    of_layers |= {"burst_check", "burst_nan_guard"}
    ours = {"command", "run", "attention"}
    names = {row.argument for row in TABLE if ours & {*row.features.split()}} - of_layers
    names = names - {"burst_nodes"} | {"burst_tune"}
    assert {f"--{name.replace('_', '-')}" for name in names} == {
        flags.split()[0] for flags in REFUSED
    }


def overflow(rank):
    """Check the arguments of a long sample when attention is built; on CPUs RoPE is never fused."""
    start()
    long = f"{BURST} --position-embedding-type rope --seq-length {1 << 26}"
    args = parse(f"{long} --max-position-embeddings {1 << 26} --no-rope-fusion")[0]
    check_args(Namespace(**args))
    with pytest.raises(BurstError, match="cannot run with fused RoPE.* pass --no-rope-fusion"):
        check_args(Namespace(**args | {"apply_rope_fusion": True}))


def test_fused_rope_is_refused_where_its_offsets_would_overflow():
    run_ranks(overflow, 1)


def one_rank(rank):
    """What remains of a script's arguments when its context parallel size is 1, and what is
    printed."""
    start()
    given = f"{BURST} --context-parallel-size 1 --seq-length 63 --burst-intra gather"
    values, printed = parse(f"{given} --attention-backend flash")
    kept = [values[name] for name in ("context_parallel_size", "seq_length", "cp_comm_type")]
    lines = [line for line in printed.splitlines() if "--attention-backend" in line]
    with pytest.raises(BurstError, match="among cudnn under --attention-backend fused.*flash;"):
        parse(f"{given} --attention-backend fused --burst-backend flash")
    with pytest.raises(BurstError, match="--attention-backend.*=local; leave it out"):
        parse(f"{given} --attention-backend local")
    return kept, lines


def test_a_script_may_pass_a_context_parallel_size_of_one_and_a_kernel():
    (((*sizes, kind), lines),) = run_ranks(one_rank, 1)
    assert sizes == [1, 63] and kind == ["burst"]
    assert len(lines) == 1 and "flash selects the" in lines[0] and "fa4,flash" in lines[0]


def yaml_of(rank):
    """Megatron's --yaml-cfg replaces the parsed flags, including burst's."""
    from megatron.training import yaml_arguments

    start()
    loaded = Namespace(**parse(CP4, validate=False)[0])
    yaml_arguments.load_yaml = lambda yaml_path: loaded  # needs PyYAML
    for flag in ("--context-parallel-impl burst", "--context-parallel-impl=burst"):
        for file in ("--yaml-cfg a.yaml", "--yaml-cfg=a.yaml"):
            with pytest.raises(BurstError, match=r"cannot run with --yaml-cfg.*got --yaml-cfg"):
                parse(f"{CP4} {flag} {file}", validate=False)
    return parse(f"{CP4} --yaml-cfg a.yaml", validate=False)[0] is vars(loaded)


def test_refuses_a_yaml_file_that_would_drop_the_flag():
    assert run_ranks(yaml_of, 1) == [True]


LOSS = f"{STOCK} --burst-fused-loss"
LOSS_REFUSED = {
    "--fp16-lm-cross-entropy": "got fp16_lm_cross_entropy=True; ",
    "--defer-embedding-wgrad-compute": "got defer_embedding_wgrad_compute=True; ",
    "--overlap-moe-expert-parallel-comm": "got overlap_moe_expert_parallel_comm=True; ",
    "--cuda-graph-impl local --cuda-graph-scope full_iteration": "got cuda_graph_impl=local; ",
    "--logits-load-dir logits": "got logits_load_dir=logits; ",
    "--burst-loss-label-smoothing 1.5": "label_smoothing.*1.5",
}


def fused_loss_flags(rank):
    start()
    from megatron_burst.mcore.patches import rows

    there = {flags: message for flags, message in LOSS_REFUSED.items() if has_flag(flags)}
    assert LOSS_REFUSED.keys() - there.keys() <= {"--logits-load-dir logits"}  # of 0.19
    for flags, message in there.items():
        with pytest.raises(BurstError, match=message):
            parse(f"{LOSS} {flags}")
    live = [[patch.live for patch in rows("loss")]]
    values, _ = parse(f"{LOSS} --burst-loss-softcap 20 --burst-loss-z-loss 0.1")
    live.append([patch.live for patch in rows("loss")])
    from megatron_burst.loss.options import FusedLossConfig

    with pytest.raises(BurstError, match="cannot run with --yaml-cfg"):
        parse(f"{LOSS} --yaml-cfg a.yaml")
    return live, FusedLossConfig.from_args(Namespace(**values)), values["context_parallel_impl"]


def test_the_fused_loss_has_flags_of_its_own():
    ((live, config, impl),) = run_ranks(fused_loss_flags, 1)
    assert [set(patches) for patches in live] == [{False}, {True}] and impl == "megatron"
    assert (config.grads, config.z_loss, config.softcap) == ("recompute", 0.1, 20.0)
