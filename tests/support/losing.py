"""Sessions, blocking, on devices that tests can lose: in this process, or on a daemon on a thread
of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import pytest

import heliograph as hg
from heliograph_backends.fake import FakeDevice, FakeGate
from heliograph_backends.registry import Registry, open_registry
from heliograph_server.config.config import ServerConfig
from heliograph_server.daemon.daemon import Daemon
from heliograph_server.runtime.host import Host

Array: TypeAlias = "np.ndarray[Any, Any]"

SECONDS = 20
MEMORY = 2**26
NAMES = ("fake0", "fake1", "fake2")
#: `local:` and a daemon.
TRANSPORTS = ["local", "tcp"]
ALL = list(NAMES)


class Losable:
    """An address, and the devices behind it, by name."""

    def __init__(self, url: str, devices: list[FakeDevice]) -> None:
        self.url = url
        self.devices = {one.name: one for one in devices}

    def lose(self, name: str) -> None:
        """A device is gone."""
        self.devices[name].script.lose("it was pulled out")

    def hold(self, name: str) -> FakeGate:
        """The next split that a device computes waits."""
        return self.devices[name].script.hold("compute")


def make_devices() -> list[FakeDevice]:
    """Devices that cannot read each other's memory, as those of several hosts."""
    return [FakeDevice(name, MEMORY, is_host=False) for name in NAMES]


@contextmanager
def losable(transport: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Losable]:
    """Devices that can be lost; afterwards all their memory is free."""
    devices = make_devices()
    if transport == "local":
        monkeypatch.setattr(
            "heliograph_backends.registry.open_registry",
            lambda *wanted: open_registry(*wanted) if wanted else Registry.of(*devices),
        )
        yield Losable("local:", devices)
    else:
        with serving(lambda: Host(Registry.of(*devices))) as url:
            yield Losable(url, devices)
    for one in devices:
        assert one.memory().free_bytes == MEMORY, f"{one.name} has memory left"


@contextmanager
def serving(open_host: Callable[[], Host]) -> Iterator[str]:
    """A daemon on a thread of its own."""
    started, ended = threading.Event(), threading.Event()
    found: list[str] = []

    async def serve() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        daemon = Daemon(ServerConfig(("grpc://127.0.0.1:0",)), open_host)
        await daemon.start()
        found.append(str(daemon.addresses[0]))
        stops.append(lambda: loop.call_soon_threadsafe(stop.set))
        started.set()
        await stop.wait()
        await daemon.stop()
        ended.set()

    stops: list[Callable[[], object]] = []
    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="daemon")
    thread.start()
    assert started.wait(SECONDS), "the daemon did not start"
    try:
        yield found[0]
    finally:
        stops[0]()
        thread.join(SECONDS)
        assert ended.is_set(), "the daemon did not end"


def stages(count: int = 3, size: int = 64) -> hg.Graph:
    """y = x after so many products, which are named stage0, stage1, ..."""
    generator = np.random.default_rng(7)
    g = hg.Graph()
    value = g.input("x", (4, size), "f32")
    for number in range(count):
        weight = generator.standard_normal((size, size)).astype(np.float32) / 8
        with g.scope(f"stage{number}"):
            value = value @ g.weight("w", weight)
    g.output("y", value)
    return g


PINS = {"stage0/*": "fake0", "stage1/*": "fake1", "stage2/*": "fake2"}


def summing(size: int = 64) -> hg.Graph:
    """total = total * 0.5 + x * w: another order of runs gives other bits."""
    g = hg.Graph()
    x = g.input("x", (size,), "f32")
    total = g.variable("total", (size,), "f32")
    weight = g.weight("w", np.linspace(0.1, 1.7, size, dtype=np.float32))
    hg.assign(total, total * 0.5 + x * weight)
    g.output("y", total + 1.0)
    return g


def reading(size: int = 64) -> hg.Graph:
    """y = 3 * total, the variable of `summing`."""
    g = hg.Graph()
    total = g.variable("total", (size,), "f32")
    g.output("y", total * g.input("k", (), "f32"))
    return g


def inputs(count: int, shape: tuple[int, ...] = (64,), seed: int = 3) -> list[Array]:
    """Random arrays, the same each time."""
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(shape).astype(np.float32) for _ in range(count)]


def undisturbed(graph: hg.Graph, given: list[Array]) -> list[Array]:
    """Return the results of runs on one device that is not lost."""
    with hg.connect("local:#fake") as session:
        plan = session.compile(graph)
        return [plan.run(x=one)["y"] for one in given]


def same(found: Array, expected: Array) -> bool:
    """Bit for bit."""
    return found.tobytes() == expected.tobytes()
