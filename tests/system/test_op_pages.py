"""The pages of the ops: one section for each row, with an example that computes what it says."""

from __future__ import annotations

import sys
from itertools import zip_longest

import numpy as np
from paths import ROOT

import heliograph as hg
from heliograph_proto.ops.table import OPS

sys.path.append(str(ROOT / "docs"))

import op_pages
from op_examples import EXAMPLES

PAGES = ROOT / "docs/api/ops"
AGAIN = "make op-pages writes the pages again"


def test_every_op_has_an_example() -> None:
    assert set(EXAMPLES) == set(OPS), "docs/op_examples.py has them"


def test_the_pages_are_those_of_the_table(local: hg.Session) -> None:
    made = op_pages.pages(local)
    assert {one.name for one in PAGES.iterdir()} == set(made), AGAIN
    for name, text in made.items():
        lines = zip_longest((PAGES / name).read_text().splitlines(), text.splitlines(), fillvalue="")
        for written, computed in lines:
            assert written == computed or same_result(written, computed), f"{name}: {AGAIN}"


def same_result(written: str, computed: str) -> bool:
    """Return whether two results have one type, and elements that differ in the last digit at most."""
    (first, _, left), (second, _, right) = written.partition(": "), computed.partition(": ")
    try:
        numbers = [np.array(one.replace("...", "").split(), float) for one in (left, right)]
    except ValueError:
        return False
    return first == second and np.allclose(*numbers, rtol=2e-3, atol=1e-6, equal_nan=True)


def test_shapes_are_told_in_words_that_stand_alone() -> None:
    for row in OPS.values():
        words = op_pages.shapes(row)
        assert words and not words.startswith("As "), row.name
