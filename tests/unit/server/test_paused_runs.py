"""Long runs on the CPU that give their turns to another tenant's short ones."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from fair_sharing import Tenant
from numpy.typing import NDArray

import heliograph as hg
from heliograph_backends.contract import (
    Abort,
    DeviceCompileOptions,
    LeafBindings,
    Plan,
    Tensor,
    Usage,
    host_bytes,
)
from heliograph_backends.cpu.backend import CpuDevice
from heliograph_proto.errors import CancelledError
from heliograph_proto.types import F32, TensorType
from heliograph_server.resources.device_queue import DeviceLock, FairShare, compute

SIZE, PRODUCTS, SECONDS = 512, 300, 60.0


class LongRun:
    """A chain of products, on a device that two tenants share."""

    def __init__(self, *, native: bool, threads: int) -> None:
        self.device = CpuDevice("cpu0", threads=threads, native=native)
        lock = DeviceLock()
        self.own, self.other = FairShare(lock, Tenant(1.0)), FairShare(lock, Tenant(1.0))
        graph = hg.Graph()
        x = y = graph.input("x", (SIZE, SIZE), "f32")
        for _ in range(PRODUCTS):
            y = hg.tanh(x @ y)
        graph.output("y", y)
        self.plan: Plan = self.device.compile(graph._freeze(), LeafBindings({}, {}), DeviceCompileOptions())
        made = np.random.default_rng(1).normal(size=(SIZE, SIZE)) / SIZE**0.5
        self.input, self.result = self._tensor(made.astype(np.float32)), self._tensor(None)

    def _tensor(self, data: NDArray[np.float32] | None) -> Tensor:
        type = TensorType(F32, (SIZE, SIZE))
        buffer = self.device.buffer_type.allocate(type.nbytes, Usage.ANY)
        if data is not None:
            buffer.set(0, host_bytes(data))
        return Tensor(type, buffer)

    def run(self, abort: Abort, began: threading.Event | None = None) -> bytes:
        with self.own.computing(abort, self.device) as turn:
            if began is not None:
                began.set()
            compute(self.plan, [self.input], [self.result], abort, turn)
        found = np.empty(self.result.type.nbytes, np.uint8)
        self.result.buffer.get(0, host_bytes(found))
        return found.tobytes()

    def use(self) -> None:
        """Something short of the other tenant."""
        with self.other.computing(Abort(), self.device):
            pass


@pytest.mark.parametrize(("native", "threads"), [(True, 1), (True, 2), (False, 1)])
def test_another_tenant_does_not_wait_for_a_long_run(
    request: pytest.FixtureRequest, native: bool, threads: int
) -> None:
    events, found, began = list[str](), list[bytes](), threading.Event()
    it = LongRun(native=native, threads=threads)
    request.addfinalizer(it.device.close)
    expected = it.run(Abort())

    def run() -> None:
        found.append(it.run(Abort(), began))
        events.append("long")

    thread = threading.Thread(target=run)
    thread.start()
    assert began.wait(SECONDS)
    for _ in range(3):
        it.use()
        events.append("short")
    thread.join(SECONDS)
    assert events == ["short", "short", "short", "long"]
    assert found == [expected]


def test_a_run_that_is_cancelled_while_another_tenant_has_its_turn_ends_there() -> None:
    it, began, abort, ends = (
        LongRun(native=True, threads=1),
        threading.Event(),
        Abort(),
        list[BaseException](),
    )

    def run() -> None:
        try:
            it.run(abort, began)
        except CancelledError as error:
            ends.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert began.wait(SECONDS)
    with it.other.computing(Abort(), it.device):
        abort.set()
        thread.join(SECONDS)
        assert not thread.is_alive() and len(ends) == 1
    # The device is free, and the plan runs again.
    it.use()
    assert it.run(Abort())
