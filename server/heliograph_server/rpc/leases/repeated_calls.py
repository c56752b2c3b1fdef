"""Calls that a client repeats after its connection broke, in a session with a lease.

A call is known by its method, the handle that it makes, and the digest of its request. The second
one waits for the computation of the first, or gets its answer. On the event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from google.protobuf.message import Message

from heliograph_proto.digests import digest_of
from heliograph_proto.errors import HandleExistsError
from heliograph_server.session.session import Session

T = TypeVar("T", bound=Message)

#: The most answers of a session that are kept, and the most bytes of all but the newest. A client
#: repeats those alone that were on their way when its connection broke.
MOST_ANSWERS, MOST_ANSWER_BYTES = 64, 4 * 2**20
#: The time that a client has to repeat a call once its session is attached. Afterwards it counts as
#: cancelled.
PATIENCE_SECONDS = 2.0
#: How often the session is looked at meanwhile.
LOOK_SECONDS = 0.1


class _Answer:
    """The computation of a call, and the number of callers that wait for it."""

    def __init__(self, digest: bytes, task: asyncio.Future[Any]) -> None:
        self.digest, self.task, self.callers = digest, task, 0


class RepeatedCalls:
    """The calls of all sessions that may be repeated."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[Session, OrderedDict[tuple[str, int], _Answer]] = WeakKeyDictionary()
        self._watching: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<RepeatedCalls of {len(self._of)} sessions>"

    async def once(
        self,
        session: Session,
        key: tuple[str, int],
        request: tuple[Message, bytes | None],
        compute: Callable[[], Awaitable[T]],
    ) -> T:
        """Return the result of `compute`, which is called once for all repetitions of a call.

        It is cancelled if its callers leave and none comes back in time. `key`: the method, and the
        handle that it makes. Raises HandleExistsError for another request with that handle.
        """
        if not session.lease_seconds:
            return await compute()
        digest = await asyncio.to_thread(_digest, *request)
        known = self._of.setdefault(session, OrderedDict())
        answer = known.get(key)
        if answer is None or _has_failed(answer.task):
            answer = known[key] = _Answer(digest, asyncio.ensure_future(compute()))
            answer.task.add_done_callback(partial(_forget_failed, known, key))
        elif answer.digest != digest:
            raise HandleExistsError(
                f"handle {key[1]} is that of another request", advice="use a new handle for each request"
            )
        answer.callers += 1
        try:
            found: T = await asyncio.shield(answer.task)
            if known.get(key) is answer:
                known.move_to_end(key)
            _drop_oldest(known)
            return found
        except asyncio.CancelledError:
            if not answer.task.done():
                watching = asyncio.ensure_future(self._cancel_unless_repeated(session, answer))
                self._watching.add(watching)
                watching.add_done_callback(self._watching.discard)
            raise
        finally:
            answer.callers -= 1

    async def _cancel_unless_repeated(self, session: Session, answer: _Answer) -> None:
        left = PATIENCE_SECONDS
        while left > 0 and not answer.task.done() and session.closed is None:
            await asyncio.sleep(LOOK_SECONDS)
            if answer.callers:
                return
            if not session.is_detached:
                left -= LOOK_SECONDS
        answer.task.cancel()


def _digest(request: Message, graph: bytes | None) -> bytes:
    return digest_of(digest_of(request.SerializeToString(deterministic=True)) + digest_of(graph or b""))


def _forget_failed(
    known: OrderedDict[tuple[str, int], _Answer], key: tuple[str, int], task: asyncio.Future[Any]
) -> None:
    """Forget a call that failed: the frames of its error refer to the session, which would stay."""
    if _has_failed(task) and (answer := known.get(key)) is not None and answer.task is task:
        del known[key]


def _has_failed(task: asyncio.Future[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _drop_oldest(known: OrderedDict[tuple[str, int], _Answer]) -> None:
    """Keep the answers that were given last, and all that are being computed, of which there are
    few: each has a call."""
    size_bytes = 0
    done = [key for key, answer in reversed(known.items()) if answer.task.done()]
    for count, key in enumerate(done, start=1):
        size_bytes += _size_bytes(known[key].task)
        if count > MOST_ANSWERS or (count > 1 and size_bytes > MOST_ANSWER_BYTES):
            del known[key]


def _size_bytes(task: asyncio.Future[Any]) -> int:
    return 0 if _has_failed(task) else task.result().ByteSize()
