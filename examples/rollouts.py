"""One prompt with several answers, as in GRPO: attention with the prompt only once in the sample.

python examples/rollouts.py
torchrun --nproc-per-node 2 examples/rollouts.py --prompt 16384 --answer 2048
"""

import argparse
import os
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst import burst_attention, shard, unshard

HEADS, KV_HEADS, DIM = 8, 2, 64


def attend(tensors: list[Tensor], lengths: list[int], parents: list[int] | None) -> Tensor:
    """Causal attention of a packed sample [s, h, d] over all ranks, each with its contiguous rows.

    Args:
        tensors: q, k and v of the whole sample, the same on all ranks.
        lengths: of its segments.
        parents: of each segment, if they are a tree.
    """
    q, k, v = (shard(x, layout="contiguous", dim=0) for x in tensors)
    boundaries = torch.tensor([0, *accumulate(lengths)])
    out = burst_attention(
        q, k, v, cu_seqlens=boundaries, prefix_tree=parents, layout="contiguous", qkv_format="thd"
    )
    return unshard(out, layout="contiguous", dim=0)


def compare(prompt: int, answer: int, count: int, device: torch.device) -> None:
    """Time attention over `count` answers to one prompt: the prompt once, then once per answer."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(1)
    shapes = [(prompt + count * answer, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    once = [torch.randn(s, generator=generator, device=device).to(dtype) for s in shapes]
    tree = attend(once, [prompt] + count * [answer], [-1] + count * [0])

    apart = [x.split([prompt] + count * [answer]) for x in once]
    copies = [torch.cat([y for x in answers for y in (head, x)]) for head, *answers in apart]
    repeated = attend(copies, count * [prompt + answer], None)
    answers = repeated.unflatten(0, (count, prompt + answer))[:, prompt:].flatten(0, 1)
    if dist.get_rank() == 0:
        of_answers = count * (prompt * answer + answer**2 // 2)  # query-key pairs
        for name, tensors, times in (("once", once, 1), ("with each answer", copies, count)):
            work = of_answers + times * prompt**2 // 2
            print(f"prompt {name}: {len(tensors[0]):,} tokens, {work:,} pairs of query and key")
        difference = float((tree[prompt:] - answers).abs().max())
        print(f"largest difference of the answers' outputs: {difference:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--answer", type=int, default=64, help="tokens of each")
    parser.add_argument("--answers", type=int, default=8, help="how many")
    args = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, **({} if "RANK" in os.environ else alone))
    compare(args.prompt, args.answer, args.answers, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
