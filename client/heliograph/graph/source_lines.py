"""The line of user code that builds a node.

Every node keeps a code object and a line number, which cost nothing to take; the text is made only
when an error needs it. The wire never carries them: the client adds them to errors that name a
node.
"""

from __future__ import annotations

import linecache
import sys
from types import CodeType
from typing import TypeAlias

from heliograph_proto.errors import HeliographError, InvalidGraphError, Origin

#: The code object and the line that built a node; their text in a copy or a loaded pickle.
Source: TypeAlias = tuple[CodeType, int] | str
#: The most characters of a quoted line.
_LINE = 160

#: Frames of these modules are ours; the models that ship with Heliograph count as user code.
_OWN = (
    "heliograph._",
    "heliograph.autodiff",
    "heliograph.functions",
    "heliograph.graph",
    "heliograph.lowerings",
    "heliograph.op_functions",
    "heliograph.optim",
    "heliograph.random",
    "heliograph.windows",
)


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
    if source is None or isinstance(source, str):
        return source or ""
    code, line = source
    text = linecache.getline(code.co_filename, line).strip()
    if len(text) > _LINE:
        text = f"{text[:_LINE]}..."
    return f"{code.co_filename}:{line} in {code.co_qualname}" + (f": {text}" if text else "")


def invalid(
    message: str, advice: str = "", kind: type[HeliographError] = InvalidGraphError
) -> HeliographError:
    """Return an error that names the user's line; the caller raises it."""
    return kind(message, advice=advice, origin=Origin(source=describe(caller())))
