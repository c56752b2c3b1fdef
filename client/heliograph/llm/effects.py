"""Effects: the calls that a procedure asks for, so that one text of it serves both APIs.

A procedure is a generator. It yields calls, whose results it gets back, and the values that its
caller is to have. The blocking shell makes a call; the asyncio shell awaits it too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Ask:
    """A call whose result the procedure needs."""

    call: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Work:
    """A call that blocks, and whose result the procedure needs; on a thread, under asyncio."""

    call: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class AskNext:
    """The next value of an iterator, None at its end."""

    iterator: Any


@dataclass(frozen=True, slots=True)
class Pause:
    """A wait."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Give(Generic[T]):
    """A value for the caller."""

    value: T


#: A generator of effects that gives values of T and returns R.
Procedure: TypeAlias = "Generator[Ask | Work | AskNext | Pause | Give[T], Any, R]"


def blocking(
    procedure: Procedure[T, R], keep: Callable[[R], None] = lambda _: None
) -> Generator[T, None, None]:
    """Yield the values of a procedure, and hand its result over at the end."""
    answer: Any = None
    error: BaseException | None = None
    try:
        while True:
            effect = procedure.send(answer) if error is None else procedure.throw(error)
            answer = error = None
            try:
                if isinstance(effect, Give):
                    yield effect.value
                elif isinstance(effect, Ask | Work):
                    answer = effect.call()
                elif isinstance(effect, Pause):
                    time.sleep(effect.seconds)
                else:
                    answer = next(effect.iterator, None)
            except Exception as failed:
                error = failed
    except StopIteration as end:
        keep(end.value)
    finally:
        procedure.close()


async def awaiting(
    procedure: Procedure[T, R], keep: Callable[[R], None] = lambda _: None
) -> AsyncGenerator[T, None]:
    """As `blocking`, for asyncio."""
    answer: Any = None
    error: BaseException | None = None
    try:
        while True:
            effect = procedure.send(answer) if error is None else procedure.throw(error)
            answer = error = None
            try:
                if isinstance(effect, Give):
                    yield effect.value
                elif isinstance(effect, Ask):
                    answer = effect.call()
                    if isinstance(answer, Awaitable):
                        answer = await answer
                elif isinstance(effect, Work):
                    answer = await asyncio.to_thread(effect.call)
                elif isinstance(effect, Pause):
                    await asyncio.sleep(effect.seconds)
                else:
                    answer = await anext(effect.iterator, None)
            except Exception as failed:
                error = failed
    except StopIteration as end:
        keep(end.value)
    finally:
        procedure.close()


def result_of(procedure: Procedure[Any, R]) -> R:
    """Run a procedure that gives no values, and return its result."""
    found: list[R] = []
    for _ in blocking(procedure, found.append):
        pass
    return found[0]


async def awaited(procedure: Procedure[Any, R]) -> R:
    """As `result_of`, for asyncio."""
    found: list[R] = []
    async for _ in awaiting(procedure, found.append):
        pass
    return found[0]
