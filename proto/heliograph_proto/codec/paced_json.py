"""Reading of JSON that other threads need not wait for. Pure.

The interpreter's own reader lets no other thread run before it is done, which takes a second for
some tens of MB. Here it has pieces of its work: texts, and numbers in arrays. The rest is done in
Python, where threads take turns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from json.decoder import JSONArray  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

#: Texts of so many characters are read in one piece, in some 10 ms.
QUICK = 2**19
#: The characters of the first piece of an array, and the most of one.
LEAST_PIECE, MOST_PIECE = 2**10, 2**16
#: The places at which a piece may end that are tried.
TRIES = 16
#: Numbers, truth values, and arrays of them.
_PLAIN = re.compile(r"[-+0-9.eE,\s\[\]truefalsn]*")

Scan = Callable[[str, int], tuple[Any, int]]


def loads(data: bytes) -> Any:
    """Return what JSON says, as `json.loads` does, but with fewer levels in long texts. Raises
    ValueError, RecursionError."""
    if len(data) <= QUICK:
        return json.loads(data)
    return _Decoder().decode(data.decode(json.detect_encoding(data), "surrogatepass"))


def _in_ascii(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a reader of numbers that refuses other scripts' digits, as the interpreter's own."""

    def reader(digits: str) -> Any:
        if not digits.isascii():
            raise ValueError(f"{digits[:40]!r} is no number of JSON")
        return read(digits)

    return reader


class _Decoder(json.JSONDecoder):
    """The interpreter's decoder in Python, with arrays of numbers in pieces. For one text."""

    def __init__(self) -> None:
        super().__init__(parse_int=_in_ascii(int), parse_float=_in_ascii(float))
        #: No piece is tried before this place: the text up to there was looked at in vain.
        self._next = 0
        self.parse_array = self._array
        self.scan_once = py_make_scanner(self)

    def _array(self, text_and_place: tuple[str, int], scan: Scan) -> tuple[list[Any], int]:
        """Read an array from behind its bracket on; return it and the place behind its end."""
        text, place = text_and_place
        found: list[Any] = []
        size, is_tried = LEAST_PIECE, place >= self._next
        while is_tried and (end := _end_of_piece(text, place, size)) > place:
            try:
                part = json.loads(f"[{text[place:end]}]")
            except ValueError:
                part = []
            if not part:
                # It is none of this array alone, or is wrong: what follows says why.
                break
            found += part
            place, size = end + 1, min(2 * size, MOST_PIECE)
        if is_tried and not found:
            self._next = place + size
        rest, end = JSONArray((text, place), scan)
        if found and not rest:
            raise json.JSONDecodeError("Expecting value", text, place)
        if not found:
            return rest, end
        found += rest
        return found, end


def _end_of_piece(text: str, place: int, size: int) -> int:
    """Return the place of the comma that ends whole elements from a place on; -1 if none is found."""
    match = _PLAIN.match(text, place, place + size)
    end = text.rfind(",", place, match.end()) if match else -1
    for _ in range(TRIES):
        if end <= place or text.count("[", place, end) == text.count("]", place, end):
            return end
        end = text.rfind("],", place, end) + 1
    return -1
