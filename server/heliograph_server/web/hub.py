"""Collects the state for all open pages, twice a second, and hands each its messages.

    ticks ──(a thread)──▸ host, runs, log ──▸ one message for each view ──▸ its viewers' places

A viewer has one place for each kind of message, and a new one takes the place of one that was not
sent yet: a slow viewer misses some and always gets the newest. While there are no viewers, nothing
is collected, counted or kept, except the history, which has a gap then.

All of it is of the event loop but `_Collector`, which works on a thread of its own, one call at a
time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

from heliograph_proto.errors import HeliographError, LimitExceededError, UnauthenticatedError
from heliograph_proto.sessions import DrainStatus
from heliograph_server.resources.principals import Principal
from heliograph_server.runtime.draining import Draining
from heliograph_server.runtime.host import Host
from heliograph_server.runtime.host_slot import HostSlot
from heliograph_server.session.run_timeline import RunRecord
from heliograph_server.telemetry.logs import log_level
from heliograph_server.telemetry.loop_lag import LoopLag
from heliograph_server.telemetry.telemetry import ModelFigures
from heliograph_server.web.explaining.plans import plans_of
from heliograph_server.web.facts import HostFacts, HostWatch, View, open_runs, table_of, uploads_of
from heliograph_server.web.history import MOST_SAMPLES, History, Sample, largest
from heliograph_server.web.language_models import LanguageModelWatch
from heliograph_server.web.log_tap import LogTap
from heliograph_server.web.models import ModelWatch
from heliograph_server.web.quantiles import quantile_us, summed
from heliograph_server.web.run_tap import RunCounts, RunTap, Taken, counts_of
from heliograph_server.web.sign_in import Browser
from heliograph_server.web.timeline import encoded, lanes_of

logger = logging.getLogger(__name__)

#: The time between two ticks. Every second one has the state, the others runs and the log alone.
TICK_SECONDS = 0.5
STATE_TICKS = 2
#: The least time between two ticks, whatever the number of pages that open.
LEAST_SECONDS = 0.1
#: With more viewers than this, every tick has the state, and there are half as many.
FEW_VIEWERS = 16
#: The most viewers, and the most views, each of which is a message to make.
MOST_VIEWERS, MOST_VIEWS = 256, 32
#: The most viewers of a tenant, but for operators: a tenant takes no other's place.
MOST_OF_TENANT = 64
#: The places that are for operators alone. They share a view, which has a place too.
KEPT_VIEWERS = 32
#: The ticks over which p50 and p99 are taken, and those of the timeline that a new page gets.
RATE_TICKS, TIMELINE_TICKS = 20, 60
#: How long an answer with the plans is good for others.
PLANS_SECONDS = 1.0
#: A comment, which pages pass over.
_NOTHING = b": nothing new\n\n"
#: How long a page that reloads finds the collection still going.
LINGER_SECONDS = 5.0


class Viewer:
    """An open page, as the event loop sees it."""

    def __init__(self, principal: Principal, browser: Browser | None) -> None:
        self.principal, self.browser = principal, browser
        self.view = View.of(principal)
        self._waiting: dict[str, bytes] = {}
        self._news = asyncio.Event()
        self._reason = ""
        #: Messages that a newer one has replaced, and what its page was told of that.
        self.missed = self._told = 0

    def __repr__(self) -> str:
        return f"<Viewer {self.principal.shown or 'anybody'}: {len(self._waiting)} messages>"

    def give(self, kind: str, message: bytes) -> None:
        """Put a message in its place."""
        self.missed += kind in self._waiting
        self._waiting[kind] = message
        self._news.set()

    def beat(self) -> None:
        """Let the stream have a comment, if it has no message."""
        self._news.set()

    def end(self, reason: str) -> None:
        """End the stream after the messages that wait. Idempotent."""
        self._reason = self._reason or reason
        self._news.set()

    async def take(self) -> tuple[bytes, str]:
        """Wait for messages or a beat, and return them as one, and the reason of the end or ""."""
        await self._news.wait()
        self._news.clear()
        found, self._waiting = b"".join(self._waiting.values()), {}
        if self.missed != self._told:
            self._told = self.missed
            found += _event("missed", {"messages": self.missed})
        return found or (b"" if self._reason else _NOTHING), self._reason


class Hub:
    """The viewers, and the collection for them. `stop` ends both."""

    def __init__(
        self,
        slot: HostSlot,
        draining: Draining,
        models: Callable[[], Iterable[ModelFigures]],
        languages: Callable[[], LanguageModelWatch],
        why_not: Callable[[Principal], HeliographError | None],
        use: Callable[[Browser], None],
    ) -> None:
        """`languages` makes what asks the servers of language models. `why_not` returns the error
        of a principal that has lost its access; `use`: see `Browsers.use`."""
        self._slot, self._draining, self._models = slot, draining, models
        self._languages = languages
        self._why_not, self._use = why_not, use
        self._thread = ThreadPoolExecutor(1, "heliograph-web")
        self._collector: _Collector | None = None
        self._viewers: set[Viewer] = set()
        #: The newest state of each view that has viewers, and when it was made.
        self._states: dict[View, tuple[float, bytes]] = {}
        #: The plans of each view that were asked for last, and when.
        self._plans: dict[View, tuple[float, asyncio.Future[bytes]]] = {}
        #: Set when a viewer waits for the first state of its view.
        self._wanted = asyncio.Event()
        self._turning: asyncio.Task[None] | None = None
        self._has_stopped = False

    def __repr__(self) -> str:
        return f"<Hub of {len(self._viewers)} viewers>"

    @property
    def viewers(self) -> int:
        """The number of open pages."""
        return len(self._viewers)

    def join(self, principal: Principal, browser: Browser | None = None) -> Viewer:
        """Add a viewer, and begin to collect. Raises LimitExceededError, UnavailableError."""
        host = self._slot.host
        viewer = Viewer(principal, browser)
        self._check_place(viewer.view)
        self._collector = self._collector or _Collector(host, self._models, self._languages())
        self._viewers.add(viewer)
        # A page that opens shows something at once: the state that the others have, or one of its own.
        made_at, state = self._states.get(viewer.view, (float("-inf"), b""))
        if asyncio.get_running_loop().time() - made_at < STATE_TICKS * TICK_SECONDS:
            viewer.give("state", state)
        else:
            self._wanted.set()
        if self._turning is None and not self._has_stopped:
            self._turning = asyncio.create_task(self._turn(self._collector), name="heliograph-web")
        return viewer

    def _check_place(self, view: View) -> None:
        """Check that there is a place for one more viewer. Raises LimitExceededError."""
        most, is_full = MOST_VIEWERS, False
        if not view.is_operator:
            most -= KEPT_VIEWERS
            views = [one.view for one in self._viewers if not one.view.is_operator]
            is_full = views.count(view) >= MOST_OF_TENANT or len({*views, view}) >= MOST_VIEWS
        if is_full or len(self._viewers) >= most:
            raise LimitExceededError(
                "too many pages are open already", advice="close one of them, and try again"
            )

    def leave(self, viewer: Viewer) -> None:
        """Remove a viewer. Idempotent."""
        self._viewers.discard(viewer)

    async def history(self, view: View, seconds: int) -> bytes:
        """Return the history and the newest timeline of a view as JSON."""
        if self._collector is None:
            return b"{}"
        found: bytes = await self.on_thread(self._collector.history, view, seconds)
        return found

    async def plans(self, view: View) -> bytes:
        """Return the plans of a view as JSON; all who ask within a second get the same answer."""
        now = asyncio.get_running_loop().time()
        asked_at, asking = self._plans.get(view, (float("-inf"), None))
        if asking is None or now - asked_at > PLANS_SECONDS:
            if len(self._plans) >= MOST_VIEWS:
                self._plans.clear()
            sessions = self._slot.host.sessions
            asking = asyncio.ensure_future(self.on_thread(lambda: _json(plans_of(sessions, view))))
            self._plans[view] = now, asking
        # One who leaves takes the answer from no other.
        return await asyncio.shield(asking)

    async def on_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function on the thread of the collection, after what it does now."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def stop(self) -> None:
        """End all streams, and the collection. Idempotent."""
        self._has_stopped = True
        for viewer in self._viewers:
            viewer.end("stopping")
        turning, self._turning = self._turning, None
        if turning is not None:
            turning.cancel()
            await asyncio.gather(turning, return_exceptions=True)
        if self._collector is not None:
            self._collector.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # Ticks

    async def _turn(self, collector: _Collector) -> None:
        """Collect until no viewer was there for a while."""
        loop = asyncio.get_running_loop()
        lag = LoopLag(loop)
        lag.start()
        collector.begin()
        alone_since, tick = loop.time(), 0
        try:
            while self._viewers or loop.time() - alone_since < LINGER_SECONDS:
                began = loop.time()
                if self._viewers:
                    alone_since = began
                self._check_viewers()
                is_crowd = len(self._viewers) > FEW_VIEWERS
                has_state = is_crowd or tick % STATE_TICKS == 0 or self._wanted.is_set()
                self._wanted.clear()
                await self._tick(collector, lag.seconds, has_state=has_state)
                tick += 1
                seconds = TICK_SECONDS * (STATE_TICKS if is_crowd else 1)
                await asyncio.sleep(LEAST_SECONDS)
                with suppress(TimeoutError):
                    async with asyncio.timeout(began + seconds - loop.time()):
                        await self._wanted.wait()
        finally:
            lag.stop()
            collector.end()
            if asyncio.current_task() is self._turning:
                self._turning = None

    async def _tick(self, collector: _Collector, lag: float, *, has_state: bool) -> None:
        views = {one.view for one in self._viewers}
        try:
            drain, level = self._draining.status, log_level()
            found = await self.on_thread(collector.collect, views, drain, level, lag, has_state)
        except Exception:
            # The next tick may do better; pages say how old their state is.
            logger.exception("the dashboard cannot collect the state of the host")
            return
        # All at once: a run meets one burst rather than many small ones.
        now = asyncio.get_running_loop().time()
        if has_state:
            self._states = {view: (now, messages["state"]) for view, messages in found.items()}
        for viewer in self._viewers:
            for kind, message in found.get(viewer.view, {}).items():
                viewer.give(kind, message)

    def _check_viewers(self) -> None:
        """End the streams of those who have lost their access."""
        for viewer in tuple(self._viewers):
            error = self._why_not(viewer.principal)
            if error is not None:
                viewer.end(error.message)
            elif viewer.browser is not None:
                # An open page is in use, until the most time since it signed in.
                try:
                    self._use(viewer.browser)
                except UnauthenticatedError as over:
                    viewer.end(over.message)


class _Collector:
    """Makes the messages. On one thread, one call at a time; `begin` and `end` on the loop."""

    def __init__(
        self, host: Host, models: Callable[[], Iterable[ModelFigures]], languages: LanguageModelWatch
    ) -> None:
        self._host, self._models, self._languages = host, models, languages
        self._runs, self._log = RunTap(), LogTap()
        self._watch = HostWatch(host)
        self._served = ModelWatch()
        self._views: dict[View, _ViewMemory] = {}
        self._taken_at = time.monotonic()
        self._sequence = 0
        self._facts: HostFacts | None = None

    def begin(self) -> None:
        """Begin to take runs and lines of the log."""
        self._host.observers.append(self._runs)
        logging.getLogger().addHandler(self._log)
        self._runs.take()
        self._taken_at = time.monotonic()
        for memory in self._views.values():
            memory.pause()

    def end(self) -> None:
        """Take nothing any more, so that no run costs anything."""
        with suppress(ValueError):
            self._host.observers.remove(self._runs)
        logging.getLogger().removeHandler(self._log)

    def close(self) -> None:
        """As `end`, for good."""
        self.end()
        self._watch.close()
        self._languages.close()

    def collect(
        self, views: set[View], drain: DrainStatus, level: str, lag: float, has_state: bool
    ) -> dict[View, dict[str, bytes]]:
        """Return the messages of a tick by view and kind."""
        now, self._sequence = time.monotonic(), self._sequence + 1
        seconds, self._taken_at = max(now - self._taken_at, 1e-3), now
        if has_state or self._facts is None:
            found = self._watch.look(drain, level, lag)
            self._facts = replace(
                found,
                models=self._served.rows(self._models(), now),
                language_models=self._languages.rows(now),
            )
        facts = replace(self._facts, monotonic=now, wall=time.time(), sessions=tuple(self._host.sessions))
        taken = self._runs.take()
        for gone in self._views.keys() - views:
            if now - self._views[gone].seen > MOST_SAMPLES:
                del self._views[gone]
        return {view: self._of_view(view, facts, taken, seconds, has_state) for view in views}

    def _of_view(
        self, view: View, facts: HostFacts, taken: Taken, seconds: float, has_state: bool
    ) -> dict[str, bytes]:
        memory = self._views.setdefault(view, _ViewMemory(self._log.newest))
        memory.seen = facts.monotonic
        counts, records = counts_of(taken, view.may_see)
        memory.add(counts, seconds)
        found: dict[str, bytes] = {}
        runs = self._runs_message(memory, facts, view, records, taken.stride, seconds)
        # An idle host has no bars, and says so once.
        has_runs = bool(runs["bars"] or runs["open"])
        if has_runs or memory.had_runs:
            found["runs"] = _event("runs", runs)
        memory.had_runs = has_runs
        lines, dropped = self._log.since(memory.line, lambda tenant: _may_read(view, tenant))
        memory.line = self._log.newest
        if lines or dropped:
            found["log"] = _event("log", {"lines": lines, "dropped": dropped})
        if has_state:
            state = table_of(facts, view, memory.session_rates)
            state |= {"seq": self._sequence, "run_rates": memory.rates()}
            state["uploads"] = uploads_of(self._host, facts.sessions, view)
            found["state"] = _event("state", state)
            memory.history.add(_sample(facts, view, state))
        return found

    def _runs_message(
        self,
        memory: _ViewMemory,
        facts: HostFacts,
        view: View,
        records: list[RunRecord],
        stride: int,
        seconds: float,
    ) -> dict[str, Any]:
        lanes, bars = encoded(lanes_of(records), facts.monotonic)
        message = {
            "seq": self._sequence,
            "at": round(facts.wall * 1e3),
            "span": round(seconds * 1e3),
            "stride": stride,
            "lanes": lanes,
            "bars": bars,
            "open": open_runs(facts, view),
        }
        if bars:
            memory.timeline.append(message)
        return message

    def history(self, view: View, seconds: int) -> bytes:
        """Return the history of a view as JSON, and the newest part of its timeline."""
        memory = self._views.get(view)
        if memory is None:
            return b"{}"
        lines, _ = self._log.since(0, lambda tenant: _may_read(view, tenant))
        found = {
            "history": memory.history.table(seconds),
            "timeline": [{**one, "open": []} for one in memory.timeline],
            "log": lines,
        }
        return _json(found)


class _ViewMemory:
    """The figures of a view that the collector keeps from tick to tick."""

    def __init__(self, line: int) -> None:
        self.history = History()
        self.timeline: deque[dict[str, Any]] = deque(maxlen=TIMELINE_TICKS)
        self.line = line
        self.seen = 0.0
        self.had_runs = False
        self._counts: deque[tuple[RunCounts, float]] = deque(maxlen=RATE_TICKS)

    def add(self, counts: RunCounts, seconds: float) -> None:
        """Add the runs of a tick, which took these seconds."""
        self._counts.append((counts, seconds))

    def pause(self) -> None:
        """Forget the rates: there was no viewer for a while."""
        self._counts.clear()

    @property
    def session_rates(self) -> dict[int, float]:
        """Runs a second by session, of the last two ticks."""
        last = list(self._counts)[-STATE_TICKS:]
        seconds = sum(one for _, one in last)
        total: Counter[int] = Counter()
        for counts, _ in last:
            total.update(counts.sessions)
        return {session: count / seconds for session, count in total.items()}

    def rates(self) -> dict[str, float]:
        """Rates of the last two ticks, and quantiles in microseconds of the last ten seconds."""
        last = list(self._counts)[-STATE_TICKS:]
        seconds = sum(one for _, one in last)
        whole = summed([counts.whole for counts, _ in self._counts])
        turn = summed([counts.turn for counts, _ in self._counts])
        return {
            "ended": round(sum(counts.ended for counts, _ in last) / seconds, 1),
            "failed": round(sum(counts.failed for counts, _ in last) / seconds, 1),
            "p50": round(quantile_us(whole, 0.5)),
            "p99": round(quantile_us(whole, 0.99)),
            "turn_p50": round(quantile_us(turn, 0.5)),
            "turn_p99": round(quantile_us(turn, 0.99)),
        }


def _may_read(view: View, tenant: str | None) -> bool:
    """True if a caller may read a line of the log: one of a tenant's sessions, or of none."""
    return view.is_operator or (tenant is not None and view.may_see(tenant))


def _sample(facts: HostFacts, view: View, state: dict[str, Any]) -> Sample:
    rates = state["run_rates"]
    sessions = [one for one in facts.snapshot.sessions if view.may_see(one.tenant)]
    return Sample(
        state["at"],
        rates["ended"],
        rates["p50"],
        rates["p99"],
        state["queues"]["waiting"],
        facts.busy if view.is_operator else {},
        {one["name"]: one["total"] - one["free"] for one in facts.devices},
        {one["name"]: one["memory"] for one in state["tenants"]},
        largest({one.number: one.device_bytes for one in sessions if one.device_bytes}),
    )


def _event(kind: str, content: dict[str, Any]) -> bytes:
    """A server-sent event: JSON has no line ends."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _json(content))


def _json(content: dict[str, Any]) -> bytes:
    # In ASCII: a client's text may have half of a surrogate pair.
    return json.dumps(content, separators=(",", ":")).encode()
