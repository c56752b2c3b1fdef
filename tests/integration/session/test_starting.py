"""Connecting to a server whose devices are still starting."""

from __future__ import annotations

import asyncio
import threading

import pytest

import heliograph as hg
from heliograph_backends.fake import FakeDevice
from heliograph_backends.registry import Registry
from heliograph_server.config.config import ServerConfig
from heliograph_server.daemon.daemon import Daemon
from heliograph_server.runtime.host import Host

SECONDS = 10.0


def test_connecting_waits_for_the_devices_of_a_server_that_starts_within_its_time() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def open_host() -> Host:
        begun.set()
        assert go_on.wait(SECONDS)
        return Host(Registry.of(FakeDevice()))

    async def scenario() -> None:
        daemon = Daemon(ServerConfig(("grpc://127.0.0.1:0",)), open_host)
        starting = asyncio.ensure_future(daemon.start())
        assert await asyncio.to_thread(begun.wait, SECONDS)
        url = str(daemon.addresses[0])
        with pytest.raises(hg.UnavailableError, match="starting its devices"):
            await asyncio.to_thread(hg.connect, url, timeout=0.5)
        waiting = [
            asyncio.ensure_future(asyncio.to_thread(hg.connect, url, timeout=SECONDS)),
            asyncio.ensure_future(devices_of(url)),
        ]
        done, _ = await asyncio.wait(waiting, timeout=0.3)
        assert not done
        go_on.set()
        await starting
        session, names = await asyncio.gather(*waiting)
        assert [device.name for device in session.devices] == names == ["fake0"]
        await asyncio.to_thread(session.close)
        await daemon.stop()

    asyncio.run(asyncio.wait_for(scenario(), 4 * SECONDS))


async def devices_of(url: str) -> list[str]:
    async with hg.aio.connect(url, timeout=SECONDS) as session:
        return [device.name for device in session.devices]
