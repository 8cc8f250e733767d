"""The doctor's checks of one machine, on output of real machines. Guards against storage HCAs among
those that a job uses, busy GPUs that pass as free, and problems that pass as fine."""

import json
import logging
import os
import re
import subprocess
import sys
import warnings

import pytest
from typer.testing import CliRunner

from megatron_burst.mcore import patches
from megatron_burst.patching import Patch
from megatron_burst.tools.doctor.machine import (
    VARIABLES,
    check_environment,
    check_machine,
    check_network,
    check_nvlink,
    check_room,
    check_state,
    used_hcas,
)
from megatron_burst.tools.doctor.report import Status, breaks, fail, merged, ok, print_report
from megatron_burst.tools.doctor.software import check_hook_points
from megatron_burst.tools.doctor.survey import SCRIPT, Survey, links_of, parse_survey, survey_of
from megatron_burst.tools.main import app
from tests.tools.doctor.surveys import (
    A100_NICS,
    gpu_line,
    h200,
    hca_line,
    matrix,
    on_a100,
)


def survey(**changes):
    return parse_survey(h200(**changes))


def by_name(checks, name):
    (found,) = [check for check in checks if check.name == name]
    return found


def test_a_healthy_machine_has_nothing_to_change():
    checks = check_machine(survey())
    here = ("torch", "backends", "versions", "hook points", "environment")
    of_survey = [check for check in checks if check.name not in here]
    assert {check.status for check in of_survey} == {Status.OK}
    assert not any(check.change for check in of_survey)
    assert "8 x NVIDIA H200 of 1980 MHz, 140 GiB, driver 570.86.15" in by_name(checks, "gpus").what
    assert by_name(checks, "nvlink").what == "NV18 between all GPUs"
    assert by_name(checks, "torch").status is Status.FAIL  # GPUs are listed, but torch sees none


@pytest.mark.parametrize(
    "changes, name, status, match",
    [
        ({"gpus": "sh: nvidia-smi: not found"}, "gpus", Status.SKIP, "sh: nvidia-smi: not found"),
        ({"gpus": gpu_line(0, errors="3")}, "state", Status.FAIL, r"GPUs \[0\]: memory errors"),
        ({"gpus": gpu_line(0, throttles="0x0000000000000060")}, "state", Status.WARN,
         r"GPUs \[0\]: slowed down by heat or power"),
        ({"gpus": gpu_line(0) + "\n" + gpu_line(1, max="1700")}, "gpus", Status.WARN,
         "NVIDIA H200 of 1700 MHz, NVIDIA H200 of 1980 MHz"),
        ({"gpus": gpu_line(0, mig="Enabled")}, "state", Status.FAIL, "MIG is on"),
        ({"gpus": gpu_line(0, mode="Prohibited")}, "state", Status.FAIL, "Prohibited"),
        ({"gpus": gpu_line(0) + "\n" + gpu_line(1, used="90000")}, "free", Status.WARN,
         r"1 of 2 GPUs are free: \[0\]"),
        ({"gpus": gpu_line(0) + "\n" + gpu_line(1, name="NVIDIA H100")}, "gpus", Status.WARN,
         "2 x NVIDIA H100 of 1980 MHz, NVIDIA H200 of 1980 MHz"),
    ],
)  # fmt: skip
def test_trouble_with_gpus_is_named(changes, name, status, match):
    found = by_name(check_state(survey(**changes)), name)
    assert found.status is status and re.search(match, found.what)
    assert status is Status.SKIP or found.change


def test_what_the_driver_does_not_tell_is_not_made_up():
    line = gpu_line(0, errors="[N/A]", total="[Not Supported]", throttles="[N/A]")
    checks = check_state(survey(gpus=line))
    assert {check.status for check in checks} == {Status.OK}


def test_gpus_whose_memory_is_used_are_not_free():
    gpus = "\n".join([gpu_line(0), gpu_line(1, used="8000"), gpu_line(2), gpu_line(3, used="600")])
    found = by_name(check_state(survey(gpus=gpus)), "free")
    assert (found.status, found.what) == (Status.WARN, "3 of 4 GPUs are free: [0, 2, 3]")


def test_nvlink_that_is_missing():
    half = matrix(18, [], lambda gpu, nic: "").replace("GPU7\tNV18", "GPU7\tSYS")
    half = half.replace("GPU0\t X " + "\tNV18" * 7, "GPU0\t X " + "\tNV18" * 6 + "\tSYS")
    found = check_nvlink(survey(topology=half))
    assert found.status is Status.WARN
    assert "1 of 28 pairs of GPUs have no NVLink, but SYS between GPU0 and GPU7" in found.what
    assert check_nvlink(survey(topology="")).status is Status.SKIP


def test_the_links_of_gpus():
    read = links_of(survey())
    assert len(read) == 8 * 17
    assert read["GPU2", "GPU2"] == "X" and read["GPU2", "GPU3"] == "NV18"
    assert read["GPU2", "mlx5_4"] == "PIX" and read["GPU4", "mlx5_bond_0"] == "SYS"


def test_hcas_of_the_fastest_network_are_used_and_the_bond_is_left_out():
    names = ["mlx5_0:1", *(f"mlx5_{i}:1" for i in range(3, 10))]
    assert [hca.name for hca in used_hcas(survey())] == names
    found = by_name(check_network(survey()), "hcas")
    assert found.what.startswith(f"use NCCL_IB_HCA=={','.join(names)}; leave out")
    assert found.what.endswith("; leave out mlx5_bond_0:1: Ethernet at 100 Gbit/s")


def test_storage_hcas_of_the_same_speed_are_left_out():
    hcas = "\n".join(hca_line(n) for n in A100_NICS)
    a100 = survey(topology=matrix(12, A100_NICS, on_a100), hcas=hcas)
    assert [hca.name for hca in used_hcas(a100)] == [f"{name}:1" for name in A100_NICS[:8]]
    assert "leave out mlx5_8:1: no GPU is near" in by_name(check_network(a100), "hcas").what
    virtual = survey(topology=matrix(18, A100_NICS, lambda gpu, nic: "SYS"), hcas=hcas)
    assert len(used_hcas(virtual)) == 10


def test_ports_that_are_down_or_slower_are_left_out_with_the_reason():
    hcas = [hca_line(n) for n in A100_NICS]
    hcas[3] = hca_line("mlx5_3", state="1: DOWN")
    hcas[6] = hca_line("mlx5_6", layer="Ethernet", rate="100 Gb/sec (4X EDR)")
    machine = survey(topology=matrix(12, A100_NICS, on_a100), hcas="\n".join(hcas))
    assert len(used_hcas(machine)) == 6
    found = by_name(check_network(machine), "hcas")
    assert found.status is Status.OK
    assert "leave out mlx5_3:1: down; leave out mlx5_6:1: Ethernet at 100 Gbit/s" in found.what
    dead = survey(hcas=hca_line("mlx5_0", state="1: DOWN"))
    assert by_name(check_network(dead), "hcas").status is Status.FAIL


def test_the_interface_of_the_default_route_is_named_as_nccl_and_gloo_want_it():
    found = by_name(check_network(survey()), "interface")
    assert "NCCL_SOCKET_IFNAME==bond0 and GLOO_SOCKET_IFNAME=bond0" in found.what
    assert [check.name for check in check_network(survey(route=""))] == ["hcas"]


def test_room_and_limits():
    assert {check.status for check in check_room(survey())} == {Status.OK}
    shm, locked, files = check_room(survey(shm="65536", memlock="8192", nofile="1024"))
    assert shm.status is Status.WARN and shm.what == "KiB free in /dev/shm: 65536"
    assert locked.status is Status.FAIL and "8192" in locked.what
    assert files.status is Status.WARN and files.change
    unknown, locked, _ = check_room(survey(shm="", memlock="8192", hcas=""))  # nothing to pin for
    assert unknown.status is locked.status is Status.OK and not locked.change


@pytest.mark.parametrize(
    "name, value",
    [("NCCL_P2P_DISABLE", "1"), ("NCCL_SOCKET_IFNAME", "=lo"), ("NCCL_NET", "Socket"),
     ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"), ("NVTE_FUSED_ATTN", "0")],
)  # fmt: skip
def test_variables_that_spoil_a_run_are_named(name, value):
    (found,) = check_environment({name: value, "HOME": "/"})
    assert found.status is Status.WARN and found.what.startswith(f"{name}=")
    assert found.change


def test_harmless_variables_are_not():
    harmless = {name: "fine" for name, *_ in VARIABLES} | {"NCCL_P2P_DISABLE": "0"}
    (found,) = check_environment(harmless)
    assert found.status is Status.OK


def test_hook_points(monkeypatch):
    installed = patches.rows()
    assert len(installed) > 10 and not any(patch.misfit() for patch in installed)
    other = Patch("flags", "megatron.core:no_such.name", "", (), "a test")
    monkeypatch.setattr(patches, "rows", lambda: [*installed, other])
    broken = check_hook_points()
    assert broken.status is Status.FAIL and broken.change
    assert broken.what.startswith("megatron.core.no_such.name (a test): ")

    def missing():
        raise ImportError("No module named 'megatron'")

    monkeypatch.setattr(patches, "rows", missing)
    assert check_hook_points().status is Status.WARN


def test_a_hook_point_that_does_not_fit_is_found(monkeypatch):
    from megatron.training import arguments

    monkeypatch.setattr(arguments, "validate_args", lambda args, more: None)
    (found,) = [patch for patch in patches.rows() if patch.target.endswith("validate_args")]
    assert "('args', 'defaults')" in found.misfit() and "('args', 'more')" in found.misfit()
    assert not found.live


def test_the_script_runs_here_and_only_reads():
    assert survey_of(30).word("nofile").isdigit()
    assert subprocess.run(["sh", "-n", "-c", SCRIPT]).returncode == 0
    assert set(re.findall(r"\d?>+\s*(\S+)", SCRIPT)) <= {"/dev/null", "&1"}
    asked = "nvidia-smi|echo|for|do|\\[|name=|tr|done|ip|df|ulimit"
    for line in SCRIPT.strip().splitlines():
        assert re.match(rf"\s*({asked})", line), line


def test_a_script_that_is_cut_short_is_no_survey():
    assert parse_survey("Welcome to the cluster\n== gpus\n") is None
    text = "Welcome\n" + h200()
    assert parse_survey(text).word("shm") == "1056575324"
    assert "not known: killed" in by_name(check_machine(Survey(error="killed")), "survey").what


def test_commands_that_hang_are_missing_or_fail():
    assert survey_of(0.2, ["sh", "-c", "sleep 9"]) == {"error": "no answer within 0.2 s"}
    assert "no-such-command" in survey_of(1, ["no-such-command"])["error"]
    assert survey_of(9, ["sh", "-c", "exit 3"]) == {"error": "exit status 3"}
    assert survey_of(9, ["sh", "-c", "echo one; echo two"]) == {"error": "two"}


def test_equal_findings_are_merged_and_printed_worst_first(capsys):
    fine, bad = ok("shm", "room"), fail("ecc", "errors", "reset")
    checks = merged({"a": [fine, bad], "b": [fine]})
    assert [check.where for check in checks] == ["all 2 nodes", "a"]
    print_report(checks, as_json=True)
    written = json.loads(capsys.readouterr().out)
    assert breaks(checks) and written["breaks"] and written["checks"][1]["status"] == "fail"
    print_report(checks, as_json=False)
    text = capsys.readouterr().out
    assert text.index("errors") < text.index("room")
    assert "1 fail, 1 ok: a run would break" in text
    assert "where" in text and "what to change" in text


def test_columns_without_a_word_are_left_out(capsys):
    print_report([ok("shm", "room"), ok("nofile", "enough")], as_json=False)
    text = capsys.readouterr().out
    assert "found" in text and "where" not in text and "what to change" not in text


def test_a_terminal_shows_progress_before_torch_is_there():
    """Loading it takes seconds, in which nothing was shown."""
    code = (
        "import builtins, sys\n"
        "from megatron_burst.tools.main import app\n"
        "real = builtins.__import__\n"
        "def found(name, *more):\n"
        "    if name == 'torch': print('torch', file=sys.stderr, flush=True); sys.exit(0)\n"
        "    return real(name, *more)\n"
        "builtins.__import__ = found\n"
        "app(['doctor'])\n"
    )
    there = os.environ | {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=there)
    assert "loading torch" in done.stderr.partition("\ntorch")[0]


def test_warnings_of_other_packages_stay_out_of_the_report(monkeypatch, caplog, recwarn):
    def noisy():
        warnings.warn("Apex is not installed", stacklevel=1)
        logging.getLogger("a.package").warning("No CUDA runtime is found")
        logging.getLogger("a.package").error("the device is lost")
        return ok("hook points", "all fit")

    monkeypatch.setattr("megatron_burst.tools.doctor.software.check_hook_points", noisy)
    done = CliRunner().invoke(app, ["doctor"])
    assert "all fit" in done.output and "Apex" not in done.stdout
    warned = [str(one.message) for one in recwarn] + [one.message for one in caplog.records]
    assert "the device is lost" in warned, "errors are never hidden"
    assert "Apex is not installed" not in warned and "No CUDA runtime is found" not in warned
