"""Every figure of README.md is that of rows in benchmarks/results, which are named here."""

import re
from collections.abc import Callable
from statistics import geometric_mean

import pytest

from benchmarks.compared import compare
from benchmarks.frontier_table import points_of, runs_in, speedup
from benchmarks.loss_table import native_of
from benchmarks.sheets import FRONTIER_CSV, LOSS_CSV, PACKED_CSV, SLICES_CSV
from benchmarks.tables import Ratio
from tests.benchmarks.test_figures import (
    NODE,
    NODES,
    README,
    lead_with_experts,
    leads,
    leads_with_everything_recomputed,
    on_cudnn,
    rows_of,
    span,
)

PACKED, WINDOW = "packed documents, 2 GPUs", "sliding window, 2 GPUs"
PACKED_ON_FOUR = "packed documents, 4 GPUs"
PEERS = "peers_4xh200_one_node"
SLOW = "2026-11-27"  # the day from which sockets between emulated nodes were slower
TWO, FOUR = "causal, 2 GPUs", "causal, 4 GPUs"
ON_NODES = "causal, 2 emulated nodes x 2 GPUs", "packed documents, 2 emulated nodes x 1 GPU"
# of frontier_1xh200.csv, which README.md tells of
RUNS = [f"2026-11-26T{time}+00:00" for time in ("06:48:15", "06:50:16")]


def gains():
    """By kind of problem, from the CSVs of docs/gains.png."""
    made = pytest.importorskip("benchmarks.plots", exc_type=ImportError)
    rows = [*rows_of("attention_2xh200_one_node"), *rows_of(NODE), *rows_of(NODES)]
    packed = "packed_2xh200_one_node+packed_4xh200_one_node+packed_2x1xh200"
    rows += rows_of(packed, PACKED_CSV)
    return {each.label.replace("\n", ", "): each for each in made.gains_of(rows)}


def speed():
    found = gains()
    means = [geometric_mean(each.speed) for name, each in found.items() if name not in ON_NODES]
    on_nodes = [span(found[name].speed) for name in ON_NODES]
    return {
        "Bars are geometric means": [span(means)],
        "| attention on packed documents, 4 GPUs": [span(found[PACKED_ON_FOUR].speed)],
        "| packed documents, 2 GPUs": [span(found[PACKED].speed)],
        "| sliding windows": [span(found[WINDOW].speed)],
        "| causal attention, 2 and 4 GPUs": [span(found[TWO].speed + found[FOUR].speed)],
        "| two nodes, emulated": on_nodes,
    }


def documents_start_anywhere():
    """Of the same samples on 4 GPUs: times as fast as TransformerEngine, and as Ulysses."""
    found = [one for one in compare(rows_of("packed_4xh200_one_node", PACKED_CSV))
             if one.problem.pass_ == "fwd_bwd" and "burst:auto@zigzag" in one.rows]  # fmt: skip
    rows = [one.rows["burst:auto@zigzag"] for one in found]
    peers = [one.best_te for one in found], [one.fastest("ulysses") for one in found]
    beside_te, beside_ulysses = (
        span([Ratio.of(*pair).value for pair in zip(rows, own, strict=True)]) for own in peers
    )
    assert all(row.peak_gib < te.peak_gib for row, te in zip(rows, peers[0], strict=True))
    return {
        "| the same, if documents may start at any token": [f"{beside_te} times as fast"],
        "- **DeepSpeed's Ulysses": [f"{beside_ulysses} times as fast"],
    }


def half_at_any_token(pass_="fwd_bwd"):
    """The row and its ratio to TransformerEngine's."""
    (half,) = (one for one in compare(rows_of("packed_2x1xh200", PACKED_CSV))
               if one.problem.mask == "half" and one.problem.pass_ == pass_)  # fmt: skip
    row = half.rows["burst:auto@zigzag"]
    return row, f"{Ratio.of(row, half.best_te).value:.2f}"


def slower():
    """Documents at any token on two nodes, forward alone there, and heads of two dimensions."""
    wide = grouped_of_two_dimensions()
    uneven = [row for row in rows_of("sizes_4xh200_one_node") if row.head_dim_qk == 64]
    drawn = beside_te(rows_of("packed_2x1xh200", PACKED_CSV), "fwd")
    told = [half_at_any_token(pass_)[1] for pass_ in ("fwd_bwd", "fwd")]
    told += [
        f"{min(beside_te(rows_of(NODES), 'fwd')):.2f} with causal",
        f"{min(drawn):.2f} with documents",
    ]
    long = [row for row in wide if row.seq >= 8 << 10]
    today = [row for row in rows_of("gather_then_all_to_all_h200") if row.seq >= 8 << 10]
    both, alone = (as_auto(long, each) + beside_te(today, each) for each in ("fwd_bwd", "fwd"))
    told += [f"{span(both)} times as fast in both", f"{span(alone)} times in forward"]
    short = [row for row in wide if row not in long]
    told += [f"forward is {span(as_auto(short, 'fwd'))}", f"were {span(as_auto(short))} times"]
    told += [f"{min(beside_te(uneven)):.2f}", f"{max(losses().values()):.2f} times as long"]
    return {"- **Slower:**": told}


def grouped_of_two_dimensions():
    """Rows of 192/128, before `auto` gathered in forward."""
    sizes = [row for ranks in (2, 4) for row in rows_of(f"sizes_{ranks}xh200_one_node")]
    return [row for row in sizes if row.head_dim_qk == 192 and row.heads_kv < row.heads_q]


def as_auto(rows, pass_="fwd_bwd"):
    """The same of these. `auto` gathers in forward. In both passes it is as fast as the all-to-all
    that it was there from 4K tokens a GPU on, and before that a gather (a test below)."""
    ratios = []
    for one in (one for one in compare(rows) if one.problem.pass_ == pass_):
        few = one.problem.seq // one.problem.ranks < 4 << 10
        own = one.rows.get("burst:gather")
        if pass_ == "fwd_bwd" and not few:
            own = one.rows.get("burst:auto") or one.rows["burst:a2a"]
        ratios += [Ratio.of(own, one.best_te).value] if own else []
    return ratios


def test_a_gather_before_an_all_to_all_costs_nothing():
    """Before it were all-to-alls in both passes, and with fewer tokens gathers."""
    rows = {(row.ranks, row.heads_kv, row.seq, row.pass_, row.impl): row.ms
            for row in rows_of("gather_then_all_to_all_h200") if row.impl != "te"}  # fmt: skip
    pairs = [(rows[*call, "before"], ms) for (*call, impl), ms in rows.items() if impl == "burst"]
    assert len(pairs) == 9 and all(now <= 1.01 * before for before, now in pairs)


def beside_te(rows, pass_="fwd_bwd"):
    """How many times as fast burst is as TransformerEngine's fastest mode, of each problem."""
    return [Ratio.of(each.burst, each.best_te).value
            for each in compare(rows) if each.problem.pass_ == pass_]  # fmt: skip


def memory():
    found = gains()
    pairs = [item for name in (NODE, "attention_2xh200_one_node") for item in leads(name).items()]
    mha = [gain for (q, kv, _), (_, gain) in pairs if q == kv]
    assert min(mha) > 1.8 and round(max(mha)) == 15  # "a half to a fifteenth"
    packed = found[PACKED].memory
    assert min(packed) > 2 and round(max(packed)) == 7  # "a seventh to less than half"
    some = found[PACKED_ON_FOUR].memory
    assert round(max(some)) == 5  # "a fifth to"
    more = [sum(gain < 1 for _, gain in leads(name).values()) for name in (NODE, NODES)]
    most = 1 / min(gain for name in (NODE, NODES) for _, gain in leads(name).values())
    wide = compare(grouped_of_two_dimensions()) + compare(rows_of("gather_then_all_to_all_h200"))
    of_te = [one.burst.peak_gib / one.best_te.peak_gib for one in wide if one.burst.peak_gib]
    return {
        "| attention on packed documents, 4 GPUs": [f"{1 / min(some):.1f} times the memory"],
        "- **More memory:**": [
            f"up to {most:.2f} times",
            f"{more[0]} of {len(leads(NODE))} causal",
            f"{more[1]} of 12 on two nodes",
            f"{max(of_te):.2f} times as much",
        ],
    }


def step():
    by = {}
    for row in rows_of("slices_2xh200", SLICES_CSV):
        by.setdefault((row.seq >> 10, row.impl), []).append(row)
    full, burst = by[512, "megatron"][-1], by[512, "burst"][-1]
    ms = {impl: by[256, impl][0].ms for impl in ("megatron", "megatron-keep", "burst")}
    long, more = f"{full.ms / burst.ms:.2f}", f"{burst.peak_gib / full.peak_gib - 1:.0%}"[:-1]
    kept, attention = ms["megatron"] / ms["megatron-keep"], ms["megatron-keep"] / ms["burst"]
    packed, experts = leads_with_everything_recomputed(), lead_with_experts()
    return {
        "| a whole step of two Llama-3-8B layers": [f"{long} times as fast", f"{more} % more"],
        "- **Most of a step's": [
            f"{kept * attention:.2f} times as fast",
            f"{kept:.2f}",
            f"{attention:.2f}",
        ],
        "- **Packed documents gain little": [f"{packed} times as fast", f"{experts} times"],
    }


def on_four_gpus():
    """`keep` beside Megatron's full recomputation, of packed documents and of one document."""
    gains, memory, steps = {}, set(), {}
    for _, own in runs_in(rows_of("frontier_4xh200", FRONTIER_CSV)):
        points = {point.name: point for point in points_of(own)}
        full, keep = points["megatron:full"], points["burst:keep"]
        kind = own[0].documents.partition("-")[0]
        gains[kind], steps[kind] = f"{speedup(keep, full):.2f}", (keep.steps, full.steps)
        memory.add(f"{1 - keep.peak_gib / full.peak_gib:.0%}"[:-1] + " % less memory")
    (less,) = memory
    begins = "| a whole step of four layers as wide as Qwen3-8B's, 256K tokens, 4 GPUs"
    assert steps[""] == (2, 2)
    return {
        begins: [f"{gains['']} times as fast", f"{gains['drawn']} times", less],
        "- **Rows:**": [f"the {gains['']} of a step is of two steps"],
    }


def planned():
    every = runs_in(rows_of("frontier_1xh200", FRONTIER_CSV))
    runs = [
        {point.name: point for point in points_of(rows)}
        for name, rows in every
        if any(run in name for run in RUNS)
    ]
    assert len(runs) == len(RUNS)
    autos, fulls = ([run[name] for run in runs] for name in ("burst:auto-7", "megatron:full"))
    ratios, shares = (span([getattr(x, of) for x in autos]) for of in ("ratio", "share"))
    full = span([each.ratio for each in fulls])
    told = [f"{ratios} times as long", f"{shares} of the memory", f"{full} times as long"]
    return {"| a whole step of four layers as wide as Qwen3-8B's, 64K tokens": told}


def loss():
    head = 32768, 4096, 131072, 1
    gib = {row.impl: row.peak_gib for row in rows_of("loss_h200", LOSS_CSV)
           if (row.tokens, row.hidden, row.vocab, row.ranks) == head}  # fmt: skip
    told = [f"{gib['burst:recompute']:.1f} GiB", f"{gib['megatron:fused']:.0f} GiB"]
    told += [f"{losses()[head]:.2f} times the time"]
    return {"| LM head and loss": told}


def losses():
    """By head, how much longer burst's default takes than Megatron's fused loss of the same day;
    of several days the newest."""
    rows = rows_of("loss_h200", LOSS_CSV)
    pairs = (
        (row, native_of(row, rows)) for row in rows if row.impl == "burst:recompute" and row.ms
    )
    return {
        (row.tokens, row.hidden, row.vocab, row.ranks): Ratio.of(native, row).value
        for row, native in pairs if native
    }  # fmt: skip


def between_nodes():
    """Rows over the slow sockets of 27 November, and over the faster ones of before."""
    rows = rows_of(NODES)
    return ([row for row in rows if row.date > SLOW], [row for row in rows if row.date < SLOW])


def the_same_kernel():
    one = on_cudnn(rows_of(f"attention_2xh200_one_node+{NODE}"))
    slow, fast = map(on_cudnn, between_nodes())
    many, few = (sorted(x for heads, x in fast if heads == of) for of in (32, 8))
    kernels = beside_te(rows_of("packed_1xh200", PACKED_CSV))
    return {
        "- **Most of the lead on one node": [span([ratio for _, ratio in one]), span(kernels)],
        "- **Between nodes the lead": [
            f"{span([ratio for _, ratio in slow])} times",
            *(" and ".join(f"{ratio:.2f}" for ratio in ratios) for ratios in (many, few)),
        ],
    }


def beside_ulysses():
    rows = rows_of(PEERS) + rows_of("packed_4xh200_one_node", PACKED_CSV)
    ratios = {"fwd_bwd": [], "fwd": []}
    for each in compare(rows):
        if peer := each.fastest("ulysses"):
            ratios[each.problem.pass_].append(Ratio.of(each.burst, peer).value)
    return {"- **DeepSpeed's Ulysses": [f"{span(found)} times" for found in ratios.values()]}


def repetitions():
    """Which figures are of few repetitions: every such end of a span, and five others."""
    found = {}
    for sheet in (
        (f"attention_2xh200_one_node+{NODE}",), (NODES,), ("packed_4xh200_one_node", PACKED_CSV),
        ("packed_2xh200_one_node", PACKED_CSV), ("packed_2x1xh200", PACKED_CSV),
    ):  # fmt: skip
        counts = {}
        for each in compare(rows_of(*sheet)):
            of = each.problem
            if of.pass_ == "fwd_bwd" and each.best_te and not of.mask.startswith("window"):
                figure = f"{Ratio.of(each.burst, each.best_te).value:.2f}"
                counts[figure] = max(count_of(each.burst), counts.get(figure, 0))
        found |= {end: counts[end] for end in (min(counts), max(counts))}
    _, fast = between_nodes()
    (alone,) = (each for each in compare(fast) if each.problem.pass_ == "fwd_bwd"
                and each.problem[:3] == (32, 32, 64 << 10))  # fmt: skip
    found["1.35"] = count_of(alone.rows["burst:backend=cudnn"])
    for pass_ in ("fwd_bwd", "fwd"):
        row, ratio = half_at_any_token(pass_)
        found[ratio] = count_of(row)
    for each in compare([row for row in grouped_of_two_dimensions() if row.seq == 4 << 10]):
        own = each.rows["burst:gather"]
        found[f"{Ratio.of(own, each.best_te).value:.2f}"] = count_of(own)
    single = [end for end in sorted(found) if found[end] == 1]
    assert not [end for end in found if found[end] in (2, 3)]  # would be told apart
    return {"- **Rows:**": [f"({', '.join(single[:-1])} and {single[-1]}) are single repetitions"]}


def count_of(row):
    return int(re.search(r"(\d+) repetition", row.note)[1])


SOURCES: dict[Callable[[], dict[str, list[str]]], str] = {  # lines' beginnings, their figures
    speed: "attention_*.csv, peers_4xh200_one_node.csv, packed_*.csv",
    documents_start_anywhere: "packed_4xh200_one_node.csv",
    slower: "packed_2x1xh200.csv, sizes_2xh200_one_node.csv, attention_2x2xh200.csv",
    memory: "the same as speed",
    step: "slices_2xh200.csv, frontier_*.csv",
    on_four_gpus: "frontier_4xh200.csv",
    planned: "frontier_1xh200.csv",
    loss: "loss_h200.csv",
    the_same_kernel: "the same of causal attention, packed_1xh200.csv",
    beside_ulysses: "peers_4xh200_one_node.csv, packed_4xh200_one_node.csv",
    repetitions: "the notes of the same rows",
}
NO_MEASUREMENT = {"0.16", "0.19", "2.9", "3.12", "3.13"}  # versions


@pytest.fixture(scope="module")
def told():
    """README.md's lines from its title to its references, without code and links' targets."""
    text = README.read_text(encoding="utf-8").partition("## Cite")[0]
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", " ", text, flags=re.DOTALL)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def figures():
    """By the beginning of the line that tells them."""
    found = {}
    for source in SOURCES:
        for begins, some in source().items():
            found[begins] = found.get(begins, []) + some
    return found


def test_figures_of_rows_are_told_where_they_belong(told, figures):
    for begins, some in figures.items():
        (line,) = (line for line in told if line.startswith(begins))
        for figure in some:
            assert re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", line), (begins, figure)


def test_every_decimal_that_is_told_is_one_of_that_lines_rows(told, figures):
    count = 0
    for line in told:
        own = [
            figure for begins, some in figures.items() if line.startswith(begins) for figure in some
        ]
        known = {number for figure in own for number in re.findall(r"\d+\.\d+", figure)}
        numbers = set(re.findall(r"(?<![\w.])\d+\.\d+", line))
        assert numbers <= known | NO_MEASUREMENT, (line[:60], numbers - known)
        count += len(numbers - NO_MEASUREMENT)
    assert count > 35
