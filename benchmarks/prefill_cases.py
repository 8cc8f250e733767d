"""What `benchmarks.prefill` measures: models, who shares a prompt, and how; a run's row."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.facts import stamp
from benchmarks.one_rank import Silent, passes_of_last
from benchmarks.sheets import PrefillRow
from benchmarks.tables import repetitions, spread
from megatron_burst.engine.passes import Passes
from megatron_burst.errors import require
from megatron_burst.kernels.backends import choose_backend
from megatron_burst.kernels.visible import CAUSAL
from megatron_burst.schedule.mask import Mask
from megatron_burst.tools.job.hugging_face import PRESETS
from megatron_burst.tools.job.model import Model
from megatron_burst.tools.speeds import problem_of
from megatron_burst.tools.world import World

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from prefill import Generation, Llama, Sizes, random_model

WHO = "benchmarks.prefill"
MODELS = {
    "7b": replace(PRESETS["burstengine-7b"], name="7b"),
    "13b": replace(PRESETS["burstengine-14b"], name="13b", vocab=32000),  # Llama-2's
    "tiny": Model("tiny", 2, 64, 4, 4, 16, 16, 128, 128),
}
IMPLS = {name: name for name in ("burst", "burst-gathered", "tp-v1", "tp-v3")}


class Ranks(NamedTuple):
    """Who shares a prompt: `size` ranks, which all run, or the last of them alone."""

    world: World
    size: int

    @property
    def alone(self) -> bool:
        return self.size != self.world.size

    @property
    def rank(self) -> int:
        return self.size - 1 if self.alone else self.world.rank

    def total(self, x: Tensor) -> Tensor:
        """The sum of all ranks' tensors."""
        if not self.alone:
            dist.all_reduce(x, group=self.world.group)
        return x

    def scattered(self, x: Tensor) -> Tensor:
        """This rank's rows of the sum of all ranks' tensors [1, s, n]."""
        rows = torch.empty_like(x.chunk(self.size, 1)[0])
        if self.alone:
            return rows.copy_(x.chunk(self.size, 1)[self.rank])
        if x.is_cuda:
            dist.reduce_scatter_tensor(rows, x.contiguous(), group=self.world.group)
            return rows
        return self.total(x).chunk(self.size, 1)[self.rank]  # gloo scatters no sums

    def gathered(self, x: Tensor) -> Tensor:
        """All ranks' rows [1, s, n]."""
        if self.alone:
            return x.repeat(1, self.size, 1)
        rows = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(rows, x.contiguous(), self.world.group)
        return torch.cat(rows, 1)


def sizes_of(model: Model, tp: int) -> Sizes:
    """Of the part that one of `tp` ranks has; BurstError if heads or features are not even."""
    shared = {"query heads": model.heads_q, "KV heads": model.heads_kv, "features": model.ffn}
    require(WHO, [(
        count % tp == 0, "tensor parallelism must divide heads and features, because each rank has "
        "equally many", f"{count} {name} on {tp} ranks", "leave tp-v1 and tp-v3 out",
    ) for name, count in shared.items()])  # fmt: skip
    heads = model.heads_q // tp, model.heads_kv // tp
    return Sizes(model.layers, model.hidden, *heads, model.dim_qk, model.ffn // tp, model.vocab)


def share_heads(model: Llama, ranks: Ranks, rows: bool) -> None:
    """Make the model's blocks one rank's share of larger ones; `rows`: as `tp-v3`."""
    for block in model.blocks:
        for module in (block.out, block.down):
            join = ranks.scattered if rows else ranks.total
            module.register_forward_hook(lambda _, given, out, join=join: join(out))
        for module in (block.qkv, block.up) if rows else ():
            module.register_forward_pre_hook(lambda _, given: (ranks.gathered(given[0]),))


class LoneRank:
    """Attention of the last context-parallel rank, which sends nothing; made by its first call."""

    def __init__(self, size: int) -> None:
        self.size, self.carrier = size, Silent(size - 1)
        self.passes: Passes | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.passes = self.passes or passes_of_last(self.carrier, self.size, q, k, v)
        return self.passes.forward(q, k, v)[0].to(q.dtype)


def kernel_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of a tensor-parallel rank's heads, without communication."""
    backend, _ = choose_backend(problem_of(q, k, v, mask=Mask.CAUSAL), "auto")
    return backend.forward(q, k, v, q.shape[-1] ** -0.5, CAUSAL)[0].to(q.dtype)


class Layer:
    """K and V of one layer, left where they are."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self.attend = attend

    def prefill(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.k, self.v = k, v
        return self.attend(q, k, v)


class Prefill:
    """One model on the ranks, and a prompt."""

    def __init__(self, model: Model, seq: int, impl: str, ranks: Ranks, dtype: torch.dtype) -> None:
        self.impl, self.ranks, self.layers = impl, ranks, []
        tp = ranks.size if impl.startswith("tp") else 1
        device = ranks.world.device
        self.model = random_model(sizes_of(model, tp), device, dtype)
        if tp > 1:
            share_heads(self.model, ranks, impl == "tp-v3")
        self.attend = kernel_alone if impl.startswith("tp") else LoneRank(ranks.size).attend
        generator = torch.Generator(device).manual_seed(1)
        self.prompt = torch.randint(model.vocab, (1, seq), generator=generator, device=device)

    def run(self) -> Tensor:
        """Logits [1, vocab] of the prompt's last token; K and V stay in `layers`."""
        self.layers = []  # the previous run's are free
        if self.impl.startswith("burst") and not self.ranks.alone:
            gathered = self.impl == "burst-gathered"
            generation = Generation(self.model, self.ranks.world.group, gathered)
            self.layers = generation.layers
            return generation.prefill(self.prompt)
        self.layers = [Layer(self.attend) for _ in self.model.blocks]
        tokens, ranks = self.prompt, self.ranks
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        if self.impl != "tp-v1":
            tokens = tokens.chunk(ranks.size, 1)[ranks.rank]
        if self.impl == "burst":
            positions = positions.chunk(ranks.size)[ranks.rank]
        logits = self.model(tokens, positions, [layer.prefill for layer in self.layers], -1)
        has_last_row = ranks.rank == ranks.size - 1
        return ranks.total(logits.mul_(has_last_row)) if self.impl == "tp-v3" else logits

    @property
    def kv_gib(self) -> float:
        return sum(x.nbytes for layer in self.layers for x in (layer.k, layer.v)) / 2**30


def row_of(
    name: str, seq: int, impl: str, ranks: Ranks, dtype: torch.dtype, times: list[float],
    **others: object,
) -> PrefillRow:  # fmt: skip
    """A row from the milliseconds of its repetitions; none: one that failed."""
    model, world = MODELS[name], ranks.world
    if times:
        others |= spread(times) | {"note": repetitions(times)}
        ms, head = others["ms"], model.embedding_params
        flops = 2 * (model.matmul_params - head) * seq + 2 * head
        flops += 2 * model.layers * model.heads_q * model.dim_qk * seq**2
        others["tokens_per_s"] = 1e3 * seq / ms
        others["tflops_per_gpu"] = flops / ranks.size / ms / 1e9
    return PrefillRow(
        **stamp(world.device), model=name, seq=seq, ranks=ranks.size, nodes=world.nodes,
        runs="one" if ranks.alone else "all", dtype=str(dtype).removeprefix("torch."), impl=impl,
        **others,
    )  # fmt: skip
