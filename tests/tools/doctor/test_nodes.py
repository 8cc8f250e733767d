"""`doctor --nodes`, with a stand-in for ssh that answers like the nodes of a cluster."""

import json
import os
import sys

import pytest
from typer.testing import CliRunner

from megatron_burst.errors import BurstError
from megatron_burst.tools.doctor import nodes
from megatron_burst.tools.doctor.nodes import check_alike, check_nodes, nodes_in
from megatron_burst.tools.doctor.report import Status
from megatron_burst.tools.doctor.survey import survey_of
from megatron_burst.tools.main import app
from tests.tools.doctor.surveys import gpu_line, h200

FAKE_SSH = """#!{python}
import sys, time
*options, node, command = sys.argv[1:]
assert options == ["-o", "BatchMode=yes", "-o", "ConnectTimeout=5"]
assert command.startswith("sh -c ") and "nvidia-smi topo -m" in command
if node == "down":
    sys.exit("ssh: connect to node down port 22: Connection refused")
if node == "hung":
    time.sleep(60)
print("Welcome to " + node)
print(open({folder!r} + "/" + node).read())
"""
BUSY = "\n".join(gpu_line(i, used="90000" if i == 3 else "1") for i in range(8))


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """A program in the place of ssh; nodes a, b and c answer."""
    (tmp_path / "a").write_text(h200())
    (tmp_path / "b").write_text(h200(gpus=BUSY))
    four = "\n".join(gpu_line(i, max="1755") for i in range(4))
    (tmp_path / "c").write_text(h200(gpus=four, route="default via 10.2.0.1 dev eth0"))
    script = tmp_path / "ssh"
    script.write_text(FAKE_SSH.format(python=sys.executable, folder=str(tmp_path)))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def doctor(*arguments):
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_nodes_are_asked_and_one_is_down_and_one_hangs(ssh, monkeypatch):
    def ask(timeout_s, reach):  # only the node that hangs uses up its time
        return survey_of(0.5 if "hung" in reach else timeout_s, reach)

    monkeypatch.setattr(nodes, "survey_of", ask)
    done = doctor("--nodes", "a,b,down,hung", "--timeout-s", "60", "--json")
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
    use = "NCCL_SOCKET_IFNAME==bond0 and GLOO_SOCKET_IFNAME=bond0"
    assert use in found["interface", "all 2 nodes"][1]


def test_the_table(ssh):
    done = doctor("--nodes", "a")
    assert done.exit_code == 0, done.output
    hcas = ",".join(f"mlx5_{i}:1" for i in (0, *range(3, 10)))
    assert f"NCCL_IB_HCA=={hcas}" in "".join(done.output.replace("│", " ").split())
    assert "a run would start" in done.output.splitlines()[-1]


def test_nodes_that_differ(ssh):
    checks = check_nodes(["a", "b", "c"], 60.0)
    assert [(check.status, check.what) for check in checks if check.name == "alike"] == [
        (Status.WARN, "clock differs: c has 1755; the others have 1980"),
        (Status.WARN, "gpus differs: c has 4; the others have 8"),
    ]
    assert {check.where for check in checks if check.name == "interface"} == {"a, b", "c"}
    assert not any(check.status is Status.FAIL for check in checks)


USUAL = {
    "gpu": "H200", "gpus": "8", "ranks": "8", "clock": "1980", "driver": "570",
    "hcas": "8 x InfiniBand at 400 Gbit/s", "torch": "2.11.0", "NCCL_DEBUG": "WARN",
}  # fmt: skip


@pytest.mark.parametrize(
    "changes, status, what",
    [
        ({"gpu": "H100"}, Status.WARN, "gpu differs: d has H100; the others have H200"),
        ({"gpus": "4"}, Status.WARN, "gpus differs: d has 4; the others have 8"),
        ({"ranks": "4"}, Status.WARN, "ranks differs: d has 4; the others have 8"),
        ({"clock": "1755"}, Status.WARN, "clock differs: d has 1755; the others have 1980"),
        ({"hcas": "7 x InfiniBand at 400 Gbit/s"}, Status.WARN, "hcas differs: d has "
         "7 x InfiniBand at 400 Gbit/s; the others have 8 x InfiniBand at 400 Gbit/s"),
        ({"driver": "550"}, Status.WARN, "driver differs: d has 550; the others have 570"),
        ({"torch": "2.10.0"}, Status.FAIL,
         "torch differs: d has 2.10.0; the others have 2.11.0"),
        ({"te": "2.20"}, Status.FAIL, "te differs: d has 2.20; the others have none"),
        ({"NCCL_PROTO": "LL"}, Status.WARN, "NCCL_PROTO differs: d has LL; the others have none"),
    ],
)  # fmt: skip
def test_the_odd_node_is_named(changes, status, what):
    (found,) = check_alike(dict.fromkeys("abc", USUAL) | {"d": USUAL | changes})
    assert (found.status, found.what, found.where) == (status, what, "d")
    assert found.change


def test_equal_nodes_and_names_of_nodes_are_no_difference():
    own = {h: USUAL | {"NCCL_HOSTID": h, "NCCL_IB_HCA": h} for h in "ab"}
    assert [check.status for check in check_alike(own)] == [Status.OK]


def test_nobody_answers(ssh):
    assert [check.status for check in check_nodes(["down"], 60.0)] == [Status.FAIL]


@pytest.mark.parametrize("text", ["", "a,,b", "a,a", "-oProxyCommand=x", "a b", "a;reboot"])
def test_names_that_are_none_are_refused(text, monkeypatch):
    with pytest.raises(BurstError, match="--nodes must list node names, each once"):
        nodes_in(text)
    done = doctor(f"--nodes={text}")
    assert done.exit_code == 2 and done.output.count("error: doctor: --nodes") == 1
