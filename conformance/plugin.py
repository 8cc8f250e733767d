"""The pytest plugin: deselects cases by the table, and writes each outcome as it comes.

Enabled by `-p conformance.plugin`; CONFORMANCE_SUITE and CONFORMANCE_RESULTS name the suite and
the CSV, which all ranks and runs share, and CONFORMANCE_RANKS is the number of ranks.
"""

import os
import sys
from math import prod
from pathlib import Path
from types import ModuleType

import pytest

from conformance.results import Outcome, read, write
from conformance.suites import MEGATRON, SUITES, Suite

_DOWNLOADS = "tests.test_utils.python_scripts.download_unit_tests_dataset"
_CONFTEST = "tests.unit_tests.conftest"
_ON_CPU = bool(os.environ.get("CONFORMANCE_ON_CPU"))
_RANK = int(os.environ.get("RANK", "0"))
_RANKS = int(os.environ["CONFORMANCE_RANKS"])


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before Megatron's conftest is imported, which cells of ours need too; without a GPU Megatron
    runs on the CPU."""
    if _suite().checkout != MEGATRON:
        return
    sys.modules[_DOWNLOADS] = _without_downloads()
    if _ON_CPU:
        from conformance import on_cpu

        on_cpu.install()
    if _suite().is_own:
        early_config.pluginmanager.import_plugin(_CONFTEST)


def pytest_configure(config: pytest.Config) -> None:
    """Begin."""
    results = Path(os.environ["CONFORMANCE_RESULTS"])
    config.pluginmanager.register(Selection(_suite(), results))


def _suite() -> Suite:
    name = os.environ["CONFORMANCE_SUITE"]
    return next(suite for suite in SUITES if suite.name == name)


def _without_downloads() -> ModuleType:
    """Replaces a download of data that none of these programs reads."""

    def download_and_extract_asset(assets_dir: Path) -> None:
        raise ImportError("conformance needs no data")  # Megatron's conftest goes on then

    module = ModuleType(_DOWNLOADS)
    module.download_and_extract_asset = download_and_extract_asset
    return module


class Selection:
    """Which cases of one suite run, and what became of them."""

    def __init__(self, suite: Suite, results: Path) -> None:
        self.suite, self.results = suite, results
        self.before = [row for row in read(results) if row.suite == suite.name]
        self.left_out: dict[str, int] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Leave out values of parameters before cases are made of all their combinations."""
        marks = metafunc.definition.own_markers
        names = {_name_of(m): i for i, m in enumerate(marks) if m.name == "parametrize"}
        axes = [axis for axis in self.suite.axes if axis.ranks in (0, _RANKS)]
        if not {axis.argument for axis in axes} <= names.keys():
            return
        for axis in axes:
            before = prod(len(marks[i].args[1]) for i in names.values())
            i = names[axis.argument]
            kept = [value for value in marks[i].args[1] if value not in axis.values]
            marks[i] = pytest.mark.parametrize(axis.argument, kept, **marks[i].kwargs).mark
            after = prod(len(marks[i].args[1]) for i in names.values())
            self._leave_out(axis.reason, before - after)

    def _leave_out(self, reason: str, count: int) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + count

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list) -> None:
        """Deselect cases by the table, and those that an earlier run has finished."""
        done = {row.case for row in self.before if row.is_final}
        kept, dropped = [], []
        for item in items:
            reason = self.suite.why_left_out(case_of(item.nodeid), _RANKS, _ON_CPU)
            if reason:
                self._leave_out(reason, 1)
            is_out = reason or case_of(item.nodeid) in done
            (dropped if is_out else kept).append(item)
        kept.sort(key=lambda item: self.suite.turn(case_of(item.nodeid), _RANKS, _ON_CPU))
        items[:] = kept
        config.hook.pytest_deselected(items=dropped)
        if _RANK == 0 and not any(row.outcome == "selected" for row in self.before):
            again = sum(case_of(item.nodeid) in done for item in dropped)
            self._write("selected", "", count=len(kept) + again)
            for reason, count in self.left_out.items():
                self._write("left out", "", count=count, detail=reason)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record the case, so that the caller knows what was running if the program hangs."""
        if _RANK == 0:
            self._write("started", case_of(nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One row a case; a rank that fails says so itself."""
        case = case_of(report.nodeid)
        if report.failed:
            lines = "\n".join(report.longreprtext.splitlines()[-40:])
            print(f"{case}, rank {_RANK}:\n{lines}", file=sys.__stderr__, flush=True)
            detail = f"rank {_RANK}, {report.when}: {_last_words(report)}"
            self._write("failed", case, report.duration, detail=detail)
        elif _RANK == 0 and report.skipped:
            reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else "xfail"
            self._write("skipped", case, report.duration, detail=str(reason))
        elif _RANK == 0 and report.when == "call":
            self._write("passed", case, report.duration)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """An empty selection is not a failure."""
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK

    def _write(self, outcome: str, case: str, seconds=0.0, count=1, detail="") -> None:
        write(self.results, Outcome(self.suite.name, case, outcome, count, seconds, detail))


def case_of(nodeid: str) -> str:
    """`Class::test[parameters]` of a pytest node."""
    return nodeid.partition("::")[2]


def _last_words(report: pytest.TestReport) -> str:
    """The exception of a failure, and the end of another process's output about its own."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else report.longreprtext)[-800:]


def _name_of(mark: pytest.Mark) -> str:
    """The argument, or the arguments, that a mark gives values."""
    names = mark.args[0] if mark.args else ""
    return names if isinstance(names, str) else ",".join(names)
