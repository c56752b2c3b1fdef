"""An explanation in a notebook: when each device works, splits, devices and copies between hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from heliograph.explain.tables import Table, device_table, edge_table, link_table, split_table, step_table
from heliograph.notebook.elements import Markup, card, folded, heading, lanes, note, table

if TYPE_CHECKING:
    from heliograph.explain.explanation import Explanation

#: The most measured steps that are shown.
MOST_STEPS = 10


def explanation_view(found: Explanation) -> str:
    """The explanation as HTML."""
    return card("Plan, explained", note(found.summary()), *explanation_parts(found))


def explanation_parts(found: Explanation) -> list[Markup]:
    """The parts of its view, for a view of the plan as well."""
    edges = edge_table(found.splits)
    steps = found.steps
    return [
        picture(found),
        _table("splits", split_table(found.splits)),
        *([_table("between hosts", edges)] if len(edges) > 1 else []),
        _table("devices", device_table(found.devices)),
        *([folded("links", _table("", link_table(found.links)))] if found.links else []),
        *([_table("longest steps", step_table(steps, MOST_STEPS))] if steps else []),
        *(note(f"split {one.number} on {one.device}: {one.note}") for one in found.splits if one.note),
    ]


def picture(found: Explanation) -> Markup:
    """The small picture of the view: when each device computes splits, in the last or a predicted
    run."""
    has_run = bool(found.run_us)
    spans: dict[str, list[tuple[float, float]]] = {}
    for one in found.splits:
        began = one.began_us if has_run else one.predicted_began_us
        ended = one.ended_us if has_run else began + one.predicted_us
        if ended > began:
            spans.setdefault(one.device, []).append((began, ended))
    what = "the last run" if has_run else "the predicted run"
    shown = lanes(list(spans.items()), f"{what}: the time of each device's splits")
    return Markup(heading(what) + shown if shown else "")


def _table(title: str, rows: Table) -> Markup:
    header, *body = rows
    shown = table(header, body)
    return Markup((heading(title) if title and body else "") + shown)
