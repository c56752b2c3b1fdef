"""The pure parts of the dashboard: bars, quantiles, history, sign-ins and checks of requests."""

from __future__ import annotations

import logging
import random
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
from prometheus_client import generate_latest

from heliograph.llm.serving.http.metrics import Metrics
from heliograph_proto.errors import (
    CancelledError,
    LimitExceededError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from heliograph_proto.sessions import DrainStatus, SessionStatus, Snapshot
from heliograph_server.resources.principals import Principal, Right
from heliograph_server.session.run_timeline import RunRecord, SplitRecord
from heliograph_server.telemetry.telemetry import ModelFigures
from heliograph_server.web import guard
from heliograph_server.web.facts import HostFacts, View, table_of
from heliograph_server.web.history import MOST_SERIES, History, Sample, largest
from heliograph_server.web.language_models import parse, row_of
from heliograph_server.web.log_tap import KEPT_LINES, MOST_LINES, MOST_TEXT, LogTap
from heliograph_server.web.models import ModelWatch
from heliograph_server.web.quantiles import bucket_of, quantile_of_bounds, quantile_us
from heliograph_server.web.run_tap import MOST_RECORDS, RunTap, counts_of
from heliograph_server.web.sign_in import (
    IDLE_SECONDS,
    MINUTE,
    MOST_BROWSERS,
    MOST_FAILURES,
    MOST_OF_TOKEN,
    MOST_SECONDS,
    Browsers,
)
from heliograph_server.web.timeline import (
    COMPUTE,
    COPY,
    MOST_BARS,
    SEVERAL,
    TURN,
    Bar,
    encoded,
    fewer,
    lanes_of,
)

ALICE, BOB = Principal("alice", frozenset((Right.USE,))), Principal("bob", frozenset((Right.USE,)))


def run(session: int = 1, at: float = 0.0, who: Principal = ALICE, **changed: object) -> RunRecord:
    """A run that waits 1 ms for its turn and 2 ms for inputs, computes 3 ms, and delivers for 4 ms."""
    found = RunRecord(session, 1, ("cpu0",), at, at + 0.001, at + 0.003, at + 0.006, at + 0.010, who)
    return found._replace(**changed)


# The timeline


def test_a_run_is_a_turn_two_copies_and_computing() -> None:
    lanes = lanes_of([run()])
    assert lanes["cpu0", TURN] == [Bar(0.0, 0.001, 1, 1, 0.001)]
    assert [(one.began, one.ended) for one in lanes["cpu0", COPY]] == [(0.001, 0.003), (0.006, 0.010)]
    assert [(one.began, one.ended) for one in lanes["cpu0", COMPUTE]] == [(0.003, 0.006)]


def test_splits_are_bars_of_their_devices() -> None:
    splits = SplitRecord("a", 0.003, 0.004, 0.005), SplitRecord("b", 0.003, 0.003, 0.006)
    lanes = lanes_of([run(devices=("a", "b"), splits=splits)])
    assert [(one.began, one.ended) for one in lanes["a", COMPUTE]] == [(0.004, 0.005)]
    assert [(one.began, one.ended) for one in lanes["b", COMPUTE]] == [(0.003, 0.006)]
    # The wait of the split for its inputs follows that of the run.
    assert [(one.began, one.ended, one.parts) for one in lanes["a", COPY]] == [(0.001, 0.004, 2)]


def test_a_run_that_was_refused_before_it_had_a_device_has_no_bar() -> None:
    assert lanes_of([run(devices=())]) == {}


def test_bars_are_bounded_and_cover_the_same_time_in_order() -> None:
    random.seed(7)
    for sessions in (1, 3):
        bars = []
        for _ in range(5000):
            began, long = random.random(), random.expovariate(2000)
            bars.append(Bar(began, began + long, random.randint(1, sessions), 1, long))
        found = fewer(list(bars))
        assert len(found) <= MOST_BARS
        assert all(one.began <= other.began for one, other in pairwise(found))
        assert sum(one.parts for one in found) == len(bars)
        assert sum(one.busy for one in found) == pytest.approx(sum(one.busy for one in bars))
        assert all(any(one.began <= bar.began <= one.ended for one in found) for bar in bars)
        assert {one.session for one in found} <= set(range(1, sessions + 1)) | {SEVERAL}


def test_short_gaps_of_one_session_close_and_others_stay() -> None:
    near = [Bar(0.0, 0.001, 1, 1, 0.001), Bar(0.0012, 0.002, 1, 1, 0.0008)]
    assert [one.parts for one in fewer(near)] == [2]
    assert len(fewer([near[0], near[1]._replace(session=2)])) == 2
    assert len(fewer([near[0], near[1]._replace(began=0.1, ended=0.2)])) == 2


def test_bars_in_a_message_are_whole_numbers_of_microseconds() -> None:
    lanes, flat = encoded(lanes_of([run(at=5.0)]), 5.010)
    assert lanes == [("cpu0", "turn"), ("cpu0", "copy"), ("cpu0", "compute")]
    assert flat[:6] == [0, -10_000, 1000, 1000, 1, 1] and len(flat) == 24
    assert all(type(one) is int for one in flat)


# Runs


def test_the_tap_counts_every_run_and_keeps_a_bounded_sample() -> None:
    tap = RunTap()
    for _ in range(3):
        for _ in range(5 * MOST_RECORDS):
            tap.run_ended(run())
        taken = tap.take()
        assert taken.ended == {("alice", 1): 5 * MOST_RECORDS}
        assert len(taken.records) <= 2 * MOST_RECORDS
    # Once it knows the rate, the sample is spread over the whole tick.
    assert taken.stride == 5 and len(taken.records) == MOST_RECORDS
    tap.take()
    assert tap.take().stride == 1


def test_a_view_has_the_runs_of_its_tenant_alone() -> None:
    tap = RunTap()
    tap.run_ended(run(1))
    tap.run_ended(run(2, who=BOB, error=CancelledError("over")))
    taken = tap.take()
    mine, records = counts_of(taken, View(False, "alice").may_see)
    assert (mine.ended, mine.failed, set(mine.sessions)) == (1, 0, {1})
    assert [one.session for one in records] == [1]
    everything, _ = counts_of(taken, View(True).may_see)
    assert (everything.ended, everything.failed) == (2, 1)


def test_who_may_administrate_sees_all_tenants() -> None:
    operator = View.of(Principal("ops", frozenset((Right.ADMIN,))))
    assert operator.may_see("alice") and operator.may_see("")
    assert not View.of(ALICE).may_see("bob") and not View.of(ALICE).may_see("")


@pytest.mark.parametrize("part", [0.5, 0.99])
def test_quantiles_are_right_within_five_percent(part: float) -> None:
    random.seed(3)
    values = sorted(random.lognormvariate(-7, 1.5) for _ in range(5000))
    counts = Counter(map(bucket_of, values))
    exact = values[int(part * len(values))] * 1e6
    assert quantile_us(counts, part) == pytest.approx(exact, rel=0.05)


def test_quantiles_of_nothing_are_zero_and_extremes_are_counted() -> None:
    assert quantile_us({}, 0.5) == 0
    assert quantile_us(Counter([bucket_of(-1.0), bucket_of(0.0)]), 0.99) > 0
    assert quantile_of_bounds([0, 0], [0, 0], ["1.0", "+Inf"], 0.5) == 0
    assert quantile_of_bounds([5, 5], [5, 9], ["1.0", "+Inf"], 0.5) == 1.0


# Models


def figures(count: float, fast: float) -> ModelFigures:
    buckets = [("0.001", fast), ("0.01", count), ("+Inf", count)]
    empty = ([("+Inf", 0.0)], 0.0)
    return ModelFigures("m", "1", {"ok": int(count), "failed": 0}, 2, {"request": (buckets, 1.0)}, empty)


def test_a_models_rates_are_those_of_the_last_seconds() -> None:
    watch = ModelWatch()
    watch.rows([figures(1000, 1000)], 0.0)
    # All before were fast; of the last hundred in ten seconds, most were not.
    [row] = watch.rows([figures(1100, 1010)], 10.0)
    assert (row["rate"], row["p50"], row["waiting"]) == (10.0, 10_000, 2)
    # A model that was loaded again begins at 0.
    [row] = watch.rows([figures(10, 10)], 11.0)
    assert row["rate"] > 0


def told(answers: int, tokens: int) -> str:
    """The metrics of a server of a language model that has given so many answers."""
    metrics = Metrics()
    for _ in range(answers):
        metrics.requests.labels("/v1/completions", 200).inc()
        result = SimpleNamespace(
            prompt_tokens=5,
            reused_tokens=0,
            tokens=[1] * tokens,
            prompt_seconds=0.02,
            seconds=1.0,
            speculation=None,
        )
        metrics.count(SimpleNamespace(result=result, gaps=()))  # type: ignore[arg-type]
    pages = SimpleNamespace(used=3, kept=1, free=4, shared=0, evictions=0)
    bounds = SimpleNamespace(answers=8)
    metrics._scheduler = SimpleNamespace(pages=pages, waiting=2, jobs=[1, 2, 3], bounds=bounds, puts_back=0)  # type: ignore[assignment]
    return generate_latest(metrics.registry).decode()


def test_the_metrics_of_a_language_model_become_a_row_with_rates() -> None:
    before, now = parse(told(2, 10)), parse(told(6, 10))
    row = row_of("small", now, before, 2.0)
    assert row == {
        "name": "small", "state": "ready", "answers": 3, "waiting": 2, "requests": 2.0, "tokens": 20.0,
        "first": 25_000, "pages": 0.375,
    }  # fmt: skip
    # A server that has just begun has no figures of answers yet, and none that restarted a rate below 0.
    assert row_of("small", {}, {}, 1.0)["state"] == "loading"
    assert row_of("small", before, now, 1.0)["tokens"] == 0


@pytest.mark.parametrize(
    "text", ["", "x", "heliograph_llm_waiting", "heliograph_llm_waiting one\n\0", "# HELP"]
)
def test_what_is_no_metric_is_left_out(text: str) -> None:
    assert parse(text) == {}


@pytest.mark.parametrize("figure", ["NaN", "+Inf", "-Inf", "1e999"])
def test_a_language_model_with_figures_that_are_no_numbers_has_a_row(figure: str) -> None:
    text = f"heliograph_llm_answers {figure}\nheliograph_llm_waiting {figure}\n"
    text += f'heliograph_llm_first_token_seconds_bucket{{le="x"}} {figure}\n'
    text += 'heliograph_llm_first_token_seconds_bucket{le="y"} 1\n'
    assert row_of("strange", parse(text), {}, 1.0)["first"] == 0


# The state


def test_a_session_that_ended_since_its_status_was_taken_breaks_no_table() -> None:
    status = SessionStatus(7, 1.0, attached=False)
    snapshot = Snapshot("a daemon", bytes(16), 1.0, DrainStatus(), sessions=(status,))
    state = table_of(HostFacts(snapshot, (), (), 0.0, 0.0), View(True), {})
    row = dict(zip(state["session_columns"], state["sessions"][0], strict=True))
    assert (row["number"], row["waiting"], row["running"]) == (7, 0, 0)


# History


def test_the_history_keeps_ten_minutes_and_columns_are_of_one_length() -> None:
    history = History(600)
    for second in range(700):
        history.add(Sample(second * 1000, busy={"cpu0": 0.5}, sessions={second // 100: 10}))
    assert len(history) == 600
    table = history.table(600)
    assert len(table["at"]) == 600 and len(table["busy"]["cpu0"]) == 600
    assert all(len(column) == 600 for column in table["sessions"].values())
    assert table["sessions"]["6"][-1] == 10 and table["sessions"]["6"][0] is None
    assert len(history.table(10)["at"]) == 10


def test_many_sessions_are_a_bounded_number_of_series_with_the_same_sum() -> None:
    values = {number: number for number in range(1, 1001)}
    found = largest(values)
    assert len(found) == MOST_SERIES and sum(found.values()) == sum(values.values())
    history = History()
    for second in range(20):
        history.add(Sample(second, sessions={100 * second + number: 5 for number in range(30)}))
    columns = history.table(600)["sessions"]
    assert len(columns) == MOST_SERIES
    assert sum(column[7] or 0 for column in columns.values()) == 150


# The log


def record(text: str, **extra: object) -> logging.LogRecord:
    found = logging.LogRecord("heliograph_server.rpc.x", logging.WARNING, __file__, 1, text, None, None)
    found.__dict__.update(extra)
    return found


def test_lines_are_for_their_tenant_and_those_of_the_daemon_for_operators() -> None:
    tap = LogTap()
    tap.handle(record("of alice", session=1, tenant="alice"))
    tap.handle(record("of bob", session=2, tenant="bob"))
    tap.handle(record("of the daemon"))
    mine, _ = tap.since(0, lambda tenant: tenant == "alice")
    assert [line[4] for line in mine] == ["of alice"]
    everything, _ = tap.since(0, lambda _: True)
    assert [line[4] for line in everything] == ["of alice", "of bob", "of the daemon"]
    assert everything[0][1:4] == [everything[0][1], "warning", "rpc.x"]


def test_lines_have_no_secrets_no_line_ends_and_a_bounded_length() -> None:
    tap = LogTap()
    tap.handle(record("token=hgt_secret\nsecond line " + "x" * 5000))
    [line], _ = tap.since(0, lambda _: True)
    assert "secret" not in line[4] and "\n" not in line[4] and len(line[4]) < MOST_TEXT + 100


def test_lines_that_do_not_fit_are_counted() -> None:
    tap = LogTap()
    for number in range(KEPT_LINES + 50):
        tap.handle(record(f"line {number}"))
    lines, dropped = tap.since(0, lambda _: True)
    assert len(lines) == MOST_LINES and dropped == KEPT_LINES + 50 - MOST_LINES
    assert lines[-1][4] == f"line {KEPT_LINES + 49}"
    assert tap.since(tap.newest, lambda _: True) == ([], 0)


# Signing in


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_browser_is_known_by_its_name_until_its_time_is_over() -> None:
    clock = Clock()
    browsers = Browsers(clock)
    name = browsers.add(ALICE)
    assert len(name) >= 43 and browsers.find(name).principal is ALICE
    clock.now += IDLE_SECONDS - 1
    browsers.find(name)
    clock.now += IDLE_SECONDS + 1
    with pytest.raises(UnauthenticatedError, match="time is over"):
        browsers.find(name)
    with pytest.raises(UnauthenticatedError, match="signed out"):
        browsers.find(name)
    assert len(browsers) == 0


def test_use_does_not_prolong_a_sign_in_for_ever() -> None:
    clock = Clock()
    browsers = Browsers(clock)
    browser = browsers.find(browsers.add(ALICE))
    while clock.now <= MOST_SECONDS:
        browsers.use(browser)
        clock.now += IDLE_SECONDS / 2
    with pytest.raises(UnauthenticatedError):
        browsers.use(browser)
    assert browser.is_out


def test_who_signs_out_is_out_also_on_open_pages() -> None:
    browsers = Browsers(Clock())
    name = browsers.add(ALICE)
    browser = browsers.find(name)
    browsers.remove(name)
    browsers.remove(name)
    with pytest.raises(UnauthenticatedError):
        browsers.use(browser)


def test_the_number_of_browsers_is_bounded_and_the_idlest_gives_its_place() -> None:
    browsers = Browsers(Clock())
    first, second = browsers.add(ALICE), browsers.add(ALICE)
    kept = browsers.find(second)
    browsers.find(first)
    for number in range(MOST_BROWSERS - 1):
        browsers.add(Principal("bob", frozenset((Right.USE,)), key=f"token {number}"))
    assert len(browsers) == MOST_BROWSERS and kept.is_out
    assert browsers.find(first).principal is ALICE


def test_a_token_signs_no_browser_of_another_one_out() -> None:
    browsers = Browsers(Clock())
    bob = Principal("bob", frozenset((Right.USE,)), key="a token of bob")
    name = browsers.add(ALICE)
    first = browsers.find(browsers.add(bob))
    for _ in range(MOST_BROWSERS):
        newest = browsers.add(bob)
    assert len(browsers) == 1 + MOST_OF_TOKEN
    assert first.is_out and not browsers.find(name).is_out and not browsers.find(newest).is_out


def test_failed_sign_ins_are_bounded_for_an_address_and_for_all() -> None:
    clock = Clock()
    browsers = Browsers(clock)
    for _ in range(MOST_FAILURES):
        browsers.check_failures("a")
        browsers.failed("a")
    with pytest.raises(LimitExceededError):
        browsers.check_failures("a")
    browsers.check_failures("b")
    for number in range(100):
        browsers.failed(f"c{number}")
    with pytest.raises(LimitExceededError):
        browsers.check_failures("d")
    clock.now += MINUTE
    browsers.check_failures("a")


# Requests


@pytest.mark.parametrize(
    "host", ["127.0.0.1:7080", "localhost:7080", "LOCALHOST", "[::1]:7080", "10.1.2.3", "box.example:7080"]
)
def test_a_daemon_without_tokens_is_asked_by_its_address_or_name(host: str) -> None:
    guard.check_host(host, "box.example")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "", "[evil", "a" * 1000])
def test_other_names_are_refused_as_another_site_may_own_them(host: str) -> None:
    with pytest.raises(PermissionDeniedError):
        guard.check_host(host, "127.0.0.1")


OWN = {"host": "127.0.0.1:7080", "origin": "http://127.0.0.1:7080", guard.HEADER: "1"}


@pytest.mark.parametrize(
    "changed",
    [
        {guard.HEADER: "0"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_only_the_page_itself_changes_something(changed: dict[str, str]) -> None:
    guard.check_origin(OWN)
    guard.check_origin({**OWN, "sec-fetch-site": "same-origin"})
    with pytest.raises(PermissionDeniedError):
        guard.check_origin({**OWN, **changed})
    with pytest.raises(PermissionDeniedError):
        guard.check_origin({name: value for name, value in OWN.items() if name != guard.HEADER})


def test_no_script_style_or_other_host_is_allowed_but_the_pages_files() -> None:
    policy = dict(part.split(" ", 1) for part in guard.POLICY.split("; "))
    assert policy.pop("default-src") == "'none'"
    assert set(policy.values()) == {"'self'", "'none'"}
