"""Tests on an event loop of their own, in asyncio's debug mode, which leave no task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import heliograph as hg


def run(url: str, test: Callable[[hg.aio.Session], Awaitable[None]]) -> None:
    """Run a test with a session."""

    async def main() -> None:
        async with hg.aio.connect(url) as session:
            await test(session)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main(), debug=True)


def run_with_plan(
    url: str, graph: hg.Graph, test: Callable[[hg.aio.Session, hg.aio.Plan], Awaitable[None]]
) -> None:
    """Run a test with a session and its plan of a graph."""

    async def compiled(session: hg.aio.Session) -> None:
        await test(session, await session.compile(graph))

    run(url, compiled)
