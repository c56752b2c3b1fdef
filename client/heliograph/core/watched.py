"""Tensors whose writes must be noticed."""

from __future__ import annotations

from collections.abc import Callable

from heliograph_proto import commands as c


class Watched:
    """Tensor handles with a function to call when a command writes one of them, or a view of it."""

    def __init__(self) -> None:
        self._by_handle: dict[int, dict[Callable[[], None], None]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_handle)

    def __contains__(self, handle: int) -> bool:
        return handle in self._by_handle

    def watch(self, handle: int, written: Callable[[], None]) -> None:
        """Call the function from now on for writes of a handle. It must not send."""
        self._by_handle.setdefault(handle, {})[written] = None

    def leave(self, handle: int) -> None:
        """Undo `watch`."""
        self._by_handle.pop(handle, None)

    def look_at(self, kind: c.CommandKind) -> None:
        """Call the functions for the tensors that a command writes."""
        if isinstance(kind, c.View) and kind.source in self._by_handle:
            self._by_handle[kind.tensor] = self._by_handle[kind.source]
        for handle in _written(kind):
            for written in self._by_handle.get(handle, ()):
                written()


def _written(kind: c.CommandKind) -> tuple[int, ...]:
    match kind:
        case c.SetTensor(tensor=handle) | c.Memset(tensor=handle) | c.CopyTensor(destination=handle):
            return (handle,)
        case c.RunCommand(outputs=outputs):
            return tuple(one.into for one in outputs if one.into)
    return ()
