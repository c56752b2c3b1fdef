"""The work of users with the blocking API. Each program checks every answer, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import numpy as np

import heliograph as hg
from heliograph_proto.errors import HeliographError

#: The bound of each call.
SECONDS = 30.0
LARGE_BYTES = 4 * 2**20
Array: TypeAlias = "np.ndarray[Any, Any]"
#: Opens a further session of the same user.
Connect: TypeAlias = Callable[[], hg.Session]
Program: TypeAlias = Callable[[hg.Session, random.Random, Connect], None]


class WrongAnswerError(AssertionError):
    """An answer has other bits than it must have."""


def check(found: Any, wanted: Any) -> None:
    """Raise WrongAnswerError for a difference in any bit."""
    here, there = np.asarray(found), np.asarray(wanted)
    if here.dtype != there.dtype or here.shape != there.shape or here.tobytes() != there.tobytes():
        raise WrongAnswerError(f"{here.ravel()[:8]} {here.dtype}{here.shape}, not {there.ravel()[:8]}")


@contextmanager
def expected(kind: type[HeliographError]) -> Any:
    """Demand this error. Others pass."""
    try:
        yield
    except kind:
        return
    raise WrongAnswerError(f"no {kind.__name__}")


def whole(chance: random.Random, *shape: int) -> Array:
    """Return small whole numbers, whose sums and products are exact in any order."""
    values = np.frombuffer(chance.randbytes(int(np.prod(shape))), np.uint8)
    return (values % 5).astype(np.float32).reshape(shape)


def product_graph(weight: Array) -> hg.Graph:
    """Return a graph that multiplies rows by a weight."""
    g = hg.Graph()
    x = g.input("x", (4, weight.shape[0]), "f32")
    g.output("y", x @ g.weight("w", weight) * 2.0 + 1.0)
    return g


def step_graph(columns: int) -> hg.Graph:
    """Return a graph that adds one, for loops."""
    g = hg.Graph()
    g.output("next", g.input("x", (4, columns), "f32") + 1.0)
    return g


def total_graph() -> hg.Graph:
    """Return a graph that adds its input to a variable."""
    g = hg.Graph()
    x, total = g.input("x", (8,), "f32"), g.variable("total", (8,), "f32")
    g.output("total", hg.assign(total, total + x))
    return g


def run(session: hg.Session, chance: random.Random, connect: Connect) -> None:
    weight = whole(chance, 8 * chance.randint(1, 4), 16)
    plan = session.compile(product_graph(weight), timeout=SECONDS)
    for _ in range(20):
        x = whole(chance, 4, len(weight))
        check(plan.run(x=x, timeout=SECONDS)["y"], x @ weight * np.float32(2) + np.float32(1))
    x = whole(chance, 4, len(weight))
    futures = [plan.submit(x=x, timeout=SECONDS) for _ in range(8)]
    for future in futures:
        check(future.result(SECONDS)["y"], x @ weight * np.float32(2) + np.float32(1))
    kept = plan.run(x=session.put(x, timeout=SECONDS), fetch=False, timeout=SECONDS)["y"]
    check(kept.get(timeout=SECONDS), x @ weight * np.float32(2) + np.float32(1))
    plan.free()


def loop(session: hg.Session, chance: random.Random, connect: Connect) -> None:
    x, steps = whole(chance, 4, 8), chance.randint(5, 40)
    plan = session.compile(step_graph(8), timeout=SECONDS)
    looping = plan.loop(x=x, steps=steps, carry={"next": "x"}, taps=["next"], timeout=SECONDS)
    seen = 0
    for tap in looping.taps(SECONDS):
        check(tap.value, x + np.float32(tap.step + 1))
        seen += 1
    check(looping.result(SECONDS)["next"], x + np.float32(steps))
    if seen != steps:
        raise WrongAnswerError(f"{seen} taps of {steps} steps")
    endless = plan.loop(x=x, steps=10**9, carry={"next": "x"}, timeout=SECONDS)
    endless.cancel()
    with expected(hg.CancelledError):
        endless.result(SECONDS)
    fed = plan.loop(x=x, steps=10**9, carry={"next": "x"}, feed="x", timeout=SECONDS)
    step = fed.feed({"x": x[:1]}, rows=[chance.randrange(1, 4)]).result(SECONDS)
    again = fed.feed({"x": x}).result(SECONDS)
    fed.stop()
    found = fed.result(SECONDS)["next"]
    check(found, x + np.float32(fed.steps - again))
    if again <= step:
        raise WrongAnswerError(f"a feed in step {again}, after one in step {step}")
    with expected(hg.LoopEndedError):
        fed.feed({"x": x}).result(SECONDS)
    plan.free()


def taps(session: hg.Session, chance: random.Random, connect: Connect) -> None:
    x = whole(chance, 4, 16)
    g = hg.Graph()
    values = [g.input("x", (4, 16), "f32")]
    for number in range(6):
        values.append(values[-1] + float(number))
    g.output("y", values[-1])
    plan, nodes = session.compile(g, timeout=SECONDS), values[1:]
    observed = plan.submit(x=x, taps=nodes, pause=chance.random() < 0.5, timeout=SECONDS)
    for number, tap in enumerate(observed.taps(SECONDS)):
        check(tap.value, x + np.float32(sum(range(number + 1))))
    check(observed.result(SECONDS)["y"], x + np.float32(15))
    # The reader leaves, and the run goes on.
    left = plan.submit(x=x, taps=nodes, pause=True, timeout=SECONDS)
    next(left.taps(SECONDS), None)
    check(left.result(SECONDS)["y"], x + np.float32(15))
    plan.free()


def large(session: hg.Session, chance: random.Random, connect: Connect) -> None:
    data = np.frombuffer(chance.randbytes(chance.randint(1, LARGE_BYTES)), np.uint8)
    tensor = session.put(data, timeout=SECONDS)
    other = session.empty(data.shape, "u8")
    tensor.copy_to(other)
    check(other.get(timeout=SECONDS), data)
    half = len(data) // 2
    other[:half].set(data[len(data) - half :], timeout=SECONDS)
    check(
        other.get(timeout=SECONDS), np.concatenate([data[len(data) - half :], data[half:]]) if half else data
    )
    other.memset(7)
    check(other.get(timeout=SECONDS), np.full(data.shape, 7, np.uint8))
    tensor.free()
    other.free()


def small(session: hg.Session, chance: random.Random, connect: Connect) -> None:
    arrays = [whole(chance, chance.randint(1, 300)) for _ in range(20)]
    tensors = [session.put(one, timeout=SECONDS) for one in arrays]
    for tensor, array in zip(tensors, arrays, strict=True):
        check(tensor.get(timeout=SECONDS), array)
    buffer = session.buffer(8192)
    placed = buffer.place((16, 16), "f32", 128)
    placed.set(np.eye(16, dtype=np.float32), timeout=SECONDS)
    check(placed.get(timeout=SECONDS), np.eye(16, dtype=np.float32))


def weights(session: hg.Session, chance: random.Random, connect: Connect) -> None:
    weight = whole(chance, 256, chance.randint(64, 1024))
    plan = session.compile(product_graph(weight), timeout=SECONDS)
    x = whole(chance, 4, 256)
    check(plan.run(x=x, timeout=SECONDS)["y"], x @ weight * np.float32(2) + np.float32(1))
    plan.free()


def variables(session: hg.Session, chance: random.Random, connect: Connect) -> None:
    plan = session.compile(total_graph(), timeout=SECONDS)
    start = whole(chance, 8)
    plan.variables["total"].set(start, timeout=SECONDS)
    ones, count = np.ones(8, np.float32), chance.randint(1, 20)
    futures = [plan.submit(x=ones, timeout=SECONDS) for _ in range(count)]
    kept = plan.checkpoint(SECONDS)
    check(kept["total"], start + np.float32(count))
    for number, future in enumerate(futures):
        check(future.result(SECONDS)["total"], start + np.float32(number + 1))
    check(plan.run(x=ones, timeout=SECONDS)["total"], start + np.float32(count + 1))
    plan.restore(kept, SECONDS)
    check(plan.variables["total"].get(timeout=SECONDS), start + np.float32(count))
    plan.free()


def order(session: hg.Session, chance: random.Random, connect: Connect) -> None:
    first, second = session.stream(), session.stream()
    values = whole(chance, 3, 40)
    tensor = session.put(np.zeros((3, 40), np.float32), timeout=SECONDS)
    session.synchronize(SECONDS)
    tensor.set(values, stream=first, timeout=SECONDS)
    event = first.record()
    second.wait(event)
    check(tensor.get(stream=second, timeout=SECONDS), values)
    event.result(SECONDS)
    first.synchronize(SECONDS)
    second.synchronize(SECONDS)


def facts(session: hg.Session, chance: random.Random, connect: Connect) -> None:
    graph = product_graph(whole(chance, 8, 8))
    session.estimate(graph, timeout=SECONDS)
    session.reserve(graph, timeout=SECONDS).reset()
    plan = session.compile(graph, timeout=SECONDS)
    plan.explain(SECONDS)
    plan.free()
    device = session.devices[0]
    device.memory(SECONDS)
    device.unsupported(graph, SECONDS)
    device.placement([((100, 100), "f32")], timeout=SECONDS)
    session.backends(SECONDS)
    session.server_facts(SECONDS)
    session.server_traffic(SECONDS)
    session.members(SECONDS)
    session.links(SECONDS)
    with session.log("warning"), session.watch():
        session.synchronize(SECONDS)


def errors(session: hg.Session, chance: random.Random, connect: Connect) -> None:
    g = hg.Graph()
    rows, index = g.input("rows", (3, 2), "f32"), g.input("index", (1,), "i32")
    g.output("y", hg.take(rows, index, axis=0))
    plan, data = session.compile(g, timeout=SECONDS), np.ones((3, 2), np.float32)
    with expected(hg.OutOfRangeError):
        plan.run(rows=data, index=np.array([9], np.int32), timeout=SECONDS)
    check(plan.run(rows=data, index=np.array([1], np.int32), timeout=SECONDS)["y"], data[:1])
    with expected(hg.OutOfMemoryError):
        session.empty((2**40,), "f32").get(timeout=SECONDS)
    stepping = session.compile(step_graph(4), timeout=SECONDS)
    with expected(hg.DeadlineExceededError):
        x = np.zeros((4, 4), np.float32)
        stepping.loop(x=x, steps=10**9, carry={"next": "x"}, timeout=0.05).result(SECONDS)
    with expected(hg.InvalidInputError):
        stepping.run(x=data, timeout=SECONDS)
    plan.free()
    stepping.free()


def sessions(session: hg.Session, chance: random.Random, connect: Connect) -> None:
    for _ in range(4):
        with connect() as other:
            check(other.put(np.arange(5), timeout=SECONDS).get(timeout=SECONDS), np.arange(5))


def leaving(session: hg.Session, chance: random.Random, connect: Connect) -> None:
    """Close a session with work of every kind in flight."""
    other = connect()
    try:
        plan = other.compile(step_graph(16), timeout=SECONDS)
        x = np.zeros((4, 16), np.float32)
        held = [plan.loop(x=x, steps=10**9, carry={"next": "x"}, taps=["next"], timeout=SECONDS)]
        held += [plan.submit(x=x, timeout=SECONDS) for _ in range(5)]
        size = chance.randint(1, 2**20)
        held.append(other.empty((size,), "u8").set(np.ones(size, np.uint8), copy=False))
    finally:
        other.close()
    for one in held:
        with suppress(hg.HeliographError):
            one.result(SECONDS)


#: The programs for a daemon.
PROGRAMS: Mapping[str, Program] = {
    one.__name__: one
    for one in (
        run, loop, taps, large, small, weights, variables, order, facts, errors, sessions, leaving,
    )
}  # fmt: skip


def spread(session: hg.Session, chance: random.Random, connect: Connect) -> None:
    """Run a chain that alternates between two members of a pool."""
    devices = [device.name for device in session.devices if device.name.endswith("/cpu0") and not device.lost]
    if len(devices) < 2:
        raise hg.UnknownDeviceError(f"the pool has {len(devices)} members")
    devices = chance.sample(devices, 2)
    g = hg.Graph()
    x = g.input("x", (16, 64), "f32")
    for number in range(4):
        with g.scope(f"step{number}"):
            x = x + float(number)
    g.output("y", x)
    pins = {f"step{number}/*": devices[number % 2] for number in range(4)}
    plan = session.compile(g, devices=devices, pins=pins, timeout=SECONDS)
    for _ in range(10):
        given = whole(chance, 16, 64)
        check(plan.run(x=given, timeout=SECONDS)["y"], given + np.float32(6))
    plan.free()


def remote(session: hg.Session, chance: random.Random, connect: Connect) -> None:
    """Copy bytes from member to member, and run a plan with a new weight on one."""
    devices = [device.name for device in session.devices if device.name.endswith("/cpu0") and not device.lost]
    if not devices:
        raise hg.UnknownDeviceError("the pool has no member")
    here, there = chance.choice(devices), chance.choice(devices)
    data = np.frombuffer(chance.randbytes(chance.randint(1, 2**18)), np.uint8)
    one, other = session.put(data, here, timeout=SECONDS), session.empty(data.shape, "u8", there)
    one.copy_to(other)
    check(other.get(timeout=SECONDS), data)
    weight = whole(chance, 64, 64)
    plan = session.compile(product_graph(weight), devices=[there], timeout=SECONDS)
    x = whole(chance, 4, 64)
    check(plan.run(x=x, timeout=SECONDS)["y"], x @ weight * np.float32(2) + np.float32(1))
    plan.free()


#: The programs for the head of a pool.
POOL_PROGRAMS: Mapping[str, Program] = {
    one.__name__: one for one in (spread, remote, loop, large, facts, sessions)
}
