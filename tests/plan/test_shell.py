"""Scripts are planned as a shell would run them: sizes given as variables are expanded."""

from pathlib import Path

import pytest

from megatron_burst.errors import BurstError
from megatron_burst.tools.job.arguments import megatron_arguments
from megatron_burst.tools.job.model_file import model_of
from megatron_burst.tools.job.script import arguments_in, read_script
from megatron_burst.tools.job.shell import expanded

EXAMPLES = Path(__file__).parents[2] / "examples"
UNKNOWN = "A=1\n{}\nrun --tensor-model-parallel-size $A"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("TP=4\nrun --tp $TP", "4"),
        ("export TP='4' PP=2\nrun --tp ${TP} \\\n  --pp $PP", "4"),
        ("run --tp ${TP:-8}", "8"),
        ("TP=2\nrun --tp ${TP:-8}", "2"),
        ("run --tp ${TP:-$((A * 2))}", "6"),
        ("N=2 G=4\nrun --tp $((N * G / 2))", "4"),
        ("N=2; W=$((N * 8))\nrun --tp=$W", "16"),
        (': "${TP:=4}"\nrun --tp $TP', "4"),
        ("TP=4 # not 5\nF=(\n  --tp $TP # eight\n  --pp 1\n)\nTP=8\nrun ${F[@]}", "4"),
        ("TP=2\nARGS=\"\n  --tp $TP\n  --swiglu\n\"\nrun $ARGS", "2"),
        ("TP=2\nif ((TP > 1)); then TP=3; else TP=5; fi\nrun --tp $TP", "3"),
        ("if [[ -n \"${PLAN:-}\" ]]; then TP=3; elif [ 1 -lt 2 ]; then TP=4; fi\nrun --tp $TP",
         "4"),
        ("TP=2\n[[ -z $PLAN ]] && TP=4\nrun --tp $TP", "4"),
        ("TP=2\nTP=8 other\nrun --tp $TP", "2"),
        ("N=08\nTP=2\nif [ $N -gt 7 ]; then TP=4; fi\nrun --tp $TP", "4"),
        ("T=3\nF=(${T:+--tp $T})\nrun \"${F[@]}\"", "3"),
        ("cat > x <<'END' # to x\nit's\nfor one in (\nEND\nTP=4\nrun --tp $TP", "4"),
        ("case x in\n a|b) F=\"--tp 4\";;\n *) echo don\\'t ;;\nesac\nrun $F", "4"),
        ("F=(--pp 1)\nF+=(--tp 4)\nrun ${F[@]}", "4"),
    ],
)  # fmt: skip
def test_variables_are_expanded(text, value):
    found = dict(word.split() for word in (
        " ".join(pair) for pair in _pairs(expanded(text, given={"A": "3"}))
    ))  # fmt: skip
    assert found["--tp"] == value


def _pairs(text):
    import re

    return re.findall(r"(--tp|--pp)[ =]\"?([^\s\")]+)", text)


@pytest.mark.parametrize(
    "text",
    [
        "A=$1", "A=$(nproc --all)", "A=`nproc`", "for A in 1 2; do", "read -r B && B=1\nA=$B",
        "if some; then A=2; fi", "case $1 in\n big) A=2 ;;\nesac", "A=${B:?which}", "f() { A=2; }",
        "if [[ 10 < 9 ]]; then A=2; fi",
        "while more; do A=2; done", "A=$((1 / B))", "A+=$B", "A=$((2 ** 3))",
    ],
)  # fmt: skip
def test_what_only_a_run_knows_stays_open(text, monkeypatch):
    monkeypatch.delenv("B", raising=False)
    found = megatron_arguments(UNKNOWN.format(text))
    assert found["tensor_model_parallel_size"] == "$A"


def test_what_is_the_same_in_every_branch_is_known():
    found = megatron_arguments(UNKNOWN.format("if some; then A=1; fi"))
    assert found["tensor_model_parallel_size"] == "1"


def test_output_of_other_programs_is_one_word():
    assert megatron_arguments("run --seq-length `cat my file` --swiglu") == {
        "seq_length": "$(catmyfile)", "swiglu": True,
    }  # fmt: skip


def test_switches_before_other_words_are_switches():
    found = megatron_arguments('run --sft "$@"; run --swiglu $NOT_SET_ANYWHERE --bf16 "${MORE[@]}"')
    assert found == {"sft": True, "swiglu": True, "bf16": True}


@pytest.mark.parametrize(
    ("flag", "option"),
    [
        ("--tensor-model-parallel-size", "tp"), ("--seq-length", "seq_length"),
        ("--global-batch-size", "global_batch_size"), ("--burst-keep", "keep"),
        ("--hidden-size", None),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_or_given(tmp_path, flag, option):
    path = tmp_path / "run.sh"
    path.write_text(f"X=$1\nrun {flag} $X --num-layers 2 --train-iters $N")
    change = f"pass --{option}".replace("_", "-") if option else "write its value there"
    with pytest.raises(BurstError, match=rf'plan: {flag} .*got "\$X" in run.sh; {change}'):
        arguments_in(str(path))
    if option:
        assert arguments_in(str(path), [option]) == {"num_layers": "2"}


@pytest.mark.parametrize(
    ("script", "variables", "sizes"),
    [
        ("torchrun/one_node.sh", {}, (1, 8, 1, "131072", "1")),
        ("torchrun/one_node.sh", {"TP": "2", "SEQ_LENGTH": "65536"}, (2, 4, 1, "65536", "1")),
        ("torchrun/many_nodes.sh", {"NODES": "4", "TP": "2"}, (2, 16, 1, "1048576", "1")),
        ("slurm/pretrain.sbatch", {"PP": "2"}, (1, 32, 2, "1048576", "1")),
        ("torchrun/llama3_8b.sh", {"WORLD": "8", "CP": "4"}, (1, 4, 1, "1048576", "2")),
    ],
)
def test_our_own_scripts_are_read(script, variables, sizes, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    path = str(EXAMPLES / script)
    found = arguments_in(path)
    read = read_script(found).sizes
    named = found["seq_length"], found["global_batch_size"]
    assert (read["tp"], read["cp"], read["pp"], *named) == sizes
    assert found["burst_keep"] == "all" and found["context_parallel_impl"] == "burst"
    assert ("sequence_parallel" in found) == (sizes[0] > 1)
    model = model_of(path)
    assert (model.layers, model.heads_kv, model.vocab) == (32, 8, 128256)


def test_our_script_of_packed_samples_needs_its_gpus():
    with pytest.raises(BurstError, match=r'context-parallel-size .*got "\$cp".*pass --cp'):
        arguments_in(str(EXAMPLES / "torchrun" / "packed.sh"))


@pytest.mark.parametrize(
    "word",
    ["common.sh", '"$(dirname "$0")/common.sh"', "$(dirname $X)/common.sh", "${DIR}/common.sh"],
)
def test_sourced_files_are_read(tmp_path, word):
    (tmp_path / "common.sh").write_text("F='--bf16'\nTP=$((2 * PP))\n. common.sh\n")
    found = megatron_arguments(f"PP=2\nsource {word}\nrun $F --tp $TP", tmp_path)
    assert found == {"bf16": True, "tp": "4"}
