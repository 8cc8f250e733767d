"""Values of a token that do not depend on how many tokens there are.

Guards against products whose number of rows depends on the call: it chooses the GPU's kernel.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from megatron_burst.loss.linear import linear_cross_entropy, token_log_probs
from megatron_burst.loss.tiles import Sizes, choose_tiles, fixed_tiles
from tests.loss.oracle import oracle, random_problem


def test_tiles_depend_on_the_model_alone():
    one = Sizes(rows=100, classes=150_000, width=4096, itemsize=2, processors=132)
    others = [replace(one, rows=rows, processors=p, sum_bytes=h) for rows, p, h in
              ((7, 132, 0), (100_000, 108, 0), (64_000, 132, 1 << 30))]  # fmt: skip
    for whole in (False, True):
        assert {fixed_tiles(sizes, whole) for sizes in (one, *others)} == {fixed_tiles(one, whole)}
        assert len({choose_tiles(sizes, whole) for sizes in others}) > 1
        tiles = fixed_tiles(one, whole)
        assert tiles.rows * tiles.classes * 2 * one.itemsize <= 1 << 30


@pytest.mark.parametrize("function", [token_log_probs, linear_cross_entropy])
def test_all_products_have_equally_many_rows(function):
    shapes, mm = set(), torch.mm

    def product(a, b, **options):
        shapes.add((tuple(a.shape), *options))
        return mm(a, b, **options)

    for tokens in (3, 16, 37):
        given = random_problem(s=tokens, b=1, mask=False).leaves()
        with (
            mock.patch("megatron_burst.loss.tiles._FIXED_ROWS", 16),
            mock.patch("torch.mm", product), torch.no_grad(),
        ):  # fmt: skip
            found = function(given.hidden, given.weight, given.labels, invariant=True)
        losses = oracle(given, reduction="none")[0]
        if function is token_log_probs:
            torch.testing.assert_close(found.log_probs, -losses.view_as(found.log_probs))
    assert shapes == {((16, 16),)}  # the second is the width
