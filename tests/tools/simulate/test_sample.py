"""Plans of packed samples: pairs of tiles and ranks, by counting; bytes and times.

Guards against documents that see each other, tiles that differ from the engine's, work of ranks
that does not add up, and times that do not follow it.
"""

from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from random import Random

import pytest

from megatron_burst.errors import BurstError
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask, Span, Tile
from megatron_burst.tools.hardware_file import preset
from megatron_burst.tools.job.hugging_face import PRESETS
from megatron_burst.tools.job.memory import memory_of
from megatron_burst.tools.job.step import step_time
from megatron_burst.tools.job.strategy import Job, Strategy, open_call
from megatron_burst.tools.packed import rows_of_rank, way_of
from megatron_burst.tools.simulate.sample import Packing, Sample

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
H200, LLAMA = preset("h200"), PRESETS["llama3-8b"]
LENGTHS = (5000, 300, 1, 12000, 4096, 2500, 64, 9000, 700, 3111)


def call_of(gpus, on_node=8):
    job = Job(LLAMA, 65536, gpus, min(gpus, on_node), 1, H200)
    return open_call(job, Strategy(cp=gpus))


def pairs_of(lengths):
    return sum(length * (length + 1) // 2 for length in lengths)


@pytest.mark.parametrize("seed", range(20))
def test_pairs_of_a_tile_are_those_of_its_documents(seed):
    random = Random(seed)
    sample = Sample.of([random.randint(0, 9) for _ in range(8)] + [3])
    end = sample.tokens

    def places():
        edges = sorted(random.sample(range(end + 1), 4))
        return tuple(range(*edges[at : at + 2]) for at in (0, 2))

    queries, keys = places(), places()
    of = [n for n, length in enumerate(sample.lengths) for _ in range(length)]
    seen = sum(of[q] == of[k] and k <= q for some in queries for q in some
               for few in keys for k in few)  # fmt: skip
    spans = (Span(0, sum(map(len, some))) for some in (queries, keys))
    assert sample.pairs(Tile(*spans, Mask(right=0, documents=True), (queries, keys))) == seen


@pytest.mark.parametrize("gpus, on_node", [(1, 8), (2, 8), (4, 8), (8, 8), (4, 2), (8, 4)])
@pytest.mark.parametrize("layout", [Layout.ZIGZAG, Layout.DOCUMENTS])
def test_ranks_together_compute_all_pairs_once(gpus, on_node, layout):
    way = way_of(call_of(gpus, on_node), Sample.of(LENGTHS), H200, layout)
    tail = [way.padding] if layout is Layout.ZIGZAG and way.padding else []
    lengths = [*LENGTHS, *tail] if layout is Layout.ZIGZAG else way.sample.lengths
    assert sum(way.work) == pytest.approx(pairs_of(lengths), rel=2e-3)
    assert way.sample.tokens % (2 * gpus) == 0 and way.padding < 2 * gpus * len(LENGTHS)
    rows = sorted(
        place for rank in range(gpus) for some in rows_of_rank(way, rank) for place in some
    )
    assert rows == list(range(way.sample.tokens))
    assert (way.imbalance < 1.001) == (layout is Layout.DOCUMENTS or way.call.intra == "a2a"
                                       or gpus == 1)  # fmt: skip
    assert (min(way.sent) > 0) == (gpus > 1)


def test_work_of_rows_that_stay_is_that_of_each_ranks_chunks():
    """By hand: 2 ranks, chunks of 4 tokens, documents of 6 and 10; rank 0 has the outer chunks."""
    call = replace(call_of(2), intra="ring")
    way = way_of(call, Sample.of([6, 10]), H200, Layout.ZIGZAG)
    outer = (1 + 2 + 3 + 4) + (7 + 8 + 9 + 10)
    assert way.work == (outer, 21 + 55 - outer)
    assert way.imbalance == max(outer, 76 - outer) * 2 / 76


def test_times_follow_work():
    """Rows that stay take as long as the slowest rank; the kernels' speed bounds everything."""
    call, sample = call_of(8), Sample.of([30000, *[500] * 71, 36])
    even = way_of(call, sample, H200, Layout.ZIGZAG)
    stays = way_of(replace(call, intra="gather"), sample, H200, Layout.ZIGZAG)
    whole = way_of(call, Sample.of([65536]), H200, Layout.ZIGZAG)
    assert even.call.intra == "a2a" and stays.imbalance > 1.2
    assert sum(stays.seconds) > 1.15 * sum(even.seconds)
    assert sum(whole.seconds) > sum(even.seconds)
    kernel = H200.kernel(128, "auto")
    assert even.tflops < max(kernel.forward.at(1e9), kernel.backward.at(1e9))


def test_boundaries_and_lengths():
    edges = tuple(accumulate(LENGTHS, initial=0))
    assert Sample.of(LENGTHS).edges == Sample.of(edges).edges == edges
    assert Sample.of([0, 4, 4, 6]).lengths == (4, 2) and Sample.of([4, 0, 2]).lengths == (4, 2)
    for wrong in ([], [0], [0, 0], [3, -1], [0, 5, 3, -2]):
        with pytest.raises(BurstError, match="--cu-seqlens must .*; got .*; write"):
            Sample.of(wrong)


@pytest.mark.parametrize("layout", [Layout.DOCUMENTS, Layout.ZIGZAG])
def test_a_job_of_packed_samples(layout):
    """Documents only make attention cheaper; one document is a causal sequence."""
    job = Job(LLAMA, 1 << 17, 8, 8, 8, H200)
    one = replace(job, packing=Packing(layout, Sample((0, 1 << 17))))
    short = replace(job, packing=Packing(layout, Sample.of([4096] * 32)))
    usual = replace(job, packing=Packing(layout))
    times = [
        step_time(it, way, memory_of(it, way)) for it in (job, one, usual, short)
        for way in [Strategy(cp=8)]
    ]  # fmt: skip
    causal, alone, drawn, packed = (time.seconds for time in times)
    assert alone == pytest.approx(causal, rel=0.03)
    assert packed < drawn < 0.6 * causal
    parts = [dict(time.parts) for time in times]
    assert parts[3]["matrix products"] == parts[0]["matrix products"]
    assert parts[3]["attention kernels"] < 0.1 * parts[0]["attention kernels"]
    assert short.share == pytest.approx(1 / 32, rel=0.001)
    tokens = times[3].tokens_per_gpu * LLAMA.flops_per_token(1 << 17, short.share)
    assert times[3].mfu == pytest.approx(tokens / 989.5e12)


def test_documents_fill_a_sequence():
    assert Sample.of([4, 2]).filling(15).lengths == (4, 2, 4, 2, 3)
    assert Sample.of([4, 2]).filling(12).lengths == (4, 2, 4, 2)
    with pytest.raises(BurstError, match="--seq-length, .* got 6 tokens .* and 5 of"):
        Sample.of([4, 2]).filling(5)
