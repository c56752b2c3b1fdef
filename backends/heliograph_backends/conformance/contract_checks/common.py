"""Helpers that the checks of the contract share, and the decorator that collects the checks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import numpy as np

from heliograph_backends.conformance.harness.bench import Bench, Reports
from heliograph_backends.conformance.harness.case import ContractCase
from heliograph_backends.conformance.harness.content import Array
from heliograph_backends.conformance.harness.outcome import MismatchError, NotSupportedError, require
from heliograph_backends.contract import Buffer, BufferType, Device, Stream, Usage, host_bytes
from heliograph_proto.errors import UnsupportedError

#: Raises MismatchError, NotSupportedError, or an unexpected error of the backend.
Check: TypeAlias = Callable[[Bench, np.random.Generator], None]


class ContractPart:
    """A part of the contract: its name and its checks, each named by its docstring's first line."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._checks: list[Check] = []

    def __call__(self, check: Check) -> Check:
        """Register a check."""
        self._checks.append(check)
        return check

    def cases(self) -> Iterator[ContractCase]:
        """Yield a case of each check."""
        for check in self._checks:
            name = (check.__doc__ or "").strip().splitlines()[0].rstrip(".")
            yield ContractCase(self.name, name, check)


def random_bytes(random: np.random.Generator, count: int) -> Array:
    """Return seeded bytes."""
    return random.integers(0, 256, count, np.uint8)


@contextmanager
def buffer_of(buffer_type: BufferType, size_bytes: int, usage: Usage = Usage.ANY) -> Iterator[Buffer]:
    """Allocate a buffer, and free it afterwards."""
    made = buffer_type.allocate(size_bytes, usage)
    try:
        yield made
    finally:
        made.free()


@contextmanager
def stream_of(bench: Bench) -> Iterator[Stream]:
    """Make a stream, and close it afterwards."""
    made = bench.device.stream()
    try:
        yield made
    finally:
        made.close()


def read(bench: Bench, buffer: Buffer, offset_bytes: int, count: int) -> Array:
    """Read bytes of a buffer on the bench's stream."""
    out = np.zeros(count, np.uint8)
    bench.run(lambda: buffer.get(offset_bytes, host_bytes(out)))
    return out


def write(bench: Bench, buffer: Buffer, offset_bytes: int, data: Array) -> None:
    """Write bytes to a buffer on the bench's stream."""
    bench.run(lambda: buffer.set(offset_bytes, host_bytes(data)))


def require_bytes(found: Array, expected: Array, what: str) -> None:
    """Raise MismatchError with the first place where the bytes differ."""
    wrong = np.flatnonzero(found != expected)
    if wrong.size:
        place = int(wrong[0])
        raise MismatchError(
            f"{what}: {wrong.size} bytes differ, first byte {place}: {found[place]}, "
            f"expected {expected[place]}"
        )


def require_raises(kind: type[BaseException], action: Callable[[], Any], what: str) -> BaseException:
    """Return the error that the action raised. Raises MismatchError if it raised none or another
    one."""
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
    """Turn UnsupportedError, where the contract allows it, into NotSupportedError."""
    try:
        yield
    except UnsupportedError as error:
        raise NotSupportedError(str(error)) from error


def used_bytes(device: Device) -> int:
    """Return the bytes in use. Raises NotSupportedError if the device does not report them."""
    memory = device.memory()
    if not memory.total_bytes:
        raise NotSupportedError("the device does not report its memory")
    return memory.total_bytes - memory.free_bytes


class Hold:
    """Work that keeps a stream busy until it is released, or for the bench's time limit."""

    def __init__(self, bench: Bench, stream: Stream) -> None:
        self._seconds = bench.seconds
        self._begun, self._go = threading.Event(), threading.Event()
        self.reports = Reports()
        stream.submit(self._work, self.reports)

    def _work(self) -> None:
        self._begun.set()
        self._go.wait(self._seconds)

    def wait_until_begun(self) -> None:
        """Wait until the work has begun. Raises MismatchError if it does not."""
        require(self._begun.wait(self._seconds), "work that was submitted did not begin")

    def release(self) -> None:
        """Let the work end."""
        self._go.set()


@contextmanager
def held(bench: Bench, count: int = 1) -> Iterator[tuple[list[Stream], Hold]]:
    """Make streams and keep the first one busy; release and close all of them afterwards."""
    with ExitStack() as stack:
        streams = [stack.enter_context(stream_of(bench)) for _ in range(count)]
        hold = Hold(bench, streams[0])
        stack.callback(hold.release)
        hold.wait_until_begun()
        yield streams, hold
