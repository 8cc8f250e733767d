"""What `tests.frozen` compares differs where what runs differs, and is otherwise the same."""

from dataclasses import replace

from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.spec import Direction
from tests.frozen import DRAWN, bits, digest, drawn_call, of_drawn_call, ways
from tests.schedule.cases import cases_on, grid


def test_a_program_has_another_digest_if_a_value_in_it_is_another():
    case = next(cases_on(grid(1, 3)))
    first, again = (digest(case.programs(Direction.FORWARD)[0]) for _ in range(2))
    others = {digest(program) for program in case.passes()[1]}
    full = digest(replace(case, mask=Mask(1, 0)).programs(Direction.FORWARD)[0])
    assert first == again and len({first, full, *others}) == 5


def test_drawn_calls_have_each_mode_and_are_mostly_not_refused():
    numbers = range(0, DRAWN, 97)
    records = [of_drawn_call(number) for number in numbers]
    assert sum(set(record.values()) >= {"refused"} for record in records) < len(records) / 2
    assert {drawn_call(number).intra for number in numbers} == {None, "ring", "gather", "a2a"}


def test_bits_are_those_of_the_way_and_repeat():
    every = ways()
    names = [
        name for name in every if name.endswith(("circulate kv, causal", "circulate kv, full"))
    ]
    found = {name: bits(*every[name]) for name in names if "(1, 4)" in name}
    assert len(found) == len(set(found.values())) == 6
    assert found == {name: bits(*every[name]) for name in found}
