"""`session.reserve` over every transport, from both APIs, and on another daemon's devices."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Iterator

import numpy as np
import pytest
from daemon_urls import DaemonUrls
from forked_daemons import running_daemon

import heliograph as hg

SIZES = (8, 32, 64)


def deep(size: int, depth: int = 3, scale: float = 0.5) -> hg.Graph:
    """Products and softmaxes, whose results need memory between them."""
    g = hg.Graph()
    x = g.input("x", (size, size), "f32")
    w = g.weight("w", np.full((size, size), scale, np.float32))
    value = x
    for _ in range(depth):
        value = hg.softmax(value @ w) * x
    g.output("y", value)
    return g


def inputs(size: int) -> np.ndarray:
    return np.linspace(-1, 1, size * size, dtype=np.float32).reshape(size, size)


def bare(size: int) -> hg.Graph:
    """As `deep`, with a weight that has no content."""
    g = hg.Graph()
    x = g.input("x", (size, size), "f32")
    w = g.bound_weight("w", (size, size), "f32")
    g.output("y", hg.softmax(hg.softmax(x @ w) @ w))
    return g


def test_plans_lie_in_what_was_reserved(session: hg.Session) -> None:
    device = session.devices[0]
    expected = {size: session.compute(deep(size), x=inputs(size))["y"] for size in SIZES}
    # Weights that no plan uses count as free.
    holders = [session.compile(deep(size)) for size in SIZES]
    reservation = session.reserve(deep(64), timeout=30)
    assert dict(reservation.devices) == {device.name: reservation.size_bytes}
    assert reservation.size_bytes > 0 and "live" in repr(reservation)
    before = device.memory().free_bytes
    plans = {size: session.compile(deep(size)) for size in SIZES}
    session.synchronize(timeout=10)
    assert all(plan.reserved_bytes == plan.compute_bytes > 0 for plan in plans.values())
    if session.address != "local:":
        assert device.memory().free_bytes == before
    for size in random.Random(5).choices(SIZES, k=9):
        assert np.array_equal(plans[size].run(x=inputs(size))["y"], expected[size])
    for plan in holders:
        plan.free()


def test_a_reset_ends_the_plans_that_lay_there(session: hg.Session) -> None:
    reservation = session.reserve(deep(32))
    plan = session.compile(deep(32))
    kept = plan.run(x=inputs(32), fetch=False)["y"]
    reservation.reset()
    reservation.reset()
    assert "freed" in repr(reservation)
    for action in (lambda: plan.run(x=inputs(32)), plan.explain, lambda: plan.update(deep(8))):
        with pytest.raises(hg.UnknownHandleError, match="reset"):
            action()
    again = session.compile(deep(32))
    assert again.reserved_bytes == 0
    assert np.array_equal(again.run(x=inputs(32))["y"], kept.get())


def test_runs_that_were_sent_before_a_reset_end_well(session: hg.Session) -> None:
    expected = session.compute(deep(64), x=inputs(64))["y"]
    reservation = session.reserve(deep(64))
    plan = session.compile(deep(64))
    runs = [plan.submit(x=inputs(64)) for _ in range(5)]
    reservation.reset()
    for run in runs:
        assert np.array_equal(run.result(30)["y"], expected)
    with pytest.raises(hg.UnknownHandleError):
        plan.run(x=inputs(64))


def test_a_reservation_lasts_though_nobody_keeps_the_object(session: hg.Session) -> None:
    session.reserve(deep(32))
    gc.collect()
    plan = session.compile(deep(32))
    gc.collect()
    session.synchronize(timeout=10)
    assert plan.reserved_bytes == plan.compute_bytes and plan.run(x=inputs(32))["y"].shape == (32, 32)


def test_the_graph_needs_no_contents(session: hg.Session) -> None:
    reservation = session.reserve(bare(64))
    w = session.put(np.ones((64, 64), np.float32))
    plan = session.compile(bare(64), weights={"w": w})
    assert plan.reserved_bytes == plan.compute_bytes <= reservation.size_bytes
    plan.run(x=inputs(64))


def test_updates_lie_there_too(session: hg.Session) -> None:
    session.reserve(deep(64))
    plan = session.compile(deep(8))
    plan.update(deep(64, scale=0.25))
    assert plan.reserved_bytes == plan.compute_bytes > 0
    assert np.array_equal(
        plan.run(x=inputs(64))["y"], session.compute(deep(64, scale=0.25), x=inputs(64))["y"]
    )


def test_what_cannot_be_reserved(session: hg.Session) -> None:
    with pytest.raises(hg.InvalidArgumentError, match="reserve takes a graph"):
        session.reserve("graph")
    with pytest.raises(hg.UnknownDeviceError):
        session.reserve(deep(8), "nowhere")
    g = hg.Graph()
    wide = hg.broadcast_to(g.input("x", (1, 8), "f32"), (2**36, 8))
    g.output("y", hg.sum(hg.exp(hg.softmax(wide))))
    with pytest.raises(hg.OutOfMemoryError, match="bytes free"):
        session.reserve(g)
    reservation = session.reserve(deep(8))
    with pytest.raises(hg.InvalidArgumentError, match=r"already(.|\n)*reset"):
        session.reserve(deep(8))
    assert session.compile(deep(8)).reserved_bytes > 0
    reservation.reset()
    session.reserve(deep(8))


def test_a_closed_session_reserves_nothing(url: str) -> None:
    with hg.connect(url) as session:
        reservation = session.reserve(deep(8))
    with pytest.raises(hg.SessionClosedError):
        session.reserve(deep(8))
    reservation.reset()


def test_the_same_from_asyncio(url: str) -> None:
    async def main() -> None:
        async with hg.aio.connect(url) as session:
            reservation = await session.reserve(deep(32), timeout=30)
            assert isinstance(reservation, hg.aio.Reservation)
            plan = await session.compile(deep(32))
            assert plan.reserved_bytes == plan.compute_bytes > 0
            first = await plan.run(x=inputs(32))
            reservation.reset()
            with pytest.raises(hg.UnknownHandleError):
                await plan.run(x=inputs(32))
            with pytest.raises(hg.InvalidArgumentError, match="already"):
                await asyncio.gather(session.reserve(deep(32)), session.reserve(deep(32)))
            again = await session.compile(deep(32))
            assert np.array_equal((await again.run(x=inputs(32)))["y"], first["y"])

    asyncio.run(main())


# Another daemon's devices


@pytest.fixture
def head(daemon: DaemonUrls) -> Iterator[str]:
    """A daemon whose devices are its own processor and that of another daemon."""
    options = ("--device", f"remote:url={daemon.tcp}", "--device", "cpu:threads=1,memory=1GiB")
    with running_daemon(*options) as url:
        yield url


def test_memory_is_reserved_on_a_member(head: str, daemon: DaemonUrls) -> None:
    with hg.connect(head) as session, hg.connect(daemon.tcp) as watcher:
        remote = session.devices[0]
        expected = session.compute(deep(64), x=inputs(64))["y"]
        session.synchronize(timeout=10)
        reservation = session.reserve(deep(64))
        assert dict(reservation.devices) == {remote.name: reservation.size_bytes}
        before = watcher.devices[0].memory().free_bytes
        plans = [session.compile(deep(64)), session.compile(deep(64, depth=2))]
        assert all(plan.reserved_bytes == plan.compute_bytes > 0 for plan in plans)
        assert watcher.devices[0].memory().free_bytes == before
        for _ in range(2):
            assert np.array_equal(plans[0].run(x=inputs(64))["y"], expected)
            plans[1].run(x=inputs(64))
        reservation.reset()
        with pytest.raises(hg.UnknownHandleError):
            plans[0].run(x=inputs(64))
        assert np.array_equal(session.compute(deep(64), x=inputs(64))["y"], expected)


def test_memory_is_reserved_on_several_devices(head: str) -> None:
    with hg.connect(head) as session:
        names = [device.name for device in session.devices]
        g = deep(64)
        halves = {"*mul*": names[0], "*soft_max*": names[1]}
        alone = session.compile(g, names, pins=halves)
        expected = alone.run(x=inputs(64))["y"]
        reservation = session.reserve(g, names, pins=halves)
        assert set(reservation.devices) == set(names) and all(reservation.devices.values())
        plan = session.compile(g, names, pins=halves)
        assert plan.splits > 1 and plan.reserved_bytes == plan.compute_bytes
        assert np.array_equal(plan.run(x=inputs(64))["y"], expected)
        reservation.reset()
        assert np.array_equal(alone.run(x=inputs(64))["y"], expected)
