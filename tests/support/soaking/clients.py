"""Clients in processes of their own, which do programs until they are told to pause."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import heliograph as hg
from heliograph_proto.errors import HeliographError
from soaking import aio_programs, programs
from soaking.programs import WrongAnswerError

PR_SET_PDEATHSIG = 1

#: The bound of opening a session.
CONNECT_SECONDS = 20.0
#: The time before a client tries again after a failure.
AGAIN_SECONDS = 0.1
#: The tasks of an asyncio client.
TASKS = 3


@dataclass(frozen=True)
class ClientSpec:
    """A client: its name, which is also its tenant, and the way in which it works."""

    name: str
    url: str
    token: str | None = None
    shared_memory: bool | str = False
    is_async: bool = False
    #: True to keep one session for all programs, also over quiet points.
    is_resident: bool = False
    is_pool: bool = False


@dataclass(frozen=True)
class Failure:
    """A program that ended with an error. Times are of the monotonic clock of the machine."""

    client: str
    program: str
    error: str
    #: The names of the classes of a typed error; () for any other exception.
    classes: tuple[str, ...]
    text: str
    #: The time when the session was last known to work, or the program began.
    began: float
    ended: float


@dataclass
class Tally:
    """The work since the last report."""

    done: Counter[str] = field(default_factory=Counter)
    slowest: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    #: True while the client keeps a session.
    has_session: bool = False


class _Worker:
    """The part that both kinds of clients share."""

    def __init__(self, spec: ClientSpec, pipe: Connection, seed: str) -> None:
        self.spec, self.pipe = spec, pipe
        self.chance = random.Random(seed)
        self.tally = Tally()
        self.session: Any = None
        #: The time when the session was last known to work.
        self.worked = 0.0

    @property
    def connection(self) -> Mapping[str, Any]:
        return {
            "token": self.spec.token,
            "shared_memory": self.spec.shared_memory,
            "timeout": CONNECT_SECONDS,
            "progress": None,
        }

    def succeeded(self, name: str, began: float) -> None:
        self.worked = time.monotonic()
        self.tally.done[name] += 1
        self.tally.slowest[name] = max(self.tally.slowest[name], self.worked - began)  # type: ignore[assignment]

    def failed(self, name: str, error: BaseException, began: float) -> None:
        classes: tuple[str, ...] = ()
        if isinstance(error, HeliographError):
            classes = tuple(one.__name__ for one in type(error).__mro__)
        text = str(error) if classes else "".join(traceback.format_exception(error))
        if isinstance(error, WrongAnswerError):
            text = f"a wrong answer: {error}\n{text}"
        kind = type(error).__name__
        self.tally.failures.append(
            Failure(self.spec.name, name, kind, classes, text[:4000], began, time.monotonic())
        )

    def report(self) -> None:
        self.tally.has_session = self.session is not None
        self.pipe.send(self.tally)
        self.tally = Tally()


class _BlockingWorker(_Worker):
    def connect(self) -> hg.Session:
        return hg.connect(self.spec.url, **self.connection)

    def work(self) -> None:
        chosen = programs.POOL_PROGRAMS if self.spec.is_pool else programs.PROGRAMS
        while self.pipe.recv() == "go":
            while not self.pipe.poll():
                self._one(chosen)
            self.pipe.recv()
            self.report()
        self._close()

    def _one(self, chosen: Mapping[str, programs.Program]) -> None:
        name, began = self.chance.choice([*chosen]), time.monotonic()
        since = min(began, self.worked) if self.session is not None else began
        try:
            if self.session is None:
                self.session = self.connect()
            chosen[name](self.session, self.chance, self.connect)
            if not self.spec.is_resident:
                self._close()
            self.succeeded(name, began)
        except Exception as error:
            self.failed(name, error, since)
            del error
            with suppress(HeliographError):
                self._close()
            time.sleep(AGAIN_SECONDS)

    def _close(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.close()


class _AsyncWorker(_Worker):
    async def connect(self) -> hg.aio.Session:
        return await hg.aio.connect(self.spec.url, **self.connection)

    async def work(self) -> None:
        while await asyncio.to_thread(self.pipe.recv) == "go":
            await asyncio.gather(*(self._task() for _ in range(TASKS)))
            self.pipe.recv()
            self.report()

    async def _task(self) -> None:
        while not self.pipe.poll():
            name, began = self.chance.choice([*aio_programs.PROGRAMS]), time.monotonic()
            try:
                async with await self.connect() as session:
                    await aio_programs.PROGRAMS[name](session, self.chance, self.connect)
                self.succeeded(name, began)
            except Exception as error:
                self.failed(name, error, began)
                del error
                await asyncio.sleep(AGAIN_SECONDS)


def work(spec: ClientSpec, pipe: Connection, seed: str) -> None:
    """Work as the client until the pipe says "stop" or closes."""
    # A stopped client, too, ends with its parent.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with suppress(EOFError, BrokenPipeError):
        if spec.is_async:
            asyncio.run(_AsyncWorker(spec, pipe, seed).work())
        else:
            _BlockingWorker(spec, pipe, seed).work()
