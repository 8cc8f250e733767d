"""Trains on very long samples, and prints what a step takes; the weights are random.

pip install transformers peft accelerate [deepspeed] [liger-kernel]
python examples/long_samples.py [--with burst|sdpa|alst] [--keep-layers 36] [--out x.csv]
torchrun --nproc-per-node 4 examples/long_samples.py --seq 524288
torchrun --nproc-per-node 2 examples/long_samples.py --full [--with burst|accelerate|liger]

LoRA of Qwen3-8B's sizes: all variants recompute layers, whose inputs are in host memory. `burst`
keeps attention's results in the first `--keep-layers` layers, and computes the loss without logits.
`sdpa` is torch's attention with all logits, `alst` the same with DeepSpeed's tiled MLP and loss.
Only `burst` runs on several GPUs here, which share each sample.

`--full` trains all weights of Qwen3-1.7B's sizes with FSDP2 over GPUs that share each sample, and
recomputes layers. `accelerate` is its own context parallelism, torch's ring attention with sdpa,
and `liger` the same with Liger's loss, which needs no logits.
"""

import argparse
import csv
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.autograd.graph import save_on_cpu
from torch.nn.functional import cross_entropy, pad
from transformers import AutoModelForCausalLM, Qwen3Config

from megatron_burst import BurstConfig
from megatron_burst.hf import shard_batch

LORA = dict(
    hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128, vocab_size=151936, rope_theta=1e6, num_hidden_layers=36,
)  # fmt: skip
FULL = LORA | dict(
    hidden_size=2048, intermediate_size=6144, num_attention_heads=16, num_hidden_layers=28,
    tie_word_embeddings=True,
)  # fmt: skip
NARROW = dict(hidden_size=64, intermediate_size=128, vocab_size=512)
ON_ONE, ON_SEVERAL = ("burst", "sdpa", "alst"), ("burst", "accelerate", "liger")
GIB, ON_GPU = 1 << 30, torch.cuda.is_available()


def main() -> None:
    options = options_of()
    device = prepare(options.sdpa)
    model = (model_of if options.full else with_lora)(options, device).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    config, accelerator = model.config, None
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    if options.full:
        accelerator = accelerator_of(options)
        model, optimizer = accelerator.prepare(model, optimizer)
    for place, seq in enumerate(options.seq):
        torch.manual_seed(1)
        ids = torch.randint(0, config.vocab_size, (1, seq), device=device)
        for number in range(options.steps - (place > 0)):
            begin = now()
            with loss_of(model, ids, options, accelerator) as loss:
                loss.backward()
            if not options.full:  # FSDP2 does it by itself
                average(trained)
            optimizer.step()
            optimizer.zero_grad()
            report(options, config, number, seq, now() - begin, loss.detach())
    if dist.is_initialized():
        dist.destroy_process_group()


def average(trained: list[torch.nn.Parameter]) -> None:
    """Average gradients over the ranks, which share a sample."""
    if dist.is_initialized():
        for weight in trained:
            dist.all_reduce(weight.grad)
            weight.grad /= dist.get_world_size()


def prepare(sdpa: str) -> torch.device:
    """This process's device, and with torchrun its process group; sdpa uses one kernel on GPUs."""
    device = torch.device("cpu")
    if ON_GPU:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        for kernel in ("cudnn", "flash", "mem_efficient", "math"):
            getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(kernel == sdpa)
    if "LOCAL_RANK" in os.environ:
        dist.init_process_group()
    return device


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--seq", type=int, nargs="+", default=[131072], help="tokens of a sample; one or several")
    add("--full", action="store_true", help="train all weights, not LoRA")
    add("--with", dest="variant", choices=sorted({*ON_ONE, *ON_SEVERAL}), default="burst")
    add("--layers", type=int, help="default: 36, with --full 28")
    add("--keep-layers", type=int, help="layers that keep attention; default: all")
    add("--host-gib", type=float, help="memory for inputs; default: half of all")
    add("--sdpa", choices=("cudnn", "flash"), default="cudnn", help="sdpa's kernel on a GPU")
    add("--rotate", choices=("allgather", "alltoall"), default="allgather", help="accelerate's")
    add("--steps", type=int, default=3, help="the first warms up; one fewer for further --seq")
    add("--tiny", action="store_true", help="a narrow model, to try it on a CPU")
    add("--out", type=Path, help="append a row for each step")
    options = parser.parse_args()
    possible = ON_SEVERAL if options.full else ON_ONE
    if options.variant not in possible:
        parser.error(f"--with must be one of {', '.join(possible)} here")
    return options


def model_of(options: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    """The model, in bf16 for LoRA; FSDP2 computes with float32 weights in bf16."""
    sizes = (FULL if options.full else LORA) | (NARROW if options.tiny else {})
    layers = options.layers or sizes["num_hidden_layers"]
    longest = max(*options.seq, 40960)
    config = Qwen3Config(**sizes | dict(num_hidden_layers=layers, max_position_embeddings=longest))
    config.torch_dtype = torch.float32 if options.full else torch.bfloat16
    torch.manual_seed(0)
    name = "burst" if options.variant == "burst" else "sdpa"
    torch.set_default_dtype(config.torch_dtype)
    with device:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=name)
    torch.set_default_dtype(torch.float32)
    if options.variant == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3(rope=False, rms_norm=False, swiglu=False, model=model)
    return model


def with_lora(options: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    """The model with LoRA on all linear layers but the head."""
    from peft import LoraConfig, get_peft_model

    model = model_of(options, device)
    if options.variant == "alst":
        tile_mlp(model)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora, autocast_adapter_dtype=False)


def accelerator_of(options: argparse.Namespace):
    """An Accelerator with FSDP2 over all ranks, and without burst its context parallelism."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.utils import TorchContextParallelConfig
    from torch.distributed.fsdp import MixedPrecisionPolicy

    # accelerate's for bf16, but for the dtype of outputs, which would round the loss
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16) if ON_GPU else None
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, mixed_precision_policy=policy, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
    )  # fmt: skip
    parallelism = None
    if options.variant != "burst":
        handler = TorchContextParallelConfig(cp_comm_strategy=options.rotate)
        parallelism = ParallelismConfig(cp_size=dist.get_world_size(), cp_handler=handler)
    return Accelerator(
        fsdp_plugin=plugin, parallelism_config=parallelism, cpu=not ON_GPU,
        mixed_precision="bf16" if ON_GPU else "no",
    )  # fmt: skip


@contextmanager
def loss_of(model: torch.nn.Module, ids: torch.Tensor, options: argparse.Namespace,
            accelerator) -> Iterator[torch.Tensor]:  # fmt: skip
    """The loss of the sample's next tokens, for a backward pass in this context."""
    labels = pad(ids[:, 1:], (0, 1), value=-100)
    if options.variant == "burst":
        place = "none" if options.full else "inputs"
        kept = BurstConfig(keep="all", keep_layers=options.keep_layers, keep_offload=place,
                           keep_host_gib=options.host_gib)  # fmt: skip
        batch = shard_batch({"input_ids": ids}, config=kept, fused_loss=True)
        yield model(**batch, use_cache=False).loss
    elif options.full:
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        batch = dict(input_ids=ids.clone(), position_ids=positions, shift_labels=labels)
        rows = list(batch.values())
        with accelerator.maybe_context_parallel(rows, [1] * len(rows), set(rows)):
            count = (ids.shape[1] - 1) / dist.get_world_size()
            # without a mask, transformers would make one, taking a shard for packed documents
            yield model(**batch, labels=labels, num_items_in_batch=count, use_cache=False,
                        attention_mask={"full_attention": None}).loss  # fmt: skip
    else:
        yield on_one_gpu(model.get_base_model(), ids, labels, options.variant)


def on_one_gpu(causal: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor,
               variant: str) -> torch.Tensor:  # fmt: skip
    """The loss without burst, with layers' inputs in host memory."""
    with save_on_cpu(pin_memory=True) if ids.is_cuda else nullcontext():
        hidden = causal.model(input_ids=ids, use_cache=False).last_hidden_state
    if variant == "alst":
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
        return cross_entropy(logits, y.flatten(), reduction="sum")

    shards, weights = math.ceil(hidden.shape[1] / 8192), [causal.lm_head.weight]
    arguments = causal.lm_head, hidden, labels, None, shards, weights, "sum"
    return TiledFusedLogitsLoss.apply(of_rows, *arguments) / (labels != -100).sum()


def flops_of(config: Qwen3Config, tokens: int, full: bool) -> float:
    """Of a step, without recomputation: products forward, and those of gradients of activations
    and, unless they are frozen, of weights; attention forward, and twice as much backward."""
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    h, d = config.hidden_size, config.head_dim
    layer = h * d * (2 * heads + 2 * kv) + 3 * h * config.intermediate_size
    weights = config.num_hidden_layers * layer + h * config.vocab_size
    attention = config.num_hidden_layers * 4 * heads * d * tokens / 2
    return tokens * (2 * (3 if full else 2) * weights + 3 * attention)


def report(options: argparse.Namespace, config: Qwen3Config, number: int, seq: int,
           seconds: float, loss: torch.Tensor) -> None:  # fmt: skip
    """Print a step, and append it to the file."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks > 1:
        dist.all_reduce(loss)  # of the ranks' parts of the sample
    peak = torch.cuda.max_memory_allocated() / GIB if ON_GPU else 0.0
    tflops = flops_of(config, seq, options.full) / ranks / seconds / 1e12
    ring = f":{options.rotate}" if options.variant in ("accelerate", "liger") else ""
    kernel = "" if options.variant == "burst" else f":{options.sdpa}"
    row = {
        "weights": "all" if options.full else "lora", "with": options.variant + ring + kernel,
        "layers": config.num_hidden_layers, "seq": seq, "ranks": ranks,
        "keep_layers": options.keep_layers, "step": number, "s": f"{seconds:.3f}",
        "tokens_per_s": f"{seq / ranks / seconds:.0f}", "tflops": f"{tflops:.1f}",
        "peak_gib": f"{peak:.2f}", "loss": f"{float(loss) / ranks:.5f}",
        "torch": torch.__version__, "transformers": transformers.__version__,
        "gpu": torch.cuda.get_device_name() if ON_GPU else "CPU",
    }  # fmt: skip
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    if dist.is_initialized() and dist.get_rank():
        return
    print("step", *(f"{name}={value}" for name, value in row.items()), flush=True)
    if options.out:
        is_new = not options.out.exists()
        with options.out.open("a", newline="") as file:
            csv.writer(file).writerows([row] * is_new + [row.values()])


def now() -> float:
    """Seconds, when the GPU has done all its work."""
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
