"""An example of each public name, for reference/api.md; tests/test_docs.py runs those of one
process. Blocks begin with the name that they show."""

# %% setup
import torch

from megatron_burst import (
    BurstConfig,
    BurstError,
    burst_attention,
    class_log_probs,
    count_supervised,
    distillation_loss,
    keep,
    linear_cross_entropy,
    next_tokens,
    position_ids,
    shard,
    slices,
    token_log_probs,
    top_k_kl,
    top_k_log_probs,
    unshard,
)

cp_group = tp_group = None  # a process group, or one dimension of a DeviceMesh
q = torch.randn(1, 64, 4, 16, requires_grad=True)  # [b, s_local, h, d]
k, v = torch.randn(2, 1, 64, 2, 16)
tokens = torch.randint(100, (1, 64))
boundaries = torch.tensor([0, 24, 64], dtype=torch.int32)
hidden, weight = torch.randn(64, 32), torch.randn(100, 32)
labels = tokens[0]

# %% burst_attention
out = burst_attention(q, k, v, group=cp_group)  # causal
out = burst_attention(q, k, v, group=cp_group, cu_seqlens=boundaries)  # packed documents
out, lse = burst_attention(q, k, v, group=cp_group, window=(15, 0), return_lse=True)
out.sum().backward()

# %% BurstConfig
config = BurstConfig(intra="ring", deterministic=True)
out = burst_attention(q, k, v, group=cp_group, config=config)

# %% cp_groups
from megatron_burst import cp_groups

groups = cp_groups(cp_group)
print(groups)  # a row for each node

# %% CPGroups
groups = cp_groups(cp_group)  # a CPGroups
torch.distributed.all_reduce(x, group=groups.intra)  # over the ranks of this node

# %% keep
from torch.utils.checkpoint import checkpoint


def layer(q, k, v):
    return burst_attention(q, k, v, group=cp_group)


out = checkpoint(keep(layer), q, k, v, use_reentrant=False)  # backward runs no attention again
out.sum().backward()

# %% linear_cross_entropy
loss = linear_cross_entropy(hidden, weight, labels, tp_group=tp_group)
each = linear_cross_entropy(hidden, weight, labels, reduction="none", label_smoothing=0.1)

# %% token_log_probs
found = token_log_probs(hidden, weight, labels, entropy=True)
ratio = (found.log_probs - found.log_probs.detach()).exp()

# %% top_k_log_probs
teacher = top_k_log_probs(hidden, weight, 8)
assert teacher.ids.shape == (*labels.shape, 8)

# %% class_log_probs
student = class_log_probs(hidden, weight, teacher.ids, entropy=True)

# %% top_k_kl
each = top_k_kl(student, teacher)  # KL(teacher || student) of each token
loss = each.mean() - 0.01 * student.entropy.mean()

# %% distillation_loss
loss = distillation_loss(hidden, weight, teacher, reverse=True)

# %% next_tokens
following = next_tokens(tokens, group=cp_group, cu_seqlens=boundaries, dim=1)
assert following[0, 23] == -100  # a document's last token has no next one

# %% count_supervised
supervised = count_supervised(labels)  # early: the count travels while the model computes
loss = linear_cross_entropy(hidden, weight, labels, supervised=supervised)

# %% fuse_loss
from megatron_burst import fuse_loss

model = fuse_loss(GPTModel(...))  # before it is wrapped in DDP
losses = model(tokens, position_ids, None, labels=labels)

# %% burst_spec
from megatron_burst import burst_spec

spec = burst_spec(get_gpt_layer_with_transformer_engine_spec())
model = GPTModel(config, spec, ...)

# %% SlicedSeqParams
from megatron_burst import SlicedSeqParams

params = SlicedSeqParams.of(slices.prefix_lm(prefix=16, tokens=64), tokens=64)
model(tokens, position_ids, attention_mask=None, labels=labels, packed_seq_params=params)
params = SlicedSeqParams.of_tree(lengths=[16, 24, 24], parents=[-1, 0, 0])  # with positions

# %% BalancedBatches
from megatron_burst import BalancedBatches, balance

grid = BalancedBatches.grid(config, micro_batches=8, token_limit=24_576)
costs = balance.Costs.from_plan("plan.json")
sampler = balance.Sampler(lengths, grid, costs, documents=256)  # 256 a step
batches = BalancedBatches(documents, sampler, config)

# %% shard
ids = shard(tokens, group=cp_group, cu_seqlens=boundaries)  # [b, s] -> [b, s / ranks]

# %% unshard
whole = unshard(ids, group=cp_group, cu_seqlens=boundaries)  # [b, s], on every rank

# %% position_ids
places = position_ids(64, group=cp_group, cu_seqlens=boundaries)  # from 0 in each document

# %% BurstError
try:
    burst_attention(q, k, v, group=cp_group, window=(-5, 0))
except BurstError as error:
    print(error)  # who, what must hold and why; what was got; what to change

# %% slices
mask = slices.prefix_lm(prefix=16, tokens=64)  # the first 16 tokens see each other
out = burst_attention(q, k, v, group=cp_group, slices=mask, causal=False)

# %% hf
from megatron_burst.hf import ContextParallelMixin, prepare_data_loader, shard_batch

model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="burst")
for batch in prepare_data_loader(loader, group=cp_group):
    shard = shard_batch(batch, group=cp_group, fused_loss=True)
    model(**shard, use_cache=False).loss.backward()


class BurstSFTTrainer(ContextParallelMixin, SFTTrainer): ...


# %% titan
# torchrun ... -m megatron_burst.titan --module llama3 --config llama3_8b ...

# %% auto
import megatron_burst.auto  # before the model is built

provider.cp_comm_type = "burst"

# %% compat
from megatron_burst.compat import burst_attn_func

out = burst_attn_func(q, k, v, softmax_scale=None, flash="cuda", causal=True)
