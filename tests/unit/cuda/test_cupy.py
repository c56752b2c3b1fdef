"""The driver on CuPy, over a module `cupy` whose CUDA is this host: what it asks of CuPy, and what it makes
of the answers. And what the definition is held to."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cuda_emulation import EmulatedDriver, cupy_module, record, why_not
from cuda_emulation.array import DeviceArray
from cuda_emulation.cupy_module import installed
from cuda_emulation.library import Library

from heliograph_backends.conformance.runner import run
from heliograph_backends.cuda import CudaDevice
from heliograph_backends.cuda.driver import polling
from heliograph_backends.cuda.driver.cublas import MOST_WORKSPACES
from heliograph_backends.cuda.driver.driver import DriverError, Gemm
from heliograph_backends.cuda.driver.parameters import COPY, ELEMENTWISE, empty
from heliograph_backends.cuda.driver.sources import kernels_of
from heliograph_backends.reference import define
from heliograph_proto.errors import DeviceLostError

emulated = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
ILLEGAL_ADDRESS, NOT_READY = 700, 600


@pytest.fixture
def parts() -> Iterator[tuple[Any, Any, Any]]:
    """The driver of a GPU, the module `cupy` behind it, and cuBLAS."""
    with installed() as (module, cupy, cublas):
        yield module.open_gpu(1), cupy, cublas


@emulated
def test_graphs_and_events_conform() -> None:
    """All that the driver has to do with a device: launches, products, captures, replays, copies, events."""
    with installed() as (module, _, _):
        device = CudaDevice("cuda0", module.open_gpu(1))
        try:
            for part in ("graph(", "event(", "plan(", "buffer("):
                report = run(device, match=part, quick=True)
                assert not report.failures, report.failures
        finally:
            device.close()


@emulated
def test_a_launch_gives_cupy_plain_bytes(parts: Any) -> None:
    """Of a struct NumPy would describe every field, at each launch."""
    driver, cupy, _ = parts
    parameters = empty(COPY)
    driver.capture(lambda queue: driver.launch("copy_elements", (1, 1, 1), 32, parameters, queue))
    (given,) = cupy.given_types
    assert given.fields is None and given.itemsize == COPY.itemsize


@emulated
def test_kernels_may_have_all_shared_memory_of_a_block_before_anybody_launches_them(parts: Any) -> None:
    """So that no launch changes it under another thread's."""
    driver, cupy, _ = parts
    driver.capture(lambda queue: driver.launch("elementwise", (1, 1, 1), 256, empty(ELEMENTWISE), queue))
    static = cupy_module.RawKernel.shared_size_bytes
    assert cupy.shared == dict.fromkeys(kernels_of("elementwise"), driver.properties.shared_bytes - static)


# Waiting


@pytest.fixture
def busy() -> Iterator[tuple[CudaDevice, Any]]:
    """A device, and `cupy.cuda`, where no event happens before somebody blocks."""
    with installed() as (module, cupy, _):
        device = CudaDevice("cuda0", module.open_gpu(1))
        cupy.cuda.is_busy, cupy.cuda.blocked = True, 0
        yield device, cupy.cuda
        device.close()


@emulated
def test_a_short_run_is_waited_for_by_asking(busy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device, cuda = busy
    monkeypatch.setattr(polling, "POLL_SECONDS", 1000.0)
    cuda.is_busy = False
    cuda.fail("cuda.runtime.eventQuery", NOT_READY, NOT_READY)
    queue = device.driver.queue()
    with device.on(queue):
        device.settle(queue)
    assert not cuda.failures["cuda.runtime.eventQuery"] and cuda.blocked == 0


@emulated
def test_small_results_are_waited_for_by_asking(busy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device, cuda = busy
    monkeypatch.setattr(polling, "POLL_SECONDS", 1000.0)
    cuda.is_busy = False
    buffer, out = device.buffer_type.allocate(8), bytearray(8)
    with device.on(device.driver.queue()):
        buffer.set(0, memoryview(b"results."))
        cuda.fail("cuda.runtime.eventQuery", *[NOT_READY] * 5)
        buffer.get(0, memoryview(out))
    assert out == b"results." and cuda.blocked == 0
    buffer.free()


@emulated
def test_who_has_asked_long_enough_blocks(busy: Any) -> None:
    device, cuda = busy
    queue = device.driver.queue()
    with device.on(queue):
        device.settle(queue)
    assert cuda.blocked == 1


@emulated
def test_a_thread_without_a_queue_of_its_own_does_not_ask(busy: Any) -> None:
    """It may be anybody's."""
    device, cuda = busy
    cuda.fail("cuda.runtime.eventQuery", ILLEGAL_ADDRESS)
    with device.queue():
        pass
    assert cuda.failures["cuda.runtime.eventQuery"] and cuda.blocked == 1


@emulated
def test_a_failure_that_is_met_by_asking_is_the_devices(busy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device, cuda = busy
    monkeypatch.setattr(polling, "POLL_SECONDS", 1000.0)
    cuda.fail("cuda.runtime.eventQuery", NOT_READY, ILLEGAL_ADDRESS)
    queue = device.driver.queue()
    with pytest.raises(DeviceLostError), device.guarded(), device.on(queue):
        device.settle(queue)
    assert device.lost is not None


# Failures


def test_a_device_that_failed_reaches_no_mark_and_says_so(parts: Any) -> None:
    """CuPy's own event says that it is not done yet."""
    driver, cupy, _ = parts
    mark = driver.mark(driver.queue())
    cupy.cuda.fail("cuda.runtime.eventQuery", NOT_READY, ILLEGAL_ADDRESS)
    assert not driver.is_reached(mark)
    with pytest.raises(DriverError) as caught:
        driver.is_reached(mark)
    assert caught.value.status == ILLEGAL_ADDRESS
    assert driver.is_reached(mark)


def test_the_time_between_two_marks_is_in_microseconds(parts: Any) -> None:
    driver, _, _ = parts
    queue = driver.queue()
    began = time.perf_counter()
    marks = [driver.time_mark(queue) for _ in range(2)]
    assert 0 < driver.elapsed_us(*marks) <= (time.perf_counter() - began) * 1e6


def test_errors_of_cupy_and_no_others_are_cudas(parts: Any) -> None:
    driver, cupy, _ = parts
    driver.set_limit(1000)
    with pytest.raises(DriverError) as caught:
        driver.allocate(2000)
    assert caught.value.status == 2
    assert driver.failure(ValueError("ours")) is None
    library = type("CUBLASError", (RuntimeError,), {"status": 3})
    found = driver.failure(library("no memory"))
    assert found is not None and found.status == 2
    assert driver.failure(type("CompileException", (Exception,), {})("line 3")).status == -1


# Memory and copies


def test_small_pinned_memory_is_the_pools_and_large_is_as_large_as_it_says(parts: Any) -> None:
    driver, _, _ = parts
    for size in (1, 5000, 9 * 2**20 + 1):
        memory = driver.allocate_pinned(size)
        memory[:] = 7
        assert memory.nbytes == size
    assert memory.base is not None and len(memory.base) == size


def test_memory_that_is_registered_is_for_every_gpu_and_for_kernels(parts: Any) -> None:
    driver, cupy, _ = parts
    memory = np.zeros(100, np.uint8)
    release = driver.register(memory)
    assert cupy.cuda.runtime.registered == {memory.ctypes.data: 3}
    release()
    assert not cupy.cuda.runtime.registered


@pytest.mark.parametrize(("step", "at_once"), [(3, True), (2, False)], ids=["apart", "overlapping"])
def test_what_cuda_copies_in_no_call_is_copied_row_by_row(parts: Any, step: int, at_once: bool) -> None:
    driver, cupy, _ = parts
    source, target = np.arange(20, dtype=np.uint8), np.zeros(20, np.uint8)
    driver.copy_2d(target.ctypes.data, 3, source.ctypes.data, step, 3, 4, driver.queue())
    expected = np.lib.stride_tricks.as_strided(source, (4, 3), (step, 1))
    assert (target[:12].reshape(4, 3) == expected).all()
    assert bool(cupy.cuda.runtime.copies_2d) is at_once


# Products


def product(driver: Any, queue: Any) -> Any:
    """Puts a product of 2 x 2 matrices on a queue; the arrays, and what is to come."""
    a, b, c = (np.asfortranarray(np.random.default_rng(3).random((2, 2), np.float32)) for _ in range(3))
    gemm = Gemm((2, 2, 2), (False, False), ("f32", "f32", "f32"), (2, 2, 2))
    driver.gemm(gemm, a.ctypes.data, b.ctypes.data, c.ctypes.data, queue, tf32=False)
    return c, a, b


def test_a_product_is_captured_and_replayed(parts: Any) -> None:
    driver, _, _ = parts
    made: list[Any] = []
    recording = driver.capture(lambda queue: made.append(product(driver, queue)))
    result, a, b = made[0]
    assert not np.allclose(result, a @ b)
    driver.replay(recording, driver.queue())
    assert np.allclose(result, a @ b)


def test_who_multiplies_in_a_workspace_waits_for_who_did_before(parts: Any) -> None:
    driver, cupy, cublas = parts
    queues = [driver.queue() for _ in range(MOST_WORKSPACES)]
    cupy.cuda.waited = None
    for queue in (*queues, *queues):
        product(driver, queue)
    assert len(set(cublas.workspaces)) == MOST_WORKSPACES and cupy.cuda.waited is None
    product(driver, driver.queue())
    assert cupy.cuda.waited is not None, "two queues in one workspace at once"


def test_a_graph_waits_for_who_uses_its_workspace(parts: Any) -> None:
    driver, cupy, cublas = parts
    one, other = driver.queue(), driver.queue()
    product(driver, one)
    recording = driver.capture(lambda queue: product(driver, queue) and None)
    assert len(set(cublas.workspaces)) == 1, "a capture takes no memory"
    cupy.cuda.waited = None
    driver.replay(recording, one)
    assert cupy.cuda.waited is None
    driver.replay(recording, other)
    assert cupy.cuda.waited is not None and cupy.cuda.waited[0] is other.stream


# The array library that the definition is held to


@pytest.fixture
def xp() -> Library:
    return Library(lambda: None, lambda: None)


REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "an array of the host as operand": lambda xp, x: x + np.ones(3, np.float32),
    "an array of the host on the left": lambda xp, x: np.ones(3, np.float32) * x,
    "an array of the host as index": lambda xp, x: x[np.arange(2)],
    "an array of the host that is assigned": lambda xp, x: x.__setitem__(..., np.ones(3)),
    "becoming an array of the host": lambda xp, x: np.asarray(x),
    "a ufunc where": lambda xp, x: xp.add(x, x, where=x > 0),
    "a ufunc with another casting": lambda xp, x: xp.add(x, x, casting="unsafe"),
    "an argument that CuPy has not": lambda xp, x: xp.argsort(x, axis=-1, stable=True),
    "a method's argument that CuPy has not": lambda xp, x: x.argsort(kind="stable"),
    "objects": lambda xp, x: xp.asarray([None, {}]),
    "adding halves in no order": lambda xp, x: xp.subtract.at(x, xp.arange(3), x),
}


@pytest.mark.parametrize("way", REFUSED.values(), ids=REFUSED)
def test_what_cupy_refuses_is_refused(xp: Library, way: Callable[[Any, Any], Any]) -> None:
    with pytest.raises(TypeError):
        way(xp, xp.arange(3, dtype=xp.float32))


def test_there_are_no_names_that_cupy_has_not(xp: Library) -> None:
    for name in ("matvec", "strings", "longdouble"):
        assert hasattr(np, name) and not hasattr(xp, name)
    assert not hasattr(xp.arange(3), "tobytes_of_the_host") and not hasattr(xp.arange(3), "byteswap")


def test_scalars_are_operands_and_results_stay_on_the_device(xp: Library) -> None:
    x = xp.arange(4, dtype=xp.float32)
    for one in (x * 2, np.float32(3) * x, x.sum(), x[1], xp.where(x > 1, x, 0), -x):
        assert isinstance(one, DeviceArray) and one.dtype == xp.float32
    assert (
        xp.waits == 0 and float(x.sum()) == 6 and x.tolist() == [0, 1, 2, 3] and bool(x[1]) and xp.waits == 3
    )


def test_a_capture_waits_for_no_value() -> None:
    driver = EmulatedDriver()
    x = driver.xp.arange(3)
    with pytest.raises(DriverError, match="waits for no value"):
        driver.capture(lambda _queue: float(x.sum()))
    assert float(x.sum()) == 3


def test_of_rows_that_are_set_twice_the_later_stays(xp: Library) -> None:
    """Also where whoever assigns last is anybody."""
    target, rows = (xp.arange(count * 2, dtype=xp.float32).reshape(1, count, 2) for count in (4, 5))
    places = xp.asarray([[3, 1, 3, 1, 0]])
    out = xp.empty((1, 4, 2), xp.float32)
    out[0, places[0]] = rows[0]
    assert out.get()[0, 3].tolist() == [0, 1], "the emulation assigns in another order"
    define("set_rows", {}, xp)(target, rows, places, out)
    assert out.get()[0].tolist() == [[8, 9], [6, 7], [4, 5], [4, 5]]


# What CuPy has


def test_what_is_recorded_of_cupy_is_what_it_has() -> None:
    """Where a CuPy is installed, with or without a GPU."""
    pytest.importorskip("cupy", exc_type=ImportError)
    recorded = json.loads(record.PATH.read_text())
    both = record.common(recorded, record.found())
    for kind in ("functions", "ufuncs", "others"):
        # What another NumPy has no more is not looked for.
        missing = [name for name in recorded[kind] if name not in both[kind] and hasattr(np, name)]
        assert not missing, f"{kind} that this CuPy has not: {missing}"
    for kind in ("functions", "methods", "cuda"):
        for name, parameters in both[kind].items():
            assert parameters == recorded[kind][name], f"this CuPy takes no such arguments of {name}"
    assert both["cuda"].keys() == recorded["cuda"].keys()
