"""Small reads and writes of a session that has no command under way.

Nothing orders them but the caller, so it is the only thread that submits commands of the session.
They are the commands of the same names, without a place in the command stream: a session that is
busy, closed or held still, a tensor with an error, and memory elsewhere refuse them, and the caller
sends a command instead.
"""

from __future__ import annotations

from collections.abc import Callable

from heliograph_backends.contract import Buffer, access
from heliograph_server.resources.handles import TensorHandle
from heliograph_server.session.parts.inside import SessionInside
from heliograph_server.session.traffic import Transport

#: The most bytes: the session's lock is held meanwhile.
MOST_BYTES = 1 << 20


class QuietMemory:
    """The memory of a session between two commands. Thread-safe."""

    def __init__(self, inside: SessionInside) -> None:
        self._inside, self._core = inside, inside.core
        self._traffic = inside.executor.traffic

    def write(self, handle: int, offset: int, data: bytearray | memoryview) -> bool:
        """Write bytes of a contiguous tensor. False if a command must."""
        size = len(data)

        def put(tensor: TensorHandle, buffer: Buffer) -> None:
            buffer.set(tensor.layout.offset_bytes + offset, memoryview(data))
            self._changed(tensor)
            self._traffic.written(size, size, Transport.INLINE)

        return self._use(handle, offset, size, put)

    def read(self, handle: int, offset: int, out: memoryview) -> bool:
        """Read bytes of a contiguous tensor. False if a command must."""

        def get(tensor: TensorHandle, buffer: Buffer) -> None:
            buffer.get(tensor.layout.offset_bytes + offset, out)
            self._traffic.read(out.nbytes, out.nbytes, Transport.INLINE)

        return self._use(handle, offset, out.nbytes, get)

    def copy(self, source: int, destination: int) -> bool:
        """Copy a tensor to another one of its type. False if a command must."""
        with self._inside.lock:
            from_ = self._there(source, 0, 0)
            to = self._there(destination, 0, 0)
            if from_ is None or to is None or from_.type != to.type or from_.type.nbytes > MOST_BYTES:
                return False
            access.copy(from_.placed, to.placed)
            self._changed(to)
        return True

    def _use(self, handle: int, offset: int, size: int, use: Callable[[TensorHandle, Buffer], None]) -> bool:
        with self._inside.lock:
            tensor = self._there(handle, offset, size)
            if tensor is None or tensor.storage is None:
                return False
            use(tensor, tensor.storage.buffer)
        return True

    def _there(self, handle: int, offset: int, size: int) -> TensorHandle | None:
        """Return a tensor with these bytes; None if it cannot be used now."""
        core, executor = self._core, self._inside.executor
        if core.unretired or core.closed is not None or executor.stillness.keeps is not None:
            return None
        tensor = core.handles.peek(handle, TensorHandle)
        if tensor is None or tensor.storage is None or tensor.problem() is not None or size > MOST_BYTES:
            return None
        buffer, layout = tensor.storage.buffer, tensor.layout
        if buffer is None or not buffer.buffer_type.is_host or not layout.is_contiguous:
            return None
        return tensor if 0 <= offset <= layout.type.nbytes - size else None

    @staticmethod
    def _changed(tensor: TensorHandle) -> None:
        storage = tensor.storage
        assert storage is not None
        storage.version += 1
        storage.tell_weights(tensor)
