"""Pictures as SVG: boxes, wires and a legend. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files

from heliograph.explain.pictures.coordinates import HEADER, LINE, Placed, place
from heliograph.explain.pictures.labels import Label
from heliograph.explain.pictures.layers import Route
from heliograph.explain.pictures.model import TIMING_TEXT
from heliograph.explain.pictures.scene import Scene
from heliograph.explain.pictures.scopes import Box
from heliograph.explain.pictures.wires import Wire
from heliograph.explain.pictures.words import colour_of, fitted, heat_of, marked_up, width_of
from heliograph_proto.types import size_text

#: Around the picture, and the height of its title and legend.
MARGIN, TOP = 24, 92
#: The width of the stripe in a device's colour.
STRIPE = 6
#: The most devices in the legend, and the shares of time there.
MOST_DEVICES = 8
HEATS = (0.001, 0.01, 0.1, 1.0)
#: The length of the head of a wire.
TIP = 6


def style() -> str:
    """The style of pictures, dark and light."""
    return (files("heliograph.explain.pictures") / "assets" / "picture.css").read_text(encoding="utf-8")


def svg_text(scene: Scene, open_scopes: set[int]) -> str:
    """Draw a picture with these scopes open, as an SVG document."""
    placed = place(scene.layout, open_scopes)
    whole = placed[0]
    legend, legend_width = _legend(scene)
    width = max(whole.width, legend_width) + 2 * MARGIN
    height = whole.height + TOP + MARGIN
    title = marked_up(f"{scene.picture.title}: {scene.picture.summary}")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="picture alone" role="img" width="{width:g}" '
            f'height="{height:g}" viewBox="0 0 {width:g} {height:g}" font-family="sans-serif">',
            f"<title>{title}</title>",
            f"<style>{style()}</style>",
            markers(),
            f'<rect class="ground" width="{width:g}" height="{height:g}"/>',
            _text("heading", MARGIN, 34, fitted(scene.picture.title, width - 2 * MARGIN, 17)),
            _text("small", MARGIN, 54, fitted(scene.picture.summary, width - 2 * MARGIN, 11)),
            f'<g transform="translate({MARGIN} 66)">',
            *legend,
            "</g>",
            f'<g transform="translate({(width - whole.width) / 2:g} {TOP})">',
            *inner_svg(scene, placed, 0),
            "</g>",
            "</svg>",
            "",
        ]
    )


def inner_svg(scene: Scene, placed: dict[int, Placed], number: int) -> Iterator[str]:
    """Draw the wires of an open scope and its members."""
    boxes = scene.layout.tree.boxes
    yield from _wires(scene, placed, number)
    for member in boxes[number].members:
        at = placed[member]
        kind = "view" if member in scene.layout.views else boxes[member].kind
        yield (
            f'<g class="box {kind}{" open" if at.is_open else ""}" transform="translate({at.x:g} {at.y:g})">'
            f"<title>{marked_up(boxes[member].name)}</title>"
        )
        yield from _body(boxes[member], scene.labels[member], at)
        if at.is_open:
            yield from inner_svg(scene, placed, member)
        yield from _texts(scene.labels[member], at)
        yield "</g>"


def _body(box: Box, label: Label, at: Placed) -> Iterator[str]:
    radius = at.height / 2 if box.kind in ("input", "variable", "output") else 6
    size = f'width="{at.width:g}" height="{at.height:g}" rx="{radius:g}"'
    yield f'<rect class="body" {size}/>'
    if label.heat and not at.is_open:
        yield f'<rect class="heat" {size} opacity="{label.heat:.3f}"/>'
    y, height = 3.0, (HEADER - 8 if at.is_open else at.height) - 6
    for device, share in label.devices:
        colour = colour_of(device)
        yield f'<rect x="3" y="{y:g}" width="{STRIPE}" height="{height * share:g}" rx="2" fill="{colour}"/>'
        y += height * share


def _texts(label: Label, at: Placed) -> Iterator[str]:
    lines = LINE * len(label.lines)
    if at.is_open:
        yield _text("name", 16, 20, label.title)
        yield _text("small end", at.width - 12, 20, label.detail)
    elif not label.detail:
        yield _text("small", 16, (at.height - lines) / 2 + 4, label.title)
    else:
        middle = (at.height - lines) / 2
        yield _text("name", 16, middle - 3, label.title)
        yield _text("small", 16, middle + 13, label.detail)
    top = HEADER if at.is_open else at.height - lines
    for number, line in enumerate(label.lines):
        yield _text("small line", 16, top + LINE * number + 5, line)


def _text(kind: str, x: float, y: float, text: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{marked_up(text)}</text>'


# Wires


def _wires(scene: Scene, placed: dict[int, Placed], number: int) -> Iterator[str]:
    wires, layers, here = (
        scene.layout.wiring.wires.get(number, []),
        scene.layout.layers[number],
        placed[number],
    )
    # Copies are drawn last, over the others.
    for route in sorted(layers.routes, key=lambda one: wires[one.wire].crosses[one.target]):
        kind = "copy" if wires[route.wire].crosses[route.target] else "wire"
        path = _path(placed, here, wires[route.wire], route)
        back = " back" if route.is_back else ""
        yield f'<path class="{kind}{back}" d="{path}" marker-end="url(#{kind}-end)">'
        if kind == "copy" and wires[route.wire].copies:
            yield f"<title>{marked_up('; '.join(wires[route.wire].copies))}</title>"
        yield "</path>"
    for wire in wires:
        if wire.source.box >= 0 and wire.source.box not in scene.layout.views and wire.size_bytes:
            x, y = _start(placed, here, wire)
            kind = "size copied" if any(wire.crosses) else "size"
            yield _text(kind, x + 5, y + 13, size_text(wire.size_bytes))
    for box in scene.layout.tree.boxes[number].members:
        if count := scene.layout.wiring.namers.get(box):
            at = placed[box]
            yield _text("size", at.x + 16, at.y + at.height + 13, f"↳ {count} readers")


def _start(placed: dict[int, Placed], here: Placed, wire: Wire) -> tuple[float, float]:
    box, port = wire.source
    if box < 0:
        return here.width / 2 + here.uppers[port], 0.0
    at = placed[box]
    return at.x + at.width / 2 + at.lowers[port], at.y + at.height


def _end(placed: dict[int, Placed], here: Placed, wire: Wire, target: int) -> tuple[float, float]:
    box, port = wire.targets[target]
    if box < 0:
        return here.width / 2 + here.lowers[port], here.height
    at = placed[box]
    return at.x + at.width / 2 + at.uppers[port], at.y


def _path(placed: dict[int, Placed], here: Placed, wire: Wire, route: Route) -> str:
    """The way of a wire: straight through rows, curved between them."""
    (x, y), (end_x, end_y) = _start(placed, here, wire), _end(placed, here, wire, route.target)
    found = [f"M{x:.1f} {y:.1f}"]
    if route.is_back:
        found.append(f"C{x:.1f} {y + 60:.1f} {end_x:.1f} {end_y - 60:.1f} {end_x:.1f} {end_y - 3:.1f}")
        return "".join(found)
    row = here.edges[placed[wire.source.box].row if wire.source.box >= 0 else 0]
    if row[1] > y:
        y = row[1]
        found.append(f"V{y:.1f}")
    for bend in route.bends:
        top, bottom = here.edges[here.row_of[bend]]
        found.append(_curve(x, y, here.centres[bend], top))
        x, y = here.centres[bend], bottom
        if bottom > top:
            found.append(f"V{bottom:.1f}")
    target = wire.targets[route.target].box
    top = here.edges[placed[target].row if target >= 0 else -1][0]
    found.append(_curve(x, y, end_x, min(top, end_y) - TIP))
    if end_y > top:
        found.append(f"V{end_y - TIP:.1f}")
    return "".join(found)


def _curve(x: float, y: float, end_x: float, end_y: float) -> str:
    if abs(end_x - x) < 0.05:
        return f"V{end_y:.1f}"
    middle = (y + end_y) / 2
    return f"C{x:.1f} {middle:.1f} {end_x:.1f} {middle:.1f} {end_x:.1f} {end_y:.1f}"


# The legend


def markers() -> str:
    """The heads of wires."""
    return "<defs>{}</defs>".format(
        "".join(
            f'<marker id="{kind}-end" class="{kind}-head" viewBox="0 0 8 8" refX="2" refY="4" '
            f'markerWidth="7" markerHeight="7" markerUnits="userSpaceOnUse" orient="auto">'
            f'<path d="M0 0L8 4L0 8z"/></marker>'
            for kind in ("wire", "copy")
        )
    )


def legend_svg(scene: Scene) -> str:
    """The legend as an element of a page."""
    texts, width = _legend(scene)
    inner = "".join(texts)
    return f'<svg class="picture" role="img" aria-label="Legend" width="{width:g}" height="18">{inner}</svg>'


def _legend(scene: Scene) -> tuple[list[str], float]:
    """Devices, heat, and what wires mean, in a line; and its width."""
    found, x = list[str](), 0.0
    names = scene.picture.devices
    for device, name in enumerate(names[:MOST_DEVICES]):
        shown = fitted(name, 130, 11)
        found.append(
            f'<rect x="{x:g}" y="1" width="{STRIPE}" height="14" rx="2" fill="{colour_of(device)}"/>'
        )
        found.append(_text("small", x + 11, 12, shown))
        x += 26 + width_of(shown, 11)
    if len(names) > MOST_DEVICES:
        found.append(_text("small", x, 12, f"and {len(names) - MOST_DEVICES} more"))
        x += 70
    words = f"share of the {TIMING_TEXT[scene.picture.timing]}:"
    found.append(_text("small", x, 12, words))
    x += width_of(words, 11) + 4
    for share in HEATS:
        size = f'x="{x:g}" width="40" height="16" rx="3"'
        found.append(f'<rect class="body" {size}/>')
        found.append(f'<rect class="heat" {size} opacity="{heat_of(share):.3f}"/>')
        found.append(_text("small", x + 6, 12, f"{share:.1%}" if share < 0.01 else f"{share:.0%}"))
        x += 44
    if any(any(wire.crosses) for wires in scene.layout.wiring.wires.values() for wire in wires):
        found.append(f'<path class="copy" d="M{x + 10:g} 8H{x + 40:g}" marker-end="url(#copy-end)"/>')
        found.append(_text("small", x + 52, 12, "copied to another device"))
        x += 190
    found.append(_text("small", x + 8, 12, "◆ weights   ↳ read from above, not drawn as a line"))
    return found, x + 340
