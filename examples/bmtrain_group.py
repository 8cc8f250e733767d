"""The original BurstAttention call under BMTrain, on megatron_burst: from a communicator to a torch
process group.

    torchrun --nproc-per-node=8 examples/bmtrain_group.py

BMTrain's communicators are NCCL's own, and torch cannot send through them. So `torch_group` asks a
communicator for its ranks, and makes a process group of the same ones in the same order.
"""

import bmtrain as bmt
import torch
import torch.distributed as dist

from megatron_burst.compat import burst_attn_func

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)


def torch_group(comm) -> dist.ProcessGroup:
    """Return the process group of a BMTrain communicator such as `bmt.config["comm"]`.

    Call it once for a communicator, on all ranks of the job together, each with its own.

    Raises:
        ValueError: if the communicator does not have its ranks in ascending order, as torch's have.
    """
    mine = torch.tensor([dist.get_rank()], device=DEVICE)
    ranks = bmt.distributed.all_gather(mine, comm).flatten().tolist()
    if ranks != sorted(ranks):
        raise ValueError(f"ranks must ascend in a communicator, as in torch's groups; got {ranks}")
    everyones: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, ranks)
    groups = sorted(set(map(tuple, everyones)))
    return dist.new_subgroups_by_enumeration([list(group) for group in groups])[0]


def main() -> None:
    bmt.init_distributed()
    dist.init_process_group("nccl" if GPU else "gloo")  # BMTrain does without
    group = torch_group(bmt.config["comm"])

    # a rank's rows of 4096: chunks r and 2P-1-r of 2P
    torch.manual_seed(dist.get_rank(group))
    shape = (1, 4096 // group.size(), 8, 64)
    q, k, v = (torch.randn(shape, dtype=DTYPE, device=DEVICE, requires_grad=True) for _ in "qkv")
    out = burst_attn_func(q, k, v, None, "cuda", True, True, False, group)
    out.sum().backward()
    print(f"rank {dist.get_rank(group)} of {group.size()}: out {tuple(out.shape)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
