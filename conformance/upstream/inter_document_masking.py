"""The loss of one small GPT on a sample of several documents, sharded as Megatron's pretrain_gpt.py
shards it under --dataloader-inter-document-masking. It must not depend on the number of ranks.

torchrun --nproc-per-node 1 conformance/upstream/inter_document_masking.py  # the truth
torchrun --nproc-per-node 2 conformance/upstream/inter_document_masking.py  # te, CP 2
torchrun --nproc-per-node 2 conformance/upstream/inter_document_masking.py --attention burst
torchrun --nproc-per-node 2 conformance/upstream/inter_document_masking.py --attention by-document

Needs megatron-core 0.19, and a GPU a rank and TransformerEngine for the first two. The others run
on CPUs too, over gloo: `burst` knows how the sample is sharded, `by-document` is burst taking the
rows for document after document, as TransformerEngine does.
"""

import argparse
from itertools import pairwise

import torch
import torch.distributed as dist

DOCUMENTS = [0, 500, 1808, 2000, 4096]  # where they begin, and the end: all multiples of 2 * CP
VOCABULARY = 4096
GPUS = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPUS else "cpu")


def sample() -> dict[str, torch.Tensor]:
    """What Megatron's data loader yields."""
    rows = torch.randint(VOCABULARY, (DOCUMENTS[-1],), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(stop - start) for start, stop in pairwise(DOCUMENTS)])
    every = {"tokens": rows, "labels": rows.roll(-1), "position_ids": positions}
    every["places"] = torch.arange(
        len(rows)
    )  # travels with the rows, so that losses can be put back
    return {name: each[None].to(DEVICE) for name, each in every.items()}


def packed_params():
    """As pretrain_gpt.py makes them."""
    from megatron.core.packed_seq_params import PackedSeqParams

    boundaries = torch.tensor(DOCUMENTS, dtype=torch.int32, device=DEVICE)
    longest = int(boundaries.diff().max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=boundaries, cu_seqlens_kv=boundaries,
        max_seqlen_q=longest, max_seqlen_kv=longest,
    )  # fmt: skip


def model(burst: bool) -> torch.nn.Module:
    """Two layers with large weights, so that attention counts without training."""
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import TransformerConfig

    ranks = dist.get_world_size()
    ring = "p2p" if ranks > 1 else None
    config = TransformerConfig(
        num_layers=2, hidden_size=256, num_attention_heads=2, init_method=normal,
        output_layer_init_method=normal, hidden_dropout=0.0, attention_dropout=0.0, bf16=GPUS,
        params_dtype=torch.bfloat16 if GPUS else torch.float32, normalization="RMSNorm",
        context_parallel_size=ranks, cp_comm_type="burst" if burst else ring,
        use_cpu_initialization=True, gradient_accumulation_fusion=False, add_bias_linear=False,
        masked_softmax_fusion=False, bias_dropout_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    if burst:
        from megatron_burst import burst_spec

        spec = burst_spec(gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm"))
    else:
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    torch.manual_seed(2)
    gpt = GPTModel(config, spec, VOCABULARY, DOCUMENTS[-1], position_embedding_type="rope")
    return gpt.to(DEVICE)


def normal(weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.init.normal_(weight, std=0.1)


def use_burst() -> None:
    """What `python -m megatron_burst` does before a script is run."""
    from megatron_burst.mcore import patches
    from megatron_burst.tools import cpu_mode

    if not GPUS:
        cpu_mode.install(training=False)
    patches.apply("attention", "anywhere")


def say_how_the_sample_is_sharded() -> None:
    """As Megatron's parsed arguments do, in which burst looks."""
    from megatron.training import global_vars

    global_vars.set_args(argparse.Namespace(dataloader_inter_document_masking=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--attention", choices=["te", "burst", "by-document"], default="te")
    attention = parser.parse_args().attention
    burst = attention != "te"
    from megatron.core import parallel_state, tensor_parallel, utils

    dist.init_process_group("nccl" if GPUS else "gloo")
    if GPUS:
        torch.cuda.set_device(dist.get_rank())
    if burst:
        use_burst()
    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    group = parallel_state.get_context_parallel_group()
    mine = utils.get_batch_on_this_cp_rank(
        sample(), is_hybrid_cp=False, cp_group=group, use_per_sequence_balancing=True
    )
    gpt = model(burst)
    if attention == "burst":
        say_how_the_sample_is_sharded()
    with torch.no_grad():
        losses = gpt(
            mine["tokens"], mine["position_ids"], None, labels=mine["labels"],
            packed_seq_params=packed_params(),
        )  # fmt: skip
    whole = torch.zeros(DOCUMENTS[-1], device=DEVICE)
    whole[mine["places"][0]] = losses[0].float()
    dist.all_reduce(whole)
    if dist.get_rank() == 0:
        middles = [f"{whole[(start + stop) // 2]:.2f}" for start, stop in pairwise(DOCUMENTS)]
        print(f"{attention}, CP {ranks}: loss {whole.mean():.3f}; at documents' middles", *middles)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
