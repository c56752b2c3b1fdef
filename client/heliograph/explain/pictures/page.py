"""Pictures as a page: one HTML file with its own script, style and data, which asks no host for
anything. Pure.

Its content security policy allows this one script and style, by their digests. Names from graphs
are escaped where they stand in markup, and data for the script has no "<".
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files

from heliograph.explain.pictures.coordinates import place
from heliograph.explain.pictures.data import scene_data
from heliograph.explain.pictures.drawing import inner_svg, legend_svg, markers, style
from heliograph.explain.pictures.scene import Scene, opened
from heliograph.explain.pictures.words import marked_up

#: Rows of tables: the first is the header.
Rows = Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Panel:
    """A part of a page behind a tab: its name and its markup."""

    name: str
    html: str


def page(
    title: str,
    summary: str,
    scenes: Sequence[Scene],
    panels: Sequence[Panel] = (),
    marked: Sequence[Iterable[int]] = (),
) -> str:
    """Return a page with a view of each scene, side by side, and further panels.

    `marked` has for each scene the numbers of nodes to outline.
    """
    script, css = script_text(), page_style()
    views = "".join(view(scene, f"data-{number}") for number, scene in enumerate(scenes))
    every = [Panel("Graph", f'<div class="views">{views}</div>'), *panels]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy(script, css)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{marked_up(title)}</title>",
            f"<style>{css}</style>",
            "</head>",
            "<body>",
            heads(),
            f"<header><h1>{marked_up(title)}</h1><p>{marked_up(summary)}</p>{_tabs(every)}</header>",
            "<main>",
            *(_panel(one, number) for number, one in enumerate(every)),
            "</main>",
            *(
                view_data(scene, f"data-{number}", marks)
                for number, (scene, marks) in enumerate(
                    zip(scenes, marked or [()] * len(scenes), strict=True)
                )
            ),
            f"<script>{script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def page_style() -> str:
    """The style of a page."""
    return f"{style()}\n{_asset('page.css')}"


def page_policy() -> str:
    """The content security policy that every page has."""
    return policy(script_text(), page_style())


def policy(script: str, css: str) -> str:
    """The content security policy of a page with this script and style."""
    return (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(css)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def script_text() -> str:
    """The script of views."""
    return _asset("plan.js")


def heads() -> str:
    """The heads of wires, once for all views of a page."""
    return f'<svg class="heads picture" width="0" height="0" aria-hidden="true">{markers()}</svg>'


def view(scene: Scene, data: str) -> str:
    """Return the markup of a view, whose data are in the element of that name: the picture as it is
    at first, which the script draws again, and the controls around it."""
    shown = opened(scene)
    placed = place(scene.layout, shown)
    whole = placed[0]
    size = f'width="{whole.width:g}" height="{whole.height:g}" viewBox="0 0 {whole.width:g} {whole.height:g}"'
    name = marked_up(scene.picture.title)
    return "\n".join(
        [
            f'<section class="view" data-view="{data}" aria-label="{name}">',
            _controls(name),
            f'<div class="legend">{legend_svg(scene)}</div>',
            '<div class="parts"><div class="room" data-part="picture">',
            f'<svg class="picture by-time" role="img" aria-label="{name}" {size}>',
            *inner_svg(scene, placed, 0),
            "</svg></div>",
            '<aside aria-label="Facts"><h2>Facts</h2><dl data-part="facts"></dl></aside></div>',
            "</section>",
        ]
    )


def view_data(scene: Scene, name: str, marked: Iterable[int] = ()) -> str:
    """Return the element with the data of a view; see `scene_data`."""
    text = json.dumps(scene_data(scene, opened(scene), marked), separators=(",", ":"), ensure_ascii=True)
    # The end of a script and the beginning of a comment begin with "<".
    return f'<script type="application/json" id="{name}">{text.replace("<", chr(92) + "u003c")}</script>'


def table(rows: Rows, caption: str = "") -> str:
    """Return a table of texts."""
    body = "".join(f"<tr>{''.join(f'<td>{marked_up(cell)}</td>' for cell in row)}</tr>" for row in rows[1:])
    return _table(rows[0], body, caption)


def linked_table(rows: Rows, nodes: Sequence[str], caption: str) -> str:
    """As `table`, but the first cell of a row leads to nodes, by their numbers in each view."""
    cells = [f'<button type="button" data-nodes="{marked_up(one)}">' for one in nodes]
    cells += [""] * (len(rows) - 1 - len(nodes))
    body = "".join(
        f"<tr><td>{button}{marked_up(row[0])}{'</button>' if button else ''}</td>"
        f"{''.join(f'<td>{marked_up(cell)}</td>' for cell in row[1:])}</tr>"
        for row, button in zip(rows[1:], cells, strict=True)
    )
    return _table(rows[0], body, caption)


def _table(header: Sequence[str], body: str, caption: str) -> str:
    head = "".join(f'<th scope="col">{marked_up(cell)}</th>' for cell in header)
    name = f"<caption>{marked_up(caption)}</caption>" if caption else ""
    return (
        f'<div class="table"><table>{name}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _controls(name: str) -> str:
    buttons = (
        ("fold", "Fold all", ""),
        ("open", "Open a level", ""),
        ("smaller", "−", "Smaller"),
        ("larger", "+", "Larger"),
        ("fit", "Fit", "Fit the width"),
    )
    made = "".join(
        f'<button type="button" data-part="{part}" aria-label="{spoken or text}">{text}</button>'
        for part, text, spoken in buttons
    )
    return (
        f'<div class="controls"><h2>{name}</h2>'
        '<label>Find <input type="search" data-part="search" placeholder="name or op" '
        'autocomplete="off"></label>'
        '<label>Colour <select data-part="colour"><option value="time">heat</option>'
        f'<option value="device">device</option></select></label>{made}'
        '<span class="said" data-part="said" role="status"></span>'
        '<ul class="found" data-part="found" aria-label="Found"></ul></div>'
    )


def _tabs(panels: Sequence[Panel]) -> str:
    made = "".join(
        f'<button type="button" role="tab" id="tab-{n}" aria-controls="panel-{n}" '
        f'aria-selected="{str(not n).lower()}" tabindex="{-1 if n else 0}">{marked_up(one.name)}</button>'
        for n, one in enumerate(panels)
    )
    return f'<div role="tablist" aria-label="Parts of this page">{made}</div>'


def _panel(panel: Panel, number: int) -> str:
    # Without scripts all parts are shown.
    return f'<div role="tabpanel" id="panel-{number}" aria-labelledby="tab-{number}">{panel.html}</div>'


def _digest(text: str) -> str:
    return f"sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _asset(name: str) -> str:
    return (files("heliograph.explain.pictures") / "assets" / name).read_text(encoding="utf-8")
