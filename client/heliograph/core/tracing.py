"""Spans of OpenTelemetry, for callers who have it: theirs goes on in what is asked of a server.

Nothing here imports OpenTelemetry. Whoever has a span has imported it; nobody else pays more than a look
whether it is there. The caller's span decides: where none is active, or it is not sampled, no span is made
and nothing is sent.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from heliograph_proto import __version__
from heliograph_proto.trace_context import HANDED_ON, TRACE_PARENT, TRACE_STATE, error_type, parent_of

if TYPE_CHECKING:
    from heliograph.core.effects import Procedure
    from heliograph.core.future import Outcome

T = TypeVar("T")

#: Metadata of a call.
Metadata = tuple[tuple[str, str], ...]

#: Of a run, and of a loop.
RUN_SPAN, LOOP_SPAN = "heliograph.run", "heliograph.loop"
COMPILE_SPAN, CONNECT_SPAN = "heliograph.compile", "heliograph.connect"
SET_SPAN, GET_SPAN = "heliograph.set", "heliograph.get"
#: The module opentelemetry.trace, once somebody has imported it, and the tracer that makes spans.
_api: Any = None
_tracer: Any = None


class CallSpan:
    """A span of something that is asked of a server."""

    __slots__ = ("_span", "trace_parent")

    def __init__(self, span: Any, trace_parent: str) -> None:
        """`span`: None where it is somebody else's, who hands it on."""
        self._span = span
        #: What the server is told.
        self.trace_parent = trace_parent

    def __repr__(self) -> str:
        return f"<CallSpan {self.trace_parent}>"

    def end_with(self, outcome: Outcome) -> None:
        """Ends with it, from whatever thread."""
        if self._span is not None:
            outcome.add_callback(lambda: self.end(outcome.error))

    def end(self, error: BaseException | None = None) -> None:
        """It is over, well or with an error."""
        if self._span is None:
            return
        if error is not None:
            self._span.set_attribute("error.type", error_type(error))
            self._span.set_status(_api.StatusCode.ERROR, f"{type(error).__name__}: {error}"[:1000])
        self._span.end()


def begin(name: str) -> CallSpan | None:
    """A span below the caller's; None where it has none that is sampled."""
    if handed_on := HANDED_ON.get():
        return CallSpan(None, handed_on)
    if (_api or _found()) is None or not _is_traced():
        return None
    span = _tracer.start_span(name, kind=_api.SpanKind.CLIENT)
    context = span.get_span_context()
    if not context.trace_flags.sampled:
        return None
    return CallSpan(span, parent_of(f"{context.trace_id:032x}", f"{context.span_id:016x}"))


def traced(name: str, procedure: Procedure[T]) -> Procedure[T]:
    """A procedure within a span, if its caller has one that is sampled."""
    if (_api or _found()) is None or not _is_traced():
        return procedure
    return _within(name, procedure)


def as_current(name: str) -> AbstractContextManager[object]:
    """A span within which something is done, if the caller has one that is sampled."""
    if (_api or _found()) is None or not _is_traced():
        return nullcontext()
    found: AbstractContextManager[object] = _tracer.start_as_current_span(name, kind=_api.SpanKind.CLIENT)
    return found


def call_metadata() -> Metadata:
    """What a call tells of the span that it belongs to; empty: of none."""
    if handed_on := HANDED_ON.get():
        return ((TRACE_PARENT, handed_on),)
    if (_api or _found()) is None or not _is_traced():
        return ()
    context = _api.get_current_span().get_span_context()
    parent = parent_of(f"{context.trace_id:032x}", f"{context.span_id:016x}")
    state = context.trace_state.to_header() if context.trace_state else ""
    return ((TRACE_PARENT, parent), (TRACE_STATE, state)) if state else ((TRACE_PARENT, parent),)


def _within(name: str, procedure: Procedure[T]) -> Procedure[T]:
    # The effects of a procedure happen in the thread, or the task, that drives it.
    with as_current(name):
        return (yield from procedure)


def _found() -> Any:
    """OpenTelemetry's API, if somebody has imported it."""
    global _api, _tracer
    module = sys.modules.get("opentelemetry.trace")
    # While it is being imported it is there in part.
    if module is not None and hasattr(module, "use_span") and hasattr(module, "get_tracer"):
        _tracer = module.get_tracer("heliograph", __version__)
        _api = module
    return _api


def _is_traced() -> bool:
    span = _api.get_current_span()
    return span is not _api.INVALID_SPAN and bool(span.get_span_context().trace_flags.sampled)
