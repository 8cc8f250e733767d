"""What steps gain if documents of several global batches may change places: simulated.

python benchmarks/balance_ahead.py

The documents of the batches, from the longest on, are given to the steps in turns, back and forth;
then each step is assigned as usual. Prints the mean step of both, over draws as many as batches.
"""

import sys
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated

import numpy as np
import typer
from typer import Option

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its own folder alone

from benchmarks.balance import MODELS, Batch, batches, case_of
from benchmarks.balance_documents import KINDS
from megatron_burst.tools.hardware_file import hardware as hardware_of
from megatron_burst.tools.terminal import in_one_sentence


def mixed(drawn: list[Batch]) -> list[Batch]:
    """The same batches, with each other's documents."""
    every = np.sort(np.concatenate([one.lengths for one in drawn]))[::-1]
    turn, at = np.divmod(np.arange(len(every)), len(drawn))
    step = np.where(turn % 2, len(drawn) - 1 - at, at)
    return [
        Batch(every[step == number].tolist(), one.grid, one.costs, one.packed, one.seed)
        for number, one in enumerate(drawn)
    ]


def main(
    ahead: Annotated[int, Option(min=2, help="batches")] = 4,
    dp: Annotated[list[int] | None, Option(help="default: 8 and 32")] = None,
    packed: Annotated[int, Option(help="tokens of a packed micro-batch", min=64)] = 128 << 10,
    hardware: Annotated[str, Option(help="preset or TOML of calibrate's")] = "h200",
) -> None:
    """Print a line for each case."""
    with in_one_sentence():
        machine = hardware_of(hardware)
        typer.echo("| model | documents | DP | PP | step, s | looking ahead, s | times as fast |")
        typer.echo("| --- | --- | --- | --- | --- | --- | --- |")
        for name, kind, ranks, stages in product(MODELS, KINDS, dp or (8, 32), (1, 4)):
            grid, costs = case_of(name, ranks, stages, packed, machine)
            drawn = list(batches(kind, grid, costs, packed, ahead))
            plain, other = (
                fmean(one.step("balanced, changing CP") or 0.0 for one in some)
                for some in (drawn, mixed(drawn))
            )
            cells = (
                name,
                kind,
                ranks,
                stages,
                f"{plain:.2f}",
                f"{other:.2f}",
                f"{plain / other:.3f}",
            )
            typer.echo(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    typer.run(main)
