"""Tracebacks of errors in IPython and notebooks: the user's own lines, without those of this
library.

IPython asks an exception for its traceback (`_render_traceback_`). The frames of Heliograph and
gRPC are left out there, so that it ends at the user's line. `%tb` shows the same; `%debug`, a plain
interpreter, and programs see every frame, and so does IPython with
`get_ipython().InteractiveTB.skip_hidden = False`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

#: The packages whose frames are not the user's.
_PACKAGES = ("heliograph", "heliograph_proto", "heliograph_server", "heliograph_backends", "grpc")


def rendered(error: BaseException) -> list[str]:
    """Return IPython's lines for an error that has the user's frames alone, or all if none is the
    user's."""
    shell = sys.modules["IPython"].get_ipython()
    printer = shell.InteractiveTB
    shown = error.__traceback__
    if getattr(printer, "skip_hidden", True):
        left = _without_library(shown)
        # An error that no line of the user's caused is a defect: then each frame matters.
        shown = left if _own(left) < sum(1 for _ in _frames(left)) else shown
    lines: list[str] = printer.structured_traceback(type(error), error, shown, tb_offset=_own(shown))
    return lines


def _without_library(found: TracebackType | None) -> TracebackType | None:
    """The frames of others, as a new traceback; the one that is given stays as it is."""
    made: TracebackType | None = None
    for one in reversed(list(_frames(found))):
        if not _is_library(one):
            made = TracebackType(made, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return made


def _frames(found: TracebackType | None) -> Iterator[TracebackType]:
    while found is not None:
        yield found
        found = found.tb_next


def _is_library(one: TracebackType) -> bool:
    name: Any = one.tb_frame.f_globals.get("__name__", "")
    return isinstance(name, str) and name.partition(".")[0] in _PACKAGES


def _own(found: TracebackType | None) -> int:
    """The number of frames at the start that are IPython's."""
    count = 0
    for one in _frames(found):
        if not str(one.tb_frame.f_globals.get("__name__", "")).startswith("IPython."):
            break
        count += 1
    return count
