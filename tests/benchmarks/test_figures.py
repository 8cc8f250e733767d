"""Headline figures of docs/ are those of the rows in benchmarks/results; README's: test_readme."""

import re
from dataclasses import replace
from statistics import geometric_mean

from benchmarks.compared import compare
from benchmarks.frontier_cases import FULL, MODELS
from benchmarks.frontier_cases import FULL_OF_BURST as OURS
from benchmarks.frontier_table import in_equal_memory, points_of, runs_in, speedup, spread_of
from benchmarks.limits import FOUR as NODE
from benchmarks.limits import sheet as rows_of
from benchmarks.planned import predict
from benchmarks.sheets import FRONTIER_CSV, RECOMPUTE_CSV, SLICES_CSV, STEPS_CSV
from benchmarks.show import ROOT
from benchmarks.tables import Ratio

NODES = "attention_2x2xh200"
README = ROOT / "README.md"
PAGES = ROOT / "docs" / "benchmarks"
PAPERS = ROOT / "docs" / "concepts" / "papers.md"


def leads(name):
    """TransformerEngine's fastest mode over burst, in time and memory, by heads and length."""
    return {
        (each.problem.heads_q, each.problem.heads_kv, each.problem.seq): (
            Ratio.of(each.burst, each.best_te).value, each.best_te.peak_gib / each.burst.peak_gib,
        )
        for each in compare(rows_of(name))
        if each.problem.pass_ == "fwd_bwd"
    }  # fmt: skip


def span(values):
    return f"{min(values):.2f} to {max(values):.2f}"


def assert_told(path, *figures):
    text = " ".join(path.read_text(encoding="utf-8").split())
    for figure in figures:
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d])", text), (path.name, figure)


def test_memory_and_the_lead_between_nodes():
    one, two = leads(NODE), leads(NODES)
    most = [f"{1 / min(memory for _, memory in each.values()):.2f}" for each in (one, two)]
    ratios = {problem: speed / one[problem][0] for problem, (speed, _) in two.items()}
    mean = f"{geometric_mean(ratios.values()):.2f}"
    *others, largest = sorted(ratios.values())
    assert_told(PAGES / "attention.md", most[0])
    assert_told(PAGES / "nodes.md", mean, span(others), f"{largest:.2f}", most[1])


def on_cudnn(rows, pass_="fwd_bwd"):
    """Burst's speed on TransformerEngine's kernel over that of its fastest mode, and KV heads."""
    return [
        (each.problem.heads_kv, Ratio.of(each.rows["burst:backend=cudnn"], each.best_te).value)
        for each in compare(rows)
        if each.problem.pass_ == pass_ and "burst:backend=cudnn" in each.rows
    ]


def test_the_same_kernel_on_both_sides():
    rows = rows_of("attention_2xh200_one_node")
    found = [on_cudnn(rows, pass_) for pass_ in ("fwd_bwd", "fwd")]
    spans = [span([ratio for _, ratio in pairs]) for pairs in found]
    both, _ = (span([ratio for _, ratio in on_cudnn(rows_of(NODE), p)]) for p in ("fwd_bwd", "fwd"))
    told = f"at {both} of TransformerEngine's speed on 4 GPUs, and at {spans[0]} on 2"
    assert_told(PAGES / "attention.md", told)


def test_how_many_times_as_fast_attention_is():
    for name, gpus in ((NODE, 4), ("attention_2xh200_one_node", 2)):
        both, alone = (
            span([Ratio.of(each.burst, each.best_te).value for each in compare(rows_of(name))
                  if each.problem.pass_ == pass_])
            for pass_ in ("fwd_bwd", "fwd")
        )  # fmt: skip
        begins = f"On {gpus} GPUs burst" if gpus == 4 else "On 2 GPUs it"
        told = f"{begins} is {both} times as fast, and in forward alone {alone} times"
        assert_told(PAGES / "attention.md", told)


def test_what_context_parallelism_costs_beside_the_kernel_alone():
    every = compare(rows_of("attention_2xh200_one_node"))
    both = [each for each in every if each.problem.pass_ == "fwd_bwd"]
    on_cudnn = [each for each in both if "ceiling:cudnn" in each.rows]
    ours, cudnn, theirs = (
        [round(100 * (1 - Ratio.of(some, alone).value)) for some, alone in pairs]
        for pairs in (
            [(each.burst, each.ceiling) for each in both],
            [(each.rows["burst:backend=cudnn"], each.rows["ceiling:cudnn"]) for each in on_cudnn],
            [(each.best_te, each.rows["ceiling:cudnn"]) for each in on_cudnn],
        )
    )
    costs = f"{min(ours)} to {max(ours)} %", f"up to {max(cudnn)} %", f"up to {max(theirs)} %"
    assert_told(PAGES / "attention.md", *costs)


def steps_in(*names):
    """Rows of each run of frontier_*.csv and problem, by when it began, "11-26T06:48"."""
    rows = [row for name in names for row in rows_of(f"frontier_{name}", FRONTIER_CSV)]
    return {own[0].run[5:16]: own for _, own in runs_in(rows)}


def leads_with_everything_recomputed():
    """Of steps of packed documents and dense models."""
    slices = [row for row in rows_of("slices_2xh200", SLICES_CSV) if row.documents]
    (ours,) = (row for row in slices if row.impl == "burst-recompute")
    found = [Ratio.of(ours, row).value for row in slices if row is not ours]
    for own in steps_in("1xh200", "1xh100", "2xh100").values():
        points = {point.name: point for point in points_of(own)}
        if own[0].documents and not MODELS[own[0].model].experts and {FULL, OURS} <= points.keys():
            found.append(speedup(points[OURS], points[FULL]))
    assert len(found) > 5
    return span(found)


def test_whole_steps():
    ms = {}
    for row in rows_of("slices_2xh200", SLICES_CSV):
        ms.setdefault((row.seq >> 10, row.impl), []).append(row.ms)
    (keep,), (megatron,), (whole,) = (
        ms[256, impl] for impl in ("megatron-keep", "megatron", "burst")
    )
    long = ms[512, "megatron"][-1] / ms[512, "burst"][-1]
    figures = f"{long:.2f}", f"{megatron / keep:.2f}", f"{keep / whole:.2f}"
    assert_told(PAPERS, *figures[:2], f"{megatron / whole:.2f}")
    told = f"on both sides** are {leads_with_everything_recomputed()} times as fast"
    assert_told(PAGES / "steps.md", *figures, told)


def test_sentences_of_steps_follow_from_their_runs():
    every = steps_in("1xh200", "1xh100", "2xh200", "4xh200")
    runs = {run: points_of(own) for run, own in every.items()}
    named = {run: {point.name: point for point in points} for run, points in runs.items()}
    dense = [in_equal_memory(runs[run])["megatron:off"][0] for run in (
        "11-27T07:26", "11-27T04:31", "11-27T01:04", "11-27T10:20", "11-27T07:47", "11-30T13:46",
    )]  # fmt: skip
    long, small = named["11-27T07:26"], named["11-27T10:20"]["burst:keep"]
    keep, off = long["burst:keep"], long["megatron:off"]
    between = named["11-27T04:31"]["burst:auto-12"], named["11-26T04:44"]["burst:auto-18"]
    offload = named["11-27T10:18"]
    behind = offload["burst:auto-36"].ms / offload["megatron:offload"].ms
    assert_told(
        PAGES / "steps.md",
        *(f"{one.ms / 1e3:#.3g} s in {one.peak_gib:.1f} GiB" for one in between),
        f"burst is {span(dense)} times as fast for dense models",
        f"takes {keep.ms / 1e3:.2f} s in {keep.peak_gib:.0f} GiB, where Megatron needs "
        f"{off.ms / 1e3:.2f} s and {off.peak_gib:.0f} GiB",
        f"takes {small.ratio:.2f} times as long with `keep` as with nothing recomputed, in "
        f"{small.peak_gib:.0f} instead of 92 GiB",
        f"it was {behind:.2f} times as fast as the best of burst's settings",
        f"burst is {lead_with_experts()} times as fast on an H100",
    )  # fmt: skip


def lead_with_experts():
    """Over Megatron's settings that recompute nothing, or next to nothing."""
    found = in_equal_memory(points_of(steps_in("1xh100")["11-27T01:01"]))
    return span([found[name][0] for name in ("megatron:off", "megatron:moe_act")])


def test_settings_of_a_table_train_the_same():
    dense, own_loss, experts = [], [], []
    text = (PAGES / "steps.md").read_text()
    (words,) = re.findall(r"show jobs (.*) -->", text)
    for word in words.split():
        if word.endswith(".csv"):
            name = word.rpartition("frontier_")[2].removesuffix(".csv")
            continue
        own = steps_in(name)[word[5:]]
        spread = spread_of(own)
        assert spread["loss"] < 2e-5
        fused = [row for row in own if row.setting != "full+own-loss"]
        if len(fused) < len(own):
            own_loss.append(spread["grad_norm"])
        kind = experts if MODELS[own[0].model].experts else dense
        kind.append(spread_of(fused)["grad_norm"])
    method = (PAGES / "how-measured.md").read_text()
    words = (r"equal to 2e-5, and gradient norms to (\S+) \(dense models\), (\S+) "
             r"\(`full\+own-loss`\) or (\S+) \(experts\)")  # fmt: skip
    (told,) = re.findall(words, method)
    for bound, found in zip(map(float, told), (dense, own_loss, experts), strict=True):
        assert bound / 2 < max(found) < bound


def test_recomputation():
    ms = {}
    for row in rows_of("recompute_2xh200", RECOMPUTE_CSV):
        ms.setdefault(f"{row.impl}:{row.mode}", {})[row.seq] = row.ms
    full, kept, ours = (ms[name] for name in ("megatron:full", "megatron:full-keep", "burst:all"))
    for slow, fast in ((full, ours), (full, kept), (kept, ours)):
        assert_told(PAGES / "steps.md", span([slow[seq] / fast[seq] for seq in fast]))


def test_what_keeping_gives_on_one_gpu():
    ms = {row.impl: row.ms for row in rows_of("ablation_step_1xh200", SLICES_CSV)}
    gain = f"{ms['fused-loss'] / ms['whole']:.3f}"
    assert_told(PAGES / "steps.md", gain)
    assert_told(PAPERS, gain)


def test_the_ablation_of_a_step_on_one_gpu():
    """Each setting's times, and how much faster it is than the first one."""
    rows = rows_of("ablation_step_1xh100", SLICES_CSV)
    told = [f"| {row.ms:.1f} ({row.ms_min:.1f}-{row.ms_max:.1f}) |" for row in rows]
    told += [f"{row.tflops_per_gpu:.0f} | {row.peak_gib:.2f}" for row in rows]
    gains = {row.impl: f"{rows[0].ms / row.ms:.3f}" for row in rows}
    assert_told(PAGES / "steps.md", *told, *list(gains.values())[3:])
    assert_told(PAPERS, *(gains[impl] for impl in ("half", "burst", "planned")))


def test_sequences_and_batches_on_one_gpu():
    """The fastest and the slowest of burst's passes."""
    rows = [row for name in ("seeds_1xh100", "seeds_long_1xh100") for row in rows_of(name)]
    found = [row.tflops_per_gpu for row in rows if row.impl == "burst" and row.pass_ == "fwd_bwd"]
    span = f"{min(found):.0f} to {max(found):.0f} TFLOP/s"
    assert_told(PAGES / "attention.md", span)
    assert_told(PAPERS, span)


def test_measured_steps_of_balanced_micro_batches():
    """Measured steps of each draw, what changing sizes gain, also simulated, and the errors."""
    draws, errors = {}, []
    for row in rows_of("balance_steps_2xh200", STEPS_CSV):
        draws.setdefault((row.kind, row.seed), []).append((row.ms, row.simulated_ms))
        errors.append(100 * (1 - row.simulated_ms / row.ms))
    lines = []
    for (kind, seed), pairs in draws.items():
        cells = [f"{kind}, draw {seed}"]
        times, simulated = zip(*pairs, strict=True)
        told = [f"{ms:.1f}" for ms in times]
        told += [f"{each[0] / each[2]:.3f}" for each in (times, simulated) if len(each) > 2]
        lines.append(f" {' | '.join([*cells, *told])} |")
    text = (PAGES / "steps.md").read_text(encoding="utf-8")
    assert [line for line in lines if line not in text] == []
    assert f"take {min(errors):.1f} to {max(errors):.1f} % less than measured" in text


def test_what_replaced_parts_of_the_papers():
    rows = {
        (row.heads_kv, row.mode): row
        for row in rows_of("ablation_2x2xh200")
        if row.impl == "burst" and row.pass_ == "fwd_bwd"
    }
    grouped = [rows[8, mode].ms for mode in ("auto", "intra=ring", "circulate=kv", "circulate=q")]
    assert_told(PAPERS, *(f"{ms:.1f}" for ms in grouped))
    assert_told(PAPERS, *(f"{rows[8, mode].peak_gib:.2f}" for mode in ("auto", "pieces=false")))
    whole = [rows[32, mode].ms for mode in ("inter=flat", "circulate=kv", "circulate=q", "auto")]
    assert_told(PAPERS, *(f"{ms:.0f}" for ms in whole))
    alone = [Ratio.of(each.burst, each.ceiling).value for each in compare(rows_of(NODE))
             if each.problem.pass_ == "fwd_bwd" and each.ceiling]  # fmt: skip
    assert_told(PAPERS, span(alone))


def test_predictions_of_the_papers_set_ups_are_the_planners():
    """58.0 GB and 53.3% in the planner's table of published set-ups are the same here."""
    table = (PAGES / "planner.md").read_text()
    rows = re.findall(r"^\| BurstEngine, all \| (.*) \|$", table, re.MULTILINE)
    cells = [row.split(" | ") for row in rows]
    shares = [share.replace("%", " %") for *_, share, _, _, _ in cells]
    told = {(model, seq): (speed, gb) for model, seq, _, _, speed, _, _, _, gb, _ in cells}
    shown = [told[case] for case in (("burstengine-7b", "2M"), ("burstengine-14b", "1M"))]
    shown += [told["burstengine-7b", "4M"]]
    speeds = [f"{float(speed):.1f}" for speed, _ in shown]
    assert_told(PAPERS, *shares, *speeds, *(gb for _, gb in shown))


def test_peaks_of_every_mode_are_counted_and_measured():
    """The table of docs/concepts/memory.md: the programs' bytes of today, and the rows' peaks; all
    rows in which burst needs more, and those of 64K and 256K tokens."""
    page = (ROOT / "docs" / "concepts" / "memory.md").read_text()
    lines = re.findall(r"^\| (\d(?: \+ \d)? \| .*) \|$", page, re.MULTILINE)
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    shown = {tuple(of[:3]): of[3:] for of in cells}
    names = NODE, "attention_2xh200_one_node", NODES
    compared = [one for name in names for one in compare(rows_of(name))]
    every = [one for one in compared if one.problem.pass_ == "fwd_bwd"]
    assert len(every) == 48 and len(shown) == 27
    more = []
    for one in every:
        of, today = one.problem, replace(one.burst, date="")
        modes = ("auto", "intra=ring", "intra=a2a")
        counted = [predict(replace(today, mode=mode)).gib for mode in modes]
        is_more = counted[0] > one.best_te.peak_gib
        more += [of.nodes] * is_more
        gpus = " + ".join([f"{of.ranks // of.nodes}"] * of.nodes)
        told = shown.pop((gpus, f"{of.heads_q}/{of.heads_kv}", f"{of.seq >> 10}K"), None)
        if told is None:
            assert not is_more and of.seq >> 10 not in (64, 256), of
            continue
        peaks = (one.rows.get(f"te:{mode}") for mode in ("p2p", "a2a", "a2a+p2p", "all_gather"))
        measured = [
            "" if row is None or not row.peak_gib
            else f"**{row.peak_gib:.2f}**" if row is one.best_te else f"{row.peak_gib:.2f}"
            for row in peaks
        ]  # fmt: skip
        assert told == [*(f"{gib:.2f}" for gib in counted), *measured]
    assert not shown and (more.count(1), more.count(2)) == (3, 4)
