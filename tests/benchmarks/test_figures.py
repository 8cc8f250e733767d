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
    assert_told(PAGES / "attention.md", *spans)


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
    rows = [row for row in rows_of("attention_2xh200_one_node") if row.pass_ == "fwd_bwd"]
    first = min(row.date for row in rows if (row.heads_kv, row.seq) == (32, 1 << 16))
    ms = {(row.heads_kv, row.impl, row.mode): row.ms for row in rows
          if row.date[:13] == first[:13] and row.seq == 1 << 16}  # fmt: skip
    best = {heads: min(ms[heads, "te", mode] for mode in ("p2p", "a2a")) for heads in (32, 8)}
    earlier = [f"{best[heads] / ms[heads, 'burst', 'auto']:.2f}" for heads in best]
    assert_told(PAGES / "attention.md", *costs, "{} for 32/32 and {} for 32/8".format(*earlier))


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
    (packed,) = ms[128, "burst-recompute"]
    packed_leads = [f"{time / packed:.3f}" for time in ms[128, "megatron"]]
    assert_told(PAGES / "step.md", *figures, f"gain little, {leads_with_everything_recomputed()}")
    assert_told(PAGES / "step-packed.md", *packed_leads)


def test_what_steps_gain_on_one_gpu():
    """The spans at the top of step.md are of its own table."""
    text = (PAGES / "step.md").read_text()
    *_, table = re.findall(r"show overview .*-->\n\n((?:\|.*\n)+)", text)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    for kind in ("one document", "packed"):
        gains, more = [], []
        for name, full, auto, gain, *_ in lines:
            if name.endswith(kind) and gain != "-":
                gains.append(float(gain))
                gib = [float(re.search(r"([\d.]+) GiB", cell)[1]) for cell in (full, auto)]
                more.append(gib[1] - gib[0])
        least, most = min(more), max(more)
        assert len(gains) > 1
        assert_told(PAGES / "step.md", f"{span(gains)} times as fast, in {least:.0f} to {most:.0f}")


def test_sentences_of_steps_follow_from_their_runs():
    runs = {run: points_of(own) for run, own in steps_in("1xh200", "2xh100").items()}
    packed, one = runs["11-26T06:48"], runs["11-26T06:50"]
    told = {"step-packed": (packed, runs["11-24T19:57"]), "step-long": (one, runs["11-24T20:01"])}
    for page, measured in told.items():
        for points in measured:
            mean = geometric_mean(gain for gain, _ in in_equal_memory(points).values())
            assert_told(PAGES / f"{page}.md", f"{mean:.2f} times as fast in the geometric mean")
    names = [{point.name: point for point in points} for points in (packed, one)]
    first, second = (of["burst:auto-7"].ratio for of in names)
    off = [f"{of['burst:off'].ms:.0f} ms" for of in names]
    assert_told(PAGES / "step.md", f"{first:.3f} and {second:.3f} times as long", *off)
    for page in (PAGES / "step.md", PAGES / "step-experts.md"):
        assert_told(page, f"{lead_with_experts()} times as fast")


def lead_with_experts():
    """Over Megatron's settings that recompute nothing, or next to nothing."""
    found = in_equal_memory(points_of(steps_in("1xh100")["11-27T01:01"]))
    return span([found[name][0] for name in ("megatron:off", "megatron:moe_act")])


def test_settings_of_a_table_train_the_same():
    dense, experts = [], []
    for page in ("step-packed", "step-models", "step-long", "step-experts"):
        text = (PAGES / f"{page}.md").read_text()
        for name, run in re.findall(r"show frontier .*frontier_(\w+)\.csv 2026-(\S+)", text):
            own = steps_in(name)[run]
            spread = spread_of(own)
            assert spread["loss"] < 2e-5
            (experts if MODELS[own[0].model].experts else dense).append(spread["grad_norm"])
    (told,) = re.findall(r"Losses are equal to 2e-5, and gradient norms to (\S+) \(dense models\) "
                         r"or (\S+) \(experts\)", (PAGES / "step-runs.md").read_text())  # fmt: skip
    for bound, found in zip(map(float, told), (dense, experts), strict=True):
        assert bound / 2 < max(found) < bound


def test_recomputation():
    ms = {}
    for row in rows_of("recompute_2xh200", RECOMPUTE_CSV):
        ms.setdefault(f"{row.impl}:{row.mode}", {})[row.seq] = row.ms
    full, kept, ours = (ms[name] for name in ("megatron:full", "megatron:full-keep", "burst:all"))
    for slow, fast in ((full, ours), (full, kept), (kept, ours)):
        assert_told(PAGES / "recompute.md", span([slow[seq] / fast[seq] for seq in fast]))


def test_what_keeping_gives_on_one_gpu():
    ms = {row.impl: row.ms for row in rows_of("ablation_step_1xh200", SLICES_CSV)}
    assert_told(PAGES / "step-scaling.md", *(f"{one:.1f}" for one in ms.values()))
    gain = f"{ms['fused-loss'] / ms['whole']:.3f}"
    assert_told(PAGES / "step-scaling.md", gain)
    assert_told(PAPERS, gain)


def test_the_ablation_of_a_step_on_one_gpu():
    """Each setting's times, and how much faster it is than the first one."""
    rows = rows_of("ablation_step_1xh100", SLICES_CSV)
    told = [f"| {row.ms:.1f} ({row.ms_min:.1f}-{row.ms_max:.1f}) |" for row in rows]
    told += [f"{row.tflops_per_gpu:.0f} | {row.peak_gib:.2f}" for row in rows]
    gains = {row.impl: f"{rows[0].ms / row.ms:.3f}" for row in rows}
    assert_told(PAGES / "step-scaling.md", *told, *list(gains.values())[2:])
    assert_told(PAPERS, *(gains[impl] for impl in ("half", "burst", "planned")))


def test_sequences_and_batches_on_one_gpu():
    """The fastest and the slowest of burst's passes."""
    rows = [row for name in ("seeds_1xh100", "seeds_long_1xh100") for row in rows_of(name)]
    found = [row.tflops_per_gpu for row in rows if row.impl == "burst" and row.pass_ == "fwd_bwd"]
    span = f"{min(found):.0f} to {max(found):.0f} TFLOP/s"
    assert_told(PAGES / "step-scaling.md", span)
    assert_told(PAPERS, span)


def test_measured_steps_of_balanced_micro_batches():
    """Measured and simulated steps of each draw, what changing sizes gain, and the errors."""
    draws, gains, errors = {}, ([], []), []
    for row in rows_of("balance_steps_2xh200", STEPS_CSV):
        draws.setdefault((row.kind, row.seed), []).append((row.ms, row.simulated_ms))
        errors.append(100 * (1 - row.simulated_ms / row.ms))
    lines = []
    for (kind, seed), pairs in draws.items():
        cells = [f"{kind}, draw {seed}"]
        for times, found in zip(zip(*pairs, strict=True), gains, strict=True):
            found += [times[0] / ms for ms in times[2:]]
            told = [f"{ms:.1f}" for ms in times] + [f"{found[-1]:.3f}" for _ in times[2:]]
            cells += told + [""] * (4 - len(told))
        lines.append(f"| {' | '.join(cells)} |")
    spans = [f"{min(found):.3f} to {max(found):.3f}" for found in gains]
    figures = PAGES.parent / "how-to" / "balance-figures.md"
    assert_told(figures, *spans, f"{min(errors):.1f} to {max(errors):.1f} % less")
    assert "\n".join(lines) in figures.read_text(encoding="utf-8")


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
    table = (ROOT / "docs" / "planner-published.md").read_text()
    rows = re.findall(r"^\| BurstEngine, all \| (.*) \|$", table, re.MULTILINE)
    cells = [row.split(" | ") for row in rows]
    shares = [share.replace("%", " %") for *_, share, _, _, _ in cells]
    told = {(model, seq): (speed, gb) for model, seq, _, _, speed, _, _, _, gb, _ in cells}
    shown = [told[case] for case in (("burstengine-7b", "2M"), ("burstengine-14b", "1M"))]
    shown += [told["burstengine-7b", "4M"]]
    speeds = [f"{float(speed):.1f}" for speed, _ in shown]
    assert_told(PAPERS, *shares, *speeds, *(gb for _, gb in shown))


def test_peaks_of_every_mode_are_counted_and_measured():
    """The table of docs/concepts/memory.md: the programs' bytes of today, and the rows' peaks."""
    page = (ROOT / "docs" / "concepts" / "memory.md").read_text()
    lines = re.findall(r"^\| (\d(?: \+ \d)? \| .*) \|$", page, re.MULTILINE)
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    shown = {tuple(of[:3]): of[3:] for of in cells}
    names = NODE, "attention_2xh200_one_node", NODES
    compared = [one for name in names for one in compare(rows_of(name))]
    every = [one for one in compared if one.problem.pass_ == "fwd_bwd"]
    assert len(every) == len(shown) == 48
    more = []
    for one in every:
        of, today = one.problem, replace(one.burst, date="")
        modes = ("auto", "intra=ring", "intra=a2a")
        counted = [predict(replace(today, mode=mode)).gib for mode in modes]
        peaks = (one.rows.get(f"te:{mode}") for mode in ("p2p", "a2a", "a2a+p2p", "all_gather"))
        measured = [
            "" if row is None or not row.peak_gib
            else f"**{row.peak_gib:.2f}**" if row is one.best_te else f"{row.peak_gib:.2f}"
            for row in peaks
        ]  # fmt: skip
        gpus = " + ".join([f"{of.ranks // of.nodes}"] * of.nodes)
        told = shown[gpus, f"{of.heads_q}/{of.heads_kv}", f"{of.seq >> 10}K"]
        assert told == [*(f"{gib:.2f}" for gib in counted), *measured]
        if counted[0] > one.best_te.peak_gib:
            more.append(of.nodes)
    assert (more.count(1), more.count(2)) == (3, 4)
