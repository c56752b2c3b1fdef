"""Clients follow what the log has of their sessions, and of nobody else's."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from daemon_threads import ThreadDaemon, thread_daemon
from waiting import until

import heliograph as hg
from heliograph.transport import log_lines
from heliograph_proto.sessions import LogLine
from heliograph_server.resources.log_fields import LogOwner, run_fields, session_fields
from heliograph_server.rpc.session_service import SessionService
from heliograph_server.telemetry import log_followers
from heliograph_server.telemetry.log_followers import MOST_FOLLOWERS, MOST_LINES, LogFollower

SECONDS = 20.0
logger = logging.getLogger("heliograph_server.tests")


@pytest.fixture(autouse=True)
def everything_is_logged() -> Iterator[None]:
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.INFO)
    # What pytest captures keeps sessions alive, and with them gRPC's thread.
    levels = {one: one.level for one in root.handlers}
    for handler in levels:
        handler.setLevel(logging.CRITICAL)
    yield
    for handler, level in levels.items():
        handler.setLevel(level)
    root.setLevel(before)
    assert log_followers._FOLLOWERS not in root.handlers, "a follower is left"


@pytest.fixture
def one() -> Iterator[ThreadDaemon]:
    with thread_daemon() as made:
        yield made


@pytest.fixture(params=["daemon", "own process"])
def url(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue("one").url if request.param == "daemon" else "local:"


def adding() -> hg.Graph:
    g = hg.Graph()
    g.output("y", g.input("x", (4,), "f32") + 1)
    return g


def test_a_client_follows_its_session_until_it_ends(url: str) -> None:
    with hg.connect(url) as session:
        lines = session.log()
        session.compile(adding()).run(x=np.ones(4, np.float32))
        # That it began may be the first one, or came before.
        line = next(one for one in lines if "compiled" in one.message)
        assert line.level == "info" and line.dropped == 0
        assert isinstance(line, hg.LogLine)
    rest = list(lines)
    assert all(isinstance(line, LogLine) for line in rest)


def test_for_asyncio_too(url: str) -> None:
    async def main() -> None:
        async with hg.aio.connect(url) as session, session.log("info") as lines:
            await session.compile(adding())
            async for line in lines:
                if "compiled" in line.message:
                    break
            log_followers = asyncio.ensure_future(asyncio.wait_for(_all(lines), SECONDS))
            await asyncio.sleep(0)
            await session.close()
            assert isinstance(await log_followers, list)

    async def _all(lines: object) -> list[LogLine]:
        return [line async for line in lines]  # type: ignore[attr-defined]

    asyncio.run(main())


def test_one_that_waits_for_a_line_ends_when_the_session_is_closed(url: str) -> None:
    session = hg.connect(url)
    lines, found = session.log(), list[LogLine]()
    reading = threading.Thread(target=lambda: found.extend(lines))
    reading.start()
    session.close()
    reading.join(SECONDS)
    assert not reading.is_alive()


def test_one_that_is_closed_ends_and_the_session_goes_on(url: str) -> None:
    with hg.connect(url) as session:
        lines = session.log()
        reading = threading.Thread(target=list, args=(lines,))
        reading.start()
        lines.close()
        reading.join(SECONDS)
        assert not reading.is_alive() and list(lines) == []
        session.compile(adding())


def test_sessions_see_only_their_own_lines(one: ThreadDaemon) -> None:
    with hg.connect(one.url) as mine, hg.connect(one.url) as other, mine.log() as lines:
        for _ in range(3):
            other.compile(adding())
        logger.warning("of nobody")
        mine.compile(adding())
        number = one.host.session(mine._shell.info.session).number
        assert f"session {number} of" in next(lines).message.replace("<Session", "session")


def test_only_lines_of_the_level_are_given(one: ThreadDaemon) -> None:
    with hg.connect(one.url) as session, session.log("warning") as lines:
        session.compile(adding())
        owner = one.host.session(session._shell.info.session).log_owner
        logger.info("no", extra={"owner": owner})
        logger.error("yes", extra=dict(run_fields(session_fields(owner, 1, ""), 7, f"00-{'ab' * 16}-01-01")))
        line = next(lines)
        assert (line.level, line.message, line.run, line.trace) == ("error", "yes", 7, "ab" * 16)


def test_a_level_that_there_is_not_is_refused(url: str) -> None:
    with hg.connect(url) as session:
        with pytest.raises(hg.InvalidArgumentError, match="'loud'"):
            session.log("loud")
        with pytest.raises(hg.SessionClosedError):
            session.close()
            session.log()


def test_lines_that_are_closed_leave_no_call_until_a_garbage_collection(one: ThreadDaemon) -> None:
    gc.collect()
    gc.disable()
    try:
        with hg.connect(one.url) as session:
            lines = session.log()
            call = weakref.ref(lines._source._call)  # type: ignore[attr-defined]
            lines.close()
            until(lambda: call() is None, "the call is gone")
    finally:
        gc.enable()


def test_a_server_that_does_not_accept_in_time_is_no_endless_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "ACCEPT_SECONDS", 0.2)
    given_up = threading.Event()

    async def never(*_: object) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            given_up.set()

    async def ask(url: str) -> None:
        async with hg.aio.connect(url) as session:
            with pytest.raises(hg.DeadlineExceededError, match="did not accept within 0.2 s"):
                async with session.log():
                    pass
            await session.compile(adding())

    monkeypatch.setattr(SessionService, "FollowLog", never)
    with thread_daemon() as silent:
        with hg.connect(silent.url) as session:
            with pytest.raises(hg.DeadlineExceededError, match="did not accept within 0.2 s"):
                session.log()
            assert given_up.wait(SECONDS)
            given_up.clear()
            session.compile(adding())
        asyncio.run(ask(silent.url))
        assert given_up.wait(SECONDS)


def test_only_so_many_follow_one_session(one: ThreadDaemon) -> None:
    with hg.connect(one.url) as session:
        several = [session.log() for _ in range(MOST_FOLLOWERS)]
        with pytest.raises(hg.LimitExceededError, match="follow"):
            session.log()
        several[0].close()
        for lines in several:
            lines.close()


def test_who_reads_too_slowly_is_told_how_many_lines_are_missing() -> None:
    owner = LogOwner()
    follower = LogFollower(owner, "info", lambda: None)
    for number in range(MOST_LINES + 5):
        logger.info("line %d", number, extra={"owner": owner})
    lines, dropped = follower.take()
    follower.close()
    assert (dropped, len(lines), lines[0].message) == (5, MOST_LINES, "line 5")


def test_what_a_client_chose_cannot_begin_a_line_and_secrets_are_left_out() -> None:
    owner = LogOwner()
    follower = LogFollower(owner, "info", lambda: None)
    logger.info("said %s", "a\nERROR b \x1b[2J authorization: Bearer abcdef", extra={"owner": owner})
    ((line,), _) = follower.take()
    follower.close()
    assert "\n" not in line.message and "\x1b" not in line.message and "abcdef" not in line.message
