"""Pages of plans in a real browser: what is placed, opened, found and told there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import heliograph as hg
from heliograph.explain.pictures.coordinates import place
from heliograph.explain.pictures.scene import scene_of
from heliograph.explain.picturing import picture_of
from heliograph_backends.registry import open_registry

#: The types of conftest's fixtures.
Open, Picture = Callable[..., Any], Callable[..., None]
HOSTILE = '<img src=x onerror="document.title=1">&'
LAYERS = 12


@pytest.fixture(scope="module")
def explained() -> Iterator[hg.Explanation]:
    """Two devices, scopes in scopes, a mask for all, and names with markup."""
    g = hg.Graph()
    x, mask = g.input("x", (4, 16), "f32"), g.input("mask", (4, 16), "f32")
    for number in range(LAYERS):
        with g.scope(f"layer{number}"):
            with g.scope("attention"):
                y = hg.gelu(x @ g.weight("w", np.eye(16, dtype=np.float32))) + mask
            with g.scope(HOSTILE):
                x = x + hg.ops.relu(y, name=HOSTILE)
    g.output("y", x)
    with pytest.MonkeyPatch.context() as patch:
        devices = ("cpu:threads=1", "fake:host=0,memory=16MiB")
        patch.setattr("heliograph_backends.registry.open_registry", lambda: open_registry(devices))
        with hg.connect("local:") as session:
            plan = session.compile(g, ["cpu0", "fake0"], pins={"layer1?/*": "fake0"})
            array = np.ones((4, 16), np.float32)
            yield plan.profile({"x": array, "mask": array}, runs=2)


@pytest.fixture
def page(open_page: Open, explained: hg.Explanation, tmp_path: Path) -> Any:
    return shown(open_page, explained, tmp_path)


def shown(open_page: Open, found: hg.Explanation | hg.ComparedPlans, folder: Path, **options: Any) -> Any:
    """The page of a plan, or of two, in the browser: it asks for no other file."""
    titles = {"title": HOSTILE} if isinstance(found, hg.Explanation) else {}
    found.html(folder / "plan.html", **titles)
    return open_page((folder / "plan.html").as_uri(), **options)


def boxes(page: Any) -> int:
    found: int = page.evaluate("document.querySelectorAll('[data-box]').length")
    return found


def facts(page: Any) -> dict[str, str]:
    found: dict[str, str] = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('dt')].map(one => "
        "[one.textContent, one.nextElementSibling.textContent]))"
    )
    return found


def test_the_script_places_boxes_where_the_library_does(page: Any, explained: hg.Explanation) -> None:
    scene = scene_of(picture_of(explained, explained._graph, HOSTILE))
    every = range(len(scene.layout.tree.boxes))
    page.evaluate(f"views[0].opened = new Set([...Array({len(every)}).keys()]); views[0].draw()")
    there: list[list[Any]] = page.evaluate(
        "[...views[0].placing.found].map(([number, at]) => "
        "[number, at.x || 0, at.y || 0, at.width, at.height])"
    )
    here = place(scene.layout, every)
    assert len(there) == len(here) > LAYERS * 6
    for number, *corner in there:
        at = here[number]
        assert corner == pytest.approx([at.x, at.y, at.width, at.height], abs=0.01), number


def test_names_with_markup_are_text(page: Any) -> None:
    page.evaluate("views[0].openLevel(); views[0].openLevel(); views[0].openLevel()")
    assert page.evaluate("document.images.length") == 0 and page.evaluate("document.title") == HOSTILE
    texts = page.evaluate("[...document.querySelectorAll('svg title')].map(one => one.textContent)")
    assert f"layer0/{HOSTILE}/{HOSTILE}" in texts


def test_the_policy_stops_any_other_script(
    open_page: Open, explained: hg.Explanation, tmp_path: Path
) -> None:
    page = shown(open_page, explained, tmp_path, faulty=True)
    refused: list[str] = []
    page.on("console", lambda message: refused.append(message.text))
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'hit = 1'}))"
    )
    assert page.evaluate("typeof hit") == "undefined"
    page.evaluate("fetch('http://127.0.0.1:9/').catch(() => 0)")
    assert len(refused) >= 2 and all("Content Security Policy" in one for one in refused)


def test_keys_open_fold_and_walk(page: Any) -> None:
    page.evaluate("views[0].foldAll(); document.querySelector('[data-box][tabindex=\"0\"]').focus()")
    before = boxes(page)
    name = "document.activeElement.getAttribute('aria-label')"
    while not page.evaluate(name).startswith("layer0"):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert boxes(page) == before + 2 and page.evaluate("document.activeElement.ariaExpanded") == "true"
    page.keyboard.press("ArrowRight")
    assert page.evaluate(name).startswith("attention")
    page.keyboard.press("Enter")
    assert boxes(page) > before + 4
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(name).startswith("layer0")
    page.keyboard.press("ArrowLeft")
    assert boxes(page) == before and page.evaluate("document.activeElement.ariaExpanded") == "false"
    assert page.evaluate("document.querySelectorAll('[data-box][tabindex=\"0\"]').length") == 1
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.type") == "search"


def test_a_node_is_found_by_its_name_and_tells_its_facts(page: Any) -> None:
    page.evaluate("views[0].search.value = 'layer11/attention/matmul'; views[0].searched()")
    assert page.evaluate("document.querySelector('[data-part=said]').textContent") == "1 found"
    page.evaluate("document.querySelector('[data-part=found] button').click()")
    found = facts(page)
    assert found["name"].startswith("layer11/attention/matmul") and found["op"] == "matmul"
    assert found["result"] == "f32[4, 16]" and found["device"] == "fake0: user"
    assert "measured time" in found["time"] and "test_picture_pages.py" in found["built by"]
    assert "weight" in found["reads"]
    shown = page.evaluate(
        "(() => { const box = document.querySelector('.current').getBoundingClientRect(), "
        "room = document.querySelector('.room').getBoundingClientRect(); "
        "return box.top >= room.top && box.bottom <= room.bottom; })()"
    )
    assert shown


def test_no_label_lies_over_another_box(page: Any) -> None:
    page.evaluate("views[0].foldAll(); views[0].openLevel(); views[0].openLevel(); views[0].scale(1)")
    outside: list[str] = page.evaluate(
        "[...document.querySelectorAll('.box')].flatMap(box => { const body = "
        "box.querySelector(':scope > .body').getBoundingClientRect(); return [...box.querySelectorAll("
        "':scope > text')].filter(text => { const at = text.getBoundingClientRect(); return at.right > "
        "body.right + 1 || at.bottom > body.bottom + 1; }).map(text => text.textContent); })"
    )
    assert outside == []


def test_all_parts_are_shown_one_at_a_time(page: Any) -> None:
    for number in range(3):
        page.evaluate(f"document.getElementById('tab-{number}').click()")
        hidden = page.evaluate("[...document.querySelectorAll('[role=tabpanel]')].map(one => one.hidden)")
        assert hidden == [one != number for one in range(3)]
    page.evaluate("document.getElementById('tab-1').click()")
    assert page.evaluate("document.querySelectorAll('.memory .value').length") > LAYERS


def test_without_scripts_the_folded_picture_is_there(
    open_page: Open, explained: hg.Explanation, tmp_path: Path
) -> None:
    page = shown(open_page, explained, tmp_path, java_script_enabled=False)
    assert page.locator(".box.scope").count() >= LAYERS


def test_two_plans_are_shown_side_by_side(open_page: Open, explained: hg.Explanation, tmp_path: Path) -> None:
    page = shown(open_page, explained.compare(explained), tmp_path)
    assert page.evaluate("views.length") == 2
    assert page.locator(".marked").count() == 0
    g = hg.Graph()
    g.output("y", hg.gelu(g.input("x", (4, 16), "f32")))
    with hg.connect("local:") as session:
        page = shown(open_page, explained.compare(session.compile(g).explain()), tmp_path)
    page.evaluate("document.querySelector('[data-nodes]').click()")
    assert page.locator(".view .current").first.get_attribute("aria-label")
    # All nodes differ, and so do the scopes around them.
    assert "differs" in page.locator(".box.scope").first.get_attribute("aria-label")
    assert page.locator(".view:first-child .marked").count() > LAYERS


@pytest.mark.parametrize("size", ["laptop", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_screenshots_are_kept_to_be_looked_at(
    open_page: Open, picture: Picture, explained: hg.Explanation, tmp_path: Path, size: str, dark: bool
) -> None:
    page = shown(open_page, explained, tmp_path, size=size, dark=dark)
    picture(page, f"plan-{size}-{'dark' if dark else 'light'}", whole=False)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_page_around_chooses_the_colours(
    open_page: Open, explained: hg.Explanation, tmp_path: Path
) -> None:
    page = shown(open_page, explained, tmp_path)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.evaluate("new Promise(done => { addEventListener('hashchange', done); location.hash = 'dark'; })")
    assert page.evaluate(ground) != light
    page.evaluate("new Promise(done => { addEventListener('hashchange', done); location.hash = 'else'; })")
    assert page.evaluate(ground) == light
