"""The stream of a page: slow pages get the newest, and such as take nothing are let go."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from heliograph_proto.errors import LimitExceededError, UnauthenticatedError
from heliograph_server.resources.principals import Principal, Right
from heliograph_server.web import hub as web_hub
from heliograph_server.web import stream as web_stream
from heliograph_server.web.facts import View
from heliograph_server.web.hub import Hub, Viewer
from heliograph_server.web.language_models import LanguageModelWatch
from heliograph_server.web.sign_in import Browser
from heliograph_server.web.stream import Deadline, EventStream

ALICE = Principal("alice", frozenset((Right.USE,)))


class Room:
    """A hub's part that a stream uses."""

    def __init__(self) -> None:
        self.left: list[Viewer] = []

    def leave(self, viewer: Viewer) -> None:
        self.left.append(viewer)


class Page:
    """The other end of a stream, which takes a message when it is told to."""

    def __init__(self) -> None:
        self.viewer, self.room = Viewer(ALICE, None), Room()
        self.got: list[bytes] = []
        self.came, self.may_take = asyncio.Event(), asyncio.Event()
        self.gone = asyncio.Event()
        self.task = asyncio.create_task(EventStream(self.room, self.viewer)({}, self._receive, self._send))  # type: ignore[arg-type]

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.got.append(message["body"])
            self.came.set()
            await self.may_take.wait()

    async def _receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_slow_page_gets_the_newest_of_each_kind_and_is_told_what_it_missed() -> None:
    async def run() -> None:
        page = Page()
        page.viewer.give("state", b"state 1;")
        await turns()
        # It is still taking the first message when these come.
        for number in range(2, 100):
            page.viewer.give("state", b"state %d;" % number)
            page.viewer.give("runs", b"runs %d;" % number)
        await turns()
        assert page.got == [b"state 1;"]
        page.may_take.set()
        await turns()
        assert len(page.got) == 2 and b"state 99;" in page.got[1] and b"runs 99;" in page.got[1]
        assert b"state 98;" not in page.got[1] and b'"messages":194' in page.got[1]
        page.viewer.give("state", b"state 100;")
        await turns()
        assert page.got[2] == b"state 100;"
        page.gone.set()
        await page.task
        assert page.room.left == [page.viewer]

    asyncio.run(run())


def test_a_page_that_takes_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_stream, "STALL_SECONDS", 0.05)

    async def run() -> None:
        page = Page()
        page.viewer.give("state", b"state;")
        await asyncio.wait_for(page.task, 20)
        assert page.room.left == [page.viewer]

    asyncio.run(run())


def test_a_quiet_stream_has_comments_and_its_end_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_stream, "BEAT_SECONDS", 0.02)

    async def run() -> None:
        page = Page()
        page.may_take.set()
        await asyncio.wait_for(page.came.wait(), 20)
        assert page.got[0].startswith(b": ")
        page.viewer.give("log", b"last words;")
        page.viewer.end("stopping")
        page.viewer.end("another reason")
        await asyncio.wait_for(page.task, 20)
        assert (
            page.got[-1].startswith(b"last words;")
            and b'event: end\ndata: {"reason": "stopping"}' in page.got[-1]
        )

    asyncio.run(run())


def test_a_deadline_that_is_moved_comes_later_or_earlier_and_once() -> None:
    async def run() -> None:
        passed: list[float] = []
        loop = asyncio.get_running_loop()
        came = asyncio.Event()
        deadline = Deadline(lambda: (passed.append(loop.time()), came.set()))
        began = loop.time()
        deadline.move(0.01)
        deadline.move(0.1)
        await asyncio.wait_for(came.wait(), 20)
        assert passed[0] >= began + 0.1
        came.clear()
        deadline.move(600)
        deadline.move(0.01)
        await asyncio.wait_for(came.wait(), 20)
        deadline.move(0.01)
        deadline.end()
        deadline.end()
        await asyncio.sleep(0.05)
        assert len(passed) == 2

    asyncio.run(run())


def hub_of(why_not: Any = lambda _: None, use: Any = lambda _: None) -> Hub:
    slot = SimpleNamespace(host=SimpleNamespace(memory=None, observers=[]))
    made = Hub(slot, None, tuple, lambda: LanguageModelWatch(()), why_not, use)  # type: ignore[arg-type]
    # Its ticks are tried with a daemon.
    made._has_stopped = True
    return made


def test_viewers_and_views_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_hub, "MOST_VIEWERS", 4)
    monkeypatch.setattr(web_hub, "KEPT_VIEWERS", 1)
    monkeypatch.setattr(web_hub, "MOST_VIEWS", 3)

    async def run() -> None:
        hub = hub_of()
        first = hub.join(ALICE)
        hub.join(Principal("bob", frozenset((Right.USE,))))
        with pytest.raises(LimitExceededError):
            hub.join(Principal("carol", frozenset((Right.USE,))))
        hub.join(ALICE)
        with pytest.raises(LimitExceededError):
            hub.join(ALICE)
        hub.leave(first)
        hub.leave(first)
        hub.join(ALICE)
        # The last place, and the last view, are for operators.
        hub.join(Principal("olga", frozenset((Right.ADMIN,))))
        with pytest.raises(LimitExceededError):
            hub.join(Principal("oscar", frozenset((Right.ADMIN,))))
        assert hub.viewers == 4
        await hub.stop()

    asyncio.run(run())


def test_a_tenant_takes_no_other_tenants_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_hub, "MOST_OF_TENANT", 2)

    async def run() -> None:
        hub = hub_of()
        hub.join(ALICE)
        hub.join(ALICE)
        with pytest.raises(LimitExceededError):
            hub.join(ALICE)
        hub.join(Principal("bob", frozenset((Right.USE,))))
        assert hub.viewers == 3
        await hub.stop()

    asyncio.run(run())


def test_a_page_ends_with_the_access_of_its_token_or_browser() -> None:
    async def run() -> None:
        lost, over = {ALICE}, set[int]()

        def use(browser: Browser) -> None:
            if id(browser) in over:
                raise UnauthenticatedError("your time is over")

        hub = hub_of(lambda who: UnauthenticatedError("it was revoked") if who in lost else None, use)
        bob, browser = Principal("bob", frozenset((Right.USE,))), Browser(ALICE, 0.0, 0.0)
        revoked, kept, late = hub.join(ALICE), hub.join(bob), hub.join(bob, browser)
        hub._check_viewers()
        assert await revoked.take() == (b"", "it was revoked")
        over.add(id(browser))
        hub._check_viewers()
        assert (await late.take())[1] == "your time is over"
        kept.give("state", b"x")
        assert await kept.take() == (b"x", "")
        await hub.stop()
        assert (await kept.take())[1] == "stopping"

    asyncio.run(run())


def test_pages_that_ask_for_plans_within_a_second_share_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[str]()

    def plans_of(_: object, view: View) -> dict[str, Any]:
        made.append(view.tenant)
        return {"plans": [], "count": len(made)}

    monkeypatch.setattr(web_hub, "plans_of", plans_of)

    async def run() -> None:
        hub = hub_of()
        hub._slot.host.sessions = ()  # type: ignore[misc]
        alice, bob = View(False, "alice"), View(False, "bob")
        found = await asyncio.gather(*(hub.plans(view) for view in (alice, alice, bob, alice)))
        assert found[0] == found[1] == found[3] != found[2] and made == ["alice", "bob"]
        monkeypatch.setattr(web_hub, "PLANS_SECONDS", -1.0)
        assert await hub.plans(alice) != found[0]
        await hub.stop()

    asyncio.run(run())
