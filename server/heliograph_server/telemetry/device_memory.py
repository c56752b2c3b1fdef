"""How much memory devices have, asked with a bound: some are other hosts', which may be slow to say."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from heliograph_proto.devices import Memory
from heliograph_proto.errors import HeliographError

#: How long an answer is waited for.
ANSWER_SECONDS = 1.0
#: Devices that are asked at once.
ASK_THREADS = 4


class MemoryWatch:
    """Asks devices by name, and remembers what each said last. A device that has not answered is not asked
    again before it has, so that no more questions wait than there are devices."""

    def __init__(self, ask: Callable[[str], Memory], seconds: float = ANSWER_SECONDS) -> None:
        """`ask` may block and raise HeliographError."""
        self._ask, self._seconds = ask, seconds
        self._threads = ThreadPoolExecutor(ASK_THREADS, "heliograph-memory")
        self._lock = threading.Lock()
        self._asked: dict[str, Future[Memory]] = {}
        self._said: dict[str, Memory] = {}

    def __repr__(self) -> str:
        return f"<MemoryWatch of {len(self._said)} devices>"

    def look(self, devices: Sequence[str]) -> tuple[dict[str, Memory], tuple[str, ...]]:
        """What these devices have, and which of them did not say so in time. Blocks no longer than the
        bound."""
        until = time.monotonic() + self._seconds
        with self._lock:
            asked = {name: self._question(name) for name in devices}
        wait(asked.values(), timeout=max(0.0, until - time.monotonic()))
        silent = [name for name, question in asked.items() if not self._has_said(name, question)]
        with self._lock:
            self._forget(set(devices))
            return dict(self._said), tuple(silent)

    def _forget(self, but: set[str]) -> None:
        """Devices that are gone."""
        for name in self._said.keys() - but:
            del self._said[name]
        for name in [one for one, question in self._asked.items() if one not in but and question.done()]:
            del self._asked[name]

    def _question(self, name: str) -> Future[Memory]:
        question = self._asked.get(name)
        if question is None:
            question = self._asked[name] = self._threads.submit(self._ask, name)
        return question

    def _has_said(self, name: str, question: Future[Memory]) -> bool:
        if not question.done():
            return False
        with self._lock:
            self._asked.pop(name, None)
            try:
                self._said[name] = question.result()
            except HeliographError:
                return False
        return True

    def close(self) -> None:
        """Waits for no answer that has not come."""
        self._threads.shutdown(wait=False, cancel_futures=True)
