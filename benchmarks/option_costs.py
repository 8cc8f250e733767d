"""What options of a call cost on one GPU, as CSV: python -m benchmarks.option_costs --out x.csv

On several GPUs (torchrun) only a call, beside the same call in CUDA graphs.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import linear, silu

from benchmarks import sheets
from benchmarks.limits import limit_row
from benchmarks.runner import App, Out, check_out, save
from megatron_burst import BurstConfig, burst_attention
from megatron_burst.tools.terminal import Device
from megatron_burst.tools.world import started

OPTIONS = {"plain": {}, "largest logit": {"return_max_logit": True}, "soft cap": {"softcap": 50.0}}
WITHOUT_MAXIMA = ("cudnn", "flash")  # kernels beside which the largest logit needs one of its own
WAYS = {"eager": "none", "compiled": "none", "compiled, a graph break": "all"}  # what is kept
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


@app.command()
def main(out: Out = Path("option_costs.csv"), device: Device = None) -> None:
    """Forward of a call with each option, both passes of a layer in each way and of a call."""
    with started("benchmarks.option_costs", device) as world:
        check_out(out, world, sheets.LIMITS_CSV)
        on_gpu, alone = world.device.type == "cuda", world.size == 1
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
