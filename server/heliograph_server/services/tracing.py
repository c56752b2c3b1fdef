"""Calls that belong to a trace: their metadata says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from grpc import aio

from heliograph_proto.traces import handing_on, trace_in
from heliograph_server.core.runtime import Host, Session


@contextmanager
def traced(name: str, host: Host, session: Session, context: aio.ServicerContext[Any, Any]) -> Iterator[None]:
    """While a call is answered: a span of this name, if its caller has one that is sampled; what is asked of
    other daemons meanwhile belongs to it."""
    parent = trace_in(context.invocation_metadata() or ())
    if not parent:
        yield
    elif host.tracing is None:
        with handing_on(parent):
            yield
    else:
        with host.tracing.call(name, parent, session.number) as own, handing_on(own):
            yield
