"""The dashboard as people use it: in Chromium, on daemons with work."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from access_daemons import Tokens
from certificates import Authority
from dashboards import (
    WebDaemon,
    ask,
    load,
    named_session,
    rows_of,
    state_of,
    unfinished_upload,
    web_daemon,
    web_pool,
)
from waiting import until
from web_load import MARKUP

import heliograph as hg
from heliograph_server.auth.tokens import remove_token
from heliograph_server.resources.principals import Right

PANELS = (
    "overview", "hosts", "timeline", "memory", "sessions", "plans", "uploads", "models", "log", "operate",
)  # fmt: skip
#: The types of conftest's fixtures.
Open, Picture, Axe = Callable[..., Any], Callable[..., None], Callable[[Any], list[str]]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDaemon]:
    """A pool of three under load, with a served model."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "doubling" / "1").mkdir(parents=True)
    g = hg.Graph()
    g.output("y", g.input("x", (2, 3), "f32") * 2.0)
    hg.save(g, folder / "doubling" / "1" / "model.hgraph")
    with (
        web_pool("--kserve-http", "127.0.0.1:0", "--models", str(folder)) as head,
        load(head.url, "paced=100", "chain", "waiting", "marked"),
    ):
        yield head


@pytest.fixture(scope="module")
def alone() -> Iterator[WebDaemon]:
    with web_daemon() as made:
        yield made


def live(page: Any) -> Any:
    """Wait until the page is live."""
    page.wait_for_selector("#link-state[data-kind=good]")
    return page


def go_to(page: Any, panel: str) -> None:
    page.evaluate("id => document.getElementById(id).scrollIntoView({behavior: 'instant'})", panel)


def coloured(page: Any) -> int:
    """The pixels of the timeline that bars have, which have a strong colour."""
    return page.evaluate("""() => {
      const canvas = document.querySelector("#timeline canvas");
      const read = { willReadFrequently: true };
      const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", read);
      copy.drawImage(canvas, 0, 0);
      const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
      let found = 0;
      for (let at = 0; at < data.length; at += 4) {
        const least = Math.min(data[at], data[at + 1], data[at + 2]);
        if (Math.max(data[at], data[at + 1], data[at + 2]) - least > 60) found += 1;
      }
      return found;
    }""")


def wait_for(page: Any, script: str, argument: Any = None) -> None:
    """Wait until a function of the page returns true. Its policy lets no page evaluate text; this does."""
    until(lambda: page.evaluate(script, argument), script)


# Panels


@pytest.mark.parametrize("size", ["laptop", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_panel_shows_a_pool_under_load(
    pool: WebDaemon,
    open_page: Open,
    picture: Picture,
    axe: Axe,
    size: str,
    dark: bool,
) -> None:
    with unfinished_upload(pool.url, 2**22, 2**20):
        page = live(open_page(pool.web, size, dark=dark))
        wait_for(page, "() => document.querySelectorAll('#hosts .host').length === 3")
        assert page.locator("#hosts .devices li").count() == 3
        wait_for(page, "() => /\\d/.test(document.querySelector('#overview .tile b').textContent)")
        wait_for(page, "() => document.querySelectorAll('#sessions tbody tr').length >= 7")
        assert page.locator("#hosts table tbody tr").count() >= 2
        go_to(page, "timeline")
        wait_for(page, "() => document.querySelectorAll('#timeline .legend li').length > 2")
        until(lambda: coloured(page) > 500, "the timeline has bars")
        wait_for(page, "() => document.querySelectorAll('#memory canvas:not([hidden])').length === 6")
        go_to(page, "plans")
        row = page.locator("#plans tbody tr", has_text="m0/cpu0, m1/cpu0").or_(
            page.locator("#plans tbody tr", has_text="m1/cpu0")
        )
        row.first.locator("button.link").click()
        page.wait_for_selector("#plans .gantt svg rect")
        assert page.locator("#plans .plan-detail tbody tr").count() >= 3
        assert page.locator("#uploads tbody tr", has_text="weights").count() == 1
        wait_for(
            page,
            "() => document.querySelector('#uploads [role=meter]').getAttribute('aria-valuenow') === '25'",
        )
        assert page.locator("#models tbody tr", has_text="doubling").count() == 1
        wait_for(page, "() => document.querySelectorAll('#log li').length > 3")
        for panel in PANELS:
            assert page.locator(f"#{panel} h2").is_visible(), panel
        overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert overflow <= 0, f"the page is {overflow} pixels wider than the screen"
        go_to(page, "overview")
        name = f"pool-{size}-{'dark' if dark else 'light'}"
        picture(page, f"{name}-top", whole=False)
        go_to(page, "timeline")
        # Two ticks, so that the picture has bars.
        before = page.evaluate("document.querySelector('#timeline .note').textContent")
        assert "turns, copies, computing" in before
        picture(page, f"{name}-timeline", whole=False)
        picture(page, name)
        assert axe(page) == []


def test_names_with_markup_are_text_everywhere(pool: WebDaemon, open_page: Open) -> None:
    with named_session(pool.url, MARKUP):
        page = live(open_page(pool.web))
        wait_for(page, "text => document.querySelector('#sessions').textContent.includes(text)", MARKUP)
        go_to(page, "plans")
        wait_for(page, "text => document.querySelector('#plans').textContent.includes(text)", MARKUP)
        page.locator("#plans button.link", has_text=MARKUP).first.click()
        page.wait_for_selector("#plans .plan-detail h3")
        page.fill("#log input", "onerror")
        wait_for(page, "text => document.querySelector('#log').textContent.includes(text)", MARKUP)
        assert page.locator("main img, main b:text-is('bold'), main script").count() == 0


def inner_of(page: Any) -> Any:
    """The frame with the picture of a plan."""
    return next(one for one in page.frames if "/picture#" in one.url)


def test_a_plan_is_drawn_in_a_frame_of_its_own(
    pool: WebDaemon, open_page: Open, picture: Picture, axe: Axe
) -> None:
    page = live(open_page(pool.web))
    go_to(page, "plans")
    page.locator("#plans tbody tr", has_text="m0/cpu0").filter(has_text="m1/cpu0").first.click()
    page.wait_for_selector("#plans .plan-picture .hint:has-text('Drawn at')")
    # Two looks give a rate.
    wait_for(
        page, "() => /runs a second of .* \\(p50\\)/.test(document.querySelector('.lately')?.textContent)"
    )
    frame = page.frame_locator("#plans .plan-picture iframe")
    scope = frame.locator("[data-box][aria-label^=n0]")
    assert scope.get_attribute("aria-expanded") == "true"
    before = frame.locator("[data-box]").count()
    frame.locator("button", has_text="Fold all").click()
    assert frame.locator("[data-box]").count() < before
    scope.click()
    assert scope.get_attribute("aria-expanded") == "true"
    frame.locator("select").select_option("device")
    assert {"cpu0", "m0/cpu0", "m1/cpu0"} <= set(frame.locator(".legend text").all_text_contents())
    go_to(page, "plans")
    page.locator("#plans .plan-picture").scroll_into_view_if_needed()
    picture(page, "plan-picture", whole=False)
    assert axe(page) == []
    # The name of a box says its texts with words instead of signs, and none of the boxes inside.
    assert [one for one in axe(inner_of(page)) if "label-content-name-mismatch" not in one] == []
    # Its script has an origin of its own: it reads nothing of the page.
    inner = inner_of(page)
    assert inner.evaluate("window.origin") == "null"
    # A tick of the panel draws nothing again, which would fold what was opened.
    inner.evaluate("window.mark = 1")
    for _ in range(2):
        # A tick asks for the plan; the second one comes when the first has drawn what is new.
        with page.expect_response(re.compile(r"/api/plans/\d+/\d+$")):
            pass
    assert inner.evaluate("window.mark") == 1
    # It has the page's colours.
    ground = "getComputedStyle(document.body).backgroundColor"
    before = inner.evaluate(ground)
    page.click("#theme")
    page.click("#theme")
    assert page.locator("#theme").inner_text() == "Dark"
    until(lambda: inner.evaluate(ground) != before, "the picture is dark")
    # In a tab of its own it is the same.
    with page.context.expect_page() as opening:
        page.locator("#plans a", has_text="Open in a tab").click()
    opening.value.wait_for_selector("[data-box]")


def test_the_picture_of_a_plan_that_is_gone_says_so(alone: WebDaemon, open_page: Open) -> None:
    with hg.connect(alone.url) as session:
        g = hg.Graph()
        g.output("y", g.input("x", (8,), "f32") + 1.0)
        plan = session.compile(g)
        page = live(open_page(alone.web))
        go_to(page, "plans")
        page.locator("#plans tbody tr").first.click()
        frame = page.frame_locator("#plans .plan-picture iframe")
        frame.locator("[data-box]").first.wait_for()
        plan.free()
    page.locator("#plans button", has_text="Draw again").click()
    frame.locator("p", has_text="there is no session").wait_for()


def test_a_drawn_run_is_told_under_the_pointer_and_as_a_table(pool: WebDaemon, open_page: Open) -> None:
    page = live(open_page(pool.web))
    go_to(page, "timeline")
    until(lambda: coloured(page) > 500, "the timeline has bars")
    page.locator("#timeline canvas").focus()
    page.keyboard.press("Space")
    assert page.locator("#timeline button[aria-pressed=true]", has_text="Go on").count() == 1
    box = page.locator("#timeline canvas").bounding_box()
    for x in range(int(box["width"]) - 3, 40, -4):
        page.mouse.move(box["x"] + x, box["y"] + 45)
        if page.locator("#timeline .tip").is_visible():
            break
    assert "cpu0 · compute" in page.locator("#timeline .tip").inner_text()
    page.locator("#timeline summary").click()
    page.keyboard.press("Tab")
    page.locator("#timeline canvas").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("-")
    wait_for(page, "() => document.querySelectorAll('#timeline tbody tr').length > 1")
    label = page.locator("#timeline canvas")
    until(lambda: "60 seconds: " in label.get_attribute("aria-label"), "the longer time is told")
    assert "runs and splits" in label.get_attribute("aria-label")


def test_two_hundred_sessions_are_listed_sorted_and_filtered(open_page: Open, picture: Picture) -> None:
    # A tenant has 64 sessions unless its quota says otherwise.
    with web_daemon("--quota", "sessions=300") as daemon, load(daemon.url, "crowd=200", "paced=20"):
        until(lambda: state_of(daemon)["session_count"] >= 201, "all sessions are open", 60)
        page = live(open_page(daemon.web))
        wait_for(page, "() => document.querySelectorAll('#sessions tbody tr').length >= 201")
        page.locator("#sessions thead button", has_text="Commands/s").click()
        wait_for(
            page,
            """() => {
          const cells = [...document.querySelectorAll('#sessions tbody tr td:nth-child(8)')];
          return Number(cells[0].textContent) > 0 && Number(cells.at(-1).textContent) === 0;
        }""",
        )
        assert page.locator("#sessions th[aria-sort=descending]", has_text="Commands/s").count() == 1
        page.fill("#sessions input", "no such client")
        wait_for(page, "() => document.querySelector('#sessions .empty').checkVisibility()")
        page.fill("#sessions input", "heliograph")
        wait_for(page, "() => document.querySelectorAll('#sessions tbody tr').length >= 201")
        go_to(page, "sessions")
        picture(page, "sessions-200", whole=False)


def test_what_is_pressed_stays_under_the_pointer(alone: WebDaemon, open_page: Open) -> None:
    page = live(open_page(alone.web))
    page.evaluate("""async () => {
      const { Table } = await import(new URL("page/table.js", document.baseURI));
      const column = (name) => ({ name, title: name, get: (row) => row[name], show: (row) => row[name] });
      const columns = [column("first"), column("second")];
      window.table = new Table({ caption: "tried", key: (row) => row.first, columns, empty: "" });
      document.getElementById("main").replaceChildren(window.table.element);
      window.table.set([{ first: "a", second: "b" }]);
    }""")
    at = page.locator("#main thead button", has_text="second").bounding_box()
    page.mouse.move(at["x"] + 3, at["y"] + 3)
    page.mouse.down()
    # A row that would move the second column far to the right.
    page.evaluate("window.table.set([{ first: 'a'.repeat(80), second: 'b' }])")
    page.mouse.up()
    assert page.locator("#main th[aria-sort]", has_text="second").count() == 1
    wait_for(page, "() => document.querySelector('#main tbody tr').textContent.startsWith('aaaa')")
    moved = page.locator("#main thead button", has_text="second").bounding_box()
    assert moved["x"] > at["x"] + 100


def test_an_idle_daemon_says_what_to_do(
    alone: WebDaemon, open_page: Open, picture: Picture, axe: Axe
) -> None:
    page = live(open_page(alone.web))
    wait_for(page, "() => document.querySelector('#sessions .empty').checkVisibility()")
    assert "hg.connect" in page.locator("#sessions .empty").inner_text()
    page.wait_for_selector("#hosts .devices li:has-text('cpu0')")
    assert axe(page) == []
    picture(page, "idle")


def test_all_is_reached_by_the_keyboard(alone: WebDaemon, open_page: Open) -> None:
    page = live(open_page(alone.web))
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        focus = "document.activeElement"
        place = page.evaluate(f"{focus}.closest('section')?.id + ' ' + {focus}.textContent.slice(0, 12)")
        reached.add(place)
    assert any(one.startswith("timeline Pause") for one in reached)
    assert any(one.startswith("operate Drain") for one in reached)
    assert any(one.startswith("log Hold") for one in reached)


def test_colours_can_be_chosen_and_stay(alone: WebDaemon, open_page: Open) -> None:
    page = live(open_page(alone.web, dark=True))
    back = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(back)
    page.click("#theme")
    assert page.evaluate(back) != dark
    page.reload()
    assert page.evaluate(back) != dark and page.locator("#theme").inner_text() == "Light"


# Actions


def test_an_operator_ends_a_session_sets_the_level_and_drains(
    open_page: Open, picture: Picture, axe: Axe
) -> None:
    with web_daemon() as daemon, named_session(daemon.url, "guest"):
        page = live(open_page(daemon.web))
        page.locator("#sessions tbody button", has_text="End").click()
        page.fill("#reason", "lunch")
        assert axe(page) == []
        picture(page, "dialog", whole=False)
        page.keyboard.press("Escape")
        assert len(rows_of(state_of(daemon))) == 1
        page.locator("#sessions tbody button", has_text="End").click()
        page.fill("#reason", "lunch")
        page.locator("dialog button", has_text="End session").click()
        wait_for(page, "() => document.querySelector('#notices').textContent.includes('has ended')")
        wait_for(page, "() => document.querySelector('#sessions .empty').checkVisibility()")
        wait_for(page, "() => document.querySelector('#log').textContent.includes('lunch')")
        page.select_option("#log-level", "debug")
        until(lambda: state_of(daemon)["level"] == "debug", "the level is set")
        page.locator("#operate button", has_text="Drain").first.click()
        page.fill("#seconds", "2")
        page.locator("dialog button", has_text="Drain").click()
        page.wait_for_selector("#drain-state:not([hidden])")
        until(lambda: state_of(daemon)["drain"]["state"] == "drained", "the daemon is drained")
        page.locator("#operate button", has_text="Undo").click()
        until(lambda: state_of(daemon)["drain"]["state"] == "serving", "the drain was undone")
        wait_for(page, "() => document.querySelector('#drain-state').hidden")


# Tokens


def test_a_tenant_signs_in_and_sees_its_own_until_its_token_is_revoked(
    tmp_path: Path, open_page: Open, picture: Picture, axe: Axe
) -> None:
    rights = {"alice": (Right.USE,), "bob": (Right.USE,), "olga": (Right.USE, Right.ADMIN)}
    tokens = Tokens(tmp_path / "tokens.toml", rights)
    with (
        web_daemon("--tokens", str(tokens.path)) as daemon,
        load(daemon.url, "paced=20", token=tokens.of["alice"]),
        load(daemon.url, "paced=20", "crowd=2", token=tokens.of["bob"]),
    ):
        page = open_page(daemon.web)
        page.wait_for_selector("#sign-in:not([hidden])")
        assert axe(page) == []
        picture(page, "sign-in", whole=False)
        page.fill("#token", "hgt_wrong")
        page.keyboard.press("Enter")
        wait_for(page, "() => document.querySelector('#sign-in-error').textContent.includes('token')")
        page.fill("#token", tokens.of["alice"])
        page.keyboard.press("Enter")
        live(page)
        assert "alice" in page.locator("#account-name").inner_text()
        wait_for(page, "() => document.querySelectorAll('#sessions tbody tr').length === 1")
        assert page.locator("#sessions").inner_text().count("bob") == 0
        assert (
            page.locator("#operate").is_hidden()
            and page.locator("#sessions button", has_text="End").count() == 0
        )
        go_to(page, "timeline")
        until(lambda: coloured(page) > 20, "the tenant's runs are drawn")
        kept = page.evaluate(
            "[document.cookie, JSON.stringify(localStorage), JSON.stringify(sessionStorage)]"
        )
        assert tokens.of["alice"] not in json.dumps(kept) and kept[0] == ""
        # Signed in on a page that is loaded again, and an operator beside.
        page.reload()
        live(page)
        other = open_page(daemon.web)
        other.fill("#token", tokens.of["olga"])
        other.keyboard.press("Enter")
        live(other)
        wait_for(other, "() => document.querySelectorAll('#sessions tbody tr').length === 4")
        remove_token(tokens.path, "alice")
        page.wait_for_selector("#sign-in:not([hidden])")
        wait_for(page, "() => document.querySelector('#sign-in-error').textContent.includes('revoked')")
        picture(page, "revoked", whole=False)
        other.click("#sign-out")
        other.wait_for_selector("#sign-in:not([hidden])")


def test_a_token_is_taken_over_tls_by_a_cookie_for_this_host_alone(tmp_path: Path, open_page: Open) -> None:
    tokens = Tokens(tmp_path / "tokens.toml", {"alice": (Right.USE,)})
    pair = Authority(tmp_path / "authority").server()
    files = "--tls-certificate", pair.certificate, "--tls-key", pair.key
    with (
        web_daemon("--tokens", str(tokens.path), *files, web="https://127.0.0.1:0") as daemon,
        load(daemon.url, "paced=20", token=tokens.of["alice"]),
    ):
        assert daemon.web.startswith("https://")
        page = open_page(daemon.web, ignore_https_errors=True)
        page.fill("#token", tokens.of["alice"])
        page.keyboard.press("Enter")
        live(page)
        wait_for(page, "() => document.querySelectorAll('#sessions tbody tr').length === 1")
        [cookie] = page.context.cookies()
        assert cookie["name"].startswith("__Host-") and cookie["secure"] and cookie["httpOnly"]
        assert cookie["sameSite"] == "Strict" and tokens.of["alice"] not in cookie["value"]
        # The frame of a picture sends the cookie, too.
        go_to(page, "plans")
        page.locator("#plans tbody tr").first.click()
        page.frame_locator("#plans .plan-picture iframe").locator("[data-box]").first.wait_for()
        page.reload()
        live(page)
        page.click("#sign-out")
        page.wait_for_selector("#sign-in:not([hidden])")
        assert page.context.cookies() == []


def test_a_page_signs_in_again_after_the_daemon_restarts(tmp_path: Path, open_page: Open) -> None:
    tokens = Tokens(tmp_path / "tokens.toml", {"alice": (Right.USE,)})
    with web_daemon("--tokens", str(tokens.path)) as daemon:
        page = open_page(daemon.web)
        page.fill("#token", tokens.of["alice"])
        page.keyboard.press("Enter")
        live(page)
        daemon.restart()
        page.wait_for_selector("#sign-in:not([hidden])")
        assert "restarted" in page.locator("#sign-in-error").inner_text()


# Failures


def test_a_page_finds_the_daemon_again_after_it_restarts(open_page: Open, picture: Picture) -> None:
    with web_daemon() as daemon:
        page = live(open_page(daemon.web))
        wait_for(page, "() => document.querySelectorAll('#hosts .devices li').length === 1")
        daemon.end()
        page.wait_for_selector("#link-state[data-kind=bad]")
        wait_for(page, "() => document.querySelector('#notices').textContent.includes('does not answer')")
        picture(page, "lost", whole=False)
        daemon.restart()
        live(page)
        wait_for(page, "() => document.querySelector('#notices').textContent.includes('restarted')")
        assert "does not answer" not in page.locator("#notices").inner_text()


BEHIND = """(() => {
  const late = 3 * 3600 * 1000;
  const now = Date.now.bind(Date);
  Date.now = () => now() - late;
  const origin = performance.timeOrigin - late;
  Object.defineProperty(performance, "timeOrigin", { get: () => origin });
})()"""


def test_a_browser_whose_clock_differs_shows_the_daemons_time(open_page: Open) -> None:
    with web_daemon() as daemon, load(daemon.url, "paced=50"):
        page = live(open_page(daemon.web, script=BEHIND, timezone_id="UTC"))
        wait_for(page, "() => document.querySelector('#notices').textContent.includes('3 h behind')")
        go_to(page, "timeline")
        until(lambda: coloured(page) > 50, "runs are drawn at the daemon's time")
        # The page has the lines since it was opened, and the work may have begun before.
        with hg.connect(daemon.url):
            wait_for(page, "() => document.querySelectorAll('#log time').length > 0")
        shown = page.locator("#log time").last.get_attribute("datetime")
        moment = time.strptime(shown[:19], "%Y-%m-%dT%H:%M:%S")
        assert abs(time.mktime(moment) - time.timezone - time.time()) < 600


def test_messages_that_are_too_large_or_broken_end_the_stream_and_not_the_page(
    alone: WebDaemon, open_page: Open
) -> None:
    page = live(open_page(alone.web))
    bodies = [b"data: " + b"x" * (9 * 2**20), b"event: state\ndata: {\n\n", b"\xff\xfe\n\n", b""]
    asked = []

    def answer(route: Any) -> None:
        asked.append(route)
        if bodies:
            route.fulfill(status=200, content_type="text/event-stream", body=bodies.pop(0))
        else:
            route.continue_()

    page.route("**/api/events", answer)
    page.reload()
    live(page)
    wait_for(page, "() => document.querySelectorAll('#hosts .devices li').length === 1")
    assert len(asked) >= 5


def test_too_many_pages_are_told_so(alone: WebDaemon, open_page: Open) -> None:
    page = live(open_page(alone.web))
    refusal = {"error": "too many pages are open already", "advice": "close one of them, and try again"}
    page.route("**/api/events", lambda route: route.fulfill(status=429, json=refusal))
    page.reload()
    wait_for(page, "() => document.querySelector('#notices').textContent.includes('too many pages')")
    page.unroute("**/api/events")
    live(page)


def test_the_page_has_no_more_rights_than_its_policy(alone: WebDaemon, open_page: Open) -> None:
    page = live(open_page(alone.web, faulty=True))
    assert ask(alone, "/").headers["content-security-policy"].startswith("default-src 'none'")
    told = page.evaluate("""async () => {
      const found = [];
      document.addEventListener("securitypolicyviolation", (event) => found.push(event.effectiveDirective));
      const script = document.createElement("script");
      script.textContent = "window.ran = true";
      document.body.append(script);
      const image = document.createElement("img");
      image.src = "http://127.0.0.1:1/x.png";
      await fetch("http://127.0.0.1:1/").catch(() => {});
      await new Promise((resolve) => setTimeout(resolve, 100));
      return [found.sort(), window.ran === undefined];
    }""")
    assert told[1] and {"connect-src", "img-src", "script-src-elem"} <= set(told[0])
