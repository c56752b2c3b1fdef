"""Explains plans to pages, with bounds: reports on a few threads, one picture at a time.

A plan on other hosts is asked there for its times, and a host may be slow. So there are threads for
that alone, and a tenant takes only some of them. Those who ask for the same plan at the same time
get the same answer.

All of it is of the event loop but what runs on the threads.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from heliograph_proto.errors import LimitExceededError, UnknownHandleError
from heliograph_server.session.session import Session
from heliograph_server.web.explaining.picture_process import ADVICE, PictureProcess
from heliograph_server.web.explaining.picture_program import request_of
from heliograph_server.web.explaining.plans import plan_of
from heliograph_server.web.facts import View

#: The most plans that are explained at the same time, and the most that were asked for.
THREADS, MOST_ASKED = 4, 32
#: The most that a tenant, or the operators together, asked for at the same time.
MOST_OF_VIEW = 8
#: The most pictures that wait, are drawn, or are sent: of a tenant or of the operators, and of all.
MOST_PICTURES_OF_VIEW, MOST_PICTURES = 2, 8
#: The most nodes of a picture.
MOST_NODES = 20_000


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question that is not answered yet."""

    view: View
    answer: asyncio.Future[Any]


class Explainer:
    """Answers questions about plans. `stop` ends it."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "heliograph-web-plans")
        self._drawing = ThreadPoolExecutor(1, "heliograph-web-picture")
        self._asked: dict[tuple[Session, int], _Asked] = {}
        #: The pictures that wait, are drawn, or are sent.
        self._pictures: dict[PictureProcess, View] = {}

    def __repr__(self) -> str:
        return f"<Explainer of {len(self._asked)} plans and {len(self._pictures)} pictures>"

    async def plan(self, view: View, session: Session, number: int) -> dict[str, Any]:
        """Return a plan as tables.

        Raises LimitExceededError, UnknownHandleError, and the errors of the plan's devices.
        """
        key = session, number
        if (asked := self._asked.get(key)) is None:
            of_view = sum(one.view == view for one in self._asked.values())
            if of_view >= MOST_OF_VIEW or len(self._asked) >= MOST_ASKED:
                raise _busy("explained")
            loop = asyncio.get_running_loop()
            answer = loop.run_in_executor(self._threads, plan_of, session, number)
            asked = self._asked[key] = _Asked(view, answer)
            answer.add_done_callback(lambda done: self._answered(key, done))
        # One who leaves takes the answer from no other.
        found: dict[str, Any] = await asyncio.shield(asked.answer)
        return found

    def _answered(self, key: tuple[Session, int], answer: asyncio.Future[Any]) -> None:
        del self._asked[key]
        # If all who asked have left, an error is looked at here.
        if not answer.cancelled():
            answer.exception()

    def place(self, view: View) -> PictureProcess:
        """Take a place for a picture, until `leave`. Raises LimitExceededError."""
        of_view = sum(one == view for one in self._pictures.values())
        # The last places are for operators.
        most = MOST_PICTURES if view.is_operator else MOST_PICTURES - MOST_PICTURES_OF_VIEW
        if of_view >= MOST_PICTURES_OF_VIEW or len(self._pictures) >= most:
            raise _busy("drawn")
        process = PictureProcess()
        self._pictures[process] = view
        return process

    def leave(self, place: PictureProcess) -> None:
        """Give a place back, and end the picture that is drawn there. Idempotent."""
        place.end()
        self._pictures.pop(place, None)

    async def picture(self, place: PictureProcess, session: Session, number: int) -> bytes:
        """Return a plan as a page of its own.

        Raises LimitExceededError, UnknownHandleError, and the errors of the plan's devices.
        """
        loop = asyncio.get_running_loop()
        request = await loop.run_in_executor(self._threads, _request, session, number)
        return await loop.run_in_executor(self._drawing, place.draw, request)

    def stop(self) -> None:
        """End all pictures. Idempotent."""
        for process in self._pictures:
            process.end()
        for one in (self._threads, self._drawing):
            one.shutdown(wait=False, cancel_futures=True)


def _request(session: Session, number: int) -> bytes:
    """The request for a picture of a plan. Raises LimitExceededError, UnknownHandleError."""
    plan = session.plans_now().get(number)
    if plan is None:
        raise UnknownHandleError(f"session {session.number} has no plan {number}", advice="it was freed")
    graph = plan.client_graph
    if len(graph.nodes) > MOST_NODES:
        raise LimitExceededError(
            f"the plan has {len(graph.nodes):,} nodes, and at most {MOST_NODES:,} are drawn here",
            advice=ADVICE,
        )
    return request_of(graph, session.explain(number), f"Plan {number} of session {session.number}")


def _busy(what: str) -> LimitExceededError:
    return LimitExceededError(
        f"too many plans are being {what}", advice="try again in a moment", retry_after_seconds=1.0
    )
