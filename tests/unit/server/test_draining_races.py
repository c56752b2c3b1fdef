"""Two operators at once: whichever asked last is right."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

from heliograph_proto.sessions import DrainState
from heliograph_server.runtime.draining import Draining
from heliograph_server.runtime.heads import Heads
from heliograph_server.runtime.host_slot import HostSlot
from heliograph_server.runtime.moves import Moves

SECONDS = 20.0


class BusyHost:
    """One whose work does not end."""

    def __init__(self) -> None:
        self.is_draining = False
        self.sessions = ()
        self.is_waited_for = threading.Event()
        self.moves, self.heads = Moves(cast(Any, self)), Heads(cast(Any, self))

    def count_busy(self) -> int:
        return 1

    def drain(self) -> None:
        self.is_draining = True

    def undo_drain(self) -> None:
        self.is_draining = False

    def wait_quiet(self, timeout: float) -> bool:
        self.is_waited_for.set()
        return False


def test_a_drain_that_begins_while_another_is_undone_is_in_force() -> None:
    host, told = BusyHost(), [True]

    async def tell_health() -> None:
        told.append(not host.is_draining)

    async def scenario() -> None:
        draining = Draining(HostSlot(cast(Any, host)), lambda: 60.0, tell_health)
        await draining.begin(3600, stay=True)
        await asyncio.to_thread(host.is_waited_for.wait, SECONDS)
        await asyncio.gather(draining.undo(), draining.begin(3600, stay=True))
        assert draining.status.state is DrainState.DRAINING
        assert host.is_draining and not told[-1]
        assert (await draining.undo()).state is DrainState.SERVING
        assert not host.is_draining and told[-1]

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))
