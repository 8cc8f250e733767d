"""docs/compatibility.md: which tests pass with which release of Megatron-Core, by what they run.

    python scripts/compatibility.py [RELEASE=REPORT.xml ...]

Reports are those of `pytest --junitxml`; `make test-matrix` passes them. They replace their
releases' columns of docs/compatibility.csv, of which the page is made; of two for one release the
second counts, but for what it skips. Prints the table of totals.
"""

import csv
import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CSV, PAGE = ROOT / "docs" / "compatibility.csv", ROOT / "docs" / "compatibility.md"
RELEASES = ("0.16.1", "0.17.1", "0.18.2", "0.19.2", "main")
WHERE = "run"  # the first row: what a column's tests ran with, and when
HEAD = """# Compatibility

`scripts/compatibility.py` generates this page from [compatibility.csv](compatibility.csv), which
`make test-matrix` writes. Do not edit it.

A tick says that the tests of a row passed with that release. A number stands for what the release
lacks ([the list](#what-releases-lack)): behind a tick for some of the tests, behind "no" for all of
them. The CSV has the result of every test.

All tests run on the CPU, in processes over gloo without TransformerEngine, and most compare with
Megatron without context parallelism. `tests/gpu` runs with 0.19.2.

Of Apex, the extension for gradients of weights was run on one H200, [by hand](versions.md#apex);
its fused layer norm was not. The table's tests run on CPUs, where `tests/mcore/test_apex.py` puts
stand-ins in the place of both.
"""
BESIDE = """
## Beside context parallelism

Each of these runs at CP 2 or is refused, with 0.19.2. What works has the losses and gradient norms,
or the gradients, of CP 1 or of Megatron's own context parallelism. Where checkpoints are named, a
run with burst continues one without; for LoRA it is the other way round.

"""
SCRIPTS = """
Main was tested at d98e8a6 (22 August 2026), the newest whole version that could be had, and with
its pull request 6776, which gives layers layouts of their own. Stock `pretrain_gpt.py` and
`pretrain_hybrid.py` of both trained on one H200, in bf16 with TransformerEngine: dense, packed
(`--dataloader-inter-document-masking`), with experts, with multi-token prediction, and as hybrids.
Burst on two ranks differs from Megatron's own attention on one by at most 0.004 % in the loss of
the first step and 0.4 % in that of the third ([each step](stock_scripts.csv)). MLA ran on CPUs and
with burst alone, because Megatron's own needs TransformerEngine there. Packed samples of the later
pull request 6912 are recognized by their boundaries; its scripts were only read.
"""
# Rows of the page: what runs, and (file, regular expression for cases or functions) of its tests.
ROWS: dict[str, dict[str, list[tuple[str, str]]]] = {
    "Parallelism": {
        "CP 1": [("gpt", "one rank")],
        "CP 4, one node": [("gpt", "flat"), ("packed", "CP4")],
        "CP 4, two nodes": [("gpt", "two nodes|Megatron's hier.*|(kv|q) circ.*")],
        "TP 2 with SP, CP 2": [
            ("gpt", "tensor.*"), ("packed", "TP2.*"), ("loss", "TP2 SP CP2.*|gradients in forward"),
        ],
        "TP 2 without SP, CP 2": [("loss", "TP2 CP2.*|.*TP without SP")],
        "PP 2, CP 2": [
            ("keep", r"Setting\(pp=2, vp=1.*"), ("packed_uses", ".*under_way.*"),
            ("loss", "TP1 CP2 PP2.*"),
        ],
        "PP 2, VPP 2, CP 2": [
            ("keep", r"Setting\(pp=2, vp=2.*"), ("pretrain_on_cpu", "interleaved.*"),
        ],
        "EP 2, CP 2": [("pretrain_on_cpu", "experts")],
        "Muon and Lion, CP 2": [("pretrain_on_cpu", "Muon|Lion|.*continues.*")],
        "DDP, overlapped": [("loss", "DDP.*")],
        "torch FSDP2, CP 2": [("pretrain_on_cpu", "FSDP2")],
        "Megatron-FSDP, CP 2": [("pretrain_on_cpu", "Megatron-FSDP")],
        "a CP group of a micro-batch's own": [("packed_uses", ".*group.*")],
        "distributed optimizer, two CP groups": [("pretrain_on_cpu", "distributed.*")],
    },
    "Model": {
        "MHA, MQA": [("gpt", "M[HQ]A.*")],
        "attention sinks": [("gpt", "sinks.*|softmax.*"), ("sinks", ".*")],
        "largest logits, soft caps": [("max_logits", ".*")],
        "MLA": [("gpt", "(one rank, )?MLA.*"), ("packed", "MLA")],
        "tied embeddings": [("gpt", "tied.*"), ("loss", ".* tied|DDP.* tied")],
        "multi-token prediction": [
            ("specs", ".*multi_token.*"), ("loss", "(MuP, |DDP, )?MTP.*"),
            ("packed_uses", ".*multi_token.*"),
        ],
        "dense layers and experts": [("specs", ".*experts.*"), ("pretrain_on_cpu", "experts")],
        "MuP": [("loss", "MuP.*")],
    },
    "Samples": {
        "packed documents": [("packed", "CP[24]|full|one rank"), ("packed_rows", ".*")],
        "packed documents, windows": [("packed", "windows.*")],
        "documents that start at any token": [("packed_uses", ".*begin_anywhere.*")],
    },
    "Recomputation": {
        "full and selective": [("gpt", ".*full recompute.*"), ("keep", ".*-none.*|.*-all, sel.*")],
        "all kept": [("keep", ".*-all.*"), ("packed", "kept"), ("keep_other_attention", ".*")],
        "half kept": [("keep", ".*-half.*"), ("gpt", ".*half.*"), ("packed", "kept by half")],
        "kept as it fits": [
            ("keep", ".*-auto"), ("keep_auto", ".*"), ("packed", "kept as.*"),
            ("whole_layers", ".*"), ("whole_batches", ".*"),
        ],
        "outputs of modules kept": [("kept_modules", ".*")],
    },
    "Fused loss": {
        "losses and gradients": [("loss", ".*"), ("packed_uses", ".*fused_loss.*")],
        "ranks with unequal numbers of labels": [("megatron_loss", ".*")],
        "gradients in forward": [("loss", ".*forward.*")],
        "under torch FSDP2": [
            ("loss_fsdp", "FSDP2.*|.*one_gather.*|.*detached_weight.*|.*under_fsdp2"),
            ("pretrain_on_cpu", "FSDP2|.*fsdp2.*"),
        ],
        "under Megatron-FSDP": [
            ("loss_fsdp", "Megatron-FSDP.*"), ("pretrain_on_cpu", "Megatron-FSDP"),
        ],
        "other uses, refusals": [("loss_uses", ".*")],
    },
    "Entry points": {
        "`python -m megatron_burst`": [("pretrain", "python -m.*|CP4 on.*")],
        "`import megatron_burst.patch`": [("pretrain", "imported.*")],
        "`--spec`": [
            ("pretrain", "--spec.*"), ("specs", ".*layer_spec"), ("entry_points", ".*by_spec.*"),
        ],
        "`burst_spec`": [("specs", ".*")],
        "`megatron_burst.auto`": [("auto", ".*")],
        "diff in `patches/`": [("patches", ".*"), ("pretrain", "patched.*")],
        "refusals": [
            ("arguments", ".*"), ("core_attention", ".*"),
            ("packed_uses", ".*(refused|forbids|not_looked_up).*"),
        ],
        "releases, scripts, imports told apart": [("entry_points", ".*")],
        "hook points of the table": [("releases", ".*")],
        "values of options": [("option_values", ".*")],
    },
    "Runs": {
        "`pretrain()`, three steps": [("pretrain", ".*")],
        "one rank, half kept, fused loss": [("pretrain_on_cpu", "one rank")],
        "evaluation alone": [("pretrain_on_cpu", "evaluation alone")],
    },
}  # fmt: skip


ROW_FOR_EACH_CASE = {"Model classes": "models", "Checkpoints": "checkpoints"}  # of these files


@dataclass(frozen=True, eq=False)
class Outcome:
    """A test's name and, by release, "passed", "failed" or "skipped: why"."""

    name: str
    results: dict[str, str]

    @property
    def file(self) -> str:
        return self.name.partition("::")[0].removeprefix("test_").removesuffix(".py")

    @property
    def case(self) -> str:
        """What is in brackets behind the function's name; without brackets that name."""
        function = self.name.partition("::")[2]
        return function.partition("[")[2].removesuffix("]") or function


def read_report(path: Path) -> dict[str, str]:
    """Results by test of a junit file, and what was run when."""
    suite = ElementTree.parse(path).getroot().find("testsuite")
    found = {}
    for case in suite.iter("testcase"):
        file = case.get("classname").rpartition(".")[2]
        if not file:  # a module that could not be imported is a case without a class
            file = case.get("name").rpartition(".")[2]
        skipped = case.find("skipped")
        failed = case.find("failure") is not None or case.find("error") is not None
        result = "failed" if failed else "passed"
        if skipped is not None and not failed:
            result = f"skipped: {skipped.get('message')}"
        found[f"{file}.py::{case.get('name')}"] = result
    found[WHERE] = f"{suite.get('name')}, {suite.get('timestamp', '')[:10]}"
    return found


def read() -> list[Outcome]:
    """The rows of the CSV."""
    if not CSV.exists():
        return []
    with CSV.open(newline="") as file:
        return [Outcome(row.pop("test"), row) for row in csv.DictReader(file)]


def update(reports: list[tuple[str, Path]]) -> None:
    """Replace the columns of some releases."""
    columns: dict[str, dict[str, str]] = {}
    for release, path in reports:
        column, found = columns.setdefault(release, {}), read_report(path)
        files = {name.partition("::")[0] for name in found}
        for test in [
            t for t, r in column.items() if r == "failed" and t.partition("::")[0] in files
        ]:
            del column[test]  # a module that could not be imported has no other name there
        for test, result in found.items():
            if test not in column or not result.startswith("skipped"):
                column[test] = result
    before = {test.name: test.results for test in read()}
    for release in set(RELEASES) - columns.keys():
        columns[release] = {name: results[release] for name, results in before.items()}
    names = sorted(set().union(*columns.values()), key=lambda name: (name != WHERE, name))
    with CSV.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["test", *RELEASES])
        for name in names:
            row = [columns[release].get(name, "") for release in RELEASES]
            if any(row):
                writer.writerow([name, *row])


def tests_of(patterns: list[tuple[str, str]], tests: list[Outcome]) -> list[Outcome]:
    """Those of a row."""
    return [
        test for test in tests for file, case in patterns
        if test.file == file and re.fullmatch(case, test.case, re.DOTALL)
    ]  # fmt: skip


def rows_of_cases(tests: list[Outcome]) -> dict[str, dict[str, list[tuple[str, str]]]]:
    """Rows of files whose cases say by themselves what runs."""
    return {
        title: {
            name_of(test): [(file, re.escape(test.case))] for test in tests if test.file == file
        }
        for title, file in ROW_FOR_EACH_CASE.items()
    }


def name_of(test: Outcome) -> str:
    """A row's: "T5Model, refused", "torch: saved with burst CP2, resumed without burst"."""
    if test.file != "checkpoints":
        return f"{test.case}, refused" if "refused[" in test.name else test.case
    form, _, run = test.case.partition("-")
    now, _, before = run.partition(", from ")
    saved, resumed = (
        f"with {sizes}" if sizes.startswith("burst")
        else sizes.replace("without ", "without burst, ") if " " in sizes else "without burst"
        for sizes in (before or now, now)
    )  # fmt: skip
    return f"{form}: saved {saved}, resumed {resumed}"


def cell(tests: list[Outcome], release: str, reasons: list[str]) -> str:
    """A tick if tests passed, and the numbers of the reasons why others did not run."""
    results = [test.results[release] for test in tests]
    if "failed" in results:
        return "**fails**"
    lacking = dict.fromkeys(result.removeprefix("skipped: ") for result in results
                            if result.startswith("skipped"))  # fmt: skip
    reasons += [why for why in lacking if why not in reasons]
    numbers = ", ".join(map(str, sorted(reasons.index(why) + 1 for why in lacking)))
    said = "✓" if "passed" in results else "no" if lacking else "not run"
    return said + f"<sup>{numbers}</sup>" * bool(numbers)


def totals(tests: list[Outcome]) -> str:
    """How many passed, were skipped and failed, by release."""
    lines = ["| release | passed | skipped | failed | run |", "| --- | --- | --- | --- | --- |"]
    (where,) = [test.results for test in tests if test.name == WHERE]
    for release in RELEASES:
        results = [test.results[release] for test in tests if test.name != WHERE]
        counts = [sum(r.startswith(k) for r in results) for k in ("passed", "skipped", "failed")]
        lines.append(f"| {release} | {' | '.join(map(str, counts))} | {where[release]} |")
    return "\n".join(lines)


def beside() -> str:
    """The table of what else users switch on."""
    with (ROOT / "docs" / "beside.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def page(tests: list[Outcome]) -> str:
    """The whole page."""
    reasons: list[str] = []
    parts = [HEAD, totals(tests)]
    for title, rows in (ROWS | rows_of_cases(tests)).items():
        if not rows:
            continue
        lines = [f"\n## {title}\n", f"| | {' | '.join(RELEASES)} |", "| --- " * 6 + "|"]
        for row, patterns in rows.items():
            cells = [cell(tests_of(patterns, tests), release, reasons) for release in RELEASES]
            lines.append(f"| {row} | {' | '.join(cells)} |")
        parts += lines
    parts += [BESIDE + beside() + SCRIPTS, "\n## What releases lack\n"]
    parts += [f"{number}. {why}" for number, why in enumerate(reasons, 1)]
    return "\n".join(parts) + "\n"


def main(arguments: list[str]) -> None:
    """Take reports, if any, and make the page."""
    if arguments:
        reports = [argument.partition("=") for argument in arguments]
        update([(release, Path(path)) for release, _, path in reports])
    tests = read()
    PAGE.write_text(page(tests))
    print(totals(tests))


if __name__ == "__main__":
    main(sys.argv[1:])
