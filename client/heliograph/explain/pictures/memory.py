"""The memory of a plan over time, as SVG: steps to the right, bytes of a block upwards. Pure.

Each value is a rectangle in the colour of its outermost scope. A line shows the bytes that live at
each step; its peak is what a block needs at least. Weights and variables, which stay, are bars
beside the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from heliograph.explain.parts import ExplainedBlock, ExplainedValue
from heliograph.explain.pictures.drawing import MARGIN, style
from heliograph.explain.pictures.scopes import parts_of
from heliograph.explain.pictures.words import DEVICE_COLOURS, fitted, marked_up, width_of
from heliograph_proto.types import size_text

#: The size of the picture of a block, and of the bars beside.
WIDTH, HEIGHT, LEAST_HEIGHT, SIDE = 860.0, 260.0, 70.0, 210.0
#: The most rectangles and blocks; the largest are drawn.
MOST_VALUES, MOST_BLOCKS = 4000, 8
#: The most devices whose largest block is drawn, however small it is.
MOST_DEVICES = 32
#: The most splits whose beginnings are drawn.
MOST_BEGINS = 40
#: The least share of the largest block that another one has, to be drawn.
LEAST_SHARE = 0.01
#: The most scopes in the legend.
MOST_SCOPES = 12
_HEAD, _FOOT, _LEFT, _ROW = 26.0, 34.0, 74.0, 18.0


@dataclass(frozen=True, slots=True)
class MemoryPicture:
    """The memory of a plan. `lasting` has for each device what stays: words and bytes."""

    title: str
    blocks: tuple[ExplainedBlock, ...]
    values: tuple[ExplainedValue, ...]
    lasting: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]
    #: The first steps of splits.
    begins: tuple[int, ...] = ()

    @property
    def steps(self) -> int:
        """The number of steps of a run."""
        return max((one.last_step for one in self.values), default=-1) + 1


def live_bytes(values: Sequence[ExplainedValue], steps: int) -> list[int]:
    """Return the bytes that live at each step."""
    more = [0] * (steps + 1)
    for one in values:
        more[one.first_step] += one.size_bytes
        more[one.last_step + 1] -= one.size_bytes
    return list(accumulate(more))[:steps]


def memory_svg(picture: MemoryPicture, *, alone: bool = True) -> str:
    """Draw the memory of a plan as an SVG document; without `alone` as an element of a page."""
    blocks = sorted(range(len(picture.blocks)), key=lambda n: -picture.blocks[n].size_bytes)
    largest = picture.blocks[blocks[0]].size_bytes if blocks else 0
    drawn = [n for n in blocks if 0 < picture.blocks[n].size_bytes >= largest * LEAST_SHARE]
    # Each device has a lane, and the lanes of a device are together.
    order = {one: place for place, one in enumerate(dict.fromkeys(it.device for it in picture.blocks))}
    lanes = {picture.blocks[n].device: n for n in reversed(blocks) if picture.blocks[n].size_bytes}
    chosen = {*drawn[:MOST_BLOCKS], *list(lanes.values())[-MOST_DEVICES:]}
    shown = sorted(chosen, key=lambda n: (order[picture.blocks[n].device], n))
    colours = _colours(picture)
    top = 44.0 if alone else 4.0
    parts: list[str] = list(_legend(colours, top))
    y = top + _ROW + 14
    for number in shown:
        height = max(LEAST_HEIGHT, HEIGHT * picture.blocks[number].size_bytes / largest)
        parts += _block(picture, number, colours, y, height)
        y += _HEAD + height + _FOOT
    parts += _bars(picture, y)
    y += (_ROW + 12) * len(picture.lasting) + 34
    if len(blocks) > len(shown):
        parts.append(
            _text("small", MARGIN, y, f"blocks that are too small to be drawn: {len(blocks) - len(shown)}")
        )
        y += _ROW
    width = _LEFT + WIDTH + 2 * MARGIN
    head = [f"<style>{style()}</style>", f'<rect class="ground" width="{width:g}" height="{y:g}"/>']
    head.append(_text("heading", MARGIN, 30, fitted(f"Memory of {picture.title}", WIDTH, 17)))
    namespace = ' xmlns="http://www.w3.org/2000/svg" font-family="sans-serif"' if alone else ""
    words = marked_up(f"Memory of {picture.title}: {_words(picture, shown)}")
    return "\n".join(
        [
            f'<svg{namespace} class="picture memory" role="img" aria-label="{words}" width="{width:g}" '
            f'height="{y:g}" viewBox="0 0 {width:g} {y:g}">',
            *(head if alone else []),
            *parts,
            "</svg>",
        ]
    )


def _words(picture: MemoryPicture, shown: Sequence[int]) -> str:
    found = [picture.blocks[number] for number in shown]
    return "; ".join(f"{size_text(one.size_bytes)} for {one.use} on {one.device}" for one in found) or "none"


def _scope(name: str) -> str:
    path, _ = parts_of(name)
    return path[0] if path else ""


def _colours(picture: MemoryPicture) -> dict[str, str]:
    """Return the colour of each outermost scope, in the order of values."""
    found: dict[str, str] = {"": "#9aa3ad"}
    for one in picture.values:
        scope = _scope(one.name)
        if scope not in found:
            found[scope] = DEVICE_COLOURS[(len(found) - 1) % (len(DEVICE_COLOURS) - 1)]
    return found


def _legend(colours: dict[str, str], y: float) -> Iterator[str]:
    x = MARGIN + 0.0
    names = [name for name in colours if name][:MOST_SCOPES]
    for name in [*names, ""]:
        shown = fitted(name, 110, 11) or "no scope"
        if x + width_of(shown, 11) + 60 > _LEFT + WIDTH:
            yield _text("small", x, y + 11, "…")
            return
        colour = colours[name]
        yield f'<rect class="value" x="{x:g}" y="{y:g}" width="12" height="12" rx="2" fill="{colour}"/>'
        yield _text("small", x + 17, y + 10, shown)
        x += 34 + width_of(shown, 11)
    more = len(colours) - 1 - len(names)
    if more > 0:
        yield _text("small", x, y + 10, f"and {more} more scopes, whose colours repeat")


def _block(
    picture: MemoryPicture, number: int, colours: dict[str, str], y: float, height: float
) -> Iterator[str]:
    block, steps = picture.blocks[number], max(1, picture.steps)
    values = [one for one in picture.values if one.block == number]
    live = live_bytes(values, steps)
    peak = max(live, default=0)
    x, top = MARGIN + _LEFT, y + _HEAD
    across, up = WIDTH / steps, height / block.size_bytes
    share = f", {peak / block.size_bytes:.0%} of it at the peak" if peak else ""
    count = f"{len(values):,} value{'s' * (len(values) != 1)}"
    words = f"{block.device}, {block.use}: {size_text(block.size_bytes)}, {count}{share}"
    yield _text("name", MARGIN, y + 16, fitted(words, WIDTH + _LEFT, 12.5))
    yield f'<rect class="body" x="{x:g}" y="{top:g}" width="{WIDTH:g}" height="{height:g}"/>'
    drawn = sorted(values, key=lambda one: -one.size_bytes * (one.last_step - one.first_step + 1))
    for one in drawn[:MOST_VALUES]:
        left, wide = x + one.first_step * across, (one.last_step - one.first_step + 1) * across
        tall = max(0.6, one.size_bytes * up)
        low = top + height - one.offset_bytes * up
        yield (
            f'<rect class="value" x="{left:.2f}" y="{low - tall:.2f}" width="{wide:.2f}" height="{tall:.2f}" '
            f'fill="{colours[_scope(one.name)]}"><title>{marked_up(_title(one))}</title></rect>'
        )
        if wide > 70 and tall > 14:
            yield _text(
                "small in", left + 4, low - tall / 2 + 4, fitted(one.name.rpartition("/")[2], wide - 8, 11)
            )
    for begin in picture.begins[1:] if len(picture.begins) <= MOST_BEGINS else ():
        yield f'<path class="begin" d="M{x + begin * across:.1f} {top:g}v{height:g}"/>'
    yield from _scale(block.size_bytes, steps, x, top, height)
    yield _line(live, x, top + height, across, up)
    if len(values) > MOST_VALUES:
        yield _text("small end", x + WIDTH, y + 16, f"the largest {MOST_VALUES:,} are drawn")


def _title(one: ExplainedValue) -> str:
    place = f"{size_text(one.size_bytes)} at {one.offset_bytes:,}"
    return f"{one.name}: {place}, steps {one.first_step} to {one.last_step}"


def _scale(size: int, steps: int, x: float, top: float, height: float) -> Iterator[str]:
    """The ends of both axes."""
    yield _text("small end", x - 8, top + 10, size_text(size))
    yield _text("small end", x - 8, top + height, "0")
    yield _text("small", x, top + height + 15, "step 0")
    yield _text("small end", x + WIDTH, top + height + 15, f"step {steps - 1:,}")


def _line(live: Sequence[int], x: float, bottom: float, across: float, up: float) -> str:
    """The bytes that live at each step, as a line over the rectangles; it changes at few steps."""
    points, before = [f"M{x:.1f} {bottom - live[0] * up:.1f}"], live[0]
    for step, size in enumerate(live):
        if size != before:
            points.append(f"H{x + step * across:.1f}V{bottom - size * up:.1f}")
            before = size
    return f'<path class="live" d="{"".join(points)}H{x + len(live) * across:.1f}"/>'


def _bars(picture: MemoryPicture, y: float) -> Iterator[str]:
    """Bars of the memory that stays on each device, on one scale."""
    yield _text("name", MARGIN, y + 12, "Weights and variables, which stay, and what runs compute in")
    most = max((sum(size for _, size in those) for _, those in picture.lasting), default=0)
    y += 24
    for device, those in picture.lasting:
        yield _text("small", MARGIN, y + 13, fitted(device, 100, 11))
        x, room = MARGIN + 110.0, WIDTH - 430
        for place, (what, size) in enumerate(those):
            wide = room * size / most if most else 0.0
            yield (
                f'<rect class="bar bar{place}" x="{x:.1f}" y="{y:g}" width="{wide:.1f}" height="18" rx="2">'
                f"<title>{marked_up(what)}: {size_text(size)}</title></rect>"
            )
            x += wide
        words = " · ".join(f"{what} {size_text(size)}" for what, size in those if size)
        yield _text("small", x + 8, y + 13, words)
        y += _ROW + 12


def _text(kind: str, x: float, y: float, text: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{marked_up(text)}</text>'
