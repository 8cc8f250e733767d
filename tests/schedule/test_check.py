"""The proof of programs: all of them pass, and any fault introduced into one is found."""

from dataclasses import replace
from itertools import accumulate, product
from math import prod
from random import Random

import pytest

from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.modes import EMITTERS
from megatron_burst.schedule.order import order
from megatron_burst.schedule.program import (
    Buffer,
    Copy,
    Field,
    Program,
    Recv,
    Ref,
    Send,
    Space,
    Transfer,
)
from megatron_burst.schedule.spec import Cargo, Circulate, Direction, Dtype, Kernel
from megatron_burst.schedule.topology import Link, pretend_nodes, topology_of
from tests.proof import check as check_module
from tests.proof import links as links_module
from tests.proof.check import check, faults, half_of
from tests.proof.links import How, meet, run
from tests.sampling import whole
from tests.schedule.cases import BANDS, DOCUMENTS, Case, cases_on, grid
from tests.schedule.mutations import MUTATIONS

SMALL = [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1)]
LARGER = [(n, m) for n in range(1, 9) for m in range(1, 9) if 4 < n * m <= 20]
LARGEST = [(4, 8), (7, 4), (8, 8)]
UNLIKE = {  # nodes whose ranks are not neighbours; rows that span nodes
    "interleaved": topology_of("abab"),
    "backwards": topology_of("abc" * 2, places=(1, 1, 1, 0, 0, 0)),
    "flat": pretend_nodes(4, 2).flat(),
}


def faults_of(case):
    return check(case.passes(), case.layout, case.mask, boundaries=case.boundaries)


@pytest.mark.parametrize("mode", EMITTERS)
@pytest.mark.parametrize("size", SMALL, ids=str)
def test_every_call_of_a_small_group_is_proven(size, mode, draw):
    cases = [case for case in cases_on(grid(*size)) if case.mode == mode]
    assert cases
    for case in draw(cases, 6, 12):
        assert faults_of(case) == [], case


@pytest.mark.parametrize(
    "size",
    [*LARGER, *(pytest.param(size, marks=pytest.mark.whole) for size in LARGEST)],
    ids=str,
)
def test_calls_of_larger_groups_are_proven(size, draw):
    """One or two per group; which ones differs from group to group."""
    for mode in draw(EMITTERS, 1, 1 if size in LARGEST else 2):
        cases = [case for case in cases_on(grid(*size)) if case.mode == mode]
        (case,) = draw(cases, 1, 1)
        assert faults_of(case) == [], case


@pytest.mark.parametrize("mode", EMITTERS)
@pytest.mark.parametrize("size", SMALL, ids=str)
def test_windows_and_documents_are_proven(size, mode, draw):
    """A few calls per mask; which ones differs from group to group."""
    random = Random(str(size))
    for mask in (*BANDS, *DOCUMENTS):
        cases = [case for case in cases_on(grid(*size), [mask]) if case.mode == mode]
        if mask.documents:
            cases = [case for case in cases if case.layout is not Layout.STRIPED]
            if mask.windowed and (mode == "ring" or (mode == "gather" and size[0] > 1)):
                cases = []  # refused
        for case in draw(cases, 1, 4):
            places = range(1, case.tokens * case.topology.cp_size)
            starts = sorted(random.sample(places, min(len(places), random.randint(0, 4))))
            case = replace(case, boundaries=tuple(starts) if mask.documents else ())
            assert faults_of(case) == [], case


@pytest.mark.parametrize("size", [*SMALL, (2, 3), (3, 2)], ids=str)
def test_keys_of_another_sequence_are_proven(size, draw):
    """Cross-attention, in rings: more keys than queries and fewer, in one chunk and in two; slices
    are told where rows are."""
    for mask, rows in product((Mask.FULL, Mask(documents=True)), [(2, 6), (6, 4), (1, 3), (3, 1)]):
        layouts = {Layout.CONTIGUOUS, Layout.STRIPED, Layout.ZIGZAG}
        layouts -= {Layout.STRIPED} if mask.documents else set()
        layouts -= {Layout.ZIGZAG} if rows[0] % 2 else set()
        cases = [case for case in cases_on(grid(*size), [mask]) if case.mode == "ring"]
        for case in draw([case for case in cases if case.layout in layouts], 1, 6):
            case = replace(case, tokens=rows[0], tokens_kv=rows[1])
            assert faults_of(case) == [], case


def each_for_itself(case, random):
    """The case with drawn documents of which each rank has two chunks; some are empty."""
    size = case.topology.cp_size
    lengths = [2 * size * random.randint(0, 2) for _ in range(3)] + [2 * size]
    starts, tokens = list(accumulate(lengths))[:-1], sum(lengths) // size
    return replace(case, layout=Layout.DOCUMENTS, boundaries=tuple(starts), tokens=tokens)


@pytest.mark.parametrize("mode", EMITTERS)
@pytest.mark.parametrize(
    "size", [*SMALL, (2, 3), (3, 2), (4, 2), *whole(((2, 4),), ((8, 1),))], ids=str
)
def test_documents_that_are_sharded_each_for_itself_are_proven(size, mode, draw):
    """A few calls per mask; which ones differs from group to group."""
    random = Random(str(size))
    for mask in (*DOCUMENTS, Mask(1, 1, documents=True)):
        one_call = mode == "a2a" or (mode == "gather" and size[0] == 1 and mask.right == 0)
        if mask.windowed and not one_call:
            continue  # refused
        cases = [case for case in cases_on(grid(*size), [mask]) if case.mode == mode]
        cases = [case for case in cases if case.layout is Layout.ZIGZAG]
        for case in draw(cases, 1, 6 if prod(size) < 5 else 2):
            here = each_for_itself(case, random)
            assert faults_of(here) == [], here


@pytest.mark.parametrize("mode", EMITTERS)
@pytest.mark.parametrize("topology", UNLIKE.values(), ids=UNLIKE)
def test_documents_in_groups_whose_ranks_lie_otherwise_are_proven(topology, mode, draw):
    random = Random(mode)
    for mask in DOCUMENTS[:2]:
        cases = [case for case in cases_on(topology, [mask]) if case.mode == mode]
        cases = [case for case in cases if case.layout is Layout.ZIGZAG and not case.pulled]
        for case in draw(cases, 1, 3):
            here = each_for_itself(case, random)
            assert faults_of(here) == [], here


@pytest.mark.parametrize("mode", EMITTERS)
@pytest.mark.parametrize("topology", UNLIKE.values(), ids=UNLIKE)
def test_groups_whose_ranks_lie_otherwise_are_proven(topology, mode, draw):
    cases = [case for case in cases_on(topology) if case.mode == mode]
    for case in draw(cases, 3, 12):
        assert faults_of(case) == [], case


@pytest.mark.parametrize("mode", ["gather", "a2a"])
def test_what_was_to_be_pulled_may_be_sent(mode):
    """Where a rank has no room for memory that others can read."""
    size = (2, 2) if mode == "gather" else (1, 4)
    cases = [case for case in cases_on(grid(*size)) if case.mode == mode and case.pulled]
    # with contiguous causal rows a rank may have nothing to send or receive
    picked = [case for case in cases if case.rounds == 2 and case.layout is Layout.CONTIGUOUS]
    for case in (*picked, *Random(0).sample(cases, 10)):
        sent = [[_sent(program) for program in programs] for programs in case.passes()]
        assert check(sent, case.layout, case.mask) == [], case


def _sent(program):
    ops = [replace(op, pulled=False) if isinstance(op, Transfer) else op for op in program.ops]
    return replace(program, ops=tuple(ops))


CASES = [
    Case("ring", grid(2, 2), Layout.ZIGZAG, Mask.CAUSAL, rounds=1, tokens=4),
    Case("ring", grid(1, 3), Layout.STRIPED, Mask.CAUSAL, Circulate.Q, Kernel(takes_delta=False),
         rounds=1, tokens=4),
    Case("gather", grid(1, 2), Layout.ZIGZAG, Mask.CAUSAL, pulled=True, rounds=3, tokens=4),
    Case("gather", grid(2, 2), Layout.CONTIGUOUS, Mask.FULL, Circulate.Q, pulled=True, tokens=4),
    Case("gather", grid(3, 2), Layout.ZIGZAG, Mask.CAUSAL, kernel=Kernel(False, False, True),
         left=True, tokens=4),
    Case("a2a", grid(1, 2), Layout.ZIGZAG, Mask.CAUSAL, pulled=True, left=True, tokens=4),
    Case("a2a", grid(2, 2).flat(), Layout.ZIGZAG, Mask.CAUSAL, rounds=3, group=2, tokens=4),
    Case("a2a", grid(1, 3), Layout.CONTIGUOUS, Mask.FULL, left=True, tokens=4),
]  # fmt: skip


@pytest.mark.parametrize("direction", list(Direction))
def test_a_pass_may_follow_itself(direction):
    """As when layers run one after another, or results are kept."""
    for case in CASES:
        if direction is Direction.FORWARD or not case.left:
            assert check([case.programs(direction)], case.layout, case.mask) == [], case


@pytest.fixture(scope="module")
def proven():
    """Each case, its passes, and which operation waits for which in them."""
    found = []
    for case in CASES:
        passes = case.passes()
        orders = [[order(program) for program in programs] for programs in passes]
        assert check(passes, case.layout, case.mask, orders) == [], case
        found.append((case, passes, orders))
    return found


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_what_is_made_wrong_is_found(proven, mutation):
    random, tried = Random(mutation.__name__), 0
    for case, passes, orders in proven:
        mutants = list(mutation(passes, orders))
        for what, wrong, claims in random.sample(mutants, min(4, len(mutants))):
            assert any(faults(wrong, case.layout, case.mask, claims)), (str(case), what)
            tried += 1
    assert tried > 10


def test_without_flow_control_pulled_slots_are_overwritten(monkeypatch):
    """With several slots: a single one is not written before what was pulled has arrived."""
    case = next(case for case in CASES if case.mode == "gather" and case.pulled)
    monkeypatch.setattr(check_module._Rank, "_views", lambda rank, op: (0, []))
    found = faults_of(case)
    assert any("is not ordered after" in fault and "keys" in fault for fault in found)


def test_a_slot_is_filled_again_behind_the_barrier_of_its_round_only():
    """An all-to-all's slot may not be touched before the previous all-to-all is issued: its barrier
    would belong to an earlier round."""
    case = replace(CASES[2], rounds=4)
    program = case.programs(Direction.FORWARD)[0]
    numbers = [program.buffers[op.slot.buffer].number for op in program.ops
               if isinstance(op, Transfer)]  # fmt: skip
    assert numbers == [0, 1, 2, 3]
    ops = [replace(op, slot=Ref("keys 0")) if isinstance(op, Transfer) else op
           for op in program.ops]  # fmt: skip
    faults = meet([replace(program, ops=tuple(ops)), case.programs(Direction.FORWARD)[1]]).faults
    assert any("exchange 1" in fault and "keys 0" in fault for fault in faults)


# --- which operation waits for which, in programs of a few operations ---

ROW = grid(1, 3)


def program_of(rank, *ops):
    """Transfers of one row each with a peer, of a cargo; and a copy that waits for one."""
    buffers = {name: Buffer(name, Space.POOL, 1, (Field("k", 1, 1),), name, interleaved=True)
               for name in ("sent", "came 0", "came 1", "copy")}  # fmt: skip
    widths = dict.fromkeys(Dtype, 1)
    return Program(ROW, rank, Direction.FORWARD, 1, widths, buffers, tuple(ops))


def swap_with(peer, cargo=Cargo.READ, number=0):
    came = Ref(f"came {number}")
    take = Recv(peer, Ref("sent"), came)
    return Transfer(Link.INTRA, cargo, (Send(peer, Ref("sent")),), (take,))


def hangs(*programs):
    """In which execution orders the programs hang."""
    waits = [order(program).waits for program in programs]
    links = meet(programs)
    assert links.faults == []
    return [how for how in How if run(programs, links, waits, how)]


def test_transfers_in_another_order_hang_where_each_is_waited_for():
    read, grad = Cargo.READ, Cargo.GRAD
    one, other = swap_with(1, read), swap_with(0, read)
    two, another = swap_with(1, grad, 1), swap_with(0, grad, 1)
    assert hangs(program_of(0, one, two), program_of(1, other, another)) == []
    assert hangs(program_of(0, one, two), program_of(1, another, other)) == [How.SERIAL]


def test_a_wait_in_front_of_what_the_peer_waits_for_hangs_in_one_queue():
    read, grad = Cargo.READ, Cargo.GRAD
    copies = [Copy((Ref(f"came {number}"),), Ref("copy")) for number in (0, 1)]
    mine = program_of(0, swap_with(1, read), copies[0], swap_with(1, grad, 1))
    theirs = program_of(1, swap_with(0, grad, 1), copies[1], swap_with(0, read))
    assert hangs(mine, theirs) == [How.ONE_QUEUE, How.THREAD, How.SERIAL]


def test_transfers_in_a_circle_hang_where_a_communicator_serves_them_in_order():
    circle = [program_of(rank, swap_with((rank + 1) % 3), swap_with((rank + 2) % 3, number=1))
              for rank in range(3)]  # fmt: skip
    assert hangs(*circle) == [How.STREAMS, How.ONE_QUEUE, How.SERIAL]


def test_a_transfer_without_a_partner_is_told():
    faults = meet([program_of(0, swap_with(1)), program_of(1)]).faults
    assert len(faults) == 2 and all("rank 0" in fault and "rank 1" in fault for fault in faults)


class WaitsForBarriers(links_module._Run):
    """A rank that is left out waits for the barrier behind the copies, not for its turn alone."""

    def _passes(self, rank, index):
        program, waits = self.programs[rank], self.waits[rank][index] if index >= 0 else ()
        for other in (other for other in waits if other >= 0):
            op = program.ops[other]
            ends = (*op.sends, *op.recvs) if isinstance(op, Transfer) else ()
            out = ends and all(self._is_left_out(program, other, end) for end in ends)
            if out and self._frees(program, op) and ~other not in self.done[rank]:
                return False
        return super()._passes(rank, index)


def test_who_is_left_out_must_not_wait_for_the_barrier_behind_the_copies(monkeypatch):
    """With one hardware queue; a rank waits for one that waits for its barrier."""
    causal, kernel = Mask(right=0), Kernel(device="cuda", multiprocessors=132, takes_delta=True)
    case = Case(
        "gather", grid(2, 3), Layout.CONTIGUOUS, causal, Circulate.Q, kernel=kernel, rounds=3,
        pulled=True, one_slot=True, tokens=2,
    )  # fmt: skip
    hung = []
    for seed in (6, 14):
        monkeypatch.setattr(check_module, "half_of", lambda *way, seed=seed: half_of(seed, way))
        assert faults_of(case) == []
        with monkeypatch.context() as patch:
            patch.setattr(links_module, "_Run", WaitsForBarriers)
            hung += faults_of(case)
    assert any("with one hardware queue nothing goes on" in fault for fault in hung)


def test_backward_is_proven_with_the_forward_that_it_follows_only():
    """Without it, forward's leftovers are missing."""
    case = next(case for case in CASES if case.left)
    faults = check([case.programs(Direction.BACKWARD)], case.layout, case.mask)
    assert any("not written" in fault and "saved" in fault for fault in faults)
