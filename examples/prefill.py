"""Prefill a long prompt over all ranks, then decode from K and V that stay sharded or are gathered.

python examples/prefill.py
torchrun --nproc-per-node 4 examples/prefill.py --prompt README.md --tokens 8

A Llama in plain PyTorch with random weights reads the bytes of a file. Prefill is burst attention
under torch.inference_mode: nothing is saved for backward, and each rank holds K and V of its own
rows. Rank 0 then repeats everything alone. The example fails if the logits of the prompt's last
token differ from those of the ranks, or any decoded token does.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_burst import burst_attention, position_ids, shard, unshard

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int  # of a head
    ffn: int
    vocab: int


TINY = Sizes(4, 128, 8, 2, 16, 352, 256)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}  # of logits, relative to the largest


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """x [b, s, h, d] with rotary embeddings of its rows' positions [s]."""
    half = x.shape[-1] // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angles = positions.float()[:, None, None] * 10000.0**-steps
    cos, sin = (f(angles).to(x.dtype) for f in (torch.cos, torch.sin))
    a, b = x.split(half, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Block(nn.Module):
    """Attention and a gated feed-forward, each behind an RMSNorm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        width = sizes.heads * sizes.dim
        linear = partial(nn.Linear, bias=False)
        self.norm, self.ffn_norm = nn.RMSNorm(sizes.hidden), nn.RMSNorm(sizes.hidden)
        self.qkv = linear(sizes.hidden, width + 2 * sizes.kv_heads * sizes.dim)
        self.out = linear(width, sizes.hidden)
        self.up, self.down = linear(sizes.hidden, 2 * sizes.ffn), linear(sizes.ffn, sizes.hidden)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """x [b, s, hidden], whose rows are at these positions [s]."""
        heads = (self.sizes.heads, self.sizes.kv_heads, self.sizes.kv_heads)
        qkv = self.qkv(self.norm(x)).unflatten(-1, (-1, self.sizes.dim))
        q, k, v = qkv.split(heads, dim=2)
        x = x + self.out(attend(rotated(q, positions), rotated(k, positions), v).flatten(2))
        gate, up = self.up(self.ffn_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """A decoder that returns the logits of one row."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm, self.head = nn.RMSNorm(sizes.hidden), nn.Linear(sizes.hidden, sizes.vocab, False)

    def forward(self, tokens: Tensor, positions: Tensor, attends: list[Attend], row: int) -> Tensor:
        """Logits [b, vocab] after `row` of tokens [b, s]; `attends`: a layer's attention each."""
        x = self.embedding(tokens)
        for block, attend in zip(self.blocks, attends, strict=True):
            x = block(x, positions, attend)
        return self.head(self.norm(x[:, row]))


class Layer:
    """K and V of one layer, [b, rows, kv_heads, d], and attention that adds to them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.k, self.v = group, torch.empty(0), torch.empty(0)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of this rank's rows to all ranks', in zigzag."""
        self.k, self.v = k, v
        return burst_attention(q, k, v, group=self.group)

    def keep(self, rows: Tensor) -> None:
        """Keep these rows only."""
        self.k, self.v = self.k[:, rows], self.v[:, rows]

    def gather(self, tokens: int) -> None:
        """Get the rows of all ranks, in the order of the prompt, without its padding."""
        self.k, self.v = (unshard(x, group=self.group)[:, :tokens] for x in (self.k, self.v))

    def decode(self, q: Tensor, k: Tensor, v: Tensor, owns: bool, merge: bool) -> Tensor:
        """Attention of a new token, the same on all ranks, to what they hold.

        `owns`: whether this rank stores the token. `merge`: whether ranks hold different rows: then
        each attends to its own, and outputs are weighted by their softmax's sums.
        """
        if owns:
            self.k, self.v = torch.cat((self.k, k), 1), torch.cat((self.v, v), 1)
        repeats, sums = q.shape[2] // k.shape[2], torch.promote_types(q.dtype, torch.float32)
        keys, values = (x.repeat_interleave(repeats, 2).to(sums) for x in (self.k, self.v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q.to(sums), keys) * q.shape[-1] ** -0.5
        lse = scores.logsumexp(-1)  # [b, h, 1]
        out = torch.einsum("bhqk,bkhd->bhqd", scores.softmax(-1), values)
        if merge:
            parts = torch.cat((out, lse.unsqueeze(-1)), -1)
            every = [torch.empty_like(parts) for _ in range(self.group.size())]
            dist.all_gather(every, parts, self.group)
            outs, lses = torch.stack(every).split((out.shape[-1], 1), -1)
            out = (outs * lses.softmax(0)).sum(0)
        return out.transpose(1, 2).to(q.dtype)


class Generation:
    """One prompt on the ranks of a group: prefill, then one token after the other.

    `gathered`: every rank holds all of K and V; otherwise only its rows of the prompt, and every
    size'th token after it.
    """

    def __init__(self, model: Llama, group: dist.ProcessGroup, gathered: bool) -> None:
        self.model, self.group, self.gathered = model, group, gathered
        self.layers, self.length = [Layer(group) for _ in model.blocks], 0

    def prefill(self, prompt: Tensor) -> Tensor:
        """Logits [b, vocab] of the last token of a prompt [b, s], the same on all ranks."""
        self.length = prompt.shape[1]
        # no query sees later keys
        padded = F.pad(prompt, (0, -self.length % (2 * self.group.size())))
        mine = position_ids(padded.shape[1], group=self.group, device=prompt.device)
        row = (mine == self.length - 1).nonzero().flatten()
        attends = [layer.prefill for layer in self.layers]
        tokens = shard(padded, group=self.group)
        logits = self.model(tokens, mine, attends, int(row[0]) if len(row) else 0)
        dist.all_reduce(logits.mul_(len(row)), group=self.group)  # one rank has the row
        for layer in self.layers:
            if self.gathered:
                layer.gather(self.length)
            else:
                layer.keep((mine < self.length).nonzero().flatten())
        return logits

    def decode(self, token: Tensor) -> Tensor:
        """Logits [b, vocab] after one more token [b]."""
        position = torch.tensor([self.length], device=token.device)
        owns = self.gathered or self.length % self.group.size() == self.group.rank()
        how = {"owns": owns, "merge": not self.gathered}
        self.length += 1
        return self.model(
            token[:, None], position, [partial(layer.decode, **how) for layer in self.layers], 0
        )

    def run(self, prompt: Tensor, count: int) -> tuple[Tensor, list[int]]:
        """The prompt's logits and the tokens that a greedy choice adds."""
        first = logits = self.prefill(prompt)
        tokens = [int(logits.argmax())]
        while len(tokens) < count:
            logits = self.decode(torch.tensor(tokens[-1:], device=prompt.device))
            tokens.append(int(logits.argmax()))
        return first, tokens


def random_model(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Llama:
    """The same on all ranks; weights that let tokens matter to each other."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Llama(sizes).to(dtype)
    for weight in model.parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    return model


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompt", type=Path, default=Path(__file__), help="a file; bytes: tokens")
    parser.add_argument("--tokens", type=int, default=8, help="how many to decode")
    args = parser.parse_args()
    device, dtype = torch.device("cpu"), torch.float32
    if torch.cuda.is_available():
        device, dtype = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), torch.bfloat16
        torch.cuda.set_device(device)
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, **({} if "RANK" in os.environ else alone))
    prompt = torch.tensor([list(args.prompt.read_bytes())], device=device)
    model, by_itself = random_model(TINY, device, dtype), dist.new_group([0])
    runs = {
        name: Generation(model, dist.group.WORLD, name == "gathered").run(prompt, args.tokens)
        for name in ("sharded", "gathered")
    }
    if dist.get_rank() == 0:
        logits, tokens = Generation(model, by_itself, True).run(prompt, args.tokens)
        for name, (theirs, others) in runs.items():
            error = float((theirs - logits).abs().max() / logits.abs().max())
            what = f"{prompt.shape[1]} tokens on {dist.get_world_size()} ranks, K and V {name}"
            same = "the same" if others == tokens else "others"
            print(
                f"{what}: logits differ by {error:.1e} from one process's, "
                f"{len(others)} tokens are {same}",
                flush=True,
            )
            assert error < TOLERANCE[dtype] and (others == tokens or dtype is not torch.float32)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
