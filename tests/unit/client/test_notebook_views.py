"""What notebooks show: escaped, bounded, readable on dark and light pages, and never waited for."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

import heliograph as hg
from heliograph._base.views import objects
from heliograph._base.views.tensor import SAMPLE_BYTES, sample_of
from heliograph.comparison.differences import difference
from heliograph.notebook.elements import MOST_CHARACTERS, MOST_ROWS, bar, card, histogram, line, table, text
from heliograph_proto.types import F32

EVIL = '<script>alert(1)</script>" onload="x'


class Balanced(HTMLParser):
    """Checks that tags are closed, and keeps what would run or load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "iframe", "img", "link", "object"):
            self.wrong.append(tag)
        self.wrong += [name for name, _ in attrs if name.startswith("on") or name in ("src", "href")]
        if tag not in ("rect", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open.pop() != tag:
            self.wrong.append(f"/{tag}")


def checked(html: str) -> str:
    """The text of a view, whose HTML is well formed and runs nothing."""
    parser = Balanced()
    parser.feed(html.replace("/>", ">"))
    assert not parser.wrong and not parser.open
    return re.sub(r"<style>.*?</style>|<[^>]*>", " ", html)


def view(shown: Any) -> str:
    return checked(shown._repr_html_())


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views wait longer than they do for people, since this machine may be loaded."""
    monkeypatch.setattr(objects, "LOOK_SECONDS", 60.0)


@pytest.fixture
def session() -> Iterator[hg.Session]:
    with hg.connect("local:#cpu:threads=1,memory=256MiB") as found:
        yield found


def scaled(name: str = "x") -> hg.Graph:
    g = hg.Graph()
    g.output("y", g.input(name, (8, 8), "f32") @ g.weight("w", np.eye(8, dtype=np.float32)))
    return g


# Elements


def test_texts_are_escaped_and_bounded() -> None:
    assert "<script" not in text(EVIL) and '"' not in text(EVIL)
    assert len(text("x" * 10_000)) == MOST_CHARACTERS
    assert "\n" not in text("a\nb") and "\u202e" not in text("\u202e")
    assert "<script" not in card(EVIL, bar(0.5, EVIL), histogram([1, 2], EVIL), line([1, 2], EVIL))


def test_a_table_shows_a_bounded_number_of_rows() -> None:
    found = checked(card("t", table(("n",), [(number,) for number in range(1000)])))
    assert f"and {1000 - MOST_ROWS} more" in found


@pytest.mark.parametrize("share", [0.0, 1.0, 7.0, -1.0, float("nan"), float("inf")])
def test_a_bar_stays_within_its_frame(share: float) -> None:
    widths = [int(width) for width in re.findall(r'rect width="(\d+)"', bar(share, "x"))]
    assert all(0 <= width <= 120 for width in widths)


def test_no_colour_is_one_of_a_page(session: hg.Session) -> None:
    for shown in (session, session.devices[0], scaled(), session.compile(scaled())):
        assert not re.search(r"#(fff|000)|white|black", shown._repr_html_().replace("white-space", ""))


# Objects


def test_sessions_and_devices(session: hg.Session) -> None:
    assert "cpu0" in view(session) and "description" in view(session)
    assert "used" in view(session.devices[0]) and "buffer types" in view(session.devices[0])


def test_names_with_markup_are_escaped_everywhere(session: hg.Session) -> None:
    g = scaled(EVIL)
    plan = session.compile(g)
    plan.run({EVIL: np.ones((8, 8), np.float32)})
    for shown in (g, plan, plan.explain()):
        assert "<script" not in shown._repr_html_()
        view(shown)


def test_graphs_count_ops(session: hg.Session) -> None:
    found = view(scaled())
    assert "matmul" in found and "1 weight" in found
    assert "no output yet" in view(hg.Graph())


def test_plans_and_explanations_have_a_picture_of_the_last_run(session: hg.Session) -> None:
    g = scaled()
    plan = session.compile(g)
    assert "inputs" in view(plan)
    plan.run(x=np.ones((8, 8), np.float32))
    assert "the last run" in view(plan) and "<rect" in plan.explain()._repr_html_()
    plan.free()
    assert "was freed" in view(plan)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        np.arange(2**18, dtype=np.int64).reshape(512, 512),
        np.array(3.5, np.float32),
        np.array([True, False]),
        np.zeros((0, 4), np.float32),
        np.array([np.nan, np.inf, 1.0], np.float32),
        np.full(10_000, 7, np.uint8),
    ],
)
def test_tensors_show_a_corner_and_statistics(session: hg.Session, array: np.ndarray) -> None:
    found = view(session.put(array))
    assert str(array.shape) in found
    if array.size:
        assert "statistics of" in found and "elements" in found


def test_a_view_with_gaps_and_rows_of_blocks(session: hg.Session) -> None:
    tensor = session.put(np.arange(64, dtype=np.float32).reshape(8, 8))
    assert "a view with gaps" in view(tensor[:, ::2])
    rows = session.empty((4, 256), "q4_0")
    rows.set(hg.quantize(np.ones((4, 256), np.float32), "q4_0"))
    assert "mean" in view(rows)
    half = session.empty((4, 4), "bf16")
    assert "0" in view(half)


def test_a_large_tensor_is_sampled_evenly_and_not_downloaded(session: hg.Session) -> None:
    big = session.put(np.arange(2**24, dtype=np.float32))
    before = session.statistics().traffic.read_bytes
    found = view(big)
    assert session.statistics().traffic.read_bytes - before <= SAMPLE_BYTES + 4096
    assert f"of {2**24:,} elements" in found and "1.67772e+07" in found


@pytest.mark.parametrize("nbytes", [1, 4096, SAMPLE_BYTES, SAMPLE_BYTES + 4, 2**40 + 4])
@pytest.mark.parametrize("unit", [1, 4, 18, 210])
def test_a_sample_lies_within_the_tensor_and_is_bounded(nbytes: int, unit: int) -> None:
    whole = nbytes // unit * unit
    found = sample_of(whole, unit)
    assert found.total_bytes <= SAMPLE_BYTES and found.size_bytes % unit == 0
    assert (found.count - 1) * found.stride_bytes + found.size_bytes <= whole
    assert found.stride_bytes % unit == 0 and found.stride_bytes >= found.size_bytes


def test_a_tensor_that_is_not_computed_yet_is_shown_without_elements(
    session: hg.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "LOOK_SECONDS", 0.2)
    g = hg.Graph()
    g.output("y", g.input("x", (4,), "f32") + 1)
    plan = session.compile(g)
    tensor = session.put(np.zeros(4, np.float32))
    # A loop that ends when it is told to holds the stream.
    loop = plan.loop(x=tensor, steps=10**9, carry={"y": "x"}, fetch=False)
    try:
        assert "looking at" in view(tensor)
    finally:
        monkeypatch.setattr(objects, "LOOK_SECONDS", 60.0)
        loop.stop()
        loop.result(timeout=60)
    assert "statistics of all elements" in view(tensor)


def test_what_is_freed_lost_or_failed_says_so() -> None:
    session = hg.connect("local:#cpu:threads=1,memory=64MiB")
    device, tensor, freed = session.devices[0], session.put(np.ones(4, np.float32)), session.empty(4, "f32")
    failed = session.empty((2**28,), "f32")
    plan = session.compile(scaled())
    assert "memory" in view(failed)
    freed.free()
    assert "was freed" in view(freed)
    session.close()
    for shown in (session, device, tensor, plan):
        assert "ended" in view(shown) or "closed" in view(shown)


def test_asyncio_shows_what_needs_no_waiting() -> None:
    async def shown() -> list[str]:
        async with hg.aio.connect("local:#cpu:threads=1,memory=64MiB") as session:
            tensor = await session.put(np.ones(4, np.float32))
            plan = await session.compile(scaled())
            return [view(one) for one in (session, session.devices[0], tensor, plan)]

    found = asyncio.run(shown())
    assert "await tensor.get()" in found[2] and "inputs" in found[3]


def test_views_may_be_asked_for_in_several_threads(session: hg.Session) -> None:
    tensor, found = session.put(np.ones((64, 64), np.float32)), []
    threads = [threading.Thread(target=lambda: found.append(view(tensor))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(found)) == 1 and len(found) == 4


def test_differences_and_comparisons(session: hg.Session) -> None:
    ones = np.ones(4, np.float32)
    assert "all elements are equal" in view(difference(ones, ones, F32))
    assert "2 elements" in view(difference(ones, np.array([1, 1, 2, 3], np.float32), F32))
    found = hg.compare(scaled(), (session, "cpu0"), (session, "cpu0"))
    assert "agree" in view(found) and "matmul" in view(found)
