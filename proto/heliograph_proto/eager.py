"""Coroutines that start immediately.

A task starts in the next iteration of its event loop, and for a write of a few bytes that delay is
as long as the write. `begin` instead runs a coroutine on the caller's stack up to its first wait,
and callbacks continue it. It suits gRPC's coroutines, which await futures and do not depend on the
current task.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any


def begin(coroutine: Coroutine[Any, Any, object], ended: Callable[[BaseException | None], None]) -> None:
    """Run a coroutine up to its first wait, and later to its end.

    At the end, `ended` is called with the exception that the coroutine raised, or None. The call
    may happen before this returns.
    """
    try:
        waits_for = coroutine.send(None)
    except StopIteration:
        ended(None)
    except BaseException as error:  # delivered to `ended`, as a task delivers it to its awaiter
        ended(error)
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
    else:
        # As asyncio.Task does; otherwise the future cannot be awaited again.
        waits_for._asyncio_future_blocking = False
        waits_for.add_done_callback(partial(_go_on, coroutine, ended))


def _go_on(
    coroutine: Coroutine[Any, Any, object], ended: Callable[[BaseException | None], None], _: object
) -> None:
    begin(coroutine, ended)
