"""The measures of the report card, each within its share of the time.

Everything is made in sessions of its own that end with the measure, so that nothing stays on the
daemon: operands are tensors, and no weight is uploaded, which a daemon might keep on its disk. A
quota or a lack of memory makes operands smaller, and else is a note in the row.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

import heliograph as hg
from heliograph.cli.bench.card import Card, Row
from heliograph.cli.common.text import time_text
from heliograph_proto.errors import HeliographError, ResourceError
from heliograph_proto.types import size_text

#: Seconds for one measure, of about a dozen, beside its preparation.
SECONDS = 3.0
#: Runs that are measured one by one, and those that are on their way at once.
RUNS, WINDOW = 2000, 64
#: The bytes of a transfer, halved until they fit, and the least that tell something.
TRANSFER_BYTES, LEAST_BYTES = 64 * 2**20, 2**20
#: Rows and columns of the largest product, and the time that one of its runs should take.
MATRIX, STEP_SECONDS = 4096, 0.05
#: The positions, width, heads and inner width of the transformer block.
TOKENS, WIDTH, HEADS, INNER = 128, 512, 8, 1536
#: Told before each measure.
Report = Callable[[str], None]
#: Opens a session, with options of hg.connect.
Connect = Callable[..., hg.Session]


def measured(connect: Connect, seconds: float, report: Report) -> Card:
    """Measure a daemon's first device, or that of the URL. Raises the errors of connecting."""
    with connect() as session:
        device = session.best_device() if not session._shell.address.device else session.devices[0]
        name = session._shell.address.device or device.name
        info = session.device(name)
        server = session.info.server
        where = "in its process" if session._shell.address.scheme == "local" else _where(session)
    rows = []
    for measure in (_latency, _pipelined, *_transfers(), *_products(), _memory, _block):
        report(measure.title)
        rows.append(_guarded(measure, connect, name, seconds))
    return Card(server, name, info.description, where, tuple(rows))


def _where(session: hg.Session) -> str:
    return "on its host" if session.shared_memory else "connected by network"


class _Measure:
    """A measure with a name and a unit."""

    def __init__(self, title: str, unit: str, function: Callable[..., Row], *arguments: Any) -> None:
        self.title, self.unit = title, unit
        self._function, self._arguments = function, arguments

    def __call__(self, connect: Connect, device: str, seconds: float) -> Row:
        return self._function(self, connect, device, seconds, *self._arguments)

    def row(self, value: float, note: str = "") -> Row:
        """The row of this measure."""
        return Row(self.title, self.unit, value, note)


def _guarded(measure: _Measure, connect: Connect, device: str, seconds: float) -> Row:
    """The row of a measure; a refusal of the daemon is a note."""
    try:
        return measure(connect, device, seconds)
    except HeliographError as error:
        return measure.row(0.0, error.message)


# Runs


def _small(session: hg.Session, device: str) -> hg.Plan:
    g = hg.Graph()
    g.output("y", g.input("x", (16,), "f32") + 1.0)
    return session.compile(g, device)


def _round_trip(measure: _Measure, connect: Connect, device: str, seconds: float) -> Row:
    x = np.zeros(16, np.float32)
    with connect() as session:
        plan = _small(session, device)
        times, end = [], time.perf_counter() + seconds
        for _ in range(RUNS):
            began = time.perf_counter()
            plan.run(x=x)
            times.append(time.perf_counter() - began)
            if time.perf_counter() > end:
                break
    slow = sorted(times)[int(len(times) * 0.99)]
    return measure.row(
        median(times), f"a run of one op; the slowest hundredth took {time_text(slow)} or more"
    )


def _runs_ahead(measure: _Measure, connect: Connect, device: str, seconds: float) -> Row:
    x = np.zeros(16, np.float32)
    with connect() as session:
        plan = _small(session, device)
        plan.run(x=x)
        began, count, pending = time.perf_counter(), 0, []
        while (now := time.perf_counter()) - began < seconds:
            pending.append(plan.submit(x=x))
            count += 1
            if len(pending) == WINDOW:
                pending.pop(0).result()
        for one in pending:
            one.result()
        now = time.perf_counter()
    return measure.row(count / (now - began), f"{WINDOW} on their way at once")


_latency = _Measure("round trip", "s", _round_trip)
_pipelined = _Measure("runs ahead", "runs/s", _runs_ahead)


# Transfers

#: How a session is made to use a transport, and how to tell that it does.
_TRANSPORTS: dict[str, tuple[dict[str, Any], Callable[[hg.Session], bool]]] = {
    "shared memory": ({}, lambda session: session.shared_memory),
    "direct connections": ({"shared_memory": False}, lambda session: "direct" in session.info.features),
    "gRPC": ({"shared_memory": False, "direct": False}, lambda session: True),
}


def _transfers() -> list[_Measure]:
    return [
        _Measure(f"{way} by {name}", "B/s", _transfer, name, way)
        for name in _TRANSPORTS
        for way in ("upload", "download")
    ]


def _transfer(measure: _Measure, connect: Connect, device: str, seconds: float, name: str, way: str) -> Row:
    options, is_used = _TRANSPORTS[name]
    with connect(**options) as session:
        if session._shell.address.scheme == "local" or not is_used(session):
            return measure.row(0.0, "not used on this connection")
        tensor = _room(session, device)
        # Random bytes: compression must not flatter a slow link.
        data = np.random.default_rng(0).integers(0, 256, tensor.nbytes, np.uint8)

        def upload() -> None:
            tensor.set(data)
            session.synchronize()

        upload()
        each = _repeated(upload if way == "upload" else tensor.get, seconds)
    return measure.row(data.nbytes / each, f"{size_text(data.nbytes)} at a time")


def _room(session: hg.Session, device: str) -> hg.Tensor:
    """A tensor of bytes as large as the daemon grants. Raises ResourceError."""
    size = TRANSFER_BYTES
    while True:
        tensor = session.empty(size, "u8", device)
        try:
            session.synchronize()
            tensor.get(size_bytes=1)
            return tensor
        except ResourceError:
            tensor.free()
            size //= 2
            if size < LEAST_BYTES:
                raise


def _repeated(move: Callable[[], Any], seconds: float) -> float:
    """The median time of a call, after one that is not counted."""
    move()
    times: list[float] = []
    end = time.perf_counter() + seconds / 2
    while not times or (time.perf_counter() < end and len(times) < 50):
        began = time.perf_counter()
        move()
        times.append(time.perf_counter() - began)
    return median(times)


# Computing


def _products() -> list[_Measure]:
    return [_Measure(f"matmul {one}", "flop/s", _product, one) for one in ("f32", "f16", "q4_0")]


def _product(measure: _Measure, connect: Connect, device: str, seconds: float, dtype: str) -> Row:
    size = 512
    with connect() as session:
        while True:
            each = _time_of_product(session, device, size, dtype, seconds)
            if size >= MATRIX or each > STEP_SECONDS:
                break
            size *= 2
    return measure.row(2.0 * size**3 / each, f"{size:,} x {size:,} by {size:,} x {size:,}")


def _time_of_product(session: hg.Session, device: str, size: int, dtype: str, seconds: float) -> float:
    random = np.random.default_rng(1)
    weights = random.standard_normal((size, size)).astype(np.float32)
    right = session.empty((size, size), dtype, device)
    right.set(hg.quantize(weights, dtype) if dtype == "q4_0" else weights.astype(right.dtype.numpy))
    g = hg.Graph()
    w = g.bound_weight("w", (size, size), dtype)
    x = g.input("x", (size, size), "f16" if dtype == "f16" else "f32")
    # Rows of blocks run along the elements that are summed.
    g.output("y", hg.ops.mul_mat(w, x) if dtype == "q4_0" else x @ w)
    plan = session.compile(g, device, weights={"w": right})
    left = session.put(random.standard_normal((size, size)).astype(x.dtype.numpy), device)
    try:
        return _step_seconds(plan, {"x": left}, seconds)
    finally:
        plan.free()
        left.free()
        right.free()


def _step_seconds(plan: hg.Plan, inputs: dict[str, Any], seconds: float) -> float:
    """The time of a run among many in one message, so that the connection does not count."""
    plan.loop(inputs, steps=1, fetch=()).result()
    steps, took = 1, 0.0
    while True:
        began = time.perf_counter()
        plan.loop(inputs, steps=steps, fetch=()).result()
        took = time.perf_counter() - began
        if took > seconds / 4 or steps >= 10**6:
            return took / steps
        steps = max(2 * steps, min(steps * 100, int(steps * seconds / 3 / max(took, 1e-6))))


def _add(measure: _Measure, connect: Connect, device: str, seconds: float) -> Row:
    with connect() as session:
        size = _room(session, device).nbytes // 4
        g = hg.Graph()
        x = g.input("x", (size,), "f32")
        g.output("y", x + 1.0)
        plan = session.compile(g, device)
        each = _step_seconds(plan, {"x": session.empty(size, "f32", device)}, seconds)
    return measure.row(8.0 * size / each, f"x + 1 of {size_text(4 * size)}, which reads and writes each byte")


_memory = _Measure("memory", "B/s", _add)


def _transformer(measure: _Measure, connect: Connect, device: str, seconds: float) -> Row:
    with connect() as session:
        g = hg.Graph()
        shapes = {
            **{f"w{one}": (WIDTH, WIDTH) for one in "qkvo"},
            "gate": (WIDTH, INNER),
            "up": (WIDTH, INNER),
            "down": (INNER, WIDTH),
        }
        w = {name: g.bound_weight(name, shape, "f32") for name, shape in shapes.items()}
        x = g.input("x", (TOKENS, WIDTH), "f32")
        normed = hg.rms_norm(x)
        q, k, v = (_heads(normed @ w[f"w{one}"]) for one in "qkv")
        mixed = hg.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = x + hg.reshape(hg.permute_dims(mixed, (1, 0, 2)), (TOKENS, WIDTH)) @ w["wo"]
        inner = hg.rms_norm(y)
        g.output("y", y + (hg.silu(inner @ w["gate"]) * (inner @ w["up"])) @ w["down"])
        random = np.random.default_rng(2)
        tensors = {
            name: session.put(random.normal(0, 0.02, shape).astype(np.float32), device)
            for name, shape in shapes.items()
        }
        plan = session.compile(g, device, weights=tensors)
        given = session.put(random.standard_normal((TOKENS, WIDTH)).astype(np.float32), device)
        each = _step_seconds(plan, {"x": given}, seconds)
    return measure.row(TOKENS / each, f"{TOKENS} positions, width {WIDTH}, {HEADS} heads, inner {INNER}, f32")


def _heads(x: hg.Value) -> hg.Value:
    return hg.permute_dims(hg.reshape(x, (TOKENS, HEADS, WIDTH // HEADS)), (1, 0, 2))


_block = _Measure("transformer block", "tokens/s", _transformer)
