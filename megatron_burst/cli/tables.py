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
    same_kernel = any(each.on_cudnn for each in comparisons)
    head = [*facts, "burst", "best TE (mode)", "burst / TE", "burst / ceiling", "GiB burst, TE"]
    head += ["burst on cuDNN", "it / TE", "it / its ceiling"] if same_kernel else []
    lines = [head, ["---"] * len(head)]
    for each in comparisons:
        words, te = each.problem.words(), each.best_te
        best = f"{_speed(te)} ({te.mode})" if te else "-"
        to_te, to_ceiling, *memory = _judgement(each)
        line = [words[fact] for fact in facts]
        line += [_speed(each.burst), best, to_te, to_ceiling, ", ".join(memory)]
        lines.append([*line, *(_on_cudnn(each) if same_kernel else ())])
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
    return (
        _text(Ratio.of(each.burst, each.best_te)),
        _share(Ratio.of(each.burst, each.ceiling)),
        _gib(each.burst),
        _gib(each.best_te),
    )


def _on_cudnn(each: Comparison) -> tuple[str, str, str]:
    """Burst with the kernel that TransformerEngine has: speed, ratio to the best te, share of
    that kernel's ceiling."""
    to_te = Ratio.of(each.on_cudnn, each.best_te)
    return _speed(each.on_cudnn), _text(to_te), _share(Ratio.of(each.on_cudnn, each.cudnn_ceiling))


def _share(ratio: Ratio | None) -> str:
    return f"{ratio.value:.2f}" if ratio else "-"


def _text(ratio: Ratio | None) -> str:
    return str(ratio) if ratio else "-"


def _gib(row: Row | None) -> str:
    return f"{row.peak_gib:.2f}" if row and row.peak_gib is not None else "-"
