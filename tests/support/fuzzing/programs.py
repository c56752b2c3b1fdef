"""The programs whose conversations are recorded: together they call what clients, operators, heads call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

import numpy as np
from forked_daemons import running_daemon
from pool_daemons import wait_for_devices

import heliograph as hg
from fuzzing.conversations import Conversation
from fuzzing.recording import recorder
from heliograph import admin
from heliograph_proto.errors import HeliographError

#: The bound of each call.
SECONDS = 30.0
DEVICE = "cpu:threads=1,memory=256MiB"
#: The devices of a pool's members that values travel between.
MEMBERS = ("m0/cpu0", "m1/cpu0")
X = np.ones((4, 8), np.float32)


def small_graph(columns: int = 8) -> hg.Graph:
    """A graph with a weight, a variable and an output of 4 rows."""
    g = hg.Graph()
    x = g.input("x", (4, 8), "f32")
    state = g.variable("state", (4, 8), "f32")
    g.output("y", (x + state) @ g.weight("w", np.full((8, columns), 0.5, np.float32)))
    g.output("next", x * 2.0)
    g.output("state", hg.assign(state, state + x))
    return g


def _run(session: hg.Session) -> None:
    plan = session.compile(small_graph(), timeout=SECONDS)
    plan.run(x=X, timeout=SECONDS)
    plan.submit(x=session.put(X, timeout=SECONDS)).result(SECONDS)
    plan.run(x=session.put(X, timeout=SECONDS), fetch=False, timeout=SECONDS)["y"].get(timeout=SECONDS)


def _loop(session: hg.Session) -> None:
    plan = session.compile(small_graph(), timeout=SECONDS)
    looping = plan.loop(x=X, steps=5, carry={"next": "x"}, taps=["y"], timeout=SECONDS)
    for _ in looping.taps(SECONDS):
        pass
    looping.result(SECONDS)
    fed = plan.loop(x=X, steps=50, carry={"next": "x"}, feed="x", timeout=SECONDS)
    for row in (0, 1):
        fed.feed({"x": X[:1]}, rows=[row], timeout=SECONDS)
    fed.feed({"x": X}, timeout=SECONDS).exception(SECONDS)
    fed.result(SECONDS)
    observed = plan.submit(x=X, taps=["*"], pause=True, timeout=SECONDS)
    for _ in observed.taps(SECONDS):
        pass
    observed.result(SECONDS)


def _bytes(session: hg.Session) -> None:
    tensor = session.empty((300, 300), "f32")
    tensor.set(np.ones((300, 300), np.float32), timeout=SECONDS)
    other = session.put(np.zeros((300, 300), np.float32), timeout=SECONDS)
    tensor.copy_to(other)
    other.get(timeout=SECONDS)
    other.memset(7)
    session.synchronize(SECONDS)


def _order(session: hg.Session) -> None:
    stream, other = session.stream(), session.stream()
    tensor = session.put(np.arange(12, dtype=np.float32).reshape(3, 4), timeout=SECONDS)
    tensor.set(np.zeros((3, 4), np.float32), stream=stream, timeout=SECONDS)
    event = stream.record()
    other.wait(event)
    tensor.get(stream=other, timeout=SECONDS)
    event.result(SECONDS)
    stream.synchronize(SECONDS)


def _contents(session: hg.Session) -> None:
    session.compile(small_graph(40_000), timeout=SECONDS).run(x=X, timeout=SECONDS)


def _plans(session: hg.Session) -> None:
    graph = small_graph()
    session.estimate(graph, timeout=SECONDS)
    with suppress(HeliographError):
        reservation = session.reserve(graph, timeout=SECONDS)
        reservation.reset()
    plan = session.compile(graph, timeout=SECONDS)
    plan.explain(SECONDS)
    plan.free()


def _buffers(session: hg.Session) -> None:
    buffer = session.buffer(4096)
    buffer.clear(3)
    placed = buffer.place((4, 4), "f32", 128)
    placed.set(np.ones((4, 4), np.float32), timeout=SECONDS)
    placed.get(timeout=SECONDS)
    session.empty_many([((4,), "f32"), ((5, 6), "i32")])
    session.synchronize(SECONDS)


def _facts(session: hg.Session) -> None:
    device = session.devices[0]
    device.memory(SECONDS)
    device.unsupported(small_graph(), SECONDS)
    device.placement([((100, 100), "f32")], timeout=SECONDS)
    session.members(SECONDS)
    session.links(SECONDS)
    session.backends(SECONDS)
    session.server_facts(SECONDS)
    session.server_traffic(SECONDS)
    session.models(SECONDS)
    with suppress(HeliographError):
        session.server_weights("no.safetensors", SECONDS)
    with session.log("debug"):
        session.synchronize(SECONDS)


PROGRAMS: Mapping[str, Callable[[hg.Session], None]] = {
    "run": _run,
    "loop": _loop,
    "bytes": _bytes,
    "order": _order,
    "contents": _contents,
    "plans": _plans,
    "buffers": _buffers,
    "facts": _facts,
}


def _operate(url: str, token: str) -> None:
    with admin.connect(url, token=token) as daemon:
        daemon.sessions()
        daemon.snapshot()
        daemon.set_log_level("info")
        with suppress(HeliographError):
            daemon.end_session(999_999)


def record(target: str, user: str, operator: str) -> list[Conversation]:
    """Record what a user and an operator, known by their tokens, say to the daemon at `target`."""
    found: list[Conversation] = []
    with recorder(target) as (proxy, url):
        for name, program in PROGRAMS.items():
            proxy.begin(name)
            with hg.connect(url, token=user, shared_memory=False) as session:
                program(session)
            found.append(proxy.conversation)
        proxy.begin("operate")
        _operate(url, operator)
        found.append(proxy.conversation)
    return found


def record_pool() -> list[Conversation]:
    """Record what a client says to a head, and what a head and a member say to another member."""
    with (
        running_daemon("--log-level", "warning", "--device", DEVICE) as here,
        running_daemon("--log-level", "warning", "--device", DEVICE) as there,
        recorder(_target(here)) as (member, url),
    ):
        member.begin("member")
        members = f"static:m0={_target(url)},m1={_target(there)}"
        with (
            running_daemon("--log-level", "warning", "--device", DEVICE, "--pool", members) as address,
            recorder(_target(address)) as (head, front),
        ):
            head.begin("head")
            with hg.connect(front, shared_memory=False) as session:
                wait_for_devices(session, "cpu0", *MEMBERS)
                spread(session)
        return [head.conversation, member.conversation]


def _target(url: str) -> str:
    return url.removeprefix("grpc://")


def spread(session: hg.Session) -> None:
    """Run chains that alternate between two members, and copy a tensor from one to the other."""
    devices = list(MEMBERS)
    for width in (16, 300):
        g = hg.Graph()
        x = g.input("x", (width, width), "f32")
        for number in range(4):
            with g.scope(f"step{number}"):
                x = x @ g.weight(f"w{number}", np.full((width, width), 0.01, np.float32))
        g.output("y", x)
        pins = {f"step{number}/*": devices[number % 2] for number in range(4)}
        plan = session.compile(g, devices=devices, pins=pins, timeout=SECONDS)
        plan.run(x=np.ones((width, width), np.float32), timeout=SECONDS)
    ones = np.ones((300, 300), np.float32)
    one, other = (session.put(ones, name, timeout=SECONDS) for name in devices)
    one.copy_to(other)
    other.get(timeout=SECONDS)
    session.links(SECONDS)
