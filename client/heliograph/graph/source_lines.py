"""Which line of the user's code is building the graph.

Every node keeps a code object and a line number, which cost nothing to take; the text is made only
when an error needs it. The wire never carries them: the client adds them to errors that name a node.
"""

from __future__ import annotations

import linecache
import sys
from types import CodeType
from typing import TypeAlias

from heliograph_proto.errors import HeliographError, InvalidGraphError, Origin

#: Where a node was built: its code and the line in it.
Source: TypeAlias = tuple[CodeType, int]

#: Frames of these modules are ours; the models that ship with Heliograph count as user code.
_OWN = ("heliograph._", "heliograph.functions", "heliograph.graph", "heliograph.ops")


def caller() -> Source | None:
    """The innermost frame outside the graph builder."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith(_OWN):
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return frame.f_code, frame.f_lineno


def describe(source: Source | None) -> str:
    """ "file.py:12 in function: source text"; empty when nothing is known."""
    if source is None:
        return ""
    code, line = source
    text = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}:{line} in {code.co_qualname}" + (f": {text}" if text else "")


def invalid(
    message: str, advice: str = "", kind: type[HeliographError] = InvalidGraphError
) -> HeliographError:
    """An error of the user's line that is building the graph now; to be raised."""
    return kind(message, advice=advice, origin=Origin(source=describe(caller())))
