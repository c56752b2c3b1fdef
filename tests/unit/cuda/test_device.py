"""The CUDA backend without a GPU: its devices, memory, streams, events, failures and replays, on an
emulated one."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from backend_graphs import Loaded, Maker, place, remove
from cuda_emulation import EmulatedDriver, why_not

from heliograph_backends.contract import (
    Abort,
    DeviceCompileOptions,
    LeafBindings,
    Stream,
    Tensor,
    access,
    host_bytes,
)
from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cuda import CudaBackend, CudaDevice, staging
from heliograph_backends.cuda import stream as streams
from heliograph_backends.cuda.binding import MOST_FIXED_BYTES
from heliograph_backends.cuda.driver import polling
from heliograph_backends.cuda.driver.driver import DriverError
from heliograph_backends.cuda.driver.failures import is_sticky, typed
from heliograph_backends.cuda.staging import MOST_PIECES, PIECE_BYTES
from heliograph_backends.cuda.steps import KernelStep
from heliograph_proto.devices import CopyPath, DeviceType
from heliograph_proto.errors import (
    CancelledError,
    ComputeFailedError,
    DeviceLostError,
    HeliographError,
    OutOfMemoryError,
    OutOfRangeError,
)
from heliograph_proto.types import DTYPES, TensorType

emulated = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
ILLEGAL_ADDRESS, OUT_OF_MEMORY, INVALID_CONFIGURATION, NOT_SUPPORTED, UNKNOWN = 700, 2, 9, 801, -1
SECONDS = 10.0


@pytest.fixture
def driver() -> EmulatedDriver:
    """One that does nothing before somebody waits for it."""
    return EmulatedDriver(lazy=True)


@pytest.fixture
def device(driver: EmulatedDriver) -> Iterator[CudaDevice]:
    made = CudaDevice("cuda0", driver, 2**28)
    yield made
    made.close()


@pytest.fixture
def stream(device: CudaDevice) -> Iterator[Stream]:
    made = device.stream()
    yield made
    made.close()


class Outcome:
    """What `done` of submitted work was told."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.is_done = threading.Event()

    def __call__(self, error: BaseException | None) -> None:
        self.error = error
        self.is_done.set()

    def wait(self) -> None:
        assert self.is_done.wait(SECONDS), "the work was never done"


def chain() -> Maker:
    """Two steps that can be captured."""
    made = Maker()
    x = made.input(np.arange(12, dtype=np.float32).reshape(3, 4))
    made.output(made.node("soft_max", made.node("sqr", x)))
    return made


# What it says of itself


def test_a_machine_without_a_gpu_says_why_there_is_no_device() -> None:
    backend = CudaBackend()
    if not backend.devices():
        assert "CuPy" in backend.why_unavailable() or "GPU" in backend.why_unavailable()
    for made in backend.devices():
        made.close()


def test_a_device_says_where_it_is_and_what_it_can(device: CudaDevice) -> None:
    assert device.id == "0000:00:00.0" and device.type is DeviceType.GPU
    found = device.capabilities
    assert found.async_ and found.host_buffer and found.events and found.buffer_from_host
    assert device.memory().total_bytes == 2**28 == device.memory().free_bytes
    assert device.features()["compute_capability"] == "9.0"


# Memory


def test_memory_ends_where_the_limit_is(device: CudaDevice) -> None:
    with pytest.raises(OutOfMemoryError, match="cuda:memory"):
        device.buffer_type.allocate(2**28 + 1)
    buffer = device.buffer_type.allocate(2**28)
    buffer.free()
    buffer.free()
    assert device.memory().free_bytes == 2**28


def test_what_the_card_refuses_is_out_of_memory_and_is_not_counted(
    device: CudaDevice, driver: EmulatedDriver
) -> None:
    driver.fail("allocate", OUT_OF_MEMORY)
    with pytest.raises(OutOfMemoryError):
        device.buffer_type.allocate(100)
    assert device.memory().free_bytes == 2**28


def test_bytes_come_back_through_few_pieces_of_pinned_memory(device: CudaDevice) -> None:
    """More than all pieces hold, written from memory that changes at once."""
    size = (MOST_PIECES + 3) * PIECE_BYTES + 12345
    data = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    given, found = data.copy(), np.zeros(size, np.uint8)
    buffer = device.buffer_type.allocate(size)
    buffer.set(0, host_bytes(given))
    given[:] = 0
    buffer.get(0, host_bytes(found))
    buffer.free()
    assert np.array_equal(found, data)
    assert device.staging.pinned_bytes <= MOST_PIECES * PIECE_BYTES


def test_small_copies_make_one_piece_of_pinned_memory(device: CudaDevice, driver: EmulatedDriver) -> None:
    """And another one only while the device is still at the first."""
    buffer = device.buffer_type.allocate(8)
    for _ in range(5):
        buffer.set(0, memoryview(bytes(8)))
    assert device.staging.pinned_bytes == PIECE_BYTES
    driver.goes_on = False
    with device.on(device.driver.queue()):
        for _ in range(2):
            buffer.set(0, memoryview(bytes(8)))
    assert device.staging.pinned_bytes == 2 * PIECE_BYTES
    buffer.free()


def test_who_has_a_piece_of_pinned_memory_waits_for_no_other(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may have the rest of them, and each wait for one more."""
    monkeypatch.setattr(staging, "WAIT_SECONDS", 0.0)
    held = [device.staging.take() for _ in range(MOST_PIECES - 1)]
    data = np.random.default_rng(1).integers(0, 256, 3 * PIECE_BYTES + 5, np.uint8)
    found, buffer = np.zeros_like(data), device.buffer_type.allocate(data.nbytes)
    buffer.set(0, host_bytes(data))
    buffer.get(0, host_bytes(found))
    assert np.array_equal(found, data)
    buffer.free()
    for piece in held:
        device.staging.give(piece)


def test_copies_say_who_copied(device: CudaDevice) -> None:
    other, cpu = (
        CudaDevice("cuda1", EmulatedDriver(1), 2**20),
        CpuDevice(threads=1, memory_bytes=2**20, native=False),
    )
    array = np.arange(100, dtype=np.float32)
    here, there, host = (place(one, np.zeros_like(array)) for one in (device, other, cpu))
    access.write(here, 0, host_bytes(array))
    assert access.copy(here, there) is CopyPath.DESTINATION
    assert access.copy(there, host) is CopyPath.SOURCE
    assert np.array_equal(remove(host), array)
    for one in (here, there):
        remove(one)
    for made in (other, cpu):
        made.close()


def test_pinned_memory_of_the_host_needs_no_staging(device: CudaDevice) -> None:
    host, buffer = device.host_buffer_type.allocate(100), device.buffer_type.allocate(100)
    host.memset(0, 100, 7)
    buffer.set(0, host.memory.data)
    host.clear()
    buffer.get(0, host.memory.data)
    assert set(host.memory.tolist()) == {7} and device.staging.pinned_bytes == 0
    for one in (host, buffer):
        one.free()
    assert not device.staging.pinned.has(np.zeros(4, np.uint8))


def test_memory_of_the_host_is_pinned_as_long_as_a_buffer_is_over_it(
    device: CudaDevice, driver: EmulatedDriver
) -> None:
    array = np.zeros(64, np.uint8)
    buffer = device.buffer_from_host(array.data)
    assert driver.registered == 1 and device.supports_buffer_type(buffer.buffer_type)
    buffer.free()
    assert driver.registered == 0


def test_memory_that_a_client_maps_is_pinned_where_it_is(device: CudaDevice, driver: EmulatedDriver) -> None:
    (shared,) = device.extra_buffer_types
    mapped, buffer = shared.allocate(100), device.buffer_type.allocate(100)
    with mmap.mmap(descriptor := mapped.descriptor(), 100) as theirs:
        os.close(descriptor)
        theirs[:100] = bytes(range(100))
        there, here = (Tensor(TensorType(DTYPES["u8"], (100,)), one) for one in (mapped, buffer))
        assert access.copy(there, here) is CopyPath.DESTINATION
        mapped.clear()
        assert access.copy(here, there) is CopyPath.SOURCE
        assert theirs[:100] == bytes(range(100))
    assert driver.registered == 1 and device.staging.pinned_bytes == 0
    assert not device.supports_buffer_type(shared)
    for one in (mapped, buffer):
        one.free()
    assert driver.registered == 0


def test_memory_that_a_client_maps_goes_through_staging_where_it_cannot_be_pinned(
    device: CudaDevice, driver: EmulatedDriver
) -> None:
    driver.fail("register", NOT_SUPPORTED)
    mapped, buffer = device.extra_buffer_types[0].allocate(100), device.buffer_type.allocate(100)
    mapped.clear(7)
    there, here = (Tensor(TensorType(DTYPES["u8"], (100,)), one) for one in (mapped, buffer))
    access.copy(there, here)
    assert access.read_whole(here) == bytes([7]) * 100 and device.staging.pinned_bytes > 0
    for one in (mapped, buffer):
        one.free()


def test_what_a_lost_device_had_pinned_is_given_back(device: CudaDevice, driver: EmulatedDriver) -> None:
    buffer = device.extra_buffer_types[0].allocate(100)
    driver.fail("copy", ILLEGAL_ADDRESS)
    with pytest.raises(DeviceLostError):
        device.buffer_type.allocate(4).set(0, memoryview(bytes(4)))
    assert device.lost is not None
    driver.fail("unregister", ILLEGAL_ADDRESS)
    buffer.free()
    with pytest.raises(HeliographError):
        buffer.descriptor()


def test_weights_of_the_cpu_that_a_card_writes_are_packed_anew(device: CudaDevice) -> None:
    """What the CPU keeps beside them is of what they were."""
    cpu = CpuDevice(threads=1, memory_bytes=2**28)
    made = Maker()
    weight, x = made.weight(np.ones((64, 64), np.float32)), made.input(np.ones((32, 64), np.float32))
    made.output(made.node("matmul", x, weight))
    there, rows = place(cpu, made.arrays[0]), place(cpu, made.arrays[1])
    here = place(device, np.full((64, 64), 2, np.float32))
    found = []
    for _ in range(2):
        plan, result = (
            cpu.compile(made.graph(), LeafBindings({weight: there}, {}), DeviceCompileOptions()),
            place(cpu, np.zeros((32, 64), np.float32)),
        )
        plan.compute([rows], [result], Abort())
        plan.free()
        found.append(remove(result))
        assert access.copy(here, there) is CopyPath.SOURCE
    assert [set(one.ravel().tolist()) for one in found] == [{64.0}, {128.0}]
    for one in (there, rows, here):
        remove(one)
    cpu.close()


# Streams and events


def test_work_is_done_when_it_is_computed_and_not_when_it_is_issued(
    device: CudaDevice, driver: EmulatedDriver, stream: Stream
) -> None:
    driver.goes_on = False
    buffer, outcome = device.buffer_type.allocate(8), Outcome()
    issued = threading.Event()

    def work() -> None:
        buffer.memset(0, 8, 3)
        issued.set()

    stream.submit(work, outcome)
    assert issued.wait(SECONDS) and not outcome.is_done.is_set()
    driver.goes_on = True
    outcome.wait()
    assert outcome.error is None
    buffer.free()


def test_small_work_is_done_without_a_pause(
    device: CudaDevice, driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread asks some times more before it sleeps."""
    monkeypatch.setattr(polling, "POLL_SECONDS", 1000.0)
    monkeypatch.setattr(streams, "FIRST_PAUSE_SECONDS", 1000.0)
    answers, is_reached = [False, False], driver.is_reached
    monkeypatch.setattr(driver, "is_reached", lambda mark: answers.pop() if answers else is_reached(mark))
    outcome, buffer = Outcome(), device.buffer_type.allocate(8)
    made = device.stream()
    made.submit(lambda: buffer.memset(0, 8, 1), outcome)
    outcome.wait()
    assert outcome.error is None and not answers
    made.close()
    buffer.free()


def test_the_next_work_is_issued_while_the_device_is_busy(
    device: CudaDevice, driver: EmulatedDriver, stream: Stream
) -> None:
    driver.goes_on = False
    outcomes = [Outcome() for _ in range(3)]
    issued = [threading.Event() for _ in range(3)]
    buffer = device.buffer_type.allocate(8)

    def work(event: threading.Event) -> None:
        buffer.memset(0, 8, 1)
        event.set()

    for event, outcome in zip(issued, outcomes, strict=True):
        stream.submit(partial(work, event), outcome)
    assert all(event.wait(SECONDS) for event in issued)
    assert not any(outcome.is_done.is_set() for outcome in outcomes)
    driver.goes_on = True
    for outcome in outcomes:
        outcome.wait()
    buffer.free()


def test_a_stream_waits_for_another_on_the_device(device: CudaDevice, driver: EmulatedDriver) -> None:
    """The host of the second goes on; only what it issued waits."""
    first, second = device.stream(), device.stream()
    driver.goes_on = False
    buffer, outcome = device.buffer_type.allocate(4), Outcome()
    first.submit(lambda: buffer.memset(0, 4, 7), lambda _error: None)
    event = device.event().record(first)
    event.wait(second)
    second.submit(lambda: buffer.memset(0, 1, 9), outcome)
    assert not event.is_reached()
    driver.goes_on = True
    outcome.wait()
    # The first stream's thread may not have asked the device yet.
    assert event.is_reached()
    event.synchronize(SECONDS)
    found = bytearray(4)
    buffer.get(0, memoryview(found))
    assert found == bytes([9, 7, 7, 7])
    for one in (first, second):
        one.close()
    buffer.free()


def test_what_is_queued_on_a_stream_that_closes_is_cancelled(
    device: CudaDevice, driver: EmulatedDriver
) -> None:
    made, gate, outcomes = device.stream(), threading.Event(), [Outcome(), Outcome()]
    entered = threading.Event()

    def work() -> None:
        entered.set()
        gate.wait(SECONDS)

    made.submit(work, outcomes[0])
    made.submit(lambda: None, outcomes[1])
    assert entered.wait(SECONDS)
    closing = threading.Thread(target=made.close)
    closing.start()
    while not made._closed:  # it says so before it waits
        pass
    gate.set()
    closing.join(SECONDS)
    for outcome in outcomes:
        outcome.wait()
    assert outcomes[0].error is None and isinstance(outcomes[1].error, CancelledError)


# Failures


def test_a_launch_that_is_refused_fails_its_run_alone(device: CudaDevice, driver: EmulatedDriver) -> None:
    it = Loaded(device, chain())
    driver.fail("launch", INVALID_CONFIGURATION)
    with pytest.raises(ComputeFailedError, match="refused a launch"):
        it.run()
    assert it.run()[0] is not None
    it.free()


@pytest.mark.parametrize("status", [214, 220, 226, *range(714, 720), 721])
def test_what_cuda_ends_a_process_for_loses_the_device(status: int) -> None:
    """Each is said to leave it in an inconsistent state: see cudaError_t in CUDA's `driver_types.h`."""
    error = DriverError(status, "said CUDA")
    assert is_sticky(error) and isinstance(typed(error, "cuda0"), DeviceLostError)


def test_after_a_sticky_error_the_device_is_lost_and_others_go_on(
    device: CudaDevice, driver: EmulatedDriver, stream: Stream
) -> None:
    other = CudaDevice("cuda1", EmulatedDriver(1), 2**20)
    driver.fail("fill", ILLEGAL_ADDRESS)
    buffer, outcomes = device.buffer_type.allocate(8), [Outcome(), Outcome()]
    for outcome in outcomes:
        stream.submit(lambda: buffer.memset(0, 8, 1), outcome)
        outcome.wait()
        assert isinstance(outcome.error, DeviceLostError) and "illegal address" in str(outcome.error)
    for attempt in (lambda: device.buffer_type.allocate(8), device.stream):
        assert device.lost is not None and "cuda0 is lost" in device.lost.message
        with pytest.raises(DeviceLostError, match="cuda0 is lost"):
            attempt()
    assert other.buffer_type.allocate(8).size_bytes == 8
    buffer.free()
    other.close()


@emulated
def test_a_run_that_lost_the_device_says_so_whatever_failed_first(
    device: CudaDevice, driver: EmulatedDriver
) -> None:
    """As cuBLAS answers with a number of its own after a kernel met an illegal address."""
    it = Loaded(device, chain())
    driver.fail("launch", UNKNOWN)
    driver.fail("wait", ILLEGAL_ADDRESS)
    with pytest.raises(DeviceLostError, match="illegal address"):
        it.plan.compute(it.inputs, [None], Abort())


@emulated
def test_an_index_outside_is_an_error_of_the_run_with_its_node(device: CudaDevice) -> None:
    made = Maker()
    rows = made.weight(np.ones((3, 4), np.float32))
    made.output(made.node("sqr", made.node("get_rows", rows, made.input(np.array([0, 3], np.int32)))))
    it = Loaded(device, made)
    for _ in range(3):  # the third is replayed
        with pytest.raises(OutOfRangeError, match="index 3 is not one of 3 rows") as raised:
            it.run()
        assert isinstance(raised.value, HeliographError) and raised.value.origin.op == "get_rows"
    it.free()


@emulated
def test_who_runs_a_plan_that_may_report_waits_once(
    device: CudaDevice, driver: EmulatedDriver, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its kernels report comes behind its steps."""
    made = Maker()
    rows, indices = made.weight(np.ones((3, 4), np.float32)), made.input(np.array([0, 2], np.int32))
    made.output(made.node("sqr", made.node("get_rows", rows, indices)))
    it, marks, outcome = Loaded(device, made), list[object](), Outcome()
    mark = driver.mark

    def counted(queue: object) -> object:
        marks.append(queue)
        return mark(queue)

    def work() -> None:
        it.plan.compute(it.inputs, [None], Abort())
        monkeypatch.setattr(driver, "mark", counted)
        it.plan.compute(it.inputs, [None], Abort())
        monkeypatch.setattr(driver, "mark", mark)

    stream.submit(work, outcome)
    outcome.wait()
    assert outcome.error is None and len(marks) == 1
    it.free()


@emulated
def test_a_run_reports_nothing_of_the_one_before(device: CudaDevice, driver: EmulatedDriver) -> None:
    """Also where that failed behind the kernel that reported."""
    made = Maker()
    rows, indices = made.weight(np.ones((3, 4), np.float32)), made.input(np.array([0, 3], np.int32))
    made.output(made.node("matmul", made.node("get_rows", rows, indices), made.weight(np.eye(4, dtype="f4"))))
    it = Loaded(device, made)
    driver.fail("gemm", INVALID_CONFIGURATION)
    for failure in (ComputeFailedError, OutOfRangeError):
        access.write(it.inputs[0], 0, host_bytes(np.array([0, 3], np.int32)))
        with pytest.raises(failure):
            it.run()
        access.write(it.inputs[0], 0, host_bytes(np.array([0, 2], np.int32)))
        assert it.run()[0] is not None
    it.free()


# Compiling


@emulated
def test_nobody_waits_for_a_plan_that_has_kernels_compiled(
    driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes the compiler 0.1 s each, while other threads write tensors and capture plans."""
    device = CudaDevice("cuda0", driver, 2**28, least_generated=1)
    buffer, build, written = device.buffer_type.allocate(8), driver.build, list[bool]()

    def meanwhile(source: str) -> object:
        other = threading.Thread(target=buffer.memset, args=(0, 8, 1))
        other.start()
        other.join(SECONDS)
        written.append(not other.is_alive())
        return build(source)

    monkeypatch.setattr(driver, "build", meanwhile)
    Loaded(device, chain()).free()
    assert written == [True]
    buffer.free()
    device.close()


@emulated
def test_a_plan_is_compiled_while_the_device_is_busy(device: CudaDevice, driver: EmulatedDriver) -> None:
    driver.goes_on = False
    other = device.stream()
    buffer, outcome, issued = device.buffer_type.allocate(8), Outcome(), threading.Event()
    other.submit(lambda: buffer.memset(0, 8, 1), lambda _error: None)
    event = device.event().record(other)
    other.submit(issued.set, outcome)
    assert issued.wait(SECONDS) and not event.is_reached()
    made = chain()
    plan = device.compile(made.graph(), LeafBindings({}, {}), DeviceCompileOptions())
    assert not event.is_reached(), "compiling waited for what others compute"
    driver.goes_on = True
    outcome.wait()
    plan.free()
    other.close()
    buffer.free()


# Replays


@emulated
def test_a_static_plan_is_captured_once_and_replayed(device: CudaDevice, driver: EmulatedDriver) -> None:
    it = Loaded(device, chain())
    found = [it.run()[0] for _ in range(4)]
    assert driver.captures == 1 and driver.replays == 3
    assert all(np.array_equal(found[0], one) for one in found[1:])
    assert it.plan.note == "2 of 2 steps replayed as 1 CUDA graph(s), captured with the second run"
    it.free()


@emulated
def test_a_replay_reads_the_inputs_of_its_own_run(device: CudaDevice) -> None:
    it = Loaded(device, chain())
    for _ in range(2):
        it.run()
    access.memset(it.inputs[0], 0, it.inputs[0].type.nbytes, 0)
    (found,) = it.run()
    assert np.allclose(found, 0.25)
    it.free()


@emulated
def test_what_cannot_be_captured_runs_between_graphs_and_is_named(
    device: CudaDevice, driver: EmulatedDriver
) -> None:
    made = chain()
    product = made.node("reduce_prod", made.outputs[0])
    made.output(product)
    it = Loaded(device, made)
    for _ in range(3):
        values, found = it.run()
        assert np.allclose(found, np.prod(values))
    assert driver.captures == 1 and "reduce_prod runs on the definition" in it.plan.note
    it.free()


@emulated
@pytest.mark.parametrize("why", [DriverError(901, "refused"), NotImplementedError("not by this library")])
def test_a_plan_that_cannot_be_captured_runs_all_the_same(
    device: CudaDevice, driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, why: Exception
) -> None:
    def refuse(_issue: object) -> None:
        raise why

    it = Loaded(device, chain())
    monkeypatch.setattr(driver, "capture", refuse)
    found = [it.run()[0] for _ in range(3)]
    assert np.array_equal(found[0], found[2])
    assert it.plan.note == f"not replayed: it could not be captured: {why}"
    it.free()


@emulated
def test_large_inputs_are_read_where_they_are_and_captured_for_each(
    device: CudaDevice, driver: EmulatedDriver
) -> None:
    made = Maker()
    x = made.input(np.ones(MOST_FIXED_BYTES // 4, np.float32))
    made.output(made.node("sqr", x), made.node("reduce_sum", x, axes=(0,), keepdims=False))
    it = Loaded(device, made)
    given = [it.inputs[0], place(device, made.arrays[0] * 2)]
    outs = [place(device, made.arrays[0]), place(device, np.zeros((), np.float32))]
    for _ in range(3):
        for number, one in enumerate(given, 1):
            it.plan.compute([one], outs, Abort())
            assert outs[0].array[-1].get() == number**2
            assert np.isclose(outs[1].array.get(), number * MOST_FIXED_BYTES // 4, rtol=1e-3)
    assert driver.captures == 2 and "for each set of input and output tensors" in it.plan.note
    for one in (given[1], *outs):
        remove(one)
    it.free()


@emulated
def test_a_replay_fills_no_parameters(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a plan reads its inputs is in the graph that was captured for them."""
    filled = []
    rebind = KernelStep.rebind
    monkeypatch.setattr(KernelStep, "rebind", lambda step: filled.append(step) or rebind(step))
    made = Maker()
    x = made.input(np.ones(MOST_FIXED_BYTES // 4, np.float32))
    made.output(made.node("reduce_sum", made.node("sqr", x), axes=(0,), keepdims=False))
    made.output(made.node("reduce_sum", x, axes=(0,), keepdims=False))
    it = Loaded(device, made)
    counts = []
    for _ in range(4):
        filled.clear()
        it.plan.compute(it.inputs, [None, None], Abort())
        counts.append(len(filled))
    assert counts == [it.plan.steps, it.plan.steps, 0, 0]
    it.free()


@emulated
def test_a_run_that_is_cancelled_ends_between_steps(device: CudaDevice) -> None:
    it, abort = Loaded(device, chain()), Abort()
    abort.set()
    with pytest.raises(CancelledError):
        it.run(abort)
    assert it.run()[0] is not None
    it.free()


@emulated
def test_an_estimate_is_what_compiling_takes(device: CudaDevice) -> None:
    made = chain()
    options = DeviceCompileOptions()
    plan = device.compile(made.graph(), LeafBindings({}, {}), options)
    assert sum(device.estimate(made.graph(), options).compute_bytes) == plan.compute_bytes
    plan.free()
