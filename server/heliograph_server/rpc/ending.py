"""The end of a session, on the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from heliograph_proto.errors import HeliographError
from heliograph_server.session.session import CLOSE_SECONDS, Session


async def end_session(session: Session, threads: Executor, error: HeliographError | None = None) -> None:
    """End a session on a thread, and wait until everything is free, CLOSE_SECONDS at most.

    The wait takes no thread, so that sessions whose work goes on delay the end of no other one.
    """
    loop = asyncio.get_running_loop()
    ended = await loop.run_in_executor(threads, session.end, error)
    await asyncio.wait({asyncio.wrap_future(ended)}, timeout=CLOSE_SECONDS)
