"""Daemons of this process, each with an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import grpc

from heliograph_backends.contract import Device, Tensor
from heliograph_backends.cpu.backend import CpuDevice
from heliograph_backends.registry import Registry
from heliograph_proto.plans import PeerSource
from heliograph_proto.sessions import Limits
from heliograph_proto.types import TensorType
from heliograph_server.compile.turns import CompileTurns
from heliograph_server.config.config import ServerConfig
from heliograph_server.daemon.daemon import Daemon
from heliograph_server.exchange.exchange import LiveExchange
from heliograph_server.runtime.host import Host
from heliograph_server.runtime.keeper import Keeper

SECONDS = 10.0


class ThreadDaemon:
    """A daemon on loopback, and its device."""

    def __init__(
        self,
        device: Device,
        limits: Limits | None = None,
        listen: tuple[str, ...] = ("grpc://127.0.0.1:0",),
        **options: Any,
    ) -> None:
        self.device = device
        config = ServerConfig(
            listen,
            limits=limits or Limits(),
            **{"shared_memory": False, "direct_connections": -1} | options,
        )
        self._daemon: Daemon | None = Daemon(config, lambda: Host(Registry.of(device), config.limits))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="daemon")
        self._thread.start()
        try:
            self.call(self._daemon.start())
        except BaseException:
            self.stop()
            # A daemon that did not start has no host, which would close it.
            device.close()
            raise
        assert self._daemon.host is not None
        self.host: Host = self._daemon.host
        self.port = self._daemon.addresses[0].port
        self.url = str(self._daemon.addresses[0])
        #: The URL of its dashboard; empty without.
        self.web = self._daemon.dashboard.url
        found = dict(self._daemon.gateways.addresses)
        #: The URL of the open inference protocol over HTTP; empty without.
        self.kserve_url = found.get("kserve", "")
        #: The port of ggml's RPC protocol; 0 without.
        self.ggml_rpc_port = int(found.get("ggml-rpc", ":0").rsplit(":", 1)[1])

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs it on the daemon's loop."""
        made: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return made.result(SECONDS)

    @property
    def turns(self) -> CompileTurns:
        assert self._daemon is not None
        return self._daemon._turns

    @property
    def keeper(self) -> Keeper:
        assert self._daemon is not None
        return self._daemon.keeper

    @property
    def exchange(self) -> LiveExchange:
        return self.host.exchange

    @property
    def source(self) -> PeerSource:
        """As others name it."""
        return PeerSource(self.url, self.host.incarnation)

    def tensor(self, type: TensorType, value: float = 0.0) -> Tensor:
        """A tensor of one value on its device."""
        tensor = Tensor(type, self.device.buffer_type.allocate(type.nbytes))
        tensor.array[:] = value
        return tensor

    def change(self, **settings: Any) -> None:
        """Has it go by other settings from now on, as when its file changes."""

        async def change() -> None:
            assert self._daemon is not None
            configuration = self._daemon.configuration
            configuration.change(replace(configuration.now, **settings))

        self.call(change())

    def stop(self) -> None:
        """Ends it and its thread. Idempotent."""
        # Not kept: while anything of gRPC's lives, so does its thread.
        daemon, self._daemon = self._daemon, None
        if daemon is not None:
            self.call(daemon.stop())
            del daemon
            self.call(_quiet())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(SECONDS)
            self._loop.close()


async def _quiet() -> None:
    """Waits for what gRPC has under way: it keeps its thread forever if a loop is closed first."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=SECONDS)
    # A call that fails at once: what ended before it has been delivered when it has.
    async with grpc.aio.insecure_channel("unix:/nowhere") as channel:
        with suppress(grpc.aio.AioRpcError):
            nowhere: Any = channel.unary_unary("/of/nothing")
            await nowhere(b"", timeout=SECONDS)


@contextmanager
def thread_daemon(
    limits: Limits | None = None, *, native: bool = False, **options: Any
) -> Iterator[ThreadDaemon]:
    """One with a CPU device, which needs no compiler unless it is `native`. Nothing is held or open
    in its exchange at the end. `options`: of its configuration."""
    made = ThreadDaemon(CpuDevice(threads=1, native=native), limits, **options)
    try:
        yield made
    finally:
        made.stop()
    assert made.exchange.budget.held_bytes == 0
    assert made.exchange.open_edges == 0
