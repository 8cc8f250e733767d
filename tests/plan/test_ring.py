"""The nested ring, executed on labels instead of tensors.

Catches a hop without its partner, a buffer overwritten before its last reader, a shard that
arrives at the wrong time or place, a gradient that misses or repeats a rank's share.
"""

from collections import Counter, defaultdict

from hypothesis import given, settings

from megatron_burst.plan.schedule import HOME
from megatron_burst.schedule.call import Cargo, Circulate, Direction
from megatron_burst.schedule.layout import Layout, positions
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.topology import Link
from tests.plan.strategies import ring_of_schedules, schedules, topologies
from tests.plan.test_layout_and_mask import pairs_of


@given(ring_of_schedules())
def test_every_send_has_its_receive_in_the_same_step_on_the_same_ring(ring):
    for schedule in ring:
        for index, step in enumerate(schedule.steps):
            for place, hop in enumerate(step.hops):
                partner = ring[hop.dest].steps[index].hops[place]
                assert partner.source == schedule.cp_rank
                assert (partner.ring, partner.cargo) == (hop.ring, hop.cargo)
                assert (partner.brings, partner.lands) == (hop.sends, hop.lands)


@given(ring_of_schedules())
def test_hops_run_along_the_grid(ring):
    """An intra hop stays in its row, an inter hop in its column: one communicator each."""
    for schedule in ring:
        row, column = schedule.topology.coord(schedule.cp_rank)
        for hop in schedule.hops:
            for other in (hop.dest, hop.source):
                other_row, other_column = schedule.topology.coord(other)
                same = other_row == row if hop.ring is Link.INTRA else other_column == column
                assert same and other != schedule.cp_rank


@settings(deadline=None)
@given(ring_of_schedules())
def test_each_query_meets_each_key_exactly_once_over_all_steps(ring):
    first = ring[0]
    size, tokens = first.topology.cp_size, first.tokens
    rows = [
        [p for span in positions(first.layout, rank, size, tokens) for p in span]
        for rank in range(size)
    ]
    met = Counter()
    for schedule in ring:
        for step in schedule.steps:
            pair = (schedule.cp_rank, step.owner)
            q_owner, kv_owner = pair if schedule.circulate is Circulate.KV else pair[::-1]
            for tile in step.tiles:
                met.update(pairs_of(tile, rows[q_owner], rows[kv_owner]))
    everything = range(size * tokens)
    full = first.mask is Mask.FULL
    assert met == Counter((q, k) for q in everything for k in everything if full or k <= q)


class Buffers:
    """The buffers of one rank, which complain when they are used wrongly."""

    def __init__(self, count):
        self.count = count
        self.content = {}
        self.read_until = defaultdict(lambda: -1)
        self.written_until = defaultdict(lambda: -1)

    def read(self, slot, step, until):
        assert HOME <= slot < self.count
        assert slot == HOME or self.written_until[slot] < step, "read while it is being filled"
        self.read_until[slot] = max(self.read_until[slot], until)
        return self.content[slot]

    def write(self, slot, step, until):
        assert 0 <= slot < self.count
        assert self.read_until[slot] < step, "overwritten before its last reader"
        assert self.written_until[slot] < step, "filled twice at once"
        self.written_until[slot] = until
        self.content.pop(slot, None)


def run(ring):
    """Run the schedules of all ranks; returns each rank's HOME gradient as a set of shares."""
    ranks = range(len(ring))
    read = [Buffers(schedule.read_slots) for schedule in ring]
    grad = [Buffers(schedule.grad_slots) for schedule in ring]
    for rank in ranks:
        read[rank].content[HOME] = rank
        grad[rank].content[HOME] = Counter({(rank, rank): 1})
    landing = defaultdict(list)
    for index in range(len(ring[0].steps)):
        for rank in ranks:
            for hop in ring[rank].steps[index].hops:
                side = read if hop.cargo is Cargo.READ else grad
                sent = side[rank].read(hop.from_slot, index, hop.lands)
                check_label(hop, sent)
                side[hop.dest].write(partner(ring, rank, index, hop).to_slot, index, hop.lands)
                landing[hop.lands].append((side[hop.dest], partner(ring, rank, index, hop), sent))
        for rank in ranks:
            step = ring[rank].steps[index]
            if step.owner is not None:
                assert read[rank].read(step.slot, index, index) == step.owner
        for buffers, hop, sent in landing.pop(index, []):
            buffers.content[hop.to_slot] = Counter(sent) if hop.cargo is Cargo.GRAD else sent
        for rank in ranks:
            add(ring[rank], index, grad[rank])
    assert not landing
    return [buffers.content[HOME] for buffers in grad]


def partner(ring, rank, index, hop):
    """The same hop as its receiver sees it."""
    return ring[hop.dest].steps[index].hops[ring[rank].steps[index].hops.index(hop)]


def check_label(hop, sent):
    owners = {hop.sends} if hop.cargo is Cargo.GRAD else hop.sends
    assert ({owner for owner, _ in sent} if hop.cargo is Cargo.GRAD else sent) == owners


def add(schedule, index, grad):
    """The end of a step: this rank's share, then the joins."""
    step = schedule.steps[index]
    if step.grad_slot not in (None, HOME):
        if step.fresh:
            grad.write(step.grad_slot, index, index - 1)
            grad.content[step.grad_slot] = Counter()
        grad.content[step.grad_slot][step.owner, schedule.cp_rank] += 1
        grad.read_until[step.grad_slot] = index
    for join in step.joins:
        grad.content[join.into].update(grad.content[join.source])
        grad.read_until[join.source] = index


@settings(deadline=None)
@given(ring_of_schedules())
def test_visitors_arrive_in_time_and_gradients_come_home_complete(ring):
    home = run(ring)
    size = len(ring)
    for rank, shares in enumerate(home):
        backward = ring[rank].direction is Direction.BACKWARD
        contributors = range(size) if backward else [rank]
        assert shares == Counter({(rank, other): 1 for other in contributors})


@given(topologies())
def test_buffers_are_few(topology):
    """Four for visitors and five for their gradients at most, however many ranks there are."""
    options = {"layout": Layout.ZIGZAG, "mask": Mask.CAUSAL, "tokens": 2}
    for schedule in schedules(topology, direction=Direction.BACKWARD, **options):
        assert schedule.read_slots <= 4 and schedule.grad_slots <= 5


@given(topologies(max_side=7))
def test_hop_counts_are_the_closed_formulas(topology):
    """N(L-1) intra and N-1 inter hops for the data, and as many for the gradients: P-1 in all."""
    n, m = topology.inter_size, topology.intra_size
    options = {"layout": Layout.ZIGZAG, "mask": Mask.CAUSAL, "tokens": 2}
    for direction in Direction:
        for schedule in schedules(topology, direction=direction, **options):
            hops = Counter((hop.cargo, hop.ring) for hop in schedule.hops)
            cargos = list(Cargo) if direction is Direction.BACKWARD else [Cargo.READ]
            expected = {(cargo, Link.INTRA): n * (m - 1) for cargo in cargos}
            expected |= {(cargo, Link.INTER): n - 1 for cargo in cargos}
            assert hops == Counter(expected)


@given(topologies())
def test_work_is_balanced_in_zigzag(topology):
    """Every rank computes the same pairs in every step; the first step half a row more."""
    tokens = 8
    for direction in Direction:
        ring = schedules(
            topology, layout=Layout.ZIGZAG, mask=Mask.CAUSAL, tokens=tokens, direction=direction
        )
        for schedule in ring:
            work = [sum(tile.pairs for tile in step.tiles) for step in schedule.steps]
            expected = [tokens * (tokens + 1) // 2] + [tokens * tokens // 2] * (len(ring) - 1)
            assert work[: len(ring)] == expected and not any(work[len(ring) :])


def test_an_inter_hop_of_data_has_a_whole_round_to_arrive():
    """Its overlap is why the ring is nested."""
    from megatron_burst.schedule.topology import pretend_hosts

    (schedule, *_) = schedules(
        pretend_hosts(12, 3),
        layout=Layout.ZIGZAG,
        mask=Mask.CAUSAL,
        tokens=2,
        direction=Direction.BACKWARD,
    )
    flights = [
        (hop.cargo, index, hop.lands)
        for index, step in enumerate(schedule.steps)
        for hop in step.hops
        if hop.ring is Link.INTER
    ]
    assert flights == [
        (Cargo.READ, 0, 3), (Cargo.READ, 4, 7), (Cargo.GRAD, 8, 11), (Cargo.GRAD, 12, 12),
    ]  # fmt: skip
