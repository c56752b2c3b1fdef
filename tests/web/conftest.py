"""A real Chromium, headless, with Playwright; both come by `make test-web`."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

#: What `make test-web` installs.
INSTALLED = ROOT / ".venv-web"
#: Screenshots, to be looked at.
PICTURES = ROOT / "dist" / "web"
SIZES = {"laptop": (1440, 900), "phone": (390, 844)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.web)


@pytest.fixture(autouse=True)
def no_threads_are_left() -> Iterator[None]:
    """As that of all tests, but for the threads of Playwright's event loop, which lives as long as the
    browser."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if not thread.name.startswith("asyncio"):
            thread.join(10)
            assert not thread.is_alive(), f"{thread.name} is left"


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    sys.path.append(str(INSTALLED / "packages"))
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        pytest.skip(f"{error.name} is missing: make test-web installs it")
    if (command := shutil.which("chromium")) is None:
        pytest.skip("no chromium command")
    with sync_playwright() as playwright:
        # Its sandbox needs rights that containers lack; it opens our own pages only.
        made = playwright.chromium.launch(executable_path=command, args=["--no-sandbox"])
        yield made
        made.close()


class Faults:
    """What no page may do."""

    def __init__(self, own: str) -> None:
        self.own, self.found = own, list[str]()

    def watch(self, page: Any) -> None:
        page.on("pageerror", lambda error: self.found.append(f"error: {error}"))
        page.on("console", self._line)
        page.on("request", self._request)
        page.on("dialog", lambda dialog: self.found.append(f"a script of a name ran: {dialog.message}"))

    def _line(self, message: Any) -> None:
        # Replies with an error status are told as errors; tests look at them themselves.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.found.append(f"console: {message.text}")

    def _request(self, request: Any) -> None:
        if not request.url.startswith((self.own, "data:", "blob:")):
            self.found.append(f"request to {request.url}")


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Open a page: `open_page(url, size="phone", dark=True)`. Its faults fail the test, unless `faulty`."""
    contexts, faults = [], []

    def open(
        url: str,
        size: str = "laptop",
        *,
        dark: bool = False,
        script: str = "",
        faulty: bool = False,
        **options: Any,
    ) -> Any:
        width, height = SIZES[size]
        is_phone = size == "phone"
        context = chromium.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            device_scale_factor=2 if is_phone else 1,
            is_mobile=is_phone,
            has_touch=is_phone,
            **options,
        )
        contexts.append(context)
        context.set_default_timeout(30_000)
        if script:
            context.add_init_script(script)
        page = context.new_page()
        seen = Faults(url)
        if not faulty:
            faults.append(seen)
        seen.watch(page)
        page.goto(url)
        return page

    yield open
    for one in contexts:
        one.close()
    assert [found for one in faults for found in one.found] == []


@pytest.fixture
def picture(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Keep a screenshot: `picture(page, "name")`."""

    def take(page: Any, name: str, *, whole: bool = True) -> None:
        PICTURES.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=str(PICTURES / f"{name}.png"), full_page=whole)

    return take


@pytest.fixture(scope="session")
def axe() -> Callable[[Any], list[str]]:
    """The rules of axe that a page breaks, with the elements."""
    path = INSTALLED / "node_modules" / "axe-core" / "axe.min.js"
    if not path.exists():
        pytest.skip("axe-core is missing: make test-web installs it")
    source = path.read_text()

    def broken(page: Any) -> list[str]:
        # In the page's own world its policy allows no such script; the debugger's may.
        page.evaluate(source)
        # A frame of another origin is checked by itself: it takes no messages of the page's.
        found = page.evaluate("axe.run(document, {resultTypes: ['violations'], iframes: false})")
        return [
            f"{one['id']} ({one['impact']}): {node['html'][:200]} {node['failureSummary'][:300]}"
            for one in found["violations"]
            for node in one["nodes"]
        ]

    return broken
