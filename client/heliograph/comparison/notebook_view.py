"""Differences and comparisons in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from heliograph.notebook.elements import card, facts, note, table

if TYPE_CHECKING:
    from heliograph.comparison.differences import Difference
    from heliograph.comparison.report import Comparison

#: The most nodes of a comparison, the worst first.
MOST_NODES = 15


def difference_view(found: Difference) -> str:
    """A difference as HTML."""
    equal = not found.different
    return card(
        "Difference: none, all elements are equal" if equal else f"Difference: {found.different:,} elements",
        facts(
            [
                ("normalised mean squared error", f"{found.nmse:.3g}"),
                ("largest difference", f"{found.max_difference:.6g}"),
                ("elements that differ", found.different),
                ("NaN in one alone", found.nan_mismatches),
                ("infinite in one, or not the same", found.infinity_mismatches),
            ]
        ),
    )


def comparison_view(found: Comparison) -> str:
    """A comparison as HTML: the verdict, and the worst nodes first."""
    header = ("node", "name", "op", "type", "verdict", "NMSE", "tolerance", "largest difference", "note")
    rows = [
        (
            one.number,
            one.name,
            one.op,
            one.type,
            one.verdict.value,
            f"{one.difference.nmse:.3g}" if one.difference else "-",
            f"{one.tolerance:.3g}",
            f"{one.difference.max_difference:.3g}" if one.difference else "-",
            one.note,
        )
        for one in found.worst(MOST_NODES)
    ]
    left = len(found.rows) - len(rows)
    return card(
        f"{found.a} and {found.b} {'agree' if found.ok else 'do not agree'}",
        note(repr(found)[1:-1]),
        table(header, rows),
        *([note(f"and {left:,} more nodes, none of them worse")] if left else []),
    )
