"""A device under test, and waiting for it with a bound."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from heliograph_backends.conformance.harness.outcome import LostError, MismatchError, NotSupportedError
from heliograph_backends.contract import Device, Stream
from heliograph_proto.graph import Graph

logger = logging.getLogger(__name__)

#: How long one piece of work may take before it counts as lost.
WORK_SECONDS = 20.0


class Reports:
    """What `done` of submitted work was called with."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.errors: list[BaseException | None] = []

    def __call__(self, error: BaseException | None) -> None:
        self.errors.append(error)
        self._event.set()

    def ended(self, seconds: float) -> bool:
        """Whether it was called, at the latest after so long."""
        return self._event.wait(seconds)

    def wait(self, seconds: float) -> None:
        """Raises what the work raised, LostError if its end was not reported, MismatchError if twice."""
        if not self.ended(seconds):
            raise LostError(f"`done` was not called within {seconds:g} s after the work was submitted")
        if len(self.errors) > 1:
            raise MismatchError(f"`done` was called {len(self.errors)} times for one piece of work")
        if self.errors[0] is not None:
            raise self.errors[0]


class Bench:
    """A device, a stream of it, and the seconds that a piece of work may take. Of use until work is lost."""

    def __init__(self, device: Device, seconds: float = WORK_SECONDS) -> None:
        self.device = device
        self.seconds = seconds
        #: Whether work did not end in time: it may still write, so nothing that it uses is freed.
        self.lost = False
        self._stream: Stream | None = None

    @property
    def stream(self) -> Stream:
        """The stream that work runs on. Raises LostError once work was lost."""
        if self.lost:
            raise LostError("work of this case was lost before")
        if self._stream is None:
            self._stream = self.device.stream()
        return self._stream

    def run(self, work: Callable[[], object]) -> None:
        """Runs work on the stream; raises what it raised, or LostError if its end was not reported."""

        def submitted() -> None:
            work()

        reports = Reports()
        self.stream.submit(submitted, reports)
        try:
            reports.wait(self.seconds)
        except LostError:
            self.lost = True
            raise

    def require_support(self, graph: Graph) -> None:
        """Raises NotSupportedError with the device's reason for the first node that it cannot run."""
        for node in graph.nodes:
            operands = [graph.type_of(value) for value in node.operands]
            if why := self.device.supports_op(node.op, node.attributes, operands, node.type):
                raise NotSupportedError(why)

    def close(self) -> None:
        """Closes the stream, unless work was lost there: closing would wait for it."""
        if self._stream is None or self.lost:
            return
        closer = threading.Thread(target=self._close, daemon=True)
        closer.start()
        closer.join(self.seconds)

    def _close(self) -> None:
        assert self._stream is not None
        try:
            self._stream.close()
        except Exception:
            logger.exception("closing a stream of %s failed", self.device.name)
