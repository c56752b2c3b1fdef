"""Streams, events and memory that are wrong in one way each, for the conformance suite to find."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from broken_backends import Intact

from heliograph_backends.contract import Done, Event, Stream, Usage
from heliograph_backends.cpu.stream import CpuStream
from heliograph_backends.host_memory.buffers import HostBuffer, HostBufferType
from heliograph_proto.types import TensorType

# Streams and events


def with_stream(stream: type[CpuStream]) -> type[Intact]:
    """A device whose streams are of this kind."""

    class Device(Intact):
        def stream(self) -> CpuStream:
            self.streams.append(stream(self, "broken-stream"))
            return self.streams[-1]

    return Device


class LosesDone(CpuStream):
    def submit(self, work: Callable[[], None], done: Done) -> None:
        super().submit(work, lambda error: None)


class SaysDoneTwice(CpuStream):
    def submit(self, work: Callable[[], None], done: Done) -> None:
        def twice(error: BaseException | None) -> None:
            done(error)
            done(error)

        super().submit(work, twice)


class SaysDoneTooEarly(CpuStream):
    """When the work was issued, not when it was computed."""

    def submit(self, work: Callable[[], None], done: Done) -> None:
        done(None)
        super().submit(work, lambda error: None)


class SwallowsErrors(CpuStream):
    def submit(self, work: Callable[[], None], done: Done) -> None:
        super().submit(work, lambda error: done(None))


class RunsAtOnce(CpuStream):
    """No queue: work is done inside `submit`."""

    def submit(self, work: Callable[[], None], done: Done) -> None:
        self._run_one(work, done)


class DropsTheQueue(CpuStream):
    """Closing forgets what is queued."""

    def submit(self, work: Callable[[], None], done: Done) -> None:
        super().submit(work, lambda error: None if self._closed and error is not None else done(error))


class OvertakesSubmitters(CpuStream):
    """Later work does not wait for work that its submitter does."""

    def submit_here(self, work: Callable[[], None], done: Done) -> Callable[[], None] | None:
        return None if self._turn.locked() else partial(self._run_one, work, done)


class Swaps(CpuStream):
    """Every second piece of work overtakes the one before it."""

    def submit(self, work: Callable[[], None], done: Done) -> None:
        with self._lock:
            if len(self._queue) % 2:
                self._queue.insert(len(self._queue) - 1, (work, done))
                self._ready.release()
                return
        super().submit(work, done)


class AlwaysReached(Event):
    def record(self, stream: Stream) -> Event:
        return self


class HasEventsAlwaysReached(Intact):
    def event(self) -> Event:
        return AlwaysReached()


# Memory


def with_memory(buffer_type: type[HostBufferType]) -> type[Intact]:
    """A device whose memory is of this kind."""

    class Device(Intact):
        def __init__(self) -> None:
            super().__init__()
            self._buffer_type = buffer_type(self, self._budget)

    return Device


class Unaligned(HostBufferType):
    def allocate(self, size_bytes: int, usage: Usage = Usage.ANY) -> HostBuffer:
        made = super().allocate(size_bytes + 16, usage)
        return HostBuffer(self, made.memory[16:], usage, on_free=made.free)


class TooSmall(HostBufferType):
    def alloc_size(self, tensor: TensorType) -> int:
        return tensor.nbytes // 2


class NeverFull(HostBufferType):
    """Does not count what it takes."""

    def allocate(self, size_bytes: int, usage: Usage = Usage.ANY) -> HostBuffer:
        return HostBuffer(self, np.zeros(min(size_bytes, 2**24), np.uint8), usage, on_free=lambda: None)


class Leaks(HostBufferType):
    def allocate(self, size_bytes: int, usage: Usage = Usage.ANY) -> HostBuffer:
        made = super().allocate(size_bytes, usage)
        return HostBuffer(self, made.memory, usage, on_free=lambda: None)


class _FreesTwice(HostBuffer):
    def free(self) -> None:
        self.buffer_type.budget.give(self.size_bytes)


class GivesBackTwice(HostBufferType):
    def allocate(self, size_bytes: int, usage: Usage = Usage.ANY) -> HostBuffer:
        made = super().allocate(size_bytes, usage)
        return _FreesTwice(self, made.memory, usage, on_free=lambda: None)


class _WritesWords(HostBuffer):
    def set(self, offset_bytes: int, data: memoryview) -> None:
        super().set(offset_bytes // 4 * 4, data)

    def memset(self, offset_bytes: int, size_bytes: int, value: int) -> None:
        super().memset(offset_bytes, -(-size_bytes // 4) * 4, value)


class WritesWholeWords(HostBufferType):
    def allocate(self, size_bytes: int, usage: Usage = Usage.ANY) -> HostBuffer:
        made = super().allocate(size_bytes, usage)
        return _WritesWords(self, made.memory, usage, on_free=made.free)
