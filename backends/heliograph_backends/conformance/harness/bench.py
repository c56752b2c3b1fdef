"""A device under test, with a time limit for its work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from heliograph_backends.conformance.harness.outcome import LostError, MismatchError, NotSupportedError
from heliograph_backends.contract import Device, Stream
from heliograph_proto.graph import Graph

logger = logging.getLogger(__name__)

#: The time limit of one piece of work; after it the work counts as lost.
WORK_SECONDS = 20.0


class Reports:
    """A `done` callback that records its calls."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.errors: list[BaseException | None] = []

    def __call__(self, error: BaseException | None) -> None:
        self.errors.append(error)
        self._event.set()

    def ended(self, seconds: float) -> bool:
        """True if `done` is called within this time."""
        return self._event.wait(seconds)

    def wait(self, seconds: float) -> None:
        """Raise the work's error, LostError if its end was not reported, MismatchError if more than
        once."""
        if not self.ended(seconds):
            raise LostError(f"`done` was not called within {seconds:g} s after the work was submitted")
        if len(self.errors) > 1:
            raise MismatchError(f"`done` was called {len(self.errors)} times for one piece of work")
        if self.errors[0] is not None:
            raise self.errors[0]


class Bench:
    """A device, one of its streams, and the time limit of its work. Unusable once work is lost."""

    def __init__(self, device: Device, seconds: float = WORK_SECONDS) -> None:
        self.device = device
        self.seconds = seconds
        #: True if work did not end in time. It may still write, so its memory is never freed.
        self.lost = False
        self._stream: Stream | None = None

    @property
    def stream(self) -> Stream:
        """The stream that work runs on. Raises LostError if work was lost."""
        if self.lost:
            raise LostError("work of this case was lost before")
        if self._stream is None:
            self._stream = self.device.stream()
        return self._stream

    def run(self, work: Callable[[], object]) -> None:
        """Run work on the stream. Raises the work's error, or LostError if its end was not
        reported."""

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
        """Raise NotSupportedError if there are nodes that the device cannot run.

        It has their ops, and the device's reason for the first one.
        """
        reasons: dict[str, str] = {}
        for node in graph.nodes:
            operands = [graph.type_of(value) for value in node.operands]
            if why := self.device.supports_op(node.op, node.attributes, operands, node.type):
                reasons.setdefault(node.op, why)
        if reasons:
            raise NotSupportedError(next(iter(reasons.values())), tuple(reasons))

    def close(self) -> None:
        """Close the stream unless its work was lost: closing would wait for it."""
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
