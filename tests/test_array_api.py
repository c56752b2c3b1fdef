"""The table of the array API's functions says what there is under `hg.`."""

from __future__ import annotations

from pathlib import Path

import pytest
from array_api import FUNCTIONS

import heliograph as hg

TABLE = Path(__file__).parents[1] / "client" / "ARRAY_API.md"


def row(heading: str) -> str:
    names = FUNCTIONS[heading].split()
    there = [f"`{name}`" for name in names if hasattr(hg, name)]
    missing = [f"`{name}`" for name in names if not hasattr(hg, name)]
    return f"| {heading} | {' '.join(there)} | {' '.join(missing) or '-'} |"


@pytest.mark.parametrize("heading", FUNCTIONS)
def test_the_table_says_which_functions_there_are(heading: str) -> None:
    assert row(heading) in TABLE.read_text().splitlines(), f"the row should be\n{row(heading)}"
