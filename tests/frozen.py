"""Whether a change leaves what burst computes as it was: compares this checkout with a commit.

    make same-as COMMIT=0a1b2c3        (python -m tests.frozen compare 0a1b2c3)

In both checkouts the same things are written down, each as a hash or a number under a name:
programs of all cases of `tests/schedule/cases.py` and of 20,000 drawn calls, and how these resolve;
bits of out, lse, dq, dk and dv on simulated ranks; simulated times of each mode asked for by name;
12 plans; what is refused, with which words. Programs are compared by the values of their fields, so
classes, fields and buffers may be renamed: `RENAMED` and `BUFFERS` give them their old names.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from hashlib import blake2b
from itertools import islice, product
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from typer.testing import CliRunner

from megatron_burst.errors import BurstError
from megatron_burst.resolve import resolve
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.modes import EMITTERS
from megatron_burst.schedule.spec import AttentionShape, Circulate, Direction, Kernel, Spec
from megatron_burst.schedule.topology import Topology, pretend_nodes, topology_of
from megatron_burst.tools.hardware_file import preset
from megatron_burst.tools.main import app
from megatron_burst.tools.simulate.call import AttentionCall, attention_time
from tests.attention.engine import Passes, Way, problem, rows_in
from tests.attention.simulated import run_simulated
from tests.schedule.cases import BANDS, DOCUMENTS, MASKS, cases_on, grid
from tests.tools.job.configs import DEEPSEEK_V3, GPT_OSS_20B, MIXTRAL_8X7B, QWEN_3_NEXT_80B

ROOT = Path(__file__).parents[1]
DRAWN, PARTS = 20_000, 8
RENAMED = {  # classes and values of enums: name now, and before
    "Recv": "Take",
    "Send": "Give",
    "NeededBy": "Between",
    "ChunkSegments": "Runs",
    "SurrogateOut": "StandIn",
    "Space.saved": "left",
    "ShardChunk": "Piece",
    "Space.temp": "part",
    "Space.pool": "hop",
}
BUFFERS = {  # of programs: first words of a name now, and before
    "outgoing sum": "leaves",
    "incoming sum": "arrives",
    "dkv of rearranged": "made",
    "rearranged": "seen",
    "partial dkv": "shares",
    "restored dkv": "whole",
    "received dkv": "came",
    "received": "came",
    "saved": "left",
    "all rows": "whole",
    "own results": "home",
    "computed": "made",
    "surrogate out of": "stand-in for",
}

type Record = dict[str, str | float | dict[str, str]]


def values(x: Any) -> Any:
    """An object as nested tuples of plain values."""
    if isinstance(x, Enum):
        return RENAMED.get(f"{type(x).__name__}.{x.value}", x.value)
    if is_dataclass(x):
        name = type(x).__name__
        return RENAMED.get(name, name), *(values(getattr(x, field.name)) for field in fields(x))
    if isinstance(x, Mapping):
        return tuple((values(key), values(value)) for key, value in x.items())
    if isinstance(x, tuple | list):
        return tuple(map(values, x))
    if isinstance(x, frozenset):
        return tuple(sorted(map(values, x)))
    if isinstance(x, range):
        return "range", x.start, x.stop, x.step
    if isinstance(x, str):
        new = next((new for new in BUFFERS if f"{x} ".startswith(f"{new} ")), "")
        return BUFFERS[new] + x.removeprefix(new) if new else x
    assert x is None or isinstance(x, int | float), type(x)
    return x


def digest(x: Any) -> str:
    return blake2b(repr(values(x)).encode(), digest_size=8).hexdigest()


def attempt(make: Callable[[], Any]) -> Any:
    """What it returns, or a word for its refusal."""
    try:
        return make()
    except (BurstError, AssertionError, ZeroDivisionError):
        return "refused"


# ---- programs --------------------------------------------------------------------------------


def programs_of_cases(part: int) -> Record:
    """A part of the cases: both passes of all ranks."""
    grids = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (2, 3), (3, 2)]
    every = (
        case for size in grids for case in cases_on(grid(*size), (*MASKS, *BANDS, *DOCUMENTS))
    )  # fmt: skip
    return {
        f"program of case {case} {tuple(case.topology.node_of)}":
            attempt(lambda case=case: digest(tuple(map(tuple, case.passes()))))
        for case in islice(every, part, None, PARTS)
    }  # fmt: skip


def drawn_topology(draw: Random) -> Topology:
    nodes, ranks = draw.choice([1, 1, 1, 2, 2, 3, 4]), draw.choice([1, 2, 4, 8])
    names = [node for node in range(nodes) for _ in range(ranks)]
    if draw.random() < 0.1:
        draw.shuffle(names)
    return topology_of(names)


def drawn_call(number: int) -> Spec:
    """A call with some choices open, of sizes that programs of real jobs have."""
    draw = Random(number)

    def asked(*choices: Any, often: float = 0.25) -> Any:
        return draw.choice(choices) if draw.random() < often else None

    heads_kv, dims = (
        draw.choice([1, 2, 3, 4, 8, 16]),
        draw.choice([(64, 64), (128, 128), (192, 128)]),
    )
    tokens = draw.choice([2, 6, 64, 1 << 10, 1 << 13, 1 << 14, 1 << 15, 1 << 17])
    masks = [Mask.CAUSAL, Mask.CAUSAL, Mask.FULL, Mask(127, 0), Mask(3, 2), Mask(None, 5)]
    masks += [Mask(right=0, documents=True), Mask(documents=True), Mask(100, 0, documents=True)]
    cross = draw.choice([2, 64, 2048]) if draw.random() < 0.05 else None
    shape = AttentionShape(
        draw.choice([1, 1, 2]), tokens, heads_kv * draw.choice([1, 2, 4, 8]), heads_kv, *dims,
        2, 4, draw.choice([2, 4]), tokens_kv=cross,
    )  # fmt: skip
    kernel = Kernel(
        draw.random() < 0.5, draw.random() < 0.5, draw.random() < 0.3,
        draw.choice(["cuda", "cuda", "cuda", "cpu"]), draw.choice([132, 108]),
    )  # fmt: skip
    return Spec(
        drawn_topology(draw), shape, draw.choice([*Layout, Layout.ZIGZAG]), draw.choice(masks),
        kernel, draw.random() < 0.3, asked("ring", "a2a", "flat"), asked("ring", "gather", "a2a"),
        asked(0, 1, 2, 3), grad_wire=asked("accumulate", "input"), circulate=asked(*Circulate),
        pulled=asked(True, False), saves_remote=asked(True, False), invariant=draw.random() < 0.05,
    )  # fmt: skip


def of_drawn_call(number: int) -> Record:
    spec = drawn_call(number)
    try:
        found, why = resolve(spec)
    except BurstError as error:
        return {f"drawn {number}": "refused", f"words of drawn {number}": digest(str(error))}
    choices = (found.inter, found.intra, found.heads_per_round, found.a2a_backward_heads,
               found.grad_wire, found.circulate, found.pulled, found.saves_remote)  # fmt: skip
    rank = number % found.topology.cp_size

    def program(direction: Direction) -> str:
        one, unit = found.program_spec(rank, direction).in_units()
        return digest((EMITTERS[one.intra or "ring"](one), unit))

    return {
        f"drawn {number}": digest(choices),
        f"words of drawn {number}": digest(tuple(why.items())),
        **{f"drawn {number} {d.value}": attempt(partial(program, d)) for d in Direction},
    }


def drawn_calls(part: int) -> Record:
    found: Record = {}
    for number in range(part, DRAWN, PARTS):
        found |= of_drawn_call(number)
    return found


# ---- bits ------------------------------------------------------------------------------------


def ways() -> dict[str, tuple[tuple[int, int], Way]]:
    """By name: nodes and ranks of each, and how a call runs on them."""
    in_documents, edges = Mask(right=0, documents=True), (0, 3, 16, 21, 32)
    slices = (0, 12, 0, 12, 0), (12, 32, 4, 32, 1)
    variants: dict[str, dict[str, Any]] = {
        "causal": {},
        "sinks, torch-cpu": {"backend": "torch-cpu", "rectangular": False, "sinks": True},
        "full": {"layout": Layout.CONTIGUOUS, "mask": Mask.FULL, "left": True},
        "striped": {"layout": Layout.STRIPED},
        "window": {"mask": Mask(5, 0), "heads_per_round": 2},
        "documents": {"mask": in_documents, "edges": edges},
        "chunks of documents": {
            "mask": in_documents, "edges": (0, 8, 24, 32), "layout": Layout.DOCUMENTS,
        },
        "slices": {"mask": Mask(documents=True), "slices": slices},
        "pulled": {"pulls": True},
        "invariant": {"invariant": True},
        "backward as an all-to-all": {"whole_heads": 1},
    }  # fmt: skip
    every = product([(1, 4), (2, 2), (4, 1)], EMITTERS, Circulate, variants.items())
    return {
        f"{mode} on {size}, circulate {circulate}, {name}": (size, Way(mode, circulate, **options))
        for size, mode, circulate, (name, options) in every
    }


def bits(size: tuple[int, int], way: Way) -> str:
    """Of out, lse, dq, dk and dv of all ranks, in float32."""
    nodes, ranks = size
    tensors = [x.float() for x in problem(nodes * ranks, 8, (4, 2), (4, 6), 7, batch=1)]
    topology = pretend_nodes(nodes * ranks, nodes)

    def one(rank: int, carrier: Any) -> list[torch.Tensor]:
        shard = [x[:, rows_in(x, way, rank, nodes * ranks)] for x in tensors]
        passes = Passes(way, topology, shard, carrier, torch.float32)
        lse = passes.forward(*shard[:3]).fields["out"]["lse"].clone()
        return [lse, *passes.both(*shard)]

    results, _ = run_simulated(one, nodes * ranks, pulls=bool(way.pulls), timeout_s=20)
    every = b"".join(x.contiguous().numpy().tobytes() for rank in results for x in rank)
    return blake2b(every, digest_size=8).hexdigest()


def all_bits(part: int) -> Record:
    torch.set_num_threads(1)
    return {
        f"bits of {name}": attempt(partial(bits, *way))
        for name, way in islice(ways().items(), part, None, PARTS)
    }


# ---- times, plans, refusals --------------------------------------------------------------------


def times(_: int) -> Record:
    """Simulated milliseconds of both passes, of modes asked for by name and of `auto`."""
    found: Record = {}
    hardware = preset("h200")
    asked = [(None, None), *product(["ring", "a2a"], EMITTERS), ("flat", "ring")]
    for (inter, intra), size, (heads, kv), tokens, layout in product(
        asked, [(1, 4), (2, 4), (4, 2)], [(32, 8), (32, 32)], [1 << 12, 1 << 15],
        [Layout.ZIGZAG, Layout.STRIPED],
    ):  # fmt: skip
        shape = AttentionShape(1, tokens, heads, kv, 128, 128, 2, 4, 4)
        call = AttentionCall(grid(*size), shape, layout, inter=inter, intra=intra)

        def seconds(direction: Direction, call: AttentionCall = call) -> float:
            resolved = resolve(call)[0]
            assert isinstance(resolved, AttentionCall)
            return attention_time(resolved, hardware, direction).seconds

        for direction in Direction:
            name = f"time of {inter} {intra} {size} {heads} {kv} {tokens} {layout} {direction}"
            found[name] = attempt(partial(seconds, direction))
    return found


JOBS = (
    "llama3-8b --gpus 8 --seq-length 128k",
    "llama3-8b --gpus 16 --seq-length 256k --tp 2 --keep all --offload",
    "llama3-8b --gpus 16 --seq-length 1M --cp 16 --keep half",
    "llama3-8b --gpus 8 --seq-length 64k --cp 8 --recompute none",
    "llama3-8b --gpus 8 --seq-length 128k --cp 4 --fsdp torch",
    "llama3-70b --gpus 24 --seq-length 256k --tp 2 --pp 3 --dp 1",
    "qwen3-8b --gpus 32 --seq-length 512k --keep auto --hardware h100",
    "gemma-3-27b --gpus 16 --seq-length 128k",
    f"{json.dumps(MIXTRAL_8X7B)} --gpus 32 --seq-length 128k --ep 8 --tp 2",
    f"{json.dumps(GPT_OSS_20B)} --gpus 8 --seq-length 128k",
    f"{json.dumps(DEEPSEEK_V3)} --gpus 256 --seq-length 32k",
    f"{json.dumps(QWEN_3_NEXT_80B)} --gpus 64 --seq-length 256k",
)


def plans(_: int) -> Record:
    """What `plan --json` writes."""
    found: Record = {}
    for job in JOBS:
        model, _, options = job.partition(" --")
        with TemporaryDirectory() as folder:
            if model.startswith("{"):
                (Path(folder) / "config.json").write_text(model)
                model = f"{folder}/config.json"
            done = CliRunner().invoke(app, ["plan", model, *f"--{options}".split(), "--json", "-"])
        found[f"plan of {job}"] = digest((done.exit_code, done.stdout.replace(folder, "")))
    return found


def refusals(_: int) -> Record:
    """Conditions and what to change, as the generated page has them."""
    sys.path.insert(0, f"{ROOT / 'docs'}")
    from reference_pages import refusals as page

    rows = [line for line in page().splitlines() if line.startswith("| ")]
    return {f"words of refusal: {row}": "" for row in rows}


PARTED = programs_of_cases, drawn_calls, all_bits
WHOLE = times, plans, refusals


def write(path: Path) -> None:
    """All records of this checkout."""
    record: Record = {}
    jobs = [(what, 0) for what in WHOLE] + [(what, n) for what in PARTED for n in range(PARTS)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for found in pool.map(_call, jobs):
            record |= found
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))


def _call(job: tuple[Callable[[int], Record], int]) -> Record:
    what, part = job
    return what(part)


def of_commit(commit: str) -> Record:
    """The record of a commit, from its own checkout; made once."""
    name = subprocess.check_output(["git", "rev-parse", commit], cwd=ROOT, text=True).strip()
    path = ROOT / ".cache" / "frozen" / f"{name}.json"
    if not path.exists():
        with TemporaryDirectory() as folder:
            archive = subprocess.run(
                ["git", "archive", name], cwd=ROOT, check=True, stdout=subprocess.PIPE
            )
            subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
            python = [sys.executable, "-m", "tests.frozen", "write", f"{path}"]
            subprocess.run(python, cwd=folder, check=True, env=os.environ | {"PYTHONPATH": folder})
    return json.loads(path.read_text())


def compare(commit: str) -> int:
    """Print what differs; returns how many programs, choices, bits, times or plans do. Other words,
    and what was refused in one of the two, are listed and do not count."""
    before, now = of_commit(commit), ROOT / ".cache" / "frozen" / "now.json"
    write(now)
    after = json.loads(now.read_text())
    names = dict.fromkeys([*before, *after])
    kinds: dict[str, list[str]] = {}
    for name in names:
        old, new = before.get(name), after.get(name)
        if old == new:
            kind = "equal"
        elif name.startswith("words of"):
            kind = "other words"
        else:
            changes = {old: "no longer refused", new: "refused now"}
            kind = changes.get(
                "refused", "gone" if new is None else "new" if old is None else "DIFFERENT"
            )
        kinds.setdefault(kind, []).append(name)
    for kind, those in kinds.items():
        print(f"{kind}: {len(those)}", *(those[:20] if kind != "equal" else ()), sep="\n  ")
    return len(kinds.get("DIFFERENT", ()))


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    else:
        sys.exit(min(compare(sys.argv[2]), 1))
