"""`doctor --nodes`, with a stand-in for ssh that answers like the nodes of a cluster."""

import json
import sys

import pytest
from typer.testing import CliRunner

from megatron_burst.errors import BurstError
from megatron_burst.tools.doctor import survey
from megatron_burst.tools.doctor.nodes import check_nodes, nodes_in
from megatron_burst.tools.doctor.report import Status
from megatron_burst.tools.doctor.survey import Answer, run_command
from megatron_burst.tools.main import app
from tests.tools.doctor.surveys import UUID, addresses, gpu_line, h200

FAKE_SSH = """
import sys, time
node, command = sys.argv[1:]
assert command.startswith("sh -c ") and "nvidia-smi topo -m" in command
if node == "down":
    sys.exit("ssh: connect to node down port 22: Connection refused")
if node == "hung":
    time.sleep(60)
print("Welcome to " + node)
print(open({folder!r} + "/" + node).read())
"""
BUSY = {
    "gpus": "\n".join(gpu_line(i) for i in range(8)),
    "processes": f"{UUID.format(3)}, 17, 90000",
    "addresses": addresses(2),
}


@pytest.fixture
def ssh(tmp_path):
    """The command that replaces ssh; nodes a and b answer."""
    (tmp_path / "a").write_text(h200())
    (tmp_path / "b").write_text(h200(**BUSY))
    script = tmp_path / "fake_ssh.py"
    script.write_text(FAKE_SSH.format(folder=str(tmp_path)))
    return f"{sys.executable} {script}"


def doctor(*arguments):
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_nodes_are_asked_and_one_is_down_and_one_hangs(ssh, monkeypatch):
    def run(command, timeout_s):  # only the node that hangs uses up its time
        return run_command(command, 0.5 if "hung" in command else timeout_s)

    monkeypatch.setattr(survey, "run_command", run)
    done = doctor("--nodes", "a,b,down,hung", "--ssh", ssh, "--timeout-s", "60", "--json")
    assert done.exit_code == 1
    report = json.loads(done.output)
    found = {(c["name"], c["where"]): (c["status"], c["what"]) for c in report["checks"]}
    assert found["reachable", "a"][0] == "ok"
    assert found["reachable", "down"] == (
        "fail", "no answer: ssh: connect to node down port 22: Connection refused",
    )  # fmt: skip
    assert found["reachable", "hung"] == ("fail", "no answer: no answer within 0.5 s")
    assert found["free", "a"] == ("ok", "8 of 8 GPUs are free")
    assert found["free", "b"] == ("warn", "7 of 8 GPUs are free: [0, 1, 2, 4, 5, 6, 7]")
    assert "export NCCL_SOCKET_IFNAME==bond0" in report["environment"]


def test_tables_and_the_block_to_paste(ssh):
    done = doctor("--nodes", "a", "--ssh", ssh)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert "export NCCL_IB_HCA==" + ",".join(f"mlx5_{i}:1" for i in (0, *range(3, 10))) in lines
    assert "a run would start" in lines[-1]


def test_nodes_that_differ_and_share_no_network():
    texts = {
        "a": h200(),
        "b": h200(),
        "c": h200(gpus="\n".join(gpu_line(i, max="1755") for i in range(4)), addresses=""),
    }
    asked = []

    def run(command, timeout_s):
        asked.append(command)
        return Answer(0, texts[command[-2]])

    report = check_nodes(["a", "b", "c"], run, "ssh -p 2222", 3.0)
    assert sorted(command[-2] for command in asked) == ["a", "b", "c"]
    assert all(command[:3] == ["ssh", "-p", "2222"] for command in asked)
    assert [(check.status, check.what) for check in report.checks if check.name == "alike"] == [
        (Status.WARN, "clock differs: c has 1755; the others 1980"),
        (Status.WARN, "gpus differs: c has 4; the others 8"),
    ]
    (network,) = [check for check in report.checks if check.name == "network"]
    assert network.status is Status.WARN
    assert not report.breaks


def test_nobody_answers():
    report = check_nodes(
        ["a"], lambda command, timeout_s: Answer(255, "", "Permission denied"), "ssh", 3.0
    )
    assert [check.status for check in report.checks] == [Status.FAIL] and not report.environment


@pytest.mark.parametrize("text", ["a,,b", "a,a", "-oProxyCommand=x", "a b", "a;reboot"])
def test_names_that_are_none_are_refused(text):
    with pytest.raises(BurstError, match="--nodes must list node names, each once"):
        nodes_in(text)
    done = doctor(f"--nodes={text}")
    assert done.exit_code == 2 and "error: doctor: --nodes" in done.output


def test_the_default_is_ssh_that_asks_for_no_password():
    from megatron_burst.tools.doctor import _SSH as SSH

    assert "BatchMode=yes" in SSH and "ConnectTimeout" in SSH


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--nodes", ""], "--nodes must list node names"),
        (["--nodes", "a", "--ssh", "ssh '"], "--ssh must be a valid shell command"),
        (["--ssh", "ssh -p 1"], "--ssh must come with --nodes"),
    ],
)
def test_options_that_would_be_ignored_are_refused(options, match, monkeypatch):
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    done = doctor(*options)
    assert done.exit_code == 2 and match in done.output and done.output.count("error: ") == 1
