"""What options of a call cost on one GPU, as CSV: python -m benchmarks.option_costs --out x.csv

On several GPUs (torchrun) only a call, beside the same call in CUDA graphs.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.nn.functional import linear, silu

from benchmarks import sheets
from benchmarks.bench import Memory
from benchmarks.limits import limit_row
from benchmarks.runner import App, Out, check_out, save
from megatron_burst import (
    BurstConfig,
    burst_attention,
    class_log_probs,
    distillation_loss,
    top_k_kl,
    top_k_log_probs,
)
from megatron_burst.tools.terminal import Device
from megatron_burst.tools.world import World, clean_up, started

OPTIONS = {"plain": {}, "largest logit": {"return_max_logit": True}, "soft cap": {"softcap": 50.0}}
WITHOUT_MAXIMA = ("cudnn", "flash")  # kernels beside which the largest logit needs one of its own
WAYS = {"eager": "none", "compiled": "none", "compiled, a graph break": "all"}  # what is kept
HEAD = {"cuda": (32 << 10, 4096, 152_064), "cpu": (64, 16, 256)}  # tokens, width, classes
TOP = 64
app = App()


def layer(x: torch.Tensor, weights: list[torch.Tensor], keep: str) -> torch.Tensor:
    """Half of a transformer's layer, with something to fuse on both sides of attention."""
    heads = linear(silu(x), weights[0]).unflatten(-1, (48, -1)).split((32, 8, 8), 2)
    q, k, v = (y * y.float().square().mean(-1, True).rsqrt().to(y) for y in heads)
    out = burst_attention(q, k, v, config=BurstConfig(keep=keep))
    return x + silu(linear(out.flatten(2), weights[1]))


def call(attend: Callable[..., torch.Tensor], *qkv: torch.Tensor) -> None:
    """Both passes of a call."""
    torch.autograd.grad(attend(*qkv), qkv, qkv[0])


def distillations(world: World) -> dict[str, Callable[[], object]]:
    """A teacher's and a student's side without logits, both of them with, and Liger's loss over
    the whole vocabulary; students with gradients."""
    tokens, width, classes = HEAD[world.device.type]
    make = partial(torch.randn, device=world.device, dtype=torch.bfloat16)
    student, teacher = make(tokens, width).requires_grad_(), make(tokens, width)
    weight = (make(classes, width) * width**-0.5).requires_grad_()
    top = top_k_log_probs(teacher, weight, TOP)

    def learn(loss: torch.Tensor) -> None:
        torch.autograd.grad(loss, (student, weight))

    def of_logits() -> None:
        with torch.no_grad():
            best = linear(teacher, weight).float().log_softmax(-1).topk(TOP)
        log_probs = linear(student, weight).float().log_softmax(-1).gather(-1, best.indices)
        learn((best.values.exp() * (best.values - log_probs)).sum(-1).mean())

    runs = {
        f"teacher's top {TOP}": partial(top_k_log_probs, teacher, weight, TOP),
        f"student at a teacher's top {TOP}":
            lambda: learn(top_k_kl(class_log_probs(student, weight, top.ids), top).mean()),
        f"student at a teacher's top {TOP}, gradients in forward":
            lambda: learn(distillation_loss(student, weight, top)),
        "both, of logits": of_logits,
    }  # fmt: skip
    if find_spec("liger_kernel"):
        module = import_module("liger_kernel.chunked_loss")
        liger = module.LigerFusedLinearJSDLoss(0.0, 1.0, beta=0.0)
        labels = torch.zeros(tokens, dtype=torch.long, device=world.device)
        detached = weight.detach()
        runs["both, by Liger"] = lambda: learn(liger(student, weight, teacher, detached, labels))
    return runs


def measure_distillation(world: World, out: Path) -> None:
    """Time and peak memory."""
    for what, run in distillations(world).items():
        run()  # compiles
        clean_up(world)
        memory = Memory(world)
        memory.restart()
        run()
        peak = memory.peak_gib(0)
        row = limit_row(what, HEAD[world.device.type][0], run, HEAD[world.device.type][0], world)
        note = row.note if peak is None else f"peak {peak:.2f} GiB; {row.note}"
        save(out, world, [replace(row, note=note)], sheets.LIMITS_CSV)


@app.command()
def main(out: Out = Path("option_costs.csv"), device: Device = None) -> None:
    """Forward of a call with each option, both passes of a layer in each way and of a call."""
    with started("benchmarks.option_costs", device) as world:
        check_out(out, world, sheets.LIMITS_CSV)
        on_gpu, alone = world.device.type == "cuda", world.size == 1
        if alone:
            measure_distillation(world, out)
        make = partial(torch.randn, device=world.device, dtype=torch.bfloat16)
        weights = [make(48 * 128, 4096), make(4096, 4096)]
        for size in (2048, 4096, 8192, 65536) if on_gpu else (64,):
            rows = size // world.size
            qkv = tuple(make(1, rows, heads, 128).requires_grad_() for heads in (32, 8, 8))
            runs = {"call": partial(call, burst_attention, *qkv)}
            if on_gpu:
                graphs = torch.cuda.make_graphed_callables(burst_attention, qkv)
                runs["call, in CUDA graphs"] = partial(call, graphs, *qkv)
            for name, options in OPTIONS.items() if alone else ():
                runs[name] = partial(burst_attention, *make(3, 1, size, 16, 128), **options)
                for backend in WITHOUT_MAXIMA if on_gpu and "softcap" not in options else ():
                    config = BurstConfig(backend=backend)
                    runs[f"{name}, {backend}"] = partial(runs[name], config=config)
            for name, keep in WAYS.items() if alone else ():
                run = layer if name == "eager" else torch.compile(layer)
                forward = partial(run, make(1, size, 4096).requires_grad_(), weights, keep)
                runs[f"layer, {name}"] = lambda forward=forward: forward().sum().backward()
            for what, run in runs.items():
                save(out, world, [limit_row(what, size, run, size, world)], sheets.LIMITS_CSV)


if __name__ == "__main__":
    app()
