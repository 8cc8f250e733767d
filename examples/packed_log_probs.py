"""Log-probabilities of packed documents across torchrun's ranks, without Megatron.

torchrun --nproc-per-node 2 examples/packed_log_probs.py

One layer of attention and an output layer with random weights; each rank has its chunks of every
document (TransformerEngine's THD). Prints the log-probability of each document, which does not
depend on the number of ranks.
"""

import torch
import torch.distributed as dist

from megatron_burst import burst_attention, next_tokens, shard, token_log_probs

LENGTHS, WIDTH, HEADS, VOCAB = (21, 40, 7, 0, 90), 64, 4, 500


def main() -> None:
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
    padded = [-(-length // (2 * size)) * 2 * size for length in LENGTHS]
    starts, lies = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (LENGTHS, padded))
    sample = dict(layout="zigzag-documents", cu_seqlens=starts, cu_seqlens_padded=lies)
    words = torch.full((int(lies[-1]),), -1)  # padding
    for number, (length, start) in enumerate(zip(LENGTHS, lies.tolist(), strict=False)):
        generator = torch.Generator().manual_seed(number)
        words[start : start + length] = torch.randint(VOCAB, (length,), generator=generator)
    document = torch.arange(len(LENGTHS)).repeat_interleave(lies.diff())
    tokens, document = (
        shard(x.to(device), group=group, dim=0, **sample) for x in (words, document)
    )

    dtype = torch.bfloat16 if on_gpu else torch.float32
    random = torch.Generator().manual_seed(5)
    table, head = (torch.randn(VOCAB, WIDTH, generator=random).to(device, dtype) for _ in range(2))
    x = table[tokens.clamp(min=0)].view(-1, HEADS, WIDTH // HEADS)
    hidden = burst_attention(x, x, x, group=group, qkv_format="thd", **sample).flatten(1)
    found = token_log_probs(hidden, head, next_tokens(tokens, group=group, **sample))

    sums = found.log_probs.new_zeros(2, len(LENGTHS))
    sums[0].index_add_(0, document, found.log_probs)
    sums[1].index_add_(0, document, found.mask.to(sums.dtype))
    dist.all_reduce(sums)
    if rank == 0:
        for length, total, count in zip(LENGTHS, *sums.tolist(), strict=True):
            print(f"{length} tokens, {count:.0f} predicted: log-probability {total:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
