"""The search for what to keep against all ways. Guards against choices that save less than others
would, and against the time of trying all: 3^n ways, in each step of new lengths."""

from itertools import product
from unittest import mock

import pytest

from megatron_burst.recompute.auto import budget
from megatron_burst.recompute.auto.search import TRIALS, best_ways
from tests.recompute.keep_problems import ANSWERS, COUNT, answers, drawn, every_way


def share(seed, best):
    """Of the seconds that the best way saves, those that the choice saves; 0 if it waits more."""
    waits, seconds = drawn(seed).choose()
    assert (waits, seconds) <= (best[0], best[1] * (1 + 1e-6))
    return (seconds / best[1] if best[1] else 1.0) if waits == best[0] else 0.0


def test_the_search_saves_nearly_as_much_as_the_best_of_all_ways(draw):
    best = answers()
    shares = {seed: share(seed, best[seed]) for seed in draw(range(COUNT), 40)}
    least = min(shares, key=shares.__getitem__)
    print(f"at least {shares[least]:.4f} of the best of all ways, in {len(shares)} problems")
    assert shares[least] >= 0.99, least


def test_the_answers_are_those_of_all_ways(draw):
    """Guards against rules that change while the file stays."""
    assert ANSWERS.stat().st_size < 100_000
    best = answers()
    for seed in draw(range(COUNT), 24, 1000):
        waits, seconds = drawn(seed).best()
        assert waits == best[seed][0] and seconds == pytest.approx(best[seed][1], rel=1e-6)


def test_all_ways_at_once_are_those_one_by_one():
    """`every_way` computes what `budget._placed` does."""

    def one_by_one(problem, whole, modules, spare, rates):
        free = 0.0 if whole else problem.free_bytes
        rest = budget.replace(problem, layers=problem.layers - whole, free_bytes=free)
        ways = product(budget._Way, repeat=len(modules))
        choices = [budget._placed(rest, modules, way, *spare) for way in ways]
        best = max(choices, key=lambda choice: budget._saved(problem, whole, choice, rates))
        many = every_way(problem, whole, modules, spare, rates)
        value = budget._saved(problem, whole, many, rates)
        assert value == pytest.approx(budget._saved(problem, whole, best, rates), rel=1e-12)
        return best

    with mock.patch.object(budget, "_best_beside", one_by_one):
        for seed in (*range(0, 60, 6), *range(1, 60, 6), *range(2, 60, 6)):  # 2 to 4 modules
            drawn(seed).choose()


def test_few_ways_are_tried(draw):
    """Guards against 0.1 s of each rank's CPU per whole layer, as at 7 modules before."""
    most, beside, place = {}, budget._best_beside, budget._placed
    tries = []

    def counting(*args):
        tries.append(args)
        return place(*args)

    def counted(problem, whole, modules, *others):
        tries.clear()
        chosen = beside(problem, whole, modules, *others)
        most[len(modules)] = max(most.get(len(modules), 0), len(tries))
        return chosen

    with (
        mock.patch.object(budget, "_best_beside", counted),
        mock.patch.object(budget, "_placed", counting),
    ):
        for seed in (*range(6), *draw(range(6, COUNT), 6, 60)):  # 2 to 7 modules
            drawn(seed).choose()
    assert most.keys() == {2, 3, 4, 5, 6, 7} and TRIALS == 30
    assert all(count <= min(TRIALS * n, 3**n + 1) for n, count in most.items()), most


@pytest.mark.parametrize("number", range(4))
def test_few_things_are_searched_whole(number):
    """However uneven values are: those of a multiplicative hash."""

    def value(ways):
        return sum(way * 7**at for at, way in enumerate(ways)) * 2654435761 % 1009

    assert best_ways(number, (0, 1, 2), value) == max(product(range(3), repeat=number), key=value)
