"""Which tensors a command writes, for whoever must know that somebody wrote them."""

from __future__ import annotations

from collections.abc import Callable

from heliograph_proto import commands as c


class Watched:
    """Handles of tensors, and what is called when a command writes one, or a view of one."""

    def __init__(self) -> None:
        self._by_handle: dict[int, Callable[[], None]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_handle)

    def __contains__(self, handle: int) -> bool:
        return handle in self._by_handle

    def watch(self, handle: int, written: Callable[[], None]) -> None:
        """From now on it is called; it must not send."""
        self._by_handle[handle] = written

    def leave(self, handle: int) -> None:
        """Undoes `watch`."""
        self._by_handle.pop(handle, None)

    def look_at(self, kind: c.CommandKind) -> None:
        """A command is sent."""
        if isinstance(kind, c.View) and kind.source in self._by_handle:
            self._by_handle[kind.tensor] = self._by_handle[kind.source]
        for handle in _written(kind):
            if (written := self._by_handle.get(handle)) is not None:
                written()


def _written(kind: c.CommandKind) -> tuple[int, ...]:
    match kind:
        case c.SetTensor(tensor=handle) | c.Memset(tensor=handle) | c.CopyTensor(destination=handle):
            return (handle,)
        case c.Run(outputs=outputs):
            return tuple(one.into for one in outputs if one.into)
    return ()
