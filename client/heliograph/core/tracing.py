"""OpenTelemetry spans for callers that use it: requests to a server continue the caller's trace.

Nothing here imports OpenTelemetry. A process with a span has imported it; for all others this costs
one look-up. The caller's span decides: if none is active, or it is not sampled, no span is made and
nothing is sent.
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

#: The spans of a run and of a loop.
RUN_SPAN, LOOP_SPAN = "heliograph.run", "heliograph.loop"
COMPILE_SPAN, CONNECT_SPAN = "heliograph.compile", "heliograph.connect"
SET_SPAN, GET_SPAN = "heliograph.set", "heliograph.get"
#: The module opentelemetry.trace, once the process has imported it, and the tracer for spans.
_api: Any = None
_tracer: Any = None


class CallSpan:
    """A span of a request to a server."""

    __slots__ = ("_span", "trace_parent")

    def __init__(self, span: Any, trace_parent: str) -> None:
        """`span`: None if it belongs to a caller that only passes its context on."""
        self._span = span
        #: The trace context for the server.
        self.trace_parent = trace_parent

    def __repr__(self) -> str:
        return f"<CallSpan {self.trace_parent}>"

    def end_with(self, outcome: Outcome) -> None:
        """End it with the outcome, from any thread."""
        if self._span is not None:
            outcome.add_callback(lambda: self.end(outcome.error))

    def end(self, error: BaseException | None = None) -> None:
        """End it, with an error or without."""
        if self._span is None:
            return
        if error is not None:
            self._span.set_attribute("error.type", error_type(error))
            self._span.set_status(_api.StatusCode.ERROR, f"{type(error).__name__}: {error}"[:1000])
        self._span.end()


def begin(name: str) -> CallSpan | None:
    """Start a span below the caller's. Returns None if the caller has none that is sampled."""
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
    """Run a procedure within a span if its caller has one that is sampled."""
    if (_api or _found()) is None or not _is_traced():
        return procedure
    return _within(name, procedure)


def as_current(name: str) -> AbstractContextManager[object]:
    """Return a context with a current span, if the caller has one that is sampled."""
    if (_api or _found()) is None or not _is_traced():
        return nullcontext()
    found: AbstractContextManager[object] = _tracer.start_as_current_span(name, kind=_api.SpanKind.CLIENT)
    return found


def call_metadata() -> Metadata:
    """Return the metadata that links a call to its span; empty without a span."""
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
    """Return OpenTelemetry's API if the process has imported it."""
    global _api, _tracer
    module = sys.modules.get("opentelemetry.trace")
    # During its import the module is there in part.
    if module is not None and hasattr(module, "use_span") and hasattr(module, "get_tracer"):
        _tracer = module.get_tracer("heliograph", __version__)
        _api = module
    return _api


def _is_traced() -> bool:
    span = _api.get_current_span()
    return span is not _api.INVALID_SPAN and bool(span.get_span_context().trace_flags.sampled)
