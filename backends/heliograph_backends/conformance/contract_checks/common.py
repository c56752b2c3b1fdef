"""What checks of the contract share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from heliograph_backends.conformance.harness.bench import Bench, Reports
from heliograph_backends.conformance.harness.content import Array
from heliograph_backends.conformance.harness.outcome import MismatchError, NotSupportedError, require
from heliograph_backends.contract import Buffer, BufferType, Device, Stream, Usage, host_bytes
from heliograph_proto.errors import UnsupportedError


def random_bytes(random: np.random.Generator, count: int) -> Array:
    """Seeded bytes."""
    return random.integers(0, 256, count, np.uint8)


@contextmanager
def buffer_of(buffer_type: BufferType, size_bytes: int, usage: Usage = Usage.ANY) -> Iterator[Buffer]:
    """A buffer, freed afterwards."""
    made = buffer_type.allocate(size_bytes, usage)
    try:
        yield made
    finally:
        made.free()


@contextmanager
def stream_of(bench: Bench) -> Iterator[Stream]:
    """A stream of its own, closed afterwards."""
    made = bench.device.stream()
    try:
        yield made
    finally:
        made.close()


def read(bench: Bench, buffer: Buffer, offset_bytes: int, count: int) -> Array:
    """Bytes of a buffer, read on the stream."""
    out = np.zeros(count, np.uint8)
    bench.run(lambda: buffer.get(offset_bytes, host_bytes(out)))
    return out


def write(bench: Bench, buffer: Buffer, offset_bytes: int, data: Array) -> None:
    """Bytes into a buffer, written on the stream."""
    bench.run(lambda: buffer.set(offset_bytes, host_bytes(data)))


def require_bytes(found: Array, expected: Array, what: str) -> None:
    """Raises MismatchError, saying where the bytes first differ."""
    wrong = np.flatnonzero(found != expected)
    if wrong.size:
        place = int(wrong[0])
        raise MismatchError(
            f"{what}: {wrong.size} bytes differ, first byte {place}: {found[place]}, "
            f"expected {expected[place]}"
        )


def require_raises(kind: type[BaseException], action: Callable[[], Any], what: str) -> BaseException:
    """The error that the action raised. Raises MismatchError if it raised none, or another."""
    try:
        action()
    except kind as error:
        return error
    except Exception as error:
        raise MismatchError(
            f"{what} raised {type(error).__name__} ({error}); {kind.__name__} is due"
        ) from error
    raise MismatchError(f"{what} raised nothing; {kind.__name__} is due")


@contextmanager
def offered() -> Iterator[None]:
    """Turns UnsupportedError, where the contract allows it, into "not supported"."""
    try:
        yield
    except UnsupportedError as error:
        raise NotSupportedError(str(error)) from error


def used_bytes(device: Device) -> int:
    """Bytes that are taken. Raises NotSupportedError where the device does not tell."""
    memory = device.memory()
    if not memory.total_bytes:
        raise NotSupportedError("the device does not tell how much memory it has")
    return memory.total_bytes - memory.free_bytes


class Hold:
    """Work that keeps a stream busy until it is let go, or for the bench's seconds."""

    def __init__(self, bench: Bench, stream: Stream) -> None:
        self._seconds = bench.seconds
        self._begun, self._go = threading.Event(), threading.Event()
        self.reports = Reports()
        stream.submit(self._work, self.reports)

    def _work(self) -> None:
        self._begun.set()
        self._go.wait(self._seconds)

    def wait_until_begun(self) -> None:
        """Raises MismatchError unless the work began by itself."""
        require(self._begun.wait(self._seconds), "work that was submitted did not begin")

    def release(self) -> None:
        """Lets the work end."""
        self._go.set()


@contextmanager
def held(bench: Bench, count: int = 1) -> Iterator[tuple[list[Stream], Hold]]:
    """Streams of their own, of which work keeps the first busy; all is let go and closed afterwards."""
    with ExitStack() as stack:
        streams = [stack.enter_context(stream_of(bench)) for _ in range(count)]
        hold = Hold(bench, streams[0])
        stack.callback(hold.release)
        hold.wait_until_begun()
        yield streams, hold
