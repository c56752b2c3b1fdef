"""The cost of the dashboard's page for a browser: its load, and the work of a frame by Chromium's trace.

The stream is replayed: the messages of a thousand runs a second of eight sessions on three devices, made
by the daemon's own code, come from a server here at the daemon's pace. Times of work are processor time
of the page's main thread, which other processes disturb little. `make .venv-web/.web` installs the needs.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from figures import Figure, shared

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.append(str(Path(__file__).parents[2] / ".venv-web" / "packages"))

from dashboards import web_daemon

from heliograph_server.session.run_timeline import RunRecord, SplitRecord
from heliograph_server.web import guard
from heliograph_server.web.facts import SESSION_COLUMNS
from heliograph_server.web.hub import TICK_SECONDS, _event
from heliograph_server.web.timeline import encoded, lanes_of

PAGE = Path(__file__).parents[2] / "server" / "heliograph_server" / "web" / "page"
LOAD_BAR_MS, FRAME_BAR_MS = 1000.0, 8.0
LOADS = 8
RUNS_A_SECOND, SESSIONS, DEVICES = 1000, 8, ("cpu0", "m0/cpu0", "m1/cpu0")
#: Replayed before the trace begins, and while it goes on.
WARM_SECONDS, TRACE_SECONDS = 12.0, 15.0
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


def figures() -> Iterator[Figure]:
    """Milliseconds until a page on loopback shows the devices, and of work in a frame."""
    from playwright.sync_api import sync_playwright

    command = shutil.which("chromium")
    assert command, "there is no chromium command"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=command, args=["--no-sandbox"])
        try:
            loads = _loads(browser)
            worst = f"the longest {max(loads):.0f} ms of {len(loads)}"
            yield Figure("web/page-load", statistics.median(loads), LOAD_BAR_MS, 1.0, "ms", "the bar", worst)
            frames = _frames(browser)
        finally:
            browser.close()
    tail = sorted(frames)[int(0.99 * len(frames))]
    note = (
        f"p99 of {len(frames)} frames; median {statistics.median(frames):.1f}, longest {max(frames):.1f} ms"
    )
    yield Figure("web/frame", tail, FRAME_BAR_MS, 1.0, "ms", "the bar", note)


def _loads(browser: Any) -> list[float]:
    """Milliseconds from the request to the first device on the page, each with an empty cache."""
    found = []
    with web_daemon("--log-level", "warning") as daemon:
        for _ in range(shared(LOADS)):
            context = browser.new_context()
            page = context.new_page()
            began = time.perf_counter()
            page.goto(daemon.web)
            page.wait_for_selector("#hosts .devices li")
            found.append(1e3 * (time.perf_counter() - began))
            context.close()
    return found


def _frames(browser: Any) -> list[float]:
    """Milliseconds of the main thread's work from each frame's begin to the next one's."""
    with replaying() as url:
        page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
        page.goto(url)
        page.wait_for_selector("#timeline .legend li")
        page.evaluate("document.getElementById('timeline').scrollIntoView({behavior: 'instant'})")
        time.sleep(WARM_SECONDS)
        browser.start_tracing(page=page, categories=["toplevel", "devtools.timeline"])
        time.sleep(TRACE_SECONDS)
        trace = json.loads(browser.stop_tracing())
    return work_of_frames(trace["traceEvents"])


def work_of_frames(events: list[dict[str, Any]]) -> list[float]:
    """The processor time in milliseconds of the main thread's tasks from a frame's to the next one's."""
    named = [one for one in events if one.get("name") == "thread_name"]
    mains = {(one["pid"], one["tid"]) for one in named if one["args"]["name"] == "CrRendererMain"}
    fired = [one for one in events if one["name"] == "FireAnimationFrame"]
    main = Counter((one["pid"], one["tid"]) for one in fired).most_common(1)[0][0]
    assert main in mains, "frames are not of the main thread"
    frames = sorted(one["ts"] for one in fired if (one["pid"], one["tid"]) == main)
    tasks = sorted(
        (one["ts"], one["dur"], one.get("tdur", one["dur"]))
        for one in events
        if one["name"] == "ThreadControllerImpl::RunTask"
        and one["ph"] == "X"
        and (one["pid"], one["tid"]) == main
    )
    found, place = [0.0], 0
    for began, took, computed in tasks:
        # The task that fires a frame begins it.
        while place < len(frames) and frames[place] < began + took:
            found.append(0.0)
            place += 1
        found[-1] += computed / 1e3
    assert len(found) > 100, "the trace has too few frames"
    # The first and the last one are not whole.
    return found[1:-1]


# The replayed stream


def runs_of(origin: float, seconds: float) -> list[RunRecord]:
    """A thousand runs a second of several sessions, every eighth of which has splits on all devices."""
    found = []
    for number in range(round(RUNS_A_SECOND * seconds)):
        came = origin + number / RUNS_A_SECOND + random.uniform(0, 5e-4)
        began = came + random.expovariate(5000)
        computing = began + random.expovariate(8000)
        ended = computing + random.expovariate(800)
        session = random.randint(1, SESSIONS)
        devices: tuple[str, ...] = (DEVICES[session % len(DEVICES)],)
        splits: tuple[SplitRecord, ...] = ()
        if number % 8 == 0:
            devices, third = DEVICES, (ended - computing) / 3
            splits = tuple(
                SplitRecord(name, *(computing + (place + part) * third for part in (0, 0.2, 1)))
                for place, name in enumerate(DEVICES)
            )
        run = RunRecord(session, number, devices, came, began, computing, ended, ended + 3e-5)
        found.append(run._replace(splits=splits))
    return found


def state_at(ms: float, tick: int) -> dict[str, Any]:
    """A state of a pool of three with some sessions and tenants."""
    shown = {"about": "a device", "backend": "cpu", "type": "cpu", "total": 2**33, "lost": ""}
    devices = [
        {
            **shown,
            "name": name,
            "host": name.rpartition("/")[0],
            "free": 2**32 + tick * 2**16,
            "busy": random.random(),
        }
        for name in DEVICES
    ]
    row = {
        **dict.fromkeys(SESSION_COLUMNS, 0),
        "tenant": "t",
        "credential": "",
        "attached": True,
        "age": tick,
    }
    sessions = [
        [*{**row, "number": number, "client": f"client {number}", "memory": number * 2**20}.values()]
        for number in range(1, SESSIONS + 1)
    ]
    for one in sessions:
        one[SESSION_COLUMNS.index("runs")] = round(random.random() * 200, 1)
    member = {"address": "grpc://10.0.0.1:7070", "state": "ready", "why": "", "server": "heliograph"}
    link = {"a": "m0", "b": "m1", "trip": 2e-4, "rate": 1e9, "measured": True, "reachable": True}
    return {
        "at": round(ms),
        "up": tick / 2,
        "life": "replayed",
        "server": "heliograph/replayed",
        "level": "info",
        "lag": 1e-4,
        "seq": tick,
        "drain": {"state": "serving", "remaining": 0, "stay": False, "busy": 0},
        "devices": devices,
        "members": [{**member, "name": name} for name in ("m0", "m1")],
        "links": [link],
        "session_columns": SESSION_COLUMNS,
        "sessions": sessions,
        "session_count": SESSIONS,
        "tenants": [{"name": "t", "memory": 2**25 + tick * 2**10}],
        "uploads": [],
        "models": [],
        "language_models": [],
        "queues": {"waiting": 1, "running": 2, "commands": 3, "staged": 0},
        "run_rates": {
            "ended": RUNS_A_SECOND,
            "failed": 0,
            "p50": 900 + tick,
            "p99": 4000,
            "turn_p50": 100,
            "turn_p99": 900,
        },
    }


class _Replay(BaseHTTPRequestHandler):
    """The page's files, and the stream."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/api/events":
            self._stream()
        elif path.startswith("/api/"):
            found: dict[str, Any] = {"plans": [], "count": 0}
            if path == "/api/me":
                found = {"name": "", "tenant": "", "operator": True, "signed_in": False}
            self._reply(json.dumps(found).encode(), "application/json")
        else:
            file = PAGE / ("index.html" if path == "/" else Path(path).name)
            self._reply(file.read_bytes(), _TYPES[file.suffix])

    def _reply(self, content: bytes, type: str) -> None:
        self.send_response(200)
        for name, value in {
            **guard.HEADERS,
            "content-type": type,
            "content-length": str(len(content)),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        began = time.monotonic()
        for tick in range(1, 10_000):
            time.sleep(max(0.0, began + tick * TICK_SECONDS - time.monotonic()))
            now = time.monotonic()
            lanes, bars = encoded(lanes_of(runs_of(now - TICK_SECONDS, TICK_SECONDS)), now)
            message: dict[str, Any] = {"seq": tick, "at": round(time.time() * 1e3), "span": 500, "stride": 1}
            message |= {"lanes": lanes, "bars": bars, "open": []}
            try:
                self.wfile.write(_event("runs", message))
                if tick % 2 == 0:
                    self.wfile.write(_event("state", state_at(time.time() * 1e3, tick)))
                self.wfile.flush()
            except OSError:
                return

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@contextmanager
def replaying() -> Iterator[str]:
    """A server of the page and of the stream."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Replay)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="replay", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
