"""Fine-tunes a tiny Qwen3 on packed text with accelerate and FSDP2, without Megatron.

pip install accelerate transformers
torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py [--cp 2] [--steps 5] [files ...]

Each group of `--cp` ranks shards the same packed sample; FSDP2 shards the weights over all ranks.
Runs on the GPUs of the machine, or without any on CPU processes. It prints the loss of each step,
which does not depend on the number of ranks in a group. Four lines are burst's: the import, the
attn_implementation, the data loader, and `shard_batch`, which also has the loss computed without
logits.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Qwen3Config

from megatron_burst.hf import prepare_data_loader, shard_batch

TINY = dict(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip


def main() -> None:
    options = options_of()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
    )
    on_gpu = torch.cuda.is_available()
    accelerator = Accelerator(
        fsdp_plugin=plugin, cpu=not on_gpu, mixed_precision="bf16" if on_gpu else "no"
    )
    world, cp = accelerator.num_processes, options.cp or accelerator.num_processes
    # not accelerate's cp_size, which would replace attention by torch's own
    mesh = dist.init_device_mesh(
        accelerator.device.type, (world // cp, cp), mesh_dim_names=("dp", "cp")
    )
    set_seed(0)
    config = Qwen3Config(**TINY)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="burst")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    loader = prepare_data_loader(
        DataLoader(
            documents(options.files, options.length), batch_size=4,
            collate_fn=DataCollatorWithFlattening(), drop_last=True,
        ),
        group=mesh["cp"], device=accelerator.device,
    )  # fmt: skip
    if not len(loader):
        raise SystemExit("accelerate_fsdp2: pass more files, 4 for each group of ranks")
    for step, batch in zip(range(options.steps), loader, strict=False):
        loss = model(**shard_batch(batch, group=mesh["cp"], fused_loss=True), use_cache=False).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean").item()
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        accelerator.print(f"step {step} loss {mean:.6f} gradient norm {norm.item():.5f}")
    accelerator.end_training()


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="text, a document each; else Python's")
    parser.add_argument("--cp", type=int, help="ranks that shard a sample; default: all")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--length", type=int, default=300, help="most bytes of a document")
    return parser.parse_args()


def documents(files: list[Path], length: int) -> list[dict[str, list[int]]]:
    """Texts as bytes: pieces of the files, or of Python's standard library."""
    files = files or sorted(Path(argparse.__file__).parent.glob("[a-d]*.py"))
    texts = [path.read_bytes()[: length - 17 * place % length] for place, path in enumerate(files)]
    return [{"input_ids": list(text)} for text in texts if len(text) > 1]


if __name__ == "__main__":
    main()
