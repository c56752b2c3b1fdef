"""Plans on the dashboard over HTTP: as tables and as pictures, for those who may see them, within bounds."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from access_daemons import Tokens
from core_client import CoreClient
from daemon_threads import ThreadDaemon, thread_daemon
from dashboards import WebDaemon, ask, bearer, rows_of, state_of, web_daemon
from waiting import until

import heliograph as hg
from heliograph_backends.cpu.backend import CpuDevice
from heliograph_proto.errors import CancelledError, HeliographError, InternalError, LimitExceededError
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.types import tensor_type
from heliograph_server.resources.principals import Right
from heliograph_server.web import stream
from heliograph_server.web.explaining import explainer, picture_process, plans
from heliograph_server.web.explaining.picture_process import PictureProcess
from heliograph_server.web.explaining.picture_program import request_of

X = np.ones(8, np.float32)
HOSTILE = '<img src=x onerror="document.title=1">&'
LAYERS = 12


@pytest.fixture(scope="module")
def daemon() -> Iterator[WebDaemon]:
    with web_daemon() as made:
        yield made


@contextmanager
def layered(url: str, token: str | None = None) -> Iterator[hg.Plan]:
    """A plan with layers as scopes, and with names that have markup."""
    with hg.connect(url, token=token) as session:
        g = hg.Graph()
        x = g.input("x", (8,), "f32")
        for number in range(LAYERS):
            with g.scope(f"layer{number}"), g.scope(HOSTILE):
                x = hg.gelu(x) + 1.0
        g.output(HOSTILE, x)
        plan = session.compile(g)
        plan.run(x=X)
        yield plan


def path_of(daemon: Any, token: str = "") -> str:
    """The path of the plan of the newest session."""
    newest = max(row["number"] for row in rows_of(state_of(daemon, token)))
    found: list[str] = []

    def is_listed() -> bool:
        # A list of plans is good for others for a second.
        rows = ask(daemon, "/api/plans", headers=bearer(token)).json["plans"]
        found[:] = [f"/api/plans/{one['session']}/{one['plan']}" for one in rows if one["session"] == newest]
        return bool(found)

    until(is_listed, "the plan is listed")
    return found[0]


def data_of(page: str) -> Any:
    """The data of the picture in a page."""
    return json.loads(page.partition('id="data-0">')[2].partition("</script>")[0])


# Pictures


def test_a_plan_is_drawn_as_its_explanation_draws_it(daemon: WebDaemon, tmp_path: Path) -> None:
    with layered(daemon.url) as plan:
        reply = ask(daemon, f"{path_of(daemon)}/picture")
        plan.explain().html(tmp_path / "plan.html")
    found, expected = data_of(reply.body.decode()), data_of((tmp_path / "plan.html").read_text())
    assert reply.status == 200 and reply.headers["content-type"] == "text/html; charset=utf-8"
    assert found["title"].startswith("Plan 1 of session")
    assert found["boxes"][1:] == expected["boxes"][1:] and len(found["boxes"]) > LAYERS
    for part in ("scopes", "devices", "outputs", "boxOf", "open"):
        assert found[part] == expected[part], part
    assert found["timing"] == "run" and "<img" not in reply.body.decode()


def test_a_picture_has_a_policy_and_an_origin_of_its_own(daemon: WebDaemon) -> None:
    with layered(daemon.url):
        headers = ask(daemon, f"{path_of(daemon)}/picture").headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    assert "sandbox allow-scripts" in policy and "frame-ancestors 'self'" in policy
    assert "allow-same-origin" not in policy and headers["x-frame-options"] == "SAMEORIGIN"
    assert headers["cache-control"] == "no-store"


def test_a_plan_whose_weights_are_divided_over_devices_is_told_and_drawn() -> None:
    with web_daemon("--device", "cpu:threads=1,memory=64MiB") as daemon, hg.connect(daemon.url) as session:
        g = hg.Graph()
        g.output("y", g.input("x", (1, 64), "f32") @ g.weight("w", np.ones((64, 256), np.float32)))
        split = hg.SplitBufferType("cpu1", {"cpu0": 1.0, "cpu1": 1.0})
        plan = session.compile(g, ["cpu0", "cpu1"], split={"w": split})
        plan.run(x=np.ones((1, 64), np.float32))
        path = path_of(daemon)
        assert {op for one in ask(daemon, path).json["splits"] for op, _ in one["ops"]} <= {"matmul"}
        found = data_of(ask(daemon, f"{path}/picture").body.decode())
        assert len(found["nodes"]) == 1 and found["devices"] == ["cpu0", "cpu1"]


def test_a_tenant_has_pictures_of_its_own_plans(tmp_path: Path) -> None:
    rights = {"alice": (Right.USE,), "bob": (Right.USE,), "olga": (Right.USE, Right.ADMIN)}
    tokens = Tokens(tmp_path / "tokens.toml", rights)
    hers, his, operators = (bearer(tokens.of[name]) for name in rights)
    with (
        web_daemon("--tokens", str(tokens.path)) as daemon,
        layered(daemon.url, tokens.of["alice"]),
    ):
        path = path_of(daemon, tokens.of["olga"])
        for given, status in ((hers, 200), (operators, 200), (his, 404), ({}, 401)):
            assert ask(daemon, path, headers=given).status == status
            reply = ask(daemon, f"{path}/picture", headers=given)
            assert reply.status == status
            if status != 200:
                # A frame shows nothing but pages, so an error is one.
                assert reply.body.startswith(b"<!doctype html>") and b"layer0" not in reply.body
                assert "sandbox" in reply.headers["content-security-policy"]


@pytest.mark.parametrize("path", ["1/x", "x/1", "999/1", "1/999", f"1/{'9' * 19}", "1/-1"])
def test_a_picture_of_no_plan_is_a_page_that_says_so(daemon: WebDaemon, path: str) -> None:
    with layered(daemon.url):
        reply = ask(daemon, f"/api/plans/{path}/picture")
    assert reply.status in (400, 404) and reply.body.startswith(b"<!doctype html>")


def test_a_plan_of_ten_thousand_nodes_is_drawn(daemon: WebDaemon) -> None:
    with hg.connect(daemon.url) as session:
        g = hg.Graph()
        x = g.input("x", (8,), "f32")
        for number in range(10_000):
            with g.scope(f"layer{number // 20}"):
                x = x + 1.0
        g.output("y", x)
        plan = session.compile(g)
        reply = ask(daemon, f"{path_of(daemon)}/picture")
        plan.free()
    assert reply.status == 200 and len(reply.body) < picture_process.PAGE_BYTES
    assert len(data_of(reply.body.decode())["nodes"]) == 10_001


def test_a_plan_of_more_nodes_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explainer, "MOST_NODES", LAYERS)
    with thread_daemon(web="127.0.0.1:0") as daemon, layered(daemon.url):
        reply = ask(daemon, f"{path_of(daemon)}/picture")
        assert reply.status == 429 and b"plan.explain().html(path)" in reply.body
        assert ask(daemon, path_of(daemon)).status == 200


# Bounds


class Gate:
    """Something that waits to be let through, and counts how many wait at the same time."""

    def __init__(self) -> None:
        self.here, self.most = 0, 0
        self.opened = threading.Event()
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            self.here += 1
            self.most = max(self.most, self.here)
        assert self.opened.wait(30)
        with self._lock:
            self.here -= 1


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ThreadDaemon, Gate]]:
    """A daemon whose pictures and reports wait at a gate."""
    gate, draw, plan_of = Gate(), PictureProcess.draw, plans.plan_of

    def wait_and_draw(process: PictureProcess, request: bytes) -> bytes:
        gate.wait()
        return draw(process, request)

    def wait_and_tell(session: Any, number: int) -> dict[str, Any]:
        gate.wait()
        return plan_of(session, number)

    monkeypatch.setattr(PictureProcess, "draw", wait_and_draw)
    monkeypatch.setattr(explainer, "plan_of", wait_and_tell)
    with thread_daemon(web="127.0.0.1:0") as daemon:
        try:
            yield daemon, gate
        finally:
            gate.opened.set()


def test_one_picture_is_drawn_at_a_time_and_few_wait(gated: tuple[ThreadDaemon, Gate]) -> None:
    daemon, gate = gated
    with layered(daemon.url), ThreadPoolExecutor() as threads:
        path = f"{path_of(daemon)}/picture"
        asking = [threads.submit(ask, daemon, path) for _ in range(explainer.MOST_PICTURES_OF_VIEW + 1)]
        until(lambda: any(one.done() for one in asking), "one too many was refused")
        [refused] = [one.result() for one in asking if one.done()]
        assert refused.status == 429 and b"too many plans are being drawn" in refused.body
        gate.opened.set()
        statuses = sorted(one.result().status for one in asking)
        assert statuses == [200] * explainer.MOST_PICTURES_OF_VIEW + [429] and gate.most == 1
        assert ask(daemon, path).status == 200


def test_a_page_that_leaves_gives_its_place_to_another(gated: tuple[ThreadDaemon, Gate]) -> None:
    daemon, gate = gated
    with layered(daemon.url):
        path = f"{path_of(daemon)}/picture"
        leaving = [http.client.HTTPConnection(daemon.web.partition("://")[2]) for _ in range(2)]
        for one in leaving:
            one.request("GET", path)
        until(lambda: ask(daemon, path).status == 429, "all places are taken")
        for one in leaving:
            one.close()
        gate.opened.set()
        until(lambda: ask(daemon, path).status == 200, "a place is free")


def test_a_page_that_takes_its_picture_slowly_keeps_its_place_for_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = 64 * 2**20
    monkeypatch.setattr(PictureProcess, "draw", lambda *_: bytes(large))
    monkeypatch.setattr(explainer, "MOST_PICTURES_OF_VIEW", 1)
    with thread_daemon(web="127.0.0.1:0") as daemon, layered(daemon.url):
        path = f"{path_of(daemon)}/picture"
        assert len(ask(daemon, path).body) == large
        slow = http.client.HTTPConnection(daemon.web.partition("://")[2])
        slow.request("GET", path)
        assert slow.getresponse().status == 200
        assert ask(daemon, path).status == 429
        slow.close()
        until(lambda: ask(daemon, path).status == 200, "the place is free")
        with monkeypatch.context() as hurried:
            hurried.setattr(stream, "REPLY_SECONDS", 0.2)
            late = http.client.HTTPConnection(daemon.web.partition("://")[2])
            late.request("GET", path)
            reply = late.getresponse()
        until(lambda: ask(daemon, path).status == 200, "the time is over")
        with pytest.raises((http.client.IncompleteRead, OSError)):
            reply.read()
        late.close()


def test_those_who_ask_for_a_plan_at_the_same_time_get_one_answer_and_few_plans_wait(
    gated: tuple[ThreadDaemon, Gate],
) -> None:
    daemon, gate = gated
    with hg.connect(daemon.url) as session, ThreadPoolExecutor(32) as threads:
        kept = []
        for size in range(1, explainer.MOST_OF_VIEW + 2):
            g = hg.Graph()
            g.output("y", g.input("x", (size,), "f32") + 1.0)
            kept.append(session.compile(g))
        rows = ask(daemon, "/api/plans").json["plans"]
        paths = [f"/api/plans/{one['session']}/{one['plan']}" for one in rows]
        asking = [threads.submit(ask, daemon, path) for path in paths for _ in range(3)]
        until(lambda: sum(one.done() for one in asking) == 3, "one plan too many was refused")
        assert {one.result().status for one in asking if one.done()} == {429}
        gate.opened.set()
        statuses = [one.result().status for one in asking]
        assert statuses.count(200) == 3 * explainer.MOST_OF_VIEW and gate.most <= explainer.THREADS


# The process that draws


@pytest.fixture(scope="module")
def large_request() -> bytes:
    """The request for a picture of a plan of many nodes."""
    type, count = tensor_type("f32", (8,)), 3000
    nodes = tuple(Node("relu", (number,), type, {}, "") for number in range(count))
    graph = Graph((Leaf(LeafKind.INPUT, "x", type),), nodes, (Output("y", count),))
    with CoreClient(CpuDevice("cpu0", 1, native=False)) as client:
        client.compile(1, graph)
        return request_of(graph, client.session.explain(1), "A plan")


def failure(data: bytes) -> HeliographError:
    with pytest.raises(HeliographError) as caught:
        PictureProcess().draw(data)
    return caught.value


@pytest.mark.parametrize(
    ("bound", "value", "words"),
    [
        ("PAGE_BYTES", 2**10, "MiB"),
        ("MEMORY_BYTES", 2**26, "memory"),
        ("CPU_SECONDS", 0, "processor"),
        ("SECONDS", 0.01, "takes over"),
    ],
)
def test_a_picture_that_takes_too_much_is_refused(
    monkeypatch: pytest.MonkeyPatch, large_request: bytes, bound: str, value: float, words: str
) -> None:
    monkeypatch.setattr(picture_process, bound, value)
    error = failure(large_request)
    assert isinstance(error, LimitExceededError) and words in error.message
    assert error.advice == picture_process.ADVICE


def test_a_process_that_fails_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(failure(b"nonsense"), InternalError)
    assert "ended with status 1: " in caplog.text


def test_a_picture_that_is_not_wanted_any_more_does_not_begin(large_request: bytes) -> None:
    process = PictureProcess()
    process.end()
    with pytest.raises(CancelledError):
        process.draw(large_request)


def test_a_picture_that_is_not_wanted_any_more_ends(
    monkeypatch: pytest.MonkeyPatch, large_request: bytes
) -> None:
    # A program that never ends by itself.
    monkeypatch.setattr(picture_process, "_PROGRAM", "import time; time.sleep(600)")
    process = PictureProcess()
    with ThreadPoolExecutor(1) as thread:
        drawing = thread.submit(process.draw, large_request)
        until(lambda: process._process is not None, "the process has begun")
        process.end()
        assert isinstance(drawing.exception(30), CancelledError)
