"""Log-probabilities of packed documents across torchrun's ranks, without Megatron.

torchrun --nproc-per-node 2 examples/packed_log_probs.py

One layer of attention and an output layer with random weights; each rank has its chunks of every
document (TransformerEngine's THD). Prints the log-probability of each document, which does not
depend on the number of ranks.
"""

import torch
import torch.distributed as dist

from megatron_burst import burst_attention, next_tokens, token_log_probs

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
    # this rank's tokens: chunks r and 2P-1-r of each document, padding (-1) included
    tokens, document = [], []
    for number, (length, room) in enumerate(zip(LENGTHS, padded, strict=True)):
        words = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(number))
        chunks = torch.cat((words, words.new_full((room - length,), -1))).chunk(2 * size)
        tokens += [chunks[rank], chunks[2 * size - 1 - rank]]
        document += [number] * (len(tokens[-2]) + len(tokens[-1]))
    tokens, document = torch.cat(tokens).to(device), torch.tensor(document, device=device)

    dtype = torch.bfloat16 if on_gpu else torch.float32
    random = torch.Generator().manual_seed(5)
    table, head = (torch.randn(VOCAB, WIDTH, generator=random).to(device, dtype) for _ in range(2))
    x = table[tokens.clamp(min=0)].view(-1, HEADS, WIDTH // HEADS)
    sample = dict(layout="zigzag-documents", cu_seqlens=starts, cu_seqlens_padded=lies)
    hidden = burst_attention(x, x, x, group=group, qkv_format="thd", **sample).flatten(1)
    found = token_log_probs(hidden, head, next_tokens(tokens, cp_group=group, **sample))

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
