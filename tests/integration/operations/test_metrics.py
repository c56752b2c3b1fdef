"""Metrics of a real daemon, scraped over HTTP; and that scrapers do no harm."""

from __future__ import annotations

import re
import socket
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from access_daemons import Tokens, daemon_with_tokens
from daemon_threads import ThreadDaemon, thread_daemon
from prometheus_client.parser import text_string_to_metric_families

import heliograph as hg
from heliograph.admin import connect as connect_admin
from heliograph_proto.devices import Memory
from heliograph_proto.errors import ConfigurationError, MemberLostError
from heliograph_server.daemon.reload import ReloadedFile
from heliograph_server.resources.principals import Principal
from heliograph_server.telemetry.device_memory import MemoryWatch
from heliograph_server.telemetry.histograms import BOUNDS, Histogram
from heliograph_server.telemetry.metrics import METRICS
from heliograph_server.telemetry.metrics_server import MAX_CONNECTIONS, MetricsServer, bind_metrics

SECONDS = 20.0
X = np.ones(4, np.float32)
SECRET = "a tenant's secret that nobody guesses"


def scrape(url: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=SECONDS) as answer:
        text: str = answer.read().decode()
        return text


def values(text: str) -> dict[str, float]:
    """By name and labels, as `name{a="b"}`."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def url_of(daemon: ThreadDaemon) -> str:
    assert daemon._daemon is not None
    return daemon._daemon.telemetry.url


@pytest.fixture
def daemon() -> Iterator[ThreadDaemon]:
    with thread_daemon(metrics_listen="127.0.0.1:0") as made:
        yield made


def rows() -> hg.Graph:
    g = hg.Graph()
    g.output("y", hg.ops.get_rows(g.weight("table", np.eye(4, dtype=np.float32)), g.input("i", (1,), "i32")))
    return g


def test_what_a_client_does_is_counted(daemon: ThreadDaemon) -> None:
    with hg.connect(daemon.url) as session:
        plan = session.compile(rows())
        for _ in range(3):
            plan.run(i=np.array([1], np.int32))
        with pytest.raises(hg.OutOfRangeError):
            plan.run(i=np.array([9], np.int32))
        tensor = session.empty((1000,), "f32")
        tensor.set(np.zeros(1000, np.float32))
        session.synchronize()
        found = values(scrape(url_of(daemon)))
        assert found['heliograph_runs_total{outcome="ok",tenant=""}'] == 3
        assert found['heliograph_runs_total{outcome="failed",tenant=""}'] == 1
        assert found['heliograph_command_errors_total{reason="out_of_range"}'] == 1
        for phase in ("queue", "input", "compute", "output"):
            assert found[f'heliograph_run_seconds_count{{phase="{phase}"}}'] == 4
            assert found[f'heliograph_run_seconds_bucket{{le="+Inf",phase="{phase}"}}'] == 4
        assert found['heliograph_run_seconds_sum{phase="compute"}'] > 0
        assert found['heliograph_bytes_total{direction="received",transport="content"}'] == 64
        carried = found['heliograph_bytes_total{direction="received",transport="inline"}'] + found.get(
            'heliograph_bytes_total{direction="received",transport="bulk"}', 0
        )
        assert carried == 4 * 4 + 4000
        assert found['heliograph_bytes_total{direction="sent",transport="inline"}'] == 3 * 16
        assert found['heliograph_content_lookups_total{outcome="miss"}'] >= 1
        assert found['heliograph_sessions{tenant=""}'] == 1 and found["heliograph_plans"] == 1
        assert found['heliograph_device_memory_bytes{device="cpu0",state="used"}'] >= 4064
        assert found["heliograph_serving"] == 1 and found["heliograph_draining"] == 0
        assert found["heliograph_runs_in_flight"] == found["heliograph_runs_queued"] == 0
    after = values(scrape(url_of(daemon)))
    assert after['heliograph_sessions{tenant=""}'] == 0 and after["heliograph_plans"] == 0
    for name, value in found.items():
        if "_total" in name or "_bucket" in name:
            assert after[name] >= value, f"{name} went back"


def test_runs_that_wait_are_the_queue(daemon: ThreadDaemon) -> None:
    with hg.connect(daemon.url) as session:
        plan = session.compile(rows())
        paused = plan.submit(i=np.array([1], np.int32), taps="*", pause=True)
        taps = paused.taps(SECONDS)
        next(taps)
        behind = [plan.submit(i=np.array([1], np.int32)) for _ in range(3)]
        session.device("cpu0").memory()
        found = values(scrape(url_of(daemon)))
        assert found["heliograph_runs_in_flight"] + found["heliograph_runs_queued"] >= 1
        assert found["heliograph_runs_in_flight"] >= 1
        list(taps)
        assert all(run.exception(SECONDS) is None for run in (paused, *behind))


def test_calls_that_are_refused_are_counted_by_reason(daemon: ThreadDaemon) -> None:
    with hg.connect(daemon.url) as session:
        g = hg.Graph()
        g.output("y", g.input("x", (4,), "f32") + 1)
        with pytest.raises(hg.UnknownDeviceError):
            session._shell.drive(_ask_memory("nowhere"))
    found = values(scrape(url_of(daemon)))
    assert found['heliograph_call_errors_total{reason="unknown_device"}'] == 1


def test_calls_without_a_right_are_counted_and_logged_with_their_address(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = Tokens(tmp_path / "tokens")
    with daemon_with_tokens(tokens, metrics_listen="127.0.0.1:0") as daemon:
        with pytest.raises(hg.UnauthenticatedError):
            hg.connect(daemon.url)
        admin = connect_admin(daemon.url, token=tokens.of["alice"])
        with admin, pytest.raises(hg.PermissionDeniedError):
            admin.sessions()
        found = values(scrape(url_of(daemon)))
    assert found['heliograph_call_errors_total{reason="unauthenticated"}'] == 1
    assert found['heliograph_call_errors_total{reason="permission_denied"}'] == 1
    assert "a call of Open by ipv4:127.0.0.1" in caplog.text


def test_refused_requests_of_the_dashboard_are_counted(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path / "tokens")
    with daemon_with_tokens(tokens, metrics_listen="127.0.0.1:0", web="127.0.0.1:0") as daemon:
        request = urllib.request.Request(f"{daemon.web}/api/me", headers={"authorization": "Bearer hgt_x"})
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            urllib.request.urlopen(request, timeout=30)
        refused.value.close()
        found = values(scrape(url_of(daemon)))
    assert found['heliograph_call_errors_total{reason="unauthenticated"}'] == 1


def _ask_memory(device: str):  # type: ignore[no-untyped-def]
    from heliograph.core.effects import ask
    from heliograph.core.methods import GET_MEMORY

    return ask(GET_MEMORY, device)


def test_every_metric_of_the_table_has_help_and_a_kind(daemon: ThreadDaemon) -> None:
    with hg.connect(daemon.url) as session:
        session.compile(rows()).run(i=np.array([1], np.int32))
        text = scrape(url_of(daemon))
    absent = {"heliograph_certificate_expiry_timestamp_seconds"}
    for metric in METRICS:
        if metric.name not in absent:
            assert f"# HELP {metric.shown} {metric.help}\n" in text
            assert f"# TYPE {metric.shown} {metric.kind}\n" in text
    named = set(re.findall(r"# TYPE (heliograph_\w+) ", text))
    assert named == {metric.shown for metric in METRICS} - absent
    assert "process_resident_memory_bytes" in text


def test_labels_and_text_hold_nothing_that_a_client_chose(
    daemon: ThreadDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HELIOGRAPH_TENANT", SECRET)
    with hg.connect(daemon.url) as session:
        g = hg.Graph()
        g.output("chosen_name", g.input("other_name", (4,), "f32") + 1)
        session.compile(g).run(other_name=X)
        text = scrape(url_of(daemon))
        assert session._shell.info.session.hex() not in text
    for word in ("chosen_name", "other_name", SECRET, "heliograph-python"):
        assert word not in text


def test_tenants_are_labels_by_the_names_that_the_operator_gave(daemon: ThreadDaemon) -> None:
    daemon.host.open_session("test", principal=Principal("team a"))
    assert values(scrape(url_of(daemon)))['heliograph_sessions{tenant="team a"}'] == 1


def test_a_daemon_that_drains_says_so(daemon: ThreadDaemon) -> None:
    daemon.host.drain()
    found = values(scrape(url_of(daemon)))
    assert found["heliograph_serving"] == 0 and found["heliograph_draining"] == 1


def test_a_file_that_could_not_be_read_again_is_counted(daemon: ThreadDaemon, tmp_path: Path) -> None:
    path = tmp_path / "settings"
    path.write_text("1")
    assert daemon._daemon is not None
    daemon._daemon.watch.add("configuration", ReloadedFile(int, path))
    for content in ("2", "nonsense", "3"):
        path.write_text(content)
        daemon._daemon.watch.look(at_once=True)
    found = values(scrape(url_of(daemon)))
    assert found['heliograph_reloads_total{kind="configuration",outcome="ok"}'] == 2
    assert found['heliograph_reloads_total{kind="configuration",outcome="failed"}'] == 1


def test_openmetrics_is_given_to_who_asks_for_it(daemon: ThreadDaemon) -> None:
    text = scrape(url_of(daemon), Accept="application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n") and not scrape(url_of(daemon)).endswith("# EOF\n")


def test_members_are_counted_by_state_and_when_they_are_lost() -> None:
    from heliograph_server.pool import open_pool_of
    from heliograph_server.telemetry.histograms import RunCounter
    from heliograph_server.telemetry.metrics import Exposition
    from heliograph_server.telemetry.telemetry import DaemonFacts

    with ExitStack() as stack:
        member = stack.enter_context(thread_daemon())
        head = open_pool_of([member.url], SECONDS)
        stack.callback(head.close)
        facts = DaemonFacts()
        facts.host = lambda: head
        exposition = Exposition(facts, RunCounter())
        stack.callback(exposition.close)
        found = values(exposition.text("")[1].decode())
        assert found['heliograph_members{state="ready"}'] == 1 and found["heliograph_members_lost_total"] == 0
        names = [name for name in found if name.startswith("heliograph_device_memory") and "/cpu0" in name]
        assert len(names) == 2
        head._devices_changed(_lost(head))
        assert values(exposition.text("")[1].decode())["heliograph_members_lost_total"] == 1


def _lost(head):  # type: ignore[no-untyped-def]
    from heliograph_server.resources.membership import MembershipChange

    return MembershipChange("member", lost=tuple(head.devices), why="it was told to")


# Where it listens


def test_nothing_listens_unless_it_is_asked_for() -> None:
    with thread_daemon() as made:
        assert url_of(made) == "" and not made.host.observers


def test_an_address_that_is_taken_says_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigurationError, match="address is in use") as failure:
            bind_metrics(f"127.0.0.1:{taken.getsockname()[1]}")
        assert "metrics_listen" in failure.value.advice


@pytest.mark.parametrize(
    "where", ["a:port:1", "127.0.0.1:99999", "http://127.0.0.1:1", "256.1.1.1:80", "127.0.0.1", ":9464"]
)
def test_an_address_that_is_none_is_refused(where: str) -> None:
    with pytest.raises(ConfigurationError):
        bind_metrics(where).close()


# Scrapers


class Slow:
    """A server whose metrics take until somebody lets them go."""

    def __init__(self) -> None:
        self.asked = 0
        self.entered, self.go = threading.Event(), threading.Event()
        self.outcomes: Counter[str] = Counter()
        self.server = MetricsServer(bind_metrics("127.0.0.1:0"), self.collect, self.outcomes)
        self.server.start()
        parts = urlsplit(self.server.url)
        self.address = (str(parts.hostname), int(parts.port or 0))

    def collect(self, accept: str) -> tuple[str, bytes]:
        self.asked += 1
        self.entered.set()
        self.go.wait(SECONDS)
        return "text/plain", b"metrics\n"


@pytest.fixture
def slow() -> Iterator[Slow]:
    made = Slow()
    yield made
    made.go.set()
    made.server.close()


def test_scrapers_that_ask_at_the_same_time_share_one_collection(slow: Slow) -> None:
    with ExitStack() as stack:
        several = [stack.enter_context(socket.create_connection(slow.address, SECONDS)) for _ in range(5)]
        for made in several:
            made.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert slow.entered.wait(SECONDS)
        # Once these are answered, which came later, all of those have been read.
        for _ in range(3):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                scrape(slow.server.url + "/nothing")
        slow.go.set()
        for made in several:
            assert made.makefile("rb").read().endswith(b"metrics\n")
    assert slow.asked < 5


def test_more_scrapers_than_there_may_be_are_told_to_come_later(slow: Slow) -> None:
    with ExitStack() as stack:
        several = [
            stack.enter_context(socket.create_connection(slow.address, SECONDS))
            for _ in range(MAX_CONNECTIONS)
        ]
        for made in several:
            made.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert slow.entered.wait(SECONDS)
        with stack.enter_context(socket.create_connection(slow.address, SECONDS)) as late:
            assert b" 503 " in late.recv(1024)
        assert slow.outcomes["refused"] == 1
        slow.go.set()
        for made in several:
            assert made.makefile("rb").read().endswith(b"metrics\n")
    assert scrape(slow.server.url) == "metrics\n"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /secrets HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"\r\n\r\n", b"404"),
        (b"GET /metrics HTTP/1.1\r\n" + b"x" * 100_000, b""),
        (b"\xff\xfe\r\n\r\n", b"404"),
    ],
)
def test_what_is_no_scrape_is_refused(slow: Slow, request_: bytes, status: bytes) -> None:
    with socket.create_connection(slow.address, SECONDS) as made:
        try:
            made.sendall(request_)
            assert made.recv(64).split(b" ")[1:2] == [status][: bool(status)]
        except ConnectionResetError:
            assert not status
    assert slow.asked == 0


def test_a_scraper_that_leaves_is_no_matter(slow: Slow) -> None:
    with socket.create_connection(slow.address, SECONDS) as made:
        made.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert slow.entered.wait(SECONDS)
    slow.go.set()
    assert scrape(slow.server.url) == "metrics\n"


def test_closing_waits_for_no_scraper(slow: Slow) -> None:
    with socket.create_connection(slow.address, SECONDS) as made:
        made.sendall(b"GET /metrics")
        slow.server.close()
        slow.server.close()
        with pytest.raises((urllib.error.URLError, OSError)):
            scrape(slow.server.url)


# What is slow to say


def test_a_device_that_says_nothing_holds_nobody_up_and_is_asked_once() -> None:
    gate, asked = threading.Event(), Counter[str]()

    def ask(name: str) -> Memory:
        asked[name] += 1
        if name == "slow":
            gate.wait(SECONDS)
        if name == "lost":
            raise MemberLostError("gone")
        return Memory(1, 2)

    watch = MemoryWatch(ask, seconds=0.05)
    try:
        for _ in range(3):
            found, silent = watch.look(["quick", "slow", "lost"])
            assert found["quick"] == Memory(1, 2) and set(silent) == {"slow", "lost"}
        assert asked["slow"] == 1 and asked["quick"] == 3
        gate.set()
        watch._queries["slow"].result(SECONDS)
        found, silent = watch.look(["slow"])
        assert found == {"slow": Memory(1, 2)} and silent == ()
    finally:
        gate.set()
        watch.close()


def test_a_histogram_counts_at_the_bound_and_above_all() -> None:
    made = Histogram()
    for value in (0.0, -1.0, BOUNDS[0], BOUNDS[1], 1e9):
        made.add(value)
    counts = dict(made.cumulative())
    assert counts[str(BOUNDS[0])] == 3 and counts[str(BOUNDS[1])] == 4 and counts["+Inf"] == 5
    assert made.sum == pytest.approx(1e9)
