"""The dashboard over HTTP: what a page may ask for, what it is told, and by whom."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from access_daemons import Tokens
from daemon_threads import thread_daemon
from dashboards import (
    WebDaemon,
    ask,
    bearer,
    events,
    first,
    llm_serve,
    names_in,
    rows_of,
    state_of,
    unfinished_upload,
    web_daemon,
)
from gguf_files import write_model
from paths import ROOT
from waiting import until

import heliograph as hg
from heliograph import admin
from heliograph_proto.errors import ConfigurationError, SessionClosedError
from heliograph_server.auth.tokens import remove_token
from heliograph_server.config.config import ServerConfig
from heliograph_server.resources.principals import Right
from heliograph_server.rpc.operators import Operators
from heliograph_server.web import hub
from heliograph_server.web.language_models import LanguageModelWatch

X = np.ones(8, np.float32)


@pytest.fixture(scope="module")
def daemon() -> Iterator[WebDaemon]:
    with web_daemon() as made:
        yield made


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    rights = {
        "alice": (Right.USE,),
        "bob": (Right.USE,),
        "olga": (Right.USE, Right.ADMIN),
        "pool": (Right.POOL,),
    }
    return Tokens(tmp_path_factory.mktemp("tokens") / "tokens.toml", rights)


@pytest.fixture(scope="module")
def guarded(tokens: Tokens) -> Iterator[WebDaemon]:
    with web_daemon("--tokens", str(tokens.path)) as made:
        yield made


def plus_one(session: hg.Session) -> hg.Plan:
    g = hg.Graph()
    g.output("y", g.input("x", (8,), "f32") + 1.0)
    return session.compile(g)


def sign_in(daemon: WebDaemon, token: str) -> str:
    """The cookie of a browser that signed in."""
    reply = ask(daemon, "/api/sign-in", {"token": token})
    assert reply.status == 200, reply.body
    return reply.headers["set-cookie"].partition(";")[0]


# The page


def test_the_page_and_its_files_come_with_a_strict_policy_and_nothing_inline(daemon: WebDaemon) -> None:
    page = ask(daemon, "/")
    assert page.status == 200 and "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff" and page.headers["x-frame-options"] == "DENY"
    text = page.body.decode()
    assert "<style" not in text and "style=" not in text and "onclick" not in text
    assert text.count("<script") == 1 and "http" not in text.replace("http-equiv", "")
    names = [part.partition('"')[0] for part in text.split('"page/')[1:]]
    modules = {one.name for one in (ROOT / "server/heliograph_server/web/page").glob("*.js")}
    assert modules <= set(names), "a module that is not named in the page is asked for late"
    for name in names:
        found = ask(daemon, f"/page/{name}")
        assert found.status == 200 and found.body, name
        assert ask(daemon, f"/page/{name}", headers={"if-none-match": found.headers["etag"]}).status == 304


@pytest.mark.parametrize(
    "path",
    [
        "/page/../app.py",
        "/page/%2e%2e/app.py",
        "/page/..%2fapp.py",
        "/page/none.js",
        "/etc/passwd",
        "/api",
        "//",
    ],
)
def test_other_paths_are_not_found(daemon: WebDaemon, path: str) -> None:
    reply = ask(daemon, path)
    assert reply.status == 404 and set(reply.json) == {"error", "advice"}
    assert "content-security-policy" in reply.headers


def test_other_methods_and_large_or_broken_bodies_are_refused(daemon: WebDaemon) -> None:
    assert ask(daemon, "/api/drain", verb="GET").status == 405
    assert ask(daemon, "/api/events", {}).status == 405
    assert ask(daemon, "/api/log-level", b"x" * 9000).status == 429
    for body in (b"{", b"[]", b'{"level": 3}', b"[" * 5000):
        assert ask(daemon, "/api/log-level", body).status == 400, body
    for body in ({"seconds": "1"}, {"seconds": -1}, {"seconds": float("nan")}, {"stay": 1}):
        assert ask(daemon, "/api/drain", body).status == 400, body
    assert ask(daemon, "/api/drain", {"seconds": 1e9}).status == 400


@pytest.mark.parametrize("seconds", ["0", "601", "1e3", "-1", "9" * 30, "x"])
def test_a_window_that_the_daemon_does_not_keep_is_refused(daemon: WebDaemon, seconds: str) -> None:
    reply = ask(daemon, f"/api/history?seconds={seconds}")
    assert reply.status == 400 and reply.json["advice"]


def test_another_site_can_neither_read_nor_act_by_a_viewers_browser(daemon: WebDaemon) -> None:
    for path in ("/api/me", "/api/events", "/api/history", "/api/plans"):
        assert ask(daemon, path, headers={"host": "evil.example"}).status == 403
    for given in ({"x-heliograph": ""}, {"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
        assert ask(daemon, "/api/undo-drain", {}, headers=given).status == 403
    assert "access-control-allow-origin" not in ask(daemon, "/api/me").headers


# Messages


def test_a_session_its_runs_and_its_plan_are_told(daemon: WebDaemon) -> None:
    with events(daemon) as found, hg.connect(daemon.url) as session:
        plan = plus_one(session)
        kept = session.put(np.ones(2**18, np.float32))
        for _ in range(20):
            plan.run(x=X)

        def has_run(state: Any) -> bool:
            # Runs are told when they have ended, so more of them until one is seen.
            plan.run(x=X)
            return bool(rows_of(state)) and state["run_rates"]["ended"] > 0

        state = first(found, "state", has_run)
        [row] = rows_of(state)
        assert row["plans"] == 1 and row["attached"] and row["memory"] >= 2**20
        assert state["run_rates"]["p99"] >= state["run_rates"]["p50"] > 0
        assert [one["name"] for one in state["devices"]] == ["cpu0"]
        plan.run(x=X)
        runs = first(found, "runs", lambda one: one["bars"])
        assert ["cpu0", "compute"] in runs["lanes"] and len(runs["bars"]) % 6 == 0
        [listed] = ask(daemon, "/api/plans").json["plans"]
        assert listed["inputs"] == ["x"] and listed["outputs"] == ["y"] and listed["devices"] == ["cpu0"]
        detail = ask(daemon, f"/api/plans/{listed['session']}/{listed['plan']}").json
        assert [one["device"] for one in detail["splits"]] == ["cpu0"] and detail["splits"][0]["nodes"] >= 1
        assert detail["runs"] == sum(runs for _, runs in detail["times"]) > 0
        assert (detail["waiting"], detail["running"], detail["loop"]) == (0, 0, [0, 0])
        kept.free()
        assert ask(daemon, "/api/plans/999/1").status == 404
        assert ask(daemon, f"/api/plans/{listed['session']}/999").status in (400, 404)
        history = ask(daemon, "/api/history?seconds=600").json
        assert history["history"]["at"] and history["timeline"]
        assert any("began" in line[4] for line in history["log"])


def test_a_run_that_takes_long_is_told_before_it_ends(daemon: WebDaemon) -> None:
    g = hg.Graph()
    x = g.input("x", (700, 700), "f32")
    for _ in range(300):
        x = hg.tanh(x @ x * 0.001)
    g.output("y", x)
    with events(daemon) as found, hg.connect(daemon.url) as session:
        plan, given = session.compile(g), session.put(np.ones((700, 700), np.float32))
        first(found, "state")
        runs = [plan.submit(x=given, fetch=False) for _ in range(3)]
        told = first(found, "runs", lambda one: one["open"])["open"]
        assert told[0]["phase"] in ("compute", "turn", "copy") and told[0]["session"] > 0
        for one in runs:
            one.cancel()


def test_an_upload_under_way_is_told(daemon: WebDaemon) -> None:
    with unfinished_upload(daemon.url, 2**22, 2**18), events(daemon) as found:
        [told] = first(found, "state", lambda one: one["uploads"])["uploads"]
        assert (told["kind"], told["size"], told["received"]) == ("weights", 2**22, 2**18)


def test_nothing_is_observed_once_no_page_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are records only while there are observers; a page that opens later sees none of before."""
    monkeypatch.setattr(hub, "LINGER_SECONDS", 0.2)
    with thread_daemon(web="127.0.0.1:0") as daemon:
        host = daemon.host
        with events(daemon) as found, hg.connect(daemon.url) as session:
            first(found, "state")
            plan = plus_one(session)
            plan.run(x=X)
            first(found, "runs", lambda one: one["bars"])
            assert host.observers
        until(lambda: not host.observers, "the collection has ended")
        with hg.connect(daemon.url) as session:
            plan = plus_one(session)
            for _ in range(50):
                plan.run(x=X)
            state = state_of(daemon)
            assert state["run_rates"]["ended"] == 0 and state["queues"]["running"] == 0


# Actions


def test_an_operator_ends_a_session_sets_the_level_and_drains(daemon: WebDaemon) -> None:
    with hg.connect(daemon.url) as session:
        plan = plus_one(session)
        [row] = rows_of(state_of(daemon))
        ended = ask(daemon, "/api/end-session", {"number": row["number"], "reason": "lunch\n<b>"})
        assert ended.status == 200, ended.body
        with pytest.raises(SessionClosedError, match="lunch"):
            plan.run(x=X)
    assert ask(daemon, "/api/end-session", {"number": row["number"]}).status in (400, 404)
    assert ask(daemon, "/api/log-level", {"level": "debug"}).json == {"previous": "info"}
    assert state_of(daemon)["level"] == "debug"
    assert ask(daemon, "/api/log-level", {"level": "info"}).status == 200
    assert ask(daemon, "/api/drain", {"seconds": 5, "stay": True}).status == 200
    until(lambda: state_of(daemon)["drain"]["state"] == "drained", "the drain is over")
    assert ask(daemon, "/api/undo-drain", {}).status == 200
    assert state_of(daemon)["drain"]["state"] == "serving"


# Tokens


def test_nothing_of_the_host_is_told_without_a_token(guarded: WebDaemon) -> None:
    assert ask(guarded, "/").status == 200
    for path in ("/api/me", "/api/events", "/api/history", "/api/plans", "/api/plans/1/1"):
        reply = ask(guarded, path)
        assert reply.status == 401 and reply.json["advice"] == "sign in with a token"
        assert ask(guarded, path, headers=bearer("hgt_wrong")).status == 401
        assert ask(guarded, path, headers={"cookie": "heliograph=wrong; heliograph-7080=x"}).status == 401
    assert ask(guarded, "/api/drain", {}).status == 401


def test_a_cookie_is_no_token_and_no_script_reads_it(guarded: WebDaemon, tokens: Tokens) -> None:
    reply = ask(guarded, "/api/sign-in", {"token": tokens.of["alice"]})
    cookie = reply.headers["set-cookie"].lower()
    assert reply.status == 200 and reply.json == {
        "name": "alice", "tenant": "alice", "operator": False, "signed_in": True,
    }  # fmt: skip
    assert (
        "httponly" in cookie and "samesite=strict" in cookie and "path=/" in cookie and "max-age=" in cookie
    )
    assert tokens.of["alice"].lower() not in cookie
    given = {"cookie": reply.headers["set-cookie"].partition(";")[0]}
    assert ask(guarded, "/api/me", headers=given).json["name"] == "alice"
    assert ask(guarded, "/api/sign-out", {}, headers=given).status == 200
    assert ask(guarded, "/api/me", headers=given).status == 401


def test_a_right_is_needed_to_look_and_another_one_to_act(guarded: WebDaemon, tokens: Tokens) -> None:
    assert ask(guarded, "/api/sign-in", {"token": tokens.of["pool"]}).status == 403
    assert ask(guarded, "/api/me", headers=bearer(tokens.of["pool"])).status == 403
    for path, body in (
        ("/api/drain", {}),
        ("/api/undo-drain", {}),
        ("/api/log-level", {"level": "debug"}),
        ("/api/end-session", {"number": 1}),
    ):
        reply = ask(guarded, path, body, headers=bearer(tokens.of["alice"]))
        assert reply.status == 403 and "admin" in reply.json["advice"]
    given = {"cookie": sign_in(guarded, tokens.of["olga"])}
    assert ask(guarded, "/api/log-level", {"level": "info"}, headers=given).status == 200
    assert (
        ask(guarded, "/api/log-level", {"level": "info"}, headers={**given, "x-heliograph": ""}).status == 403
    )


def test_a_tenant_sees_its_own(guarded: WebDaemon, tokens: Tokens) -> None:
    with (
        hg.connect(guarded.url, token=tokens.of["alice"]) as hers,
        hg.connect(guarded.url, token=tokens.of["bob"]) as his,
        events(guarded, tokens.of["alice"]) as found,
        events(guarded, tokens.of["olga"]) as all_of_it,
    ):
        plans = plus_one(hers), plus_one(his)
        first(found, "state")
        first(all_of_it, "state")
        for _ in range(10):
            for plan in plans:
                plan.run(x=X)
        mine = first(found, "state", lambda one: one["run_rates"]["ended"] > 0)
        assert names_in(rows_of(mine), "tenant") == {"alice"}
        assert names_in(mine["tenants"], "name") == {"alice"}
        assert "busy" not in mine["devices"][0] and "level" not in mine and "lag" not in mine
        everything = first(all_of_it, "state", lambda one: one["session_count"] >= 2)
        assert {"alice", "bob"} <= names_in(rows_of(everything), "tenant") and "level" in everything
        numbers = {row["tenant"]: row["number"] for row in rows_of(everything)}
        assert (
            mine["run_rates"]["ended"] <= everything["run_rates"]["ended"] or mine["run_rates"]["ended"] <= 10
        )
        history = ask(guarded, "/api/history", headers=bearer(tokens.of["alice"])).json
        assert set(history["history"]["tenants"]) == {"alice"}
        assert "bob" not in json.dumps(history)
        shown = [session for one in history["timeline"] for session in one["bars"][4::6]]
        assert set(shown) <= {numbers["alice"]}
        plans_of_hers = ask(guarded, "/api/plans", headers=bearer(tokens.of["alice"])).json["plans"]
        assert names_in(plans_of_hers, "session") == {numbers["alice"]}
        other = next(
            one
            for one in ask(guarded, "/api/plans", headers=bearer(tokens.of["olga"])).json["plans"]
            if one["session"] == numbers["bob"]
        )
        path = f"/api/plans/{other['session']}/{other['plan']}"
        assert ask(guarded, path, headers=bearer(tokens.of["alice"])).status == 404
        assert ask(guarded, path, headers=bearer(tokens.of["olga"])).status == 200


def test_served_models_are_told_to_those_to_whom_the_gateway_tells_them(
    tokens: Tokens, tmp_path: Path
) -> None:
    (tmp_path / "doubling" / "1").mkdir(parents=True)
    g = hg.Graph()
    g.output("y", g.input("x", (2, 3), "f32") * 2.0)
    hg.save(g, tmp_path / "doubling" / "1" / "model.hgraph")
    options = {"tokens": str(tokens.path), "kserve_http": "127.0.0.1:0", "models": str(tmp_path)}
    with thread_daemon(web="127.0.0.1:0", **options) as daemon:
        for name in ("alice", "olga"):
            with events(daemon, tokens.of[name]) as found:
                [told] = first(found, "state", lambda one: one["models"])["models"]
            index = urllib.request.Request(
                f"{daemon.kserve_url}/v2/repository/index", b"{}", bearer(tokens.of[name])
            )
            with urllib.request.urlopen(index, timeout=30) as reply:
                assert [one["name"] for one in json.load(reply)] == [told["name"]] == ["doubling"]


def test_a_page_is_told_when_its_token_expires_or_is_revoked(guarded: WebDaemon, tokens: Tokens) -> None:
    token = tokens.add("short", expires=time.time() + 3600)
    cookie = sign_in(guarded, token)
    with events(guarded, cookie=cookie) as found:
        first(found, "state")
        remove_token(tokens.path, "short")
        assert "revoked" in first(found, "end")["reason"]
    assert ask(guarded, "/api/me", headers={"cookie": cookie}).status == 401
    tokens.add("brief", expires=time.time() + 2)
    with events(guarded, tokens.of["brief"]) as found:
        assert "expired" in first(found, "end")["reason"]
    assert ask(guarded, "/api/sign-in", {"token": tokens.of["brief"]}).status == 401


def test_signing_out_ends_the_open_pages_of_that_browser(guarded: WebDaemon, tokens: Tokens) -> None:
    cookie = sign_in(guarded, tokens.of["alice"])
    with events(guarded, cookie=cookie) as found:
        first(found, "state")
        assert ask(guarded, "/api/sign-out", {}, headers={"cookie": cookie}).status == 200
        assert "signed out" in first(found, "end")["reason"]


def test_wrong_tokens_can_be_tried_a_few_times_only(tokens: Tokens) -> None:
    with web_daemon("--tokens", str(tokens.path)) as daemon:
        found = [ask(daemon, "/api/sign-in", {"token": f"hgt_{number}"}).status for number in range(12)]
        assert found == [401] * 10 + [429] * 2
        # Programs with a token are not concerned.
        assert ask(daemon, "/api/me", headers=bearer(tokens.of["alice"])).status == 200


def test_actions_are_in_the_audit_log_also_refused_ones(tokens: Tokens, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    with web_daemon("--tokens", str(tokens.path), "--audit-log", str(audit)) as daemon:
        ask(daemon, "/api/log-level", {"level": "info"}, headers=bearer(tokens.of["olga"]))
        ask(daemon, "/api/drain", {"seconds": 9}, headers=bearer(tokens.of["alice"]))
    found = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [(one["method"], one["principal"], one["outcome"]) for one in found] == [
        ("SetLogLevel", "olga", "ok"),
        ("Drain", "alice", "refused"),
    ]
    assert found[0]["peer"].startswith("web:127.0.0.1")


def test_an_action_that_fails_unexpectedly_is_not_in_the_audit_log_as_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> str:
        raise RuntimeError("no such thing was foreseen")

    monkeypatch.setattr(Operators, "set_log_level", fail)
    audit = tmp_path / "audit.jsonl"
    with thread_daemon(web="127.0.0.1:0", audit_log=str(audit)) as made:
        reply = ask(made, "/api/log-level", {"level": "info"})
        assert reply.status == 500
    found = json.loads(audit.read_text())
    assert (found["method"], found["outcome"], found["error"]) == ("SetLogLevel", "failed", "RuntimeError")


@pytest.mark.parametrize("seconds", [b"NaN", b"Infinity", b"1e999", b"1" + b"0" * 400])
def test_a_drain_of_no_time_is_refused(daemon: WebDaemon, seconds: bytes) -> None:
    assert ask(daemon, "/api/drain", b'{"seconds": %b}' % seconds).status == 400


# Language models


def test_a_server_that_speaks_no_http_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def speak() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"what?\r\n\r\n")

        speaking = threading.Thread(target=speak)
        speaking.start()
        watch = LanguageModelWatch([f"http://127.0.0.1:{listening.getsockname()[1]}"])
        try:
            watch.rows(0.0)
            asking = watch._servers[0].asking
            assert asking is not None and asking.result(30) is None
            assert [one["state"] for one in watch.rows(0.5)] == ["does not answer"]
        finally:
            watch.close()
            speaking.join()


def test_servers_of_language_models_are_told_with_their_requests(tmp_path: Path, tokens: Tokens) -> None:
    model = write_model(tmp_path / "small.gguf", "llama", context=2000)
    secret = tmp_path / "secret"
    secret.write_text(tokens.of["alice"])
    with (
        llm_serve(model, "--token-file", str(tokens.path)) as url,
        web_daemon(
            "--web-llm", url, "--web-llm", "http://127.0.0.1:9", "--web-llm-token", str(secret)
        ) as daemon,
        events(daemon) as found,
    ):
        rows = first(found, "state", lambda one: one["language_models"][0]["state"] == "ready")
        assert rows["language_models"][0]["name"] == f"small at {url}"
        body = json.dumps({"model": "small", "prompt": "ab", "max_tokens": 20}).encode()
        for _ in range(3):
            request = urllib.request.Request(f"{url}/v1/completions", body, bearer(tokens.of["alice"]))
            with urllib.request.urlopen(request, timeout=30) as reply:
                reply.read()
        first(found, "state", lambda one: one["language_models"][0]["tokens"] > 0)
        gone = first(found, "state", lambda one: one["language_models"][1]["state"] != "not asked yet")
        assert gone["language_models"][1]["state"] == "does not answer"


# The end, and the settings


def test_pages_are_told_of_the_end_and_do_not_delay_it() -> None:
    with web_daemon() as daemon, events(daemon) as found:
        first(found, "state")
        daemon.process.terminate()
        assert first(found, "end")["reason"] == "stopping"
        assert daemon.process.wait(30) == 0


def test_a_drain_of_the_daemon_shows_on_the_page_and_by_the_command(daemon: WebDaemon) -> None:
    with admin.connect(daemon.url) as operator:
        operator.drain(stay=True)
        try:
            assert state_of(daemon)["drain"]["state"] in ("draining", "drained")
        finally:
            operator.undo_drain()


EXPOSED: dict[str, tuple[dict[str, Any], str]] = {
    "another host's without access": ({"web": "0.0.0.0:0"}, "reached from other hosts"),
    "tokens in the clear": ({"web": "0.0.0.0:0", "tokens": "t"}, "would be sent in plain text"),
    "TLS without a certificate": ({"web": "https://127.0.0.1:0"}, "needs a certificate"),
    "a unix socket": ({"web": "unix:///tmp/x"}, "web is"),
    "a language model of another kind": ({"web_llm": ("file:///etc/passwd",)}, "web_llm has"),
    "a language model with a secret in its address": ({"web_llm": ("http://a:b@c:1",)}, "web_llm has"),
}


@pytest.mark.parametrize("name", EXPOSED)
def test_the_dashboard_is_exposed_no_more_than_other_addresses(name: str) -> None:
    given, what = EXPOSED[name]
    with pytest.raises(ConfigurationError, match=what):
        ServerConfig(**given)
