"""W3C Trace Context: the trace and the parent span of an operation.

00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01
version, trace, span, flags (1: sampled)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from heliograph_proto.errors import HeliographError, Reason

#: The length of a traceparent, in characters and bytes.
TRACE_BYTES = 55
#: Keys in the metadata of calls.
TRACE_PARENT, TRACE_STATE = "traceparent", "tracestate"
#: The parent span of the calls that this thread or task makes to other servers.
HANDED_ON: ContextVar[str] = ContextVar("heliograph_trace_parent", default="")
_FORM = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f][13579bdf]", re.ASCII)


def sampled(trace_parent: str) -> str:
    """Return the argument if it is the traceparent of a sampled span, else ""; any input is
    safe."""
    if len(trace_parent) == TRACE_BYTES and _FORM.fullmatch(trace_parent):
        return trace_parent
    return ""


def parent_of(trace: str, span: str) -> str:
    """Return the traceparent of a sampled span: 32 hexadecimal digits of trace, 16 of span."""
    return f"00-{trace}-{span}-01"


def trace_of(trace_parent: str) -> tuple[str, str]:
    """Return the trace and the span of a `sampled` traceparent, in hexadecimal digits."""
    return trace_parent[3:35], trace_parent[36:52]


def below(trace_parent: str, span: str) -> str:
    """Return the traceparent of another span in the same trace."""
    return f"{trace_parent[:36]}{span}{trace_parent[52:]}"


def trace_in(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the traceparent of a call if it is sampled, else ""."""
    for key, value in metadata:
        if key == TRACE_PARENT and isinstance(value, str):
            return sampled(value)
    return ""


def error_type(error: BaseException) -> str:
    """Return an error's name in spans: its reason in lower case (out_of_range), or its class."""
    if isinstance(error, HeliographError):
        return Reason.Name(error.reason).removeprefix("REASON_").lower()
    return type(error).__name__


@contextmanager
def handing_on(trace_parent: str) -> Iterator[None]:
    """Make this span the parent of calls to other servers within the context; "": no span."""
    token = HANDED_ON.set(trace_parent)
    try:
        yield
    finally:
        HANDED_ON.reset(token)
