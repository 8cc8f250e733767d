"""Comparisons as tables: for the terminal, and as Markdown."""

from collections.abc import Sequence

from rich.table import Table

from megatron_burst.cli.compare import Comparison, Problem, Ratio, compare, differing
from megatron_burst.cli.results import Row


def terminal_table(rows: Sequence[Row]) -> Table:
    """One line a problem and pass: TFLOP/s of everybody, ratios, memory."""
    comparisons = compare(rows)
    facts = differing(comparisons, ("S", "heads", "pass"))
    impls = list(dict.fromkeys(name for each in comparisons for name in each.rows))
    ratios = ("burst / best te", "burst / ceiling", "GiB burst", "GiB te")
    table = Table(title="TFLOP/s per GPU")
    for name in (*facts, *impls, *ratios):
        table.add_column(name, justify="right")
    for each in comparisons:
        words = each.problem.words()
        speeds = [_speed(each.rows.get(name)) for name in impls]
        table.add_row(*(words[fact] for fact in facts), *speeds, *_judgement(each))
    return table


def reasons(rows: Sequence[Row]) -> list[str]:
    """Why implementations were not measured, each reason once."""
    found = {}
    for row in rows:
        if row.status != "ok":
            found.setdefault(f"{row.impl}:{row.mode} {row.status}: {row.note}")
    return list(found)


def markdown_table(rows: Sequence[Row], pass_: str) -> str:
    """One line a problem: burst, TransformerEngine's best mode, ratios, memory.

    Args:
        rows: of results; at least one.
        pass_: "fwd" or "fwd_bwd".
    """
    comparisons = [each for each in compare(rows) if each.problem.pass_ == pass_]
    if not comparisons:
        return f"No {pass_} was measured."
    facts = differing(comparisons, ("heads", "S"))
    head = (*facts, "burst", "best TE (mode)", "burst / TE", "burst / ceiling", "GiB burst, TE")
    lines = [head, ["---"] * len(head)]
    for each in comparisons:
        words, te = each.problem.words(), each.best_te
        best = f"{_speed(te)} ({te.mode})" if te else "-"
        to_te, to_ceiling, *memory = _judgement(each)
        facts_of_it = [words[fact] for fact in facts]
        lines.append([*facts_of_it, _speed(each.burst), best, to_te, to_ceiling, ", ".join(memory)])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{_caption(comparisons[0].problem, facts)}\n\n{table}"


def _caption(problem: Problem, told: Sequence[str]) -> str:
    same = [f"{name} {value}" for name, value in problem.words().items() if name not in told]
    return f"TFLOP/s per GPU; {', '.join(same)}."


def _speed(row: Row | None) -> str:
    if row is None:
        return "-"
    if row.ms is None:
        return row.status
    return f"{row.tflops_per_gpu:.0f}" if row.tflops_per_gpu >= 10 else f"{row.tflops_per_gpu:.2g}"


def _judgement(each: Comparison) -> tuple[str, str, str, str]:
    """Ratio to the best te, share of the ceiling, memory of burst and of that te."""
    share = each.burst_to(each.ceiling)
    return (
        _text(each.burst_to(each.best_te)),
        f"{share.value:.2f}" if share else "-",
        _gib(each.burst),
        _gib(each.best_te),
    )


def _text(ratio: Ratio | None) -> str:
    return str(ratio) if ratio else "-"


def _gib(row: Row | None) -> str:
    return f"{row.peak_gib:.2f}" if row and row.peak_gib is not None else "-"
