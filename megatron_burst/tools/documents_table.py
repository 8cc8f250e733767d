"""What `plan --lengths` found, on the terminal and as JSON."""

from collections.abc import Sequence
from typing import Any

from rich.table import Column, Table

from megatron_burst.tools.documents import CHANGING, SEQUENTIAL, Documents, Outcome
from megatron_burst.tools.terminal import new_console, say


def show_documents(documents: Documents) -> None:
    """Print a step by each rule, and what to choose."""
    console, each = new_console(), documents.drawn
    grid = documents.outcomes[0].grid
    packed = grid.token_limit * grid.cp
    cut = f", {documents.cut:.1%} of them cut to {packed:,} tokens" if documents.cut else ""
    console.print("\n[bold]Documents:[/bold]", highlight=False)
    say(
        console,
        f"a step has {len(each):,} documents, drawn from the file{cut}; with padding, they have "
        f"{each.mean():,.0f} tokens on average and {each.max():,} at most. A rank has memory for "
        f"{documents.token_limit:,} tokens of a micro-batch",
    )
    console.print(_table(documents.outcomes))
    say(console, f"recommended: {in_words(documents)}")
    if documents.other and documents.elsewhere:
        one, sizes = documents.other, documents.elsewhere
        say(
            console,
            f"{sizes.layout}, {sizes.policy}, is faster with these documents, predicted "
            f"{one.seconds:.4g} s a step ({_how(one)}): plan with --tp {sizes.tp} --cp {sizes.cp} "
            f"--pp {sizes.pp} --dp {sizes.dp}",
        )


def _table(outcomes: Sequence[Outcome]) -> Table:
    names = "token limit of a rank", "predicted step, s", "ranks wait", "times as fast"
    table = Table("documents", *(Column(name, justify="right") for name in names))
    for one in outcomes:
        gain = outcomes[0].seconds / one.seconds
        words = f"{one.grid.token_limit:,}", f"{one.seconds:.4g}", f"{one.waiting:.0%}"
        table.add_row(one.rule, *words, f"{gain:.2f}")
    return table


def in_words(documents: Documents) -> str:
    """What to choose, in a sentence."""
    best, first = documents.recommended, documents.outcomes[0]
    if best is first:
        return f"{_how(best)}, because no rule is predicted to be 1 % faster"
    gain = first.seconds / best.seconds
    return (
        f"{_how(best)}: predicted {best.seconds:.4g} s a step, {gain:.2f} times as fast as "
        f"{SEQUENTIAL}"
    )


def _how(one: Outcome) -> str:
    """A rule and its setting."""
    if one.rule.startswith("packed"):
        return f"documents {one.rule}"
    sizes = ", ".join(map(str, one.cp_sizes))
    how = f"at context-parallel sizes {sizes}" if one.rule == CHANGING else f"at CP {one.grid.cp}"
    return f"documents balanced {how}, token_limit {one.grid.token_limit}"


def as_described(documents: Documents | None) -> dict[str, Any] | None:
    """What a plan's JSON has of it."""
    if not documents:
        return None
    return {
        "token_limit": documents.token_limit,
        "recommended": in_words(documents),
        "predicted": [
            {"rule": one.rule, "token_limit": one.grid.token_limit, "cp_sizes": one.cp_sizes,
             "step_s": one.seconds, "waiting": one.waiting}
            for one in documents.outcomes
        ],
    }  # fmt: skip
