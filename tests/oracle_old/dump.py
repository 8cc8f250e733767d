"""Writes what a commit does, as lines to compare: python -m tests.oracle_old.dump WHAT COUNT."""

import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from hashlib import blake2b
from importlib import import_module
from random import Random


def first(*names):
    """The first of several "module:name" that this commit has."""
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            return getattr(import_module(f"megatron_burst.{module}"), attribute)
        except (ImportError, AttributeError):
            continue
    raise ImportError(names)


def plain(x):
    """Field values without names of classes, but of operations."""
    if isinstance(x, Enum):
        return x.value
    if is_dataclass(x):
        name = type(x).__name__ if "reads" in dir(x) and "writes" in dir(x) else ""
        return (name, *(plain(getattr(x, field.name)) for field in fields(x)))
    if isinstance(x, Mapping):
        return tuple((plain(k), plain(v)) for k, v in x.items())
    if isinstance(x, list | tuple):
        return tuple(map(plain, x))
    if isinstance(x, frozenset | set):
        return tuple(sorted(map(plain, x), key=repr))
    return str(x) if isinstance(x, range) else x


def digest(x):
    return blake2b(repr(plain(x)).encode(), digest_size=10).hexdigest()


# ---- programs -------------------------------------------------------------------------------

pretend_nodes = first("schedule.topology:pretend_nodes")
Layout = first("schedule.layout:Layout")
Mask = first("schedule.mask:Mask")
BurstError = first("errors:BurstError")
AttentionShape = first("schedule.call:AttentionShape", "schedule.spec:AttentionShape")
Direction = first("schedule.call:Direction", "schedule.spec:Direction")
Circulate = first("schedule.call:Circulate", "schedule.spec:Circulate")
Kernel = first("schedule.spec:Kernel")
Spec = first("schedule.spec:Spec")
NEW = "intra" in Spec.__dataclass_fields__
GRIDS = [(1, 1), (1, 2), (1, 3), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (3, 2), (4, 1), (4, 2),
         (2, 8), (4, 4), (8, 1), (8, 8)]  # fmt: skip
MASKS = [Mask(), Mask(right=0), Mask(1, 0), Mask(3, 0), Mask(2, 1), Mask(None, 2), Mask(4, None),
         Mask(100, 0), Mask(right=0, documents=True), Mask(documents=True),
         Mask(2, 0, documents=True)]  # fmt: skip


def drawn_spec(random):
    nodes, ranks = random.choice(GRIDS if random.random() < 0.97 else GRIDS[-3:])
    topology = pretend_nodes(nodes * ranks, nodes)
    mode = random.choice(["ring", "gather", "a2a"])
    if random.random() < 0.1 and nodes > 1:
        topology = topology.flat()
    heads_kv = random.choice([1, 2, 3, 4, 8, 16])
    shape = AttentionShape(
        random.choice([1, 2]), random.choice([2, 4, 6, 8, 64, 1024]),
        heads_kv * random.choice([1, 2, 3, 4, 8]), heads_kv, *random.choice([(64, 64), (192, 128)]),
        2, 4, random.choice([2, 4]),
    )  # fmt: skip
    kernel = Kernel(*(random.random() < p for p in (0.7, 0.7, 0.3)))
    fields = {
        "cp_rank": random.randrange(nodes * ranks), "direction": random.choice(list(Direction)),
        "layout": random.choice([*Layout, Layout.ZIGZAG]), "mask": random.choice(MASKS),
    }  # fmt: skip
    backward = fields["direction"] is Direction.BACKWARD
    fields["circulate"] = random.choice(list(Circulate)) if backward else Circulate.KV
    if NEW:
        fields["intra"] = mode
    return mode, Spec(
        topology=topology, shape=shape, kernel=kernel,
        heads_per_round=random.choice([1, 1, 2, 3, 4]), pulled=random.random() < 0.5,
        left=random.random() < 0.3, **fields,
    )  # fmt: skip


def programs(count):
    program_of = first("schedule.modes:program_of", "schedule:program_of")
    order, random = first("schedule.order:order"), Random(1)
    for number in range(count):
        mode, spec = drawn_spec(random)
        spec, unit = spec.in_units()
        try:
            program = program_of(spec) if NEW else program_of(mode, spec)
        except (BurstError, ValueError, AssertionError, KeyError) as error:
            yield f"{number} {type(error).__name__} {error}"
            continue
        yield f"{number} {mode} {unit} {digest((program.buffers, program.ops, order(program)))}"


# ---- resolution -----------------------------------------------------------------------------


def drawn_call(random):
    nodes, ranks = random.choice(GRIDS)
    topology = pretend_nodes(nodes * ranks, nodes)
    heads_kv = random.choice([1, 2, 4, 8, 16, 32])
    shape = AttentionShape(
        1, random.choice([64, 1024, 4096, 16384, 131072]), heads_kv * random.choice([1, 2, 4, 5]),
        heads_kv, *random.choice([(128, 128), (128, 128), (64, 64), (192, 128)]), 2, 4, 4,
    )  # fmt: skip
    options = {}
    for name, values in {
        "intra": ["ring", "gather", "a2a"], "inter": ["ring", "a2a"], "circulate": ["kv", "q"],
        "heads_per_round": [1, 2, 4, 64], "transfer": ["send", "pull"], "pieces": [False],
        "grad_wire": ["accumulate", "input"], "resend": ["never", "always"], "again": [True],
        "device": ["cpu"], "multiprocessors": [108], "backend": ["cudnn", "triton,fa4"],
    }.items():  # fmt: skip
        if random.random() < 0.15:
            options[name] = random.choice(values)
    if options.get("heads_per_round") and "pieces" in options:
        del options["pieces"]
    if options.get("inter") == "a2a" and options.get("intra") in ("ring", "gather"):
        del options["intra"]
    layout, mask = random.choice([*Layout, Layout.ZIGZAG]), random.choice(MASKS)
    return shape, topology, layout, mask, options


SPEC = ("topology", "cp_rank", "direction", "shape", "layout", "mask", "circulate", "kernel",
        "heads_per_round", "pulled", "left", "times")  # fmt: skip


def canonical(spec):
    """A spec's fields, as they were; a ring has one round."""
    spec = replace(spec, heads_per_round=spec.heads_per_round or 1)
    values = {name: plain(getattr(spec, name)) for name in SPEC}
    return {**values, "kernel": values["kernel"][:4]}


def resolved_then(shape, topology, **options):
    from megatron_burst.plan.attention import AttentionCall

    check, check_mask = (
        first("plan.asked:check_asked", "plan.auto:check_asked"),
        first("schedule.mask:check_mask"),
    )
    call = AttentionCall(shape, topology, **options)
    mode = call.mode
    if topology.cp_size > 1:
        check_mask(call.mask, call.layout, mode, call.arranged.inter_size == 1)
    check(call)
    heads = 1 if mode == "ring" else call.heads
    specs = [canonical(call.spec(0, direction)) for direction in Direction]
    why = [str(call.mode_why), str(call.between_why), str(call.circulate_why)]
    return f"{mode} {call.between} {heads}", why, specs


def resolved_now(shape, topology, **options):
    from megatron_burst.resolve import resolve
    from tests.plan.calls import opened

    spec, reasons = resolve(opened(shape, topology, **options))
    specs = [canonical(spec.of(0, direction)) for direction in Direction]
    why = [str(reasons[name]) for name in ("intra", "inter", "circulate")]
    return f"{spec.intra} {spec.inter} {spec.heads_per_round or 1}", why, specs


def resolution(count):
    random = Random(2)
    for number in range(count):
        shape, topology, layout, mask, options = drawn_call(random)
        try:
            found = resolved_now if NEW else resolved_then
            words, why, specs = found(shape, topology, layout=layout, mask=mask, **options)
        except (BurstError, ValueError, ZeroDivisionError) as error:
            yield f"{number} {type(error).__name__} {error}"
            continue
        yield f"{number} {words} {why} {digest(specs)}"


# ---- numbers --------------------------------------------------------------------------------


def drawn_numbers(random):
    """A call of burst_attention on four ranks."""
    heads_kv = random.choice([1, 2, 4])
    options = {"nodes": random.choice([1, 2])}
    if random.random() < 0.8:
        options["intra"] = random.choice(["ring", "gather", "a2a"])
    if random.random() < 0.3:
        options["deterministic"] = True
    if random.random() < 0.3:
        options["keep"] = random.choice(["all", "half"])
    if random.random() < 0.2:
        options["heads_per_round"] = 1
    if random.random() < 0.2 and options["nodes"] > 1:
        options["circulate"] = random.choice(["kv", "q"])
    call = {"causal": random.random() < 0.7}
    sample = random.random()
    if sample < 0.2:
        call["window"] = (random.choice([3, 9]), 0 if call["causal"] else 5)
    elif sample < 0.5:
        call["cu_seqlens"] = sorted({0, *random.sample(range(1, 64), 3), 64})
        call["layout"] = random.choice(["zigzag", "contiguous"])
    elif sample < 0.6:
        call["cu_seqlens"], call["layout"] = [0, 16, 40, 64], "zigzag-documents"
    heads = heads_kv * random.choice([1, 2, 4]), heads_kv
    dtype = random.choice(["float64", "float32", "bfloat16"])
    return heads, dtype, options, call, random.random() < 0.4


def compute(rank, drawn):
    """Hashes of results and gradients of each call, or its refusal."""
    import torch
    from torch.utils.checkpoint import checkpoint

    burst_attention, config_of = (
        first("attention:burst_attention"),
        first("config:BurstConfig", "options:BurstConfig"),
    )
    torch.set_num_threads(1)
    said = []
    for seed, (heads, dtype, options, call, checkpointed) in enumerate(drawn):
        call = dict(call)
        if "cu_seqlens" in call:
            call["cu_seqlens"] = torch.tensor(call["cu_seqlens"], dtype=torch.int32)
        generator = torch.Generator().manual_seed(100 * seed + rank)
        sizes = (heads[0], heads[1], heads[1])
        q, k, v = (
            torch.randn(1, 16, h, 8, generator=generator, dtype=torch.float64)
            .to(getattr(torch, dtype)).requires_grad_()
            for h in sizes
        )  # fmt: skip
        try:
            config = getattr(config_of, "of", config_of)(**options)

            def run(q, k, v, call=call, config=config):
                return burst_attention(q, k, v, config=config, **call)

            keep = options.get("keep") or checkpointed
            out = checkpoint(run, q, k, v, use_reentrant=True) if keep else run(q, k, v)
            grads = torch.autograd.grad((out * out).sum(), (q, k, v)) if not keep else ()
            if keep:
                (out * out).sum().backward()
                grads = q.grad, k.grad, v.grad
        except BurstError as error:
            said.append(f"{error}")
            continue
        tensors = [x.detach().double().numpy().tobytes() for x in (out, *grads)]
        said.append(blake2b(b"".join(tensors), digest_size=10).hexdigest())
    return said


def loss(rank):
    import torch

    linear = first("loss.linear:linear_cross_entropy")
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(3)
    said = []
    for reduction, z_loss, softcap in (("mean", 0, 0), ("none", 1e-3, 0), ("sum", 0, 5.0)):
        hidden = torch.randn(40, 16, generator=generator).requires_grad_()
        weight = torch.randn(64, 16, generator=generator).requires_grad_()
        labels = torch.randint(0, 64, (40,), generator=generator)
        found = linear(hidden, weight, labels, reduction=reduction, z_loss=z_loss, softcap=softcap)
        found = found[0] if isinstance(found, tuple) else found
        found.sum().backward()
        tensors = [x.detach().double().numpy().tobytes() for x in (found, hidden.grad, weight.grad)]
        said.append(blake2b(b"".join(tensors), digest_size=10).hexdigest())
    return said


def numbers(count):
    from tests.ranks import run_ranks

    random = Random(3)
    drawn = [drawn_numbers(random) for _ in range(count)]
    for rank, said in enumerate(run_ranks(compute, 4, drawn, timeout_s=900)):
        yield from (f"{rank} {number} {line}" for number, line in enumerate(said))
    yield from run_ranks(loss, 1)[0]


# ---- texts ----------------------------------------------------------------------------------

JOBS = """
llama3-8b --gpus 8 --seq-length 128k
llama3-8b --gpus 64 --seq-length 1M --hardware h100
llama3-70b --gpus 64 --seq-length 256k --keep all
qwen2.5-7b --gpus 16 --seq-length 64k --tp 2
qwen3-32b --gpus 32 --seq-length 512k --recompute full
deepseek-v3 --gpus 512 --seq-length 128k
burstengine-7b --gpus 32 --seq-length 2M --hardware a800
burstengine-14b --gpus 32 --seq-length 1M --hardware a800 --cp 32
llama3-8b --gpus 4 --seq-length 32k --hardware a100 --offload
llama3-8b --gpus 1 --seq-length 1M
qwen3-8b --gpus 8 --seq-length 192k --cp 8 --keep half
llama3-8b --gpus 3 --seq-length 64k
""".strip().splitlines()


def texts(count):
    from typer.testing import CliRunner

    app, runner = first("tools.main:app", "cli.main:app"), CliRunner()
    for job in JOBS:
        for more in ([], ["--json", "-"]):
            done = runner.invoke(app, ["plan", *job.split(), *more])
            yield f"{job} {more} {done.exit_code}"
            yield from (line.rstrip() for line in done.output.splitlines())
    import argparse

    parser = argparse.ArgumentParser()
    first("mcore.args:add_flags")(parser)
    yield from parser.format_help().splitlines()


if __name__ == "__main__":
    for line in globals()[sys.argv[1]](int(sys.argv[2])):
        print(str(line).replace("\n", " "), flush=True)
