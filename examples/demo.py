"""Trains a small GPT on real text twice, without and with burst context parallelism, and compares.

    make demo

CP=1 is Megatron's own attention in one process; CP=4 is burst attention in four, posing as two
nodes. Both see the same batches from the same weights. With two or more GPUs the same command uses
them, with NCCL and bf16. Writes the folder demo/.
"""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import demo_report
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

HERE = Path(__file__).parent
MODEL = {
    "num-layers": 4,
    "hidden-size": 128,
    "num-attention-heads": 8,
    "num-query-groups": 2,
    "ffn-hidden-size": 384,
    "seq-length": 512,
    "micro-batch-size": 2,
    "global-batch-size": 8,
}


@dataclass(frozen=True)
class Run:
    """One training run: its name, how many processes, and the flags that set it apart."""

    name: str
    processes: int
    flags: tuple[str, ...]
    folder: Path

    @property
    def step_log(self) -> Path:
        return self.folder / f"{self.name}.jsonl"

    @property
    def output(self) -> Path:
        return self.folder / f"{self.name}.log"

    def steps(self) -> list[dict]:
        """What each step so far logged."""
        if not self.step_log.exists():
            return []
        whole_lines = self.step_log.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole_lines.splitlines()]


def flags(steps: int, text: Path) -> list[str]:
    """Megatron's flags that both runs share.

    The embedding's initial standard deviation and Adam's epsilon keep rounding errors from growing:
    with Megatron's defaults, even two micro-batch sizes at CP=1 drift apart by 1e-2 within 60
    steps.
    """
    shape = [word for name, value in MODEL.items() for word in (f"--{name}", str(value))]
    words = f"""
    --group-query-attention --max-position-embeddings {MODEL["seq-length"]}
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights
    --train-iters {steps} --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 6
    --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95 --adam-eps 1e-6
    --embedding-init-method-std 1.0 --calculate-per-token-loss
    --data-path {text} --tokenizer-type NullTokenizer --vocab-size 257 --split 98,1,1
    --seed 1234 --num-workers 0 --log-interval 1
    --eval-iters 0 --eval-interval 1000000
    """.split()
    return shape + words + device_flags()


def device_flags() -> list[str]:
    """fp32 over gloo on the CPU; bf16 over NCCL on GPUs, with TransformerEngine if installed."""
    if torch.cuda.device_count() < 2:
        return ["--distributed-backend", "gloo", "--use-cpu-initialization"]
    plain = "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm"
    return ["--bf16", *plain.split()]


def make_data(text: Path, files: list[Path], console: Console) -> None:
    """Write the data set in a separate process: importing Megatron prints a lot."""
    command = [sys.executable, str(HERE / "data.py"), str(text), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        console.print(done.stderr)
        raise typer.Exit(done.returncode)
    console.print(done.stdout.splitlines()[0], soft_wrap=True)


def train(run: Run, shared: list[str], steps: int, console: Console) -> float:
    """Run a training to its end, showing progress; return its seconds."""
    run.step_log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(run.processes), "-m", "megatron_burst"]
    command += [str(HERE / "pretrain_gpt.py"), *shared, *run.flags, "--step-log", str(run.step_log)]
    started = time.perf_counter()
    environment = demo_report.environment()
    with run.output.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        show_progress(run, process, steps, console)
    if process.returncode:
        console.print("".join(run.output.read_text().splitlines(keepends=True)[-30:]))
        console.print(f"[red]{run.name} failed[/]; all of its output is in {run.output}")
        raise typer.Exit(1)
    return time.perf_counter() - started


def show_progress(run: Run, process: subprocess.Popen, steps: int, console: Console) -> None:
    """Show a bar with the loss until the process ends; without a terminal, a line every ten
    steps."""
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(),
        TextColumn("step {task.completed}/{task.total}  loss {task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    told = 0
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(run.name, total=steps, loss="starting")
        while process.poll() is None:
            time.sleep(0.3)
            if done := run.steps():
                loss = f"{done[-1]['lm loss']:.4f}"
                progress.update(task, completed=len(done), loss=loss)
                if not console.is_terminal and len(done) // 10 > told:
                    told = len(done) // 10
                    console.print(f"{run.name}: step {len(done)}/{steps}, loss {loss}")
        progress.update(task, completed=len(run.steps()))


def main(
    files: Annotated[
        list[Path] | None, typer.Argument(help="text files; none: Python's own documentation")
    ] = None,
    steps: Annotated[int, typer.Option(help="training steps of each run")] = 60,
    folder: Annotated[Path, typer.Option(help="where results go")] = HERE.parent / "demo",
) -> None:
    """Train with CP=1 and with burst at CP=4, and compare them."""
    console = Console()
    folder.mkdir(parents=True, exist_ok=True)
    gpus = torch.cuda.device_count()
    cp_size = 4 if gpus < 2 or gpus >= 4 else 2
    text = folder / "text"
    make_data(text, files or [], console)
    where = f"{cp_size} GPUs, NCCL, bf16" if gpus > 1 else "the CPU, gloo, fp32"
    console.print(f"[bold]Training a small GQA GPT for {steps} steps, twice, on {where}[/]")
    burst = ("--context-parallel-size", str(cp_size), "--context-parallel-impl", "burst")
    runs = [
        Run("cp1-megatron", 1, (), folder),
        Run(f"cp{cp_size}-burst", cp_size, (*burst, "--burst-tune", "nodes=2"), folder),
    ]
    seconds = [train(run, flags(steps, text), steps, console) for run in runs]
    report = demo_report.Report(MODEL, cp_size, [run.steps() for run in runs], seconds)
    choices = demo_report.choices_in(runs[1].output)
    pictures = demo_report.save_pictures(report, folder)
    console.print(demo_report.tables(report))
    for choice in choices:
        console.print(f"auto chose: {choice}")
    console.print("pictures: " + " ".join(str(path) for path in pictures), soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
