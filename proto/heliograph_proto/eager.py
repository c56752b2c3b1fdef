"""Coroutines that begin at once.

A task begins in the next turn of its event loop, which for a write of a few bytes takes as long as the
write. Here the caller itself takes a coroutine to where it first waits, and callbacks take it from there. It
is for coroutines of gRPC, which wait for futures and do not ask which task they run in.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any


def begin(coroutine: Coroutine[Any, Any, object], ended: Callable[[BaseException | None], None]) -> None:
    """Runs it to its first wait, and later to its end; then `ended` is told what it raised, if anything. That
    may be before this returns."""
    try:
        waits_for = coroutine.send(None)
    except StopIteration:
        ended(None)
    except BaseException as error:  # its reader is `ended`, as a task's is who awaits it
        ended(error)
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
    else:
        # As a task does: the next one who awaits this future finds it as new.
        waits_for._asyncio_future_blocking = False
        waits_for.add_done_callback(partial(_go_on, coroutine, ended))


def _go_on(
    coroutine: Coroutine[Any, Any, object], ended: Callable[[BaseException | None], None], _: object
) -> None:
    begin(coroutine, ended)
