"""The values of observed nodes on their way from the command stream to whoever asks for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from heliograph._arrays import byte_view, room_for
from heliograph._outcome import Outcome
from heliograph_proto.commands import TapPiece
from heliograph_proto.errors import HeliographError, ProtocolError
from heliograph_proto.types import TensorType


class Feed:
    """Values of one run, each given once. The core's: it is touched where the core is.

    Where the run pauses, the server waits after each value for a Continue: sent when the next one is asked
    for, or at once from when on the run `flows`, since nobody will ask.
    """

    __slots__ = (
        "_array",
        "_filled",
        "_node",
        "changed",
        "error",
        "flows",
        "is_paused",
        "pauses",
        "ready",
        "types",
    )

    def __init__(self, types: Mapping[int, TensorType], pauses: bool) -> None:
        #: Of the nodes that are observed.
        self.types = types
        self.pauses = pauses
        #: Settled when a value has come, or the run has ended; then there is another.
        self.changed = Outcome()
        #: Node numbers and raw elements (`DType.storage`) that nobody has asked for yet.
        self.ready: deque[tuple[int, np.ndarray[Any, Any]]] = deque()
        #: Whether the server waits.
        self.is_paused = False
        self.flows = False
        #: Why values are missing, such as memory of this process.
        self.error: HeliographError | None = None
        self._node, self._filled = -1, 0
        self._array: np.ndarray[Any, Any] | None = None

    @property
    def size_bytes(self) -> int:
        """What one run brings."""
        return sum(type_.nbytes for type_ in self.types.values())

    def add(self, piece: TapPiece) -> bool:
        """The next piece; whether a value is complete. Raises ProtocolError for one that does not fit."""
        if piece.offset_bytes == 0:
            self._begin(piece.node)
        size_bytes = self.types[self._node].nbytes if self._node >= 0 else 0
        end = piece.offset_bytes + len(piece.data)
        fits = piece.node == self._node and piece.offset_bytes == self._filled and end <= size_bytes
        if not fits or piece.last != (end == size_bytes):
            raise ProtocolError(f"the server sent a piece of node {piece.node} that belongs nowhere")
        if self._array is not None:
            byte_view(self._array)[self._filled : end] = piece.data
        self._filled = end
        return piece.last and self._complete()

    def _begin(self, node: int) -> None:
        if self._node >= 0 or node not in self.types:
            raise ProtocolError(
                f"the server sent node {node}, which is not observed, or in the midst of another"
            )
        self._node, self._filled = node, 0
        try:
            self._array = room_for(self.types[node].storage_shape, self.types[node].dtype.storage)
        except HeliographError as error:
            self.error = self.error or error

    def _complete(self) -> bool:
        if self._array is not None:
            self.ready.append((self._node, self._array))
        self._node, self._array = -1, None
        return True
