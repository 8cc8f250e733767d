"""All causal model types of transformers, tiny, on two ranks against one process: what
docs/reference/transformers.md says of each. `python -m tests.integrations.test_hf_models` writes
that page.
"""

import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.integrations.tiny_models import model_types, outcomes
from tests.ranks import preload, run_ranks

pytest.importorskip("trl", reason="make test-integrations FRAMEWORKS=hf")
preload("transformers", "megatron_burst.hf")
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "transformers.md"
TITLE = """# Models of transformers

Every causal model type of transformers 5.24.0, with two small layers in float64, on two ranks. Where a model is right, loss and gradients are those of one process, also for packed documents and with `fused_loss=True`; 11 heads with a bias or a scale of their own refuse `fused_loss`. All others are refused in one sentence, before their loss is used. [How to use it](../how-to/without-megatron.md#transformers).

| | types | names |
| --- | --- | --- |
"""  # noqa: E501
# rows of the page's table, by what a refusal says
REASONS = {
    "layers other than full attention or a window": "all layers must be attention",
    "positions that the model counts itself": "must take position_ids",
    "attention that the model computes itself":
        "every layer must compute attention|AttentionInterface|pass further keyword arguments",
    "masks or biases of the model's own":
        "no mask or bias|nothing but windows|must pass it to attention",
}  # fmt: skip
UNKNOWN = "not tried: the default config cannot be made small, or lacks a package"


def row_of(outcome: str) -> str:
    """The row of a type that does this."""
    if outcome == "right" or outcome.startswith("not built"):
        return outcome.partition(":")[0].replace("not built", UNKNOWN)
    reasons = [name for name, said in REASONS.items() if re.search(said, outcome)]
    assert outcome.startswith("refused: ") and len(reasons) == 1, outcome
    return reasons[0]


def table_of(found: dict[str, str]) -> str:
    """The page's rows."""
    rows = defaultdict(list)
    for name, outcome in found.items():
        rows[row_of(outcome)].append(f"`{name}`")
    return "\n".join(
        f"| {reason} | {len(rows[reason])} | {', '.join(rows[reason])} |"
        for reason in ("right", *REASONS, UNKNOWN)
    )


def test_every_type_is_right_or_refused_as_the_page_says():
    first, second = run_ranks(outcomes, 2, list(model_types()), False, {}, timeout_s=1500)
    assert {name: row_of(x) for name, x in first.items()} == {
        n: row_of(x) for n, x in second.items()
    }
    assert table_of(first) in PAGE.read_text(encoding="utf-8"), table_of(first)


def test_types_that_are_right_are_so_packed_and_with_the_fused_loss():
    (row,) = re.findall(r"\| right \| \d+ \| (.*) \|", PAGE.read_text(encoding="utf-8"))
    types = re.findall(r"`([^`]+)`", row)
    for found in run_ranks(outcomes, 2, types, True, {"fused_loss": True}, timeout_s=1500):
        others = {name: x for name, x in found.items() if x != "right"}
        said = "linear layer without a bias|as its config says"
        assert all(re.search(f"refused: fused loss in .*({said})", x) for x in others.values()), (
            others
        )
        assert len(others) < len(types) / 6


if __name__ == "__main__":
    found, _ = run_ranks(outcomes, 2, list(model_types()), False, {}, timeout_s=1500)
    PAGE.write_text(f"{TITLE}{table_of(found)}\n", encoding="utf-8")
