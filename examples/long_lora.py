"""LoRA of Qwen3-8B's sizes on very long samples, and what a step takes; the weights are random.

pip install transformers peft [deepspeed]
python examples/long_lora.py --seq 131072 [--keep-layers 36] [--with burst|sdpa|alst] [--out x.csv]
torchrun --nproc-per-node 4 examples/long_lora.py --seq 524288

All variants recompute layers, whose inputs are in host memory. `burst` keeps attention's results
in the first `--keep-layers` layers, and computes the loss without logits. `sdpa` is torch's
attention (cuDNN) with all logits, `alst` the same with DeepSpeed's tiled MLP and loss. Only `burst`
runs on several GPUs here, which share each sample.
"""

import argparse
import csv
import math
import os
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.autograd.graph import save_on_cpu
from transformers import AutoModelForCausalLM, Qwen3Config

from megatron_burst import BurstConfig
from megatron_burst.hf import shard_batch

SIZES = dict(
    hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128, vocab_size=151936, rope_theta=1e6,
)  # fmt: skip
GIB = 1 << 30


def main() -> None:
    options = options_of()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "LOCAL_RANK" in os.environ:
        dist.init_process_group()
    for other in ("flash", "mem_efficient", "math"):  # cuDNN's is sdpa's fastest on Hopper
        getattr(torch.backends.cuda, f"enable_{other}_sdp")(device.type == "cpu")
    model = model_of(options, device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    torch.manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (1, options.seq), device=device)
    for number in range(options.steps):
        synchronize(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        loss = loss_of(model, ids, options)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        report(options, model, number, time.perf_counter() - begin, float(loss.detach()))


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq", type=int, default=131072, help="tokens of a sample")
    parser.add_argument(
        "--with", dest="variant", choices=("burst", "sdpa", "alst"), default="burst"
    )
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--keep-layers", type=int, help="layers that keep attention; default: all")
    parser.add_argument("--host-gib", type=float, help="memory for inputs; default: half of all")
    parser.add_argument("--steps", type=int, default=3, help="the first one also warms up")
    parser.add_argument("--tiny", action="store_true", help="a narrow model, to try it on a CPU")
    parser.add_argument("--out", type=Path, help="append a row for each step")
    return parser.parse_args()


def model_of(options: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    """The model with LoRA on all linear layers but the head."""
    narrow = dict(hidden_size=64, intermediate_size=128, vocab_size=512) if options.tiny else {}
    longest = max(options.seq, 40960)
    sizes = SIZES | narrow | {"max_position_embeddings": longest}
    config = Qwen3Config(num_hidden_layers=options.layers, **sizes)
    config.torch_dtype = torch.bfloat16
    torch.manual_seed(0)
    name = "burst" if options.variant == "burst" else "sdpa"
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=name)
    torch.set_default_dtype(torch.float32)
    if options.variant == "alst":
        tile_mlp(model)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora, autocast_adapter_dtype=False).train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def loss_of(model: torch.nn.Module, ids: torch.Tensor, options: argparse.Namespace) -> torch.Tensor:
    """The loss of the sample's next tokens."""
    if options.variant == "burst":
        kept = BurstConfig(keep="all", keep_layers=options.keep_layers, keep_offload="inputs",
                           keep_host_gib=options.host_gib)  # fmt: skip
        batch = shard_batch({"input_ids": ids}, config=kept, fused_loss=True)
        return model(**batch, use_cache=False).loss
    on_gpu = ids.is_cuda
    causal = model.get_base_model()
    with save_on_cpu(pin_memory=True) if on_gpu else nullcontext():  # the inputs of layers
        hidden = causal.model(input_ids=ids, use_cache=False).last_hidden_state
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    if options.variant == "alst":
        return tiled_loss(causal, hidden, labels)
    logits = causal.lm_head(hidden)
    return causal.loss_function(logits, ids, logits.shape[-1], shift_labels=labels)


def tile_mlp(model: torch.nn.Module) -> None:
    """ALST's: the MLP of a few thousand rows at a time."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    kind = type(model.model.layers[0].mlp)
    forward = kind.forward

    def tiled(self, x):
        shards = math.ceil(x.shape[1] / self.hidden_size)
        return TiledMLP.apply(forward, self, x, shards, list(self.parameters()))

    kind.forward = tiled


def tiled_loss(causal: torch.nn.Module, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """ALST's: the logits of a few thousand rows at a time."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

    def of_rows(head, x, y):
        logits = head(x).float().view(-1, head.out_features)
        return torch.nn.functional.cross_entropy(logits, y.flatten(), reduction="sum")

    shards, weights = math.ceil(hidden.shape[1] / 8192), [causal.lm_head.weight]
    arguments = causal.lm_head, hidden, labels, None, shards, weights, "sum"
    return TiledFusedLogitsLoss.apply(of_rows, *arguments) / (labels != -100).sum()


def flops_of(config: Qwen3Config, tokens: int) -> float:
    """Of a step with frozen weights, without recomputation: products forward, and those of
    activations' gradients; attention forward, and twice as much backward."""
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    h, d = config.hidden_size, config.head_dim
    layer = h * d * (2 * heads + 2 * kv) + 3 * h * config.intermediate_size
    weights = config.num_hidden_layers * layer + h * config.vocab_size
    attention = config.num_hidden_layers * 4 * heads * d * tokens / 2
    return tokens * (2 * 2 * weights + 3 * attention)


def report(options: argparse.Namespace, model: torch.nn.Module, number: int, seconds: float,
           loss: float) -> None:  # fmt: skip
    """Print a step, and append it to the file."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    on_gpu = torch.cuda.is_available()
    peak = torch.cuda.max_memory_allocated() / GIB if on_gpu else 0.0
    tflops = flops_of(model.config, options.seq) / ranks / seconds / 1e12
    row = {
        "with": options.variant, "layers": options.layers, "seq": options.seq, "ranks": ranks,
        "keep_layers": options.keep_layers, "step": number, "s": f"{seconds:.3f}",
        "tokens_per_s": f"{options.seq / ranks / seconds:.0f}", "tflops": f"{tflops:.1f}",
        "peak_gib": f"{peak:.2f}", "loss": f"{loss:.5f}", "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if on_gpu else "CPU",
    }  # fmt: skip
    if dist.is_initialized() and dist.get_rank():
        return
    print("step", *(f"{name}={value}" for name, value in row.items()), flush=True)
    if options.out:
        is_new = not options.out.exists()
        with options.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, row)
            if is_new:
                writer.writeheader()
            writer.writerow(row)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
