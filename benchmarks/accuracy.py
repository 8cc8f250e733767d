"""Errors of attention and its gradients against float64, by the number of ranks.

torchrun --nproc-per-node 4 -m benchmarks.accuracy OUT.csv      measure, on GPUs
python -m benchmarks.accuracy OUT.csv --seq 2048                simulate, on a CPU
python -m benchmarks.accuracy OUT.csv --nodes                   measure gradients between nodes
python -m benchmarks.accuracy A.csv B.csv --plot docs/accuracy.png --title "4 x H200, 2026-11-21"

The last one draws real ranks of all these files, and simulated ones of the last. Simulated ranks
are threads of one process that run burst's own engine: 1 to 8, or with --nodes 1 to 16 nodes of 4,
with gradients in the model's dtype or in float32 between them. Each error is |x - truth| / |truth|
over the whole sequence. A CPU's kernels are made to round their results (with --nodes gradients
alone), as those of GPUs do.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
from typer import Argument, Option

from benchmarks.cases import Case
from benchmarks.impls import impls_of
from benchmarks.peers import Burst, Shard
from benchmarks.rows import read
from benchmarks.runner import App, check_out, save
from benchmarks.sheets import ACCURACY_CSV, AccuracyRow
from benchmarks.style import colours_of, legend_below, picture
from benchmarks.te import TransformerEngine
from megatron_burst.call import attention_shape, spec_of
from megatron_burst.config import BurstConfig, Force
from megatron_burst.engine.passes import Passes
from megatron_burst.kernels.backends import choose_backend, kernel_of
from megatron_burst.resolve import resolve
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.topology import pretend_nodes
from megatron_burst.tools.speeds import problem_of
from megatron_burst.tools.world import attempt, started
from tests.attention.simulated import run_simulated
from tests.bits import by_heads
from tests.oracle import full_attention
from tests.oracle import rows_of as places_of

TENSORS = ("out", "dq", "dk", "dv")
HEADS = ((8, 8), (8, 2))
DIM = 128
_ASIDE = 0.045  # of a number of ranks, between two markers in the picture
app = App()


def draw(heads, seq, device):
    """q, k, v, dout [1, s, h, d] in bf16."""
    generator = torch.Generator(device).manual_seed(11)
    counts = (heads[0], heads[1], heads[1], heads[0])
    options = {"generator": generator, "device": device}
    return [torch.randn(1, seq, count, DIM, **options).bfloat16() for count in counts]


def truth_of(tensors):
    """(out, dq, dk, dv) in float64, one KV head at a time, as the scores are large."""
    q, k, v, dout = (x.double() for x in tensors)
    group = q.shape[2] // k.shape[2]
    parts = []
    for head in range(k.shape[2]):
        queries, keys = slice(head * group, head * group + group), slice(head, head + 1)
        own = q[:, :, queries], k[:, :, keys], v[:, :, keys]
        leaves = [x.clone().requires_grad_() for x in own]
        with torch.device(q.device):
            out = full_attention(*leaves, True, DIM**-0.5)
        parts.append((out.detach(), *torch.autograd.grad(out, leaves, dout[:, :, queries])))
    return [torch.cat(x, dim=2) for x in zip(*parts, strict=True)]


def simulated(tensors, where, config):
    """(out, dq, dk, dv) of the whole sequence from a thread for each rank of a topology."""
    ranks = where.cp_size
    tokens = tensors[0].shape[1] // ranks

    def one(rank, carrier):
        if tensors[0].is_cuda:
            torch.cuda.set_device(tensors[0].device)  # a thread begins with the first one
        rows = places_of(Layout.ZIGZAG, rank, ranks, tokens).to(tensors[0].device)
        q, k, v, dout = (x[:, rows] for x in tensors)
        backend, _ = choose_backend(problem_of(q, k, v, mask=Mask.CAUSAL), config.backend)
        shape = attention_shape([x.shape for x in (q, k, v)], q.dtype)
        kernel = replace(kernel_of(backend, q.device), wide_grads=False)
        spec = spec_of(config, where, shape, Layout.ZIGZAG, Mask.CAUSAL, kernel)
        spec = replace(resolve(spec)[0], pulled=False)
        passes = Passes(spec, backend, carrier, DIM**-0.5, q.dtype)
        out, _, left = passes.forward(q, k, v)
        out = out.to(q.dtype)
        return rows, [out, *passes.backward(left, out, dout)]

    results, _ = run_simulated(one, ranks, in_turns=True, timeout_s=300)
    whole = [torch.empty_like(tensors[i]) for i in (3, 0, 1, 2)]
    for rows, shards in results:
        for target, shard in zip(whole, shards, strict=True):
            target[:, rows] = shard.to(target.dtype)
    return whole


def relative(got, truth, group=None):
    """Errors over the whole sequence; summed over the ranks of a group if they hold its parts."""
    pairs = zip(got, truth, strict=True)
    squares = [((a.double() - b).square().sum(), b.square().sum()) for a, b in pairs]
    sums = torch.stack([torch.stack(each) for each in squares])
    if group is not None:
        torch.distributed.all_reduce(sums, group=group)
    return (sums[:, 0] / sums[:, 1]).sqrt().tolist()


def real(peer_class, text, tensors, truth, world):
    """Errors of an implementation over the real ranks, or why there are none."""
    (impl,) = impls_of((text,))
    peer, seq = peer_class(impl, world), tensors[0].shape[1]
    case = Case(seq, 1, tensors[0].shape[2], tensors[1].shape[2], DIM, DIM)
    rows = places_of(Layout.ZIGZAG, world.rank, world.size, seq // world.size).to(world.device)
    shards = [x[:, rows].transpose(0, 1).contiguous() for x in tensors]
    shard = Shard(case, *(x.requires_grad_() for x in shards[:3]), shards[3])
    results = []

    def run():
        peer.prepare(shard)
        results[:] = peer.run_forward_backward()

    reason = next(filter(None, world.gather(peer.refusal(case))), None) or attempt(run, world)
    if reason:
        return impl, reason
    got = [x.view(len(rows), 1, -1, DIM).transpose(0, 1) for x in results]
    errors = relative(got, [x[:, rows] for x in truth], world.group)
    peer.release()
    return impl, errors


def rows_of(impl, mode, ranks, is_simulated, tensors, errors):
    """A row for each tensor."""
    _, seq, heads_q, _ = tensors[0].shape
    same = {"impl": impl, "mode": mode, "ranks": ranks, "simulated": is_simulated, "seq": seq}
    same |= {"heads_q": heads_q, "heads_kv": tensors[1].shape[2]}
    return [
        AccuracyRow(**same, tensor=name, error=error)
        for name, error in zip(TENSORS, errors, strict=True)
    ]


def measure(path, seq):
    """Add a row for each implementation, number of ranks, head count and tensor."""
    rows = []
    with started("accuracy", None) as world:
        check_out(path, world, ACCURACY_CSV)
        kernel = "auto" if world.device.type == "cuda" else by_heads("torch-cpu")
        for heads in HEADS:
            tensors = draw(heads, seq, world.device)
            truth = truth_of(tensors)
            for ranks, mode in product((1, 2, 4, 8), ("gather", "ring", "a2a")):
                force = Force(heads_per_round=None if mode == "ring" else 1)
                config = BurstConfig(intra=mode, force=force, backend=kernel)
                got = simulated(tensors, pretend_nodes(ranks, 1), config)
                rows += rows_of("burst", mode, ranks, True, tensors, relative(got, truth))
            peers = [(Burst, f"burst:{mode}") for mode in ("gather", "ring", "a2a")]
            peers += [(TransformerEngine, f"te:{mode}") for mode in ("p2p", "all_gather", "a2a")]
            for peer_class, text in peers if world.size > 1 else ():
                impl, errors = real(peer_class, text, tensors, truth, world)
                if isinstance(errors, str):
                    print(f"{impl}: {errors}") if world.rank == 0 else None
                else:
                    rows += rows_of(impl.name, impl.mode, world.size, False, tensors, errors)
        save(path, world, rows, ACCURACY_CSV)


def measure_nodes(path, seq):
    """Add rows for gradients between simulated nodes, in the model's dtype and in float32."""
    with started("accuracy", None) as world:
        check_out(path, world, ACCURACY_CSV)
        tensors = draw((2, 2), seq, world.device)
        truth = truth_of(tensors)
        for nodes, wire in product((1, 2, 4, 8, 16), ("input", "accumulate")):
            force = Force(heads_per_round=1, grad_wire=wire, circulate="kv")
            config = BurstConfig(intra="gather", inter="ring", force=force)
            errors = relative(simulated(tensors, pretend_nodes(4 * nodes, nodes), config), truth)
            mode = f"gather in nodes of 4, grad_wire={wire}"
            rows = rows_of("burst", mode, 4 * nodes, True, tensors, errors)
            save(path, world, rows, ACCURACY_CSV)


def curves(paths):
    """Errors as shares of one rank's in the same file: by (heads, tensor), label, and number of
    ranks; simulated ranks of the last file alone, real ones of all. The newest of equal rows."""
    lines = {}
    for path in paths:
        rows, where = read([path], ACCURACY_CSV), path.stem.rpartition("_")[2]
        first = (r for r in rows if r.ranks == 1 and r.simulated)
        alone = {(r.heads_q, r.heads_kv, r.tensor): r.error for r in first}
        drawn = (r for r in rows if r.error and (not r.simulated or path == paths[-1]))
        for r in drawn:
            what = r.heads_q, r.heads_kv, r.tensor
            label = f"{r.impl} {r.mode}, {'simulated' if r.simulated else where}"
            lines.setdefault(what, {}).setdefault(label, {})[r.ranks] = r.error / alone[what]
    return lines


def plot(paths, path, title):
    """Errors over ranks, a panel for each tensor and head count."""
    lines = curves(paths)
    labels = sorted({label for errors in lines.values() for label in errors})
    with picture(path, 13, 6.2) as figure:
        axes = figure.subplots(len(HEADS), len(TENSORS), sharex=True, sharey=True)
        for panels, heads in zip(axes, HEADS, strict=True):
            panels[0].set_ylabel("error / that of one rank")
            for axis, tensor in zip(panels, TENSORS, strict=True):
                draw_errors(axis, lines[*heads, tensor], labels)
                axis.set(title=f"{tensor}, heads {heads[0]}/{heads[1]}", xscale="log")
                axis.set_xticks([1, 2, 4, 8], labels=["1", "2", "4", "8"])
                axis.minorticks_off()
                axis.grid(alpha=0.3)
        for axis in axes[-1]:
            axis.set_xlabel("ranks")
        legend_below(figure, columns=4)
        figure.suptitle(title)


def draw_errors(axis, errors, labels):
    """Open markers beside each other, as many errors are equal."""
    modes = [":".join(label.split(",")[0].split()) for label in labels]
    colours = colours_of(modes)
    for place, (label, mode) in enumerate(zip(labels, modes, strict=True)):
        if label in errors:
            style = "o-" if "simulated" in label else "*" if "burst" in label else "s"
            aside = 1 + _ASIDE * (place - (len(labels) - 1) / 2)
            ranks = [count * aside for count in errors[label]]
            axis.plot(
                ranks, errors[label].values(), style, label=label, color=colours[mode], lw=1,
                markersize=9 if style == "*" else 6, markerfacecolor="none",
            )  # fmt: skip


@app.command()
def main(
    paths: Annotated[list[Path], Argument(help="the CSV; rows are appended")],
    nodes: Annotated[bool, Option(help="measure gradients between nodes")] = False,
    seq: Annotated[int | None, Option(help="tokens")] = None,
    png: Annotated[Path | None, Option("--plot", help="PNG to draw of CSVs")] = None,
    title: Annotated[str, Option(help="of the PNG: GPUs and days, which CSVs lack")] = "",
) -> None:
    """Measure errors, on all ranks together; or draw what was measured."""
    gpus = torch.cuda.is_available()
    if png:
        plot(paths, png, title)
    elif nodes:
        measure_nodes(paths[0], seq or (8192 if gpus else 2048))
    else:
        measure(paths[0], seq or (8192 if gpus else 256))


if __name__ == "__main__":
    app()
