"""The memory of devices, queried with a timeout: devices of other hosts may be slow to answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from heliograph_proto.devices import Memory
from heliograph_proto.errors import HeliographError

#: The timeout of an answer.
ANSWER_SECONDS = 1.0
#: The number of devices that are queried at once.
ASK_THREADS = 4


class MemoryWatch:
    """Queries devices by name, and keeps the last answer of each. A device has at most one query in
    flight, so there are never more queries than devices."""

    def __init__(self, ask: Callable[[str], Memory], seconds: float = ANSWER_SECONDS) -> None:
        """`ask` may block and raise HeliographError."""
        self._ask, self._seconds = ask, seconds
        self._threads = ThreadPoolExecutor(ASK_THREADS, "heliograph-memory")
        self._lock = threading.Lock()
        self._queries: dict[str, Future[Memory]] = {}
        self._answers: dict[str, Memory] = {}

    def __repr__(self) -> str:
        return f"<MemoryWatch of {len(self._answers)} devices>"

    def look(self, devices: Sequence[str]) -> tuple[dict[str, Memory], tuple[str, ...]]:
        """Return the memory of these devices, and the devices that did not answer in time. Blocks
        up to the timeout."""
        until = time.monotonic() + self._seconds
        with self._lock:
            queries = {name: self._query(name) for name in devices}
        wait(queries.values(), timeout=max(0.0, until - time.monotonic()))
        silent = [name for name, query in queries.items() if not self._has_answered(name, query)]
        with self._lock:
            self._forget(set(devices))
            return dict(self._answers), tuple(silent)

    def _forget(self, present: set[str]) -> None:
        """Forget devices that are gone."""
        for name in self._answers.keys() - present:
            del self._answers[name]
        for name in [one for one, query in self._queries.items() if one not in present and query.done()]:
            del self._queries[name]

    def _query(self, name: str) -> Future[Memory]:
        query = self._queries.get(name)
        if query is None:
            query = self._queries[name] = self._threads.submit(self._ask, name)
        return query

    def _has_answered(self, name: str, query: Future[Memory]) -> bool:
        if not query.done():
            return False
        with self._lock:
            self._queries.pop(name, None)
            try:
                self._answers[name] = query.result()
            except HeliographError:
                return False
        return True

    def close(self) -> None:
        """End without waiting for pending queries."""
        self._threads.shutdown(wait=False, cancel_futures=True)
