"""The value of an observed node, or of an output of a loop, in pieces, pure."""

from __future__ import annotations

from collections.abc import Iterator

from heliograph_proto.commands import TapPiece


def pieces_of(
    sequence: int, node: int, data: memoryview, most_bytes: int, step: int = 0, output: int | None = None
) -> Iterator[TapPiece]:
    """The bytes in order, at most `most_bytes` in each piece; of no bytes one empty piece."""
    most = max(1, most_bytes)
    for offset in range(0, max(1, data.nbytes), most):
        last = offset + most >= data.nbytes
        yield TapPiece(sequence, node, offset, data[offset : offset + most], last, step, output)
