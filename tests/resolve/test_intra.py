"""What `auto` chooses inside a node, how many heads per round, and what is refused."""

import re
from dataclasses import replace
from itertools import product

import pytest

from megatron_burst.comm.communicator import choose_transfer
from megatron_burst.errors import BurstError
from megatron_burst.resolve import resolve
from megatron_burst.rules import choose_heads_gather, window_imbalance
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask, tiles
from megatron_burst.schedule.spec import AttentionShape, Direction, Kernel, Spec
from megatron_burst.schedule.topology import pretend_nodes
from tests.frozen import drawn_call

SHAPE = AttentionShape(1, 64, 32, 8, 128, 128, 2, 4, 4)


def intra(topology, layout=Layout.ZIGZAG, **asked):
    spec = Spec(topology, SHAPE, layout, inter="ring", **asked)
    return resolve(spec)[1]["intra"]


def test_auto_gathers_where_it_can():
    one, two, alone = pretend_nodes(4, 1), pretend_nodes(4, 2), pretend_nodes(1, 1)
    for case in (one,), (two,), (one, Layout.CONTIGUOUS):
        assert intra(*case).value == "gather"
    for case in (two.flat(),), (alone,), (one, Layout.STRIPED):
        assert intra(*case).value == "ring"
    assert intra(one, intra="ring").reason == "asked for"


def test_ranks_that_would_wait_under_a_window_share_heads_instead():
    def chosen(left, tokens=1 << 15, layout=Layout.ZIGZAG, right=0, ranks=2, **asked):
        shape, mask, row = replace(SHAPE, tokens=tokens), Mask(left, right), pretend_nodes(ranks, 1)
        return resolve(Spec(row, shape, layout, mask, inter="ring", **asked))[1]["intra"].value

    wide, wider = (1 << 14) - 1, 20 << 10
    assert chosen(wide) == chosen(wider) == chosen(wide, 1 << 14) == "a2a"
    assert chosen(1 << 12) == chosen(50 << 10) == "gather"  # 3 % of the time is lost, 5 %
    assert chosen((1 << 16) - 1) == chosen(1 << 20) == "gather"  # as causal
    assert chosen(wide, heads_per_round=8) == chosen(wide, heads_per_round=0) == "gather"
    assert chosen(wide, intra="gather") == chosen(wide, right=5) == "gather"
    assert chosen(wide, layout=Layout.CONTIGUOUS) == chosen(wide, ranks=3) == "gather"
    assert chosen(1 << 12, 1 << 13) == "gather"  # too short to hide anything
    assert chosen(1 << 18, 1 << 19) == "gather"  # too much memory
    assert resolve(Spec(pretend_nodes(4, 2), SHAPE, mask=Mask(wide, 0)))[1]["intra"].value != "a2a"


def test_a_kernel_that_is_slow_where_nothing_is_masked_gets_whole_sequences():
    """cuDNN with heads of 192/128, causal."""
    cudnn = Kernel(rectangular_causal=False)

    def chosen(
        tokens=1 << 15, ranks=2, dim_qk=192, mask=Mask.CAUSAL, kernel=cudnn, nodes=1, **asked
    ):
        shape, row = replace(SHAPE, tokens=tokens, dim_qk=dim_qk), pretend_nodes(ranks, nodes)
        spec = resolve(Spec(row, shape, mask=mask, kernel=kernel, **asked))[0]
        return [spec.program_spec(0, direction).intra for direction in Direction]

    both, whole = ["gather", "gather"], ["gather", "a2a"]  # in forward, in backward
    assert chosen() == chosen(ranks=4) == chosen(inter="ring") == whole
    assert chosen(tokens=1 << 10) == chosen(tokens=1 << 18) == whole
    assert chosen(dim_qk=128) == chosen(kernel=Kernel()) == both
    assert chosen(mask=Mask.FULL) == both  # nothing is masked anyway
    assert chosen(mask=Mask(100, 0)) == chosen(ranks=4, nodes=2, inter="ring") == both
    assert chosen(intra="gather") == chosen(heads_per_round=2) == chosen(ranks=3) == both
    assert chosen(intra="a2a") == ["a2a", "a2a"]


def test_what_is_lost_under_a_window_is_counted_from_its_tiles():
    # of 128 queries with a window of 32 the first 32 see half as much: one rank has 3/4 of the work
    assert window_imbalance(31, 2, 64) == pytest.approx(1 - 0.875, abs=0.01)
    for left, size in product((0, 3, 31, 40, 127), (1, 2, 4)):
        tokens = 128 // size
        work = [
            sum(tile.pairs for other in range(size)
                for tile in tiles(Layout.ZIGZAG, Mask(left, 0), rank, other, size, tokens))
            for rank in range(size)
        ]  # fmt: skip
        idle = 1 - sum(work) / (size * max(work))
        assert window_imbalance(left, size, tokens) == pytest.approx(idle)


@pytest.mark.parametrize(
    "topology, layout, words",
    [
        (
            pretend_nodes(4, 2).flat(),
            Layout.ZIGZAG,
            "must share a node.*got flat ring of 4 ranks over 2 nodes; pass --burst-intra ring",
        ),
        (pretend_nodes(4, 1), Layout.STRIPED, "must not be striped.*got striped; pass"),
    ],
)
def test_gathering_is_refused_where_it_cannot_be(topology, layout, words):
    with pytest.raises(BurstError, match=words):
        intra(topology, layout, intra="gather")


def test_a_round_has_as_many_heads_as_the_buffer_holds():
    def heads(tokens, heads_q, heads_kv, requested=None):
        shape = AttentionShape(1, tokens, heads_q, heads_kv, 128, 128, 2, 4, 4)
        return choose_heads_gather(shape, pretend_nodes(4, 1), 132, requested)

    assert heads(16384, 32, 32) == 4  # 32 MiB each
    assert heads(16384, 32, 8) == 8  # 256 MiB in all: one round
    assert heads(32768, 32, 8) == heads(32768, 8, 2) == 1  # long shards: 64 MiB each
    assert heads(32768, 32, 32) == 2  # without groups kernels are short: 128 MiB
    assert heads(131072, 32, 32) == heads(131072, 8, 1) == 1
    assert heads(1 << 20, 32, 32) == 1  # however large a single head is
    wide = AttentionShape(1, 4096, 32, 32, 1024, 1024, 2, 4, 4)
    # 256 MiB each, but shorter tiles
    assert choose_heads_gather(wide, pretend_nodes(16, 1), 132) == 16
    assert heads(16384, 32, 8, requested=5) == 5


def test_where_nothing_hides_the_first_round_there_are_four_or_two_short_ones():
    def heads(tokens, heads_q, heads_kv):
        shape = AttentionShape(1, tokens, heads_q, heads_kv, 128, 128, 2, 4, 4)
        return choose_heads_gather(shape, pretend_nodes(2, 1), 132, exposed=True)

    assert heads(16384, 64, 8) == heads(32768, 32, 8) == 2
    assert heads(8192, 64, 8) == heads(8192, 32, 8) == 4  # two rounds of 32 MiB
    assert heads(8193, 64, 8) == 2
    assert heads(32768, 32, 4) == 2 and heads(32769, 32, 4) == 1  # not one head, up to 128 MiB
    assert heads(32768, 16, 2) == 1
    assert heads(131072, 64, 8) == 1  # 128 MiB
    assert heads(1024, 32, 8) == 8  # fewer would not fill the GPU
    assert heads(16384, 8, 1) == 1


@pytest.mark.parametrize(
    "multiprocessors, expected",
    [
        (132, {65536: 1, 32768: 2, 16384: 4}),  # 256, 128, 64 blocks a head: 1.94 waves
        (108, {65536: 2, 32768: 4, 16384: 5}),  # 256 would be 2.4 waves, 512 are 4.7
        (148, {65536: 4, 32768: 8, 16384: 9}),  # 256 are 1.7, 512 are 3.5, 1024 are 6.9
    ],
)
def test_a_round_fills_the_waves_of_any_gpu(multiprocessors, expected):
    for tokens, heads in expected.items():
        shape = AttentionShape(1, tokens, 32, 32, 128, 128, 2, 4, 4)
        assert choose_heads_gather(shape, pretend_nodes(16, 4), multiprocessors) == heads


def test_several_nodes_have_several_rounds_or_one_if_asked():
    two = pretend_nodes(4, 2)

    def heads(heads_q, heads_kv, tokens=65536, **options):
        shape = AttentionShape(1, tokens, heads_q, heads_kv, 64, 64, 2, 4, 4)
        return choose_heads_gather(shape, two, 132, **options)

    assert heads(32, 32) == 4 and heads(32, 8) == 1 and heads(8, 1) == 1
    assert heads(32, 32, tokens=2048) == 32  # filling the kernels comes first
    assert heads(32, 32, requested=0) == 32


@pytest.mark.parametrize(
    "nodes, device, asked, trouble, value",
    [
        (1, "cuda", "auto", None, "pull"),
        (1, "cuda", "pull", None, "pull"),
        (1, "cuda", "send", None, "send"),
        (1, "cuda", "auto", "no peer access", "send"),
        (2, "cuda", "auto", None, "pull"),
        (4, "cuda", "auto", None, "send"),
        (1, "cpu", "auto", None, "send"),
    ],
)
def test_ranks_pull_where_they_can(nodes, device, asked, trouble, value):
    choice = choose_transfer(pretend_nodes(4, nodes), device, asked, lambda: trouble)
    assert choice.value == value
    assert (trouble or "") in choice.reason


@pytest.mark.parametrize(
    "nodes, device, trouble, why",
    [
        (4, "cuda", None, "a rank must be on one node with the ranks it"),
        (1, "cpu", None, "the ranks must use GPUs"),
        (1, "cuda", "no peer access", "symmetric memory must work between the GPUs.*; got no peer"),
    ],
)
def test_pulling_that_cannot_be_done_is_refused(nodes, device, trouble, why):
    with pytest.raises(BurstError, match=why):
        choose_transfer(pretend_nodes(4, nodes), device, "pull", lambda: trouble)


def test_backward_is_an_all_to_all_where_it_gains_more_than_it_sends():
    """Of documents that are each sharded on their own, on long shards of one node."""

    def heads(tokens=16 << 10, size=4, heads=(64, 8), layout=Layout.DOCUMENTS, **asked):
        shape = AttentionShape(1, tokens, *heads, 128, 128, 2, 4, 4)
        mask = asked.pop("mask", Mask(right=0, documents=True))
        nodes = asked.pop("nodes", 1)
        spec = Spec(pretend_nodes(size, nodes), shape, layout, mask, Kernel(), **asked)
        return resolve(spec)[0]

    found = heads()
    assert found.intra == "gather" and 0 < found.a2a_backward_heads < 2
    assert heads(32 << 10, heads=(32, 8)).a2a_backward_heads
    forward, backward = (found.program_spec(1, direction) for direction in Direction)
    assert (forward.intra, forward.a2a_backward_heads) == ("gather", 0)
    assert (backward.intra, backward.a2a_backward_heads, backward.heads_per_round) == ("a2a", 0, 1)
    assert not backward.saves_remote and backward == backward.program_spec(1, Direction.BACKWARD)
    for other in (
        heads(8 << 10), heads(size=2), heads(size=8), heads(heads=(66, 6)), heads(nodes=2),
        heads(layout=Layout.ZIGZAG), heads(intra="gather"), heads(heads_per_round=2),
        heads(mask=Mask(100, 0, documents=True)), heads(32 << 10),
    ):  # fmt: skip
        assert not other.a2a_backward_heads


def test_cpus_choose_what_gpus_choose():
    """So tests and the demo run the modes that users run."""
    for number in range(2000):
        of_gpu = drawn_call(number)
        of_cpu = replace(of_gpu, kernel=replace(of_gpu.kernel, device="cpu"))
        try:
            spec, reasons = resolve(of_gpu)
        except BurstError as refusal:
            with pytest.raises(BurstError, match=re.escape(str(refusal))):
                resolve(of_cpu)
        else:
            assert resolve(of_cpu) == (replace(spec, kernel=of_cpu.kernel), reasons), number
