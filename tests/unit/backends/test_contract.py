"""The contract of a backend over the CPU and the fake device: streams, events, tensors, buffers."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from backend_graphs import Array, nothing_left, place, type_of, used_bytes
from waiting import until

from heliograph_backends.contract import Abort, Event, Stream, Tensor, Usage, access, host_bytes
from heliograph_backends.cpu import CpuDevice
from heliograph_backends.fake import FakeDevice
from heliograph_proto.errors import (
    CancelledError,
    ComputeFailedError,
    DeadlineExceededError,
    InvalidArgumentError,
    OutOfMemoryError,
    OutOfRangeError,
    UnsupportedError,
)
from heliograph_proto.types import DTYPES, F32, TensorType

SECONDS = 20.0


@pytest.fixture(params=["cpu", "fake"])
def device(request: pytest.FixtureRequest) -> Iterator[CpuDevice]:
    """A device of each backend, with a budget of a mebibyte."""
    made = CpuDevice(threads=2, memory_bytes=2**20) if request.param == "cpu" else FakeDevice("fake0", 2**20)
    with nothing_left(made):
        yield made


@pytest.fixture
def fake() -> Iterator[FakeDevice]:
    with nothing_left(FakeDevice(memory_bytes=2**20)) as made:
        assert isinstance(made, FakeDevice)
        yield made


@pytest.fixture
def stream(device: CpuDevice) -> Iterator[Stream]:
    made = device.stream()
    yield made
    made.close()


class Record:
    """Calls in their order, with what they raised."""

    def __init__(self) -> None:
        self.done: list[tuple[Any, BaseException | None]] = []

    def of(self, name: Any) -> Any:
        return lambda error: self.done.append((name, error))


def held(stream: Stream, record: Record) -> tuple[threading.Event, threading.Event]:
    """Keeps a stream busy: (it has begun, let it go on)."""
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait(SECONDS)

    stream.submit(work, record.of("held"))
    return begun, go_on


# Streams


def test_a_stream_does_its_work_in_order_and_reports_each_once(stream: Stream) -> None:
    order: list[int] = []
    record = Record()
    for number in range(500):
        stream.submit(lambda number=number: order.append(number), record.of(number))
    stream.synchronize(SECONDS)
    assert order == list(range(500))
    assert record.done == [(number, None) for number in range(500)]


def test_what_work_raises_is_what_it_is_done_with_and_the_stream_goes_on(stream: Stream) -> None:
    record, error = Record(), ComputeFailedError("broken")

    def work() -> None:
        raise error

    stream.submit(work, record.of("bad"))
    stream.submit(lambda: None, record.of("good"))
    stream.synchronize(SECONDS)
    assert record.done == [("bad", error), ("good", None)]


def test_even_system_exit_does_not_end_a_stream(stream: Stream) -> None:
    record = Record()

    def work() -> None:
        raise SystemExit(3)

    stream.submit(work, record.of("exit"))
    stream.synchronize(SECONDS)
    assert isinstance(record.done[0][1], SystemExit)


def test_a_report_that_fails_is_logged_and_the_stream_goes_on(
    stream: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    def report(error: BaseException | None) -> None:
        raise ValueError("the report broke")

    with caplog.at_level(logging.CRITICAL + 1):
        stream.submit(lambda: None, report)
        stream.synchronize(SECONDS)


def test_closing_waits_for_the_running_work_and_cancels_what_is_queued(device: CpuDevice) -> None:
    stream, record = device.stream(), Record()
    begun, go_on = held(stream, record)
    for number in range(3):
        stream.submit(lambda: None, record.of(number))
    assert begun.wait(SECONDS)
    closing = threading.Thread(target=stream.close)
    closing.start()
    go_on.set()
    closing.join(SECONDS)
    assert record.done[0] == ("held", None)
    assert [name for name, _ in record.done[1:]] == [0, 1, 2]
    assert all(isinstance(error, CancelledError) for _, error in record.done[1:])


def test_closing_waits_for_work_that_its_submitter_does(device: CpuDevice) -> None:
    stream, record = device.stream(), Record()
    closing = threading.Thread(target=stream.close)

    def is_closed() -> bool:
        refused = Record()
        stream.submit(lambda: None, refused.of("late"))
        return bool(refused.done)

    def work() -> None:
        closing.start()
        until(is_closed, "the stream is closed")
        assert closing.is_alive()

    perform = stream.submit_here(work, record.of("here"))
    assert perform is not None
    perform()
    closing.join(SECONDS)
    assert record.done == [("here", None)] and not closing.is_alive()


def test_the_end_of_work_that_its_submitter_does_may_close_the_stream(device: CpuDevice) -> None:
    stream = device.stream()
    perform = stream.submit_here(lambda: None, lambda error: stream.close())
    assert perform is not None
    perform()
    stream.close()


def test_work_for_a_closed_stream_is_done_with_an_error_at_once(device: CpuDevice) -> None:
    stream, record = device.stream(), Record()
    stream.close()
    stream.submit(lambda: None, record.of("late"))
    assert isinstance(record.done[0][1], CancelledError)


def test_a_stream_can_be_closed_twice_and_from_its_own_work(device: CpuDevice) -> None:
    stream, record = device.stream(), Record()
    stream.submit(stream.close, record.of("close"))
    stream.submit(lambda: None, record.of("next"))
    stream.close()
    stream.close()
    assert [name for name, _ in record.done] == ["close", "next"]


def test_work_submitted_by_many_threads_is_done_exactly_once(stream: Stream) -> None:
    record = Record()

    def submit(start: int) -> None:
        for number in range(start, start + 200):
            stream.submit(lambda: None, record.of(number))

    threads = [threading.Thread(target=submit, args=(200 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stream.synchronize(SECONDS)
    assert sorted(name for name, _ in record.done) == list(range(800))


def test_synchronizing_with_a_busy_stream_ends_at_its_deadline(stream: Stream) -> None:
    begun, go_on = held(stream, Record())
    assert begun.wait(SECONDS)
    with pytest.raises(DeadlineExceededError, match="within 0.01 s"):
        stream.synchronize(0.01)
    go_on.set()
    stream.synchronize(SECONDS)


# Events


def test_an_event_that_was_never_recorded_is_reached(device: CpuDevice) -> None:
    event = device.event()
    assert event.is_reached()
    event.synchronize(0)


def test_a_stream_waits_for_an_event_of_another(device: CpuDevice) -> None:
    first, second, record = device.stream(), device.stream(), Record()
    begun, go_on = held(first, record)
    event = device.event().record(first)
    event.wait(second)
    second.submit(lambda: None, record.of("after"))
    assert begun.wait(SECONDS)
    assert not event.is_reached()
    assert record.done == []
    go_on.set()
    second.synchronize(SECONDS)
    assert [name for name, _ in record.done] == ["held", "after"]
    first.close()
    second.close()


def test_recording_again_moves_the_mark(stream: Stream) -> None:
    event = Event()
    event.record(stream).synchronize(SECONDS)
    begun, go_on = held(stream, Record())
    assert begun.wait(SECONDS)
    event.record(stream)
    assert not event.is_reached()
    go_on.set()
    event.synchronize(SECONDS)


def test_an_event_on_a_stream_that_is_closed_is_reached_so_nobody_waits_for_ever(device: CpuDevice) -> None:
    first, second = device.stream(), device.stream()
    first.close()
    event = device.event().record(first)
    event.wait(second)
    second.synchronize(SECONDS)
    second.close()


# Aborts


def test_an_abort_calls_every_hook_that_watches_once() -> None:
    abort, calls = Abort(), []
    with abort.watch(lambda: calls.append("first")), abort.watch(lambda: calls.append("second")):
        abort.set()
        abort.set()
    assert calls == ["first", "second"]


def test_an_abort_that_is_set_calls_a_hook_at_once_and_never_after_its_block() -> None:
    abort, calls = Abort(), []
    with abort.watch(lambda: calls.append("early")):
        pass
    abort.set()
    assert calls == []
    with abort.watch(lambda: calls.append("late")):
        assert calls == ["late"]


# Tensors


@pytest.fixture
def tensor(device: CpuDevice) -> Iterator[Tensor]:
    """Sixteen floats, 0 to 15, in the middle of a buffer."""
    made = place(device, np.arange(16, dtype=np.float32))
    yield made
    made.buffer.free()


HUGE = 2**63 - 1


@pytest.mark.parametrize(
    ("shape", "offset", "strides"),
    [
        ((16,), 1, ()), ((17,), 0, ()), ((1,), 64, ()), ((1,), HUGE, ()), ((1,), -4, ()), ((0,), 68, ()),
        ((HUGE // 4,), 0, ()), ((2,), 0, (64,)), ((2,), 0, (HUGE,)), ((2, 2), 0, (HUGE, HUGE)),
        ((2,), 4, (-4,)), ((HUGE,), 0, (4,)), ((2**62, 2**62), 0, (1, 1)), ((2, 2), 0, (4,)),
        ((2,), 0, (4, 4)), ((), 0, (4,)),
    ],
)  # fmt: skip
def test_a_view_that_reaches_outside_is_refused(
    shape: tuple[int, ...], offset: int, strides: tuple[int, ...], tensor: Tensor
) -> None:
    with pytest.raises(OutOfRangeError):
        tensor.view(TensorType(F32, shape), offset, strides)


@pytest.mark.parametrize(
    ("shape", "offset", "strides", "expected"),
    [
        ((16,), 0, (), list(range(16))),
        ((), 60, (), 15),
        ((2, 2), 4, (32, 12), [[1, 4], [9, 12]]),
        ((3,), 8, (0,), [2, 2, 2]),
        ((0,), 64, (), []),
        ((0, 5), 0, (HUGE, HUGE), []),
        ((2, 8), 0, (), [list(range(8)), list(range(8, 16))]),
    ],
)
def test_a_view_within_reads_what_lies_there(
    shape: tuple[int, ...], offset: int, strides: tuple[int, ...], expected: Any, tensor: Tensor
) -> None:
    found = tensor.view(TensorType(F32, shape), offset, strides)
    assert np.array(found.array).tolist() == expected or found.array.size == 0


def test_a_view_of_a_view_is_bound_by_the_view(tensor: Tensor) -> None:
    part = tensor.view(TensorType(F32, (4,)), 16)
    assert part.view(TensorType(F32, (2,)), 8).array.tolist() == [6, 7]
    with pytest.raises(OutOfRangeError):
        part.view(TensorType(F32, (2,)), 12)


def test_a_view_of_another_type_reads_the_same_bytes(tensor: Tensor) -> None:
    bits = tensor.view(TensorType(DTYPES["u32"], (16,)), 0).array
    assert bits.tolist() == np.arange(16, dtype=np.float32).view(np.uint32).tolist()


@pytest.mark.parametrize(
    ("shape", "strides", "overlaps"),
    [((4,), (4,), False), ((4,), (0,), True), ((4,), (2,), True), ((2, 4), (16, 4), False),
     ((2, 4), (8, 4), True), ((4, 2), (4, 16), False), ((1, 4), (0, 4), False), ((0, 4), (0, 0), False),
     ((), (), False)],
)  # fmt: skip
def test_a_tensor_knows_whether_its_elements_share_bytes(
    shape: tuple[int, ...], strides: tuple[int, ...], overlaps: bool, tensor: Tensor
) -> None:
    assert tensor.view(TensorType(F32, shape), 0, strides).overlaps_itself is overlaps


def test_a_tensor_of_an_array_has_its_type(device: CpuDevice) -> None:
    tensor = place(device, np.zeros((2, 3), np.int16))
    assert tensor.type == type_of(tensor.array) == TensorType(DTYPES["i16"], (2, 3))
    tensor.buffer.free()


# Reading and writing


def all_layouts(tensor: Tensor) -> dict[str, Tensor]:
    """Views of sixteen floats in a tensor of 16: contiguous, with gaps, permuted."""
    return {
        "whole": tensor,
        "gaps": tensor.view(TensorType(F32, (4, 2)), 4, (16, 8)),
        "permuted": tensor.view(TensorType(F32, (4, 4)), 0, (4, 16)),
    }


@pytest.mark.parametrize("layout", ["whole", "gaps", "permuted"])
def test_bytes_written_are_the_bytes_read_in_row_major_order(layout: str, tensor: Tensor) -> None:
    part = all_layouts(tensor)[layout]
    data = np.arange(100, 100 + part.type.size, dtype=np.float32)
    access.write(part, 0, host_bytes(data))
    np.testing.assert_array_equal(part.array.reshape(-1), data)
    out = bytearray(part.type.nbytes)
    access.read(part, 0, memoryview(out))
    assert out == data.tobytes()


@pytest.mark.parametrize("layout", ["whole", "gaps", "permuted"])
def test_a_piece_is_read_and_written_at_its_offset(layout: str, tensor: Tensor) -> None:
    part = all_layouts(tensor)[layout]
    expected = np.array(part.array).reshape(-1)
    expected[3:5] = 7, 8
    access.write(part, 12, host_bytes(np.array([7, 8], np.float32)))
    np.testing.assert_array_equal(part.array.reshape(-1), expected)
    out = bytearray(8)
    access.read(part, 12, memoryview(out))
    assert np.frombuffer(out, np.float32).tolist() == [7, 8]


@pytest.mark.parametrize("layout", ["whole", "gaps", "permuted"])
def test_nothing_can_be_read_and_written(layout: str, tensor: Tensor) -> None:
    part = all_layouts(tensor)[layout]
    before = np.array(tensor.array)
    access.write(part, part.type.nbytes, memoryview(b""))
    access.read(part, 0, memoryview(bytearray()))
    access.memset(part, 4, 0, 1)
    np.testing.assert_array_equal(tensor.array, before)


def test_writing_a_part_with_gaps_leaves_the_gaps(tensor: Tensor) -> None:
    part = all_layouts(tensor)["gaps"]
    access.memset(part, 0, part.type.nbytes, 0)
    assert tensor.array.tolist() == [0, 0, 2, 0, 4, 0, 6, 0, 8, 0, 10, 0, 12, 0, 14, 0]


def test_memset_fills_bytes_of_whole_elements_where_there_are_gaps(tensor: Tensor) -> None:
    part = all_layouts(tensor)["gaps"]
    access.memset(part, 4, 8, 255)
    assert np.isnan(part.array).reshape(-1).tolist() == [False, True, True] + [False] * 5


@pytest.mark.parametrize("value", [-1, 256])
def test_memset_with_what_is_no_byte_is_refused(value: int, tensor: Tensor) -> None:
    with pytest.raises(InvalidArgumentError, match="a byte is 0 to 255"):
        access.memset(tensor, 0, 4, value)


@pytest.mark.parametrize(("offset", "size"), [(61, 4), (0, 65), (-1, 1), (HUGE, 1), (HUGE, HUGE), (0, -1)])
def test_bytes_outside_are_refused(offset: int, size: int, tensor: Tensor) -> None:
    for part in all_layouts(tensor).values():
        with pytest.raises(OutOfRangeError):
            access.memset(part, offset, size, 0)


def test_parts_of_elements_are_refused_where_there_are_gaps(tensor: Tensor) -> None:
    with pytest.raises(InvalidArgumentError, match="whole elements of 4 bytes"):
        access.write(all_layouts(tensor)["gaps"], 2, memoryview(b"1234"))


def test_a_view_that_repeats_can_be_read_but_not_written(tensor: Tensor) -> None:
    repeated = tensor.view(TensorType(F32, (2**30, 1)), 8, (0, 4))
    out = bytearray(12)
    access.read(repeated, 400, memoryview(out))
    assert np.frombuffer(out, np.float32).tolist() == [2, 2, 2]
    for write in (
        lambda: access.memset(repeated, 0, repeated.type.nbytes, 0),
        lambda: access.write(repeated, 0, memoryview(b"1234")),
        lambda: access.copy(repeated, repeated),
    ):
        with pytest.raises(InvalidArgumentError, match="elements share bytes"):
            write()


def test_a_copy_fills_a_tensor_whatever_the_strides(device: CpuDevice, tensor: Tensor) -> None:
    source = all_layouts(tensor)["permuted"]
    target = place(device, np.zeros((4, 4), np.float32))
    access.copy(source, target)
    np.testing.assert_array_equal(target.array, source.array)
    access.copy(target, source)
    np.testing.assert_array_equal(target.array, source.array)
    target.buffer.free()


def test_a_copy_of_another_type_is_refused(tensor: Tensor) -> None:
    with pytest.raises(InvalidArgumentError, match="the types differ"):
        access.copy(tensor, tensor.view(TensorType(DTYPES["i32"], (16,)), 0))


def test_types_that_numpy_lacks_are_moved_as_bytes(device: CpuDevice) -> None:
    buffer = device.buffer_type.allocate(256)
    halves = Tensor(TensorType(DTYPES["bf16"], (4,)), buffer, 0, (8,))
    access.write(halves, 0, memoryview(b"abcdefgh"))
    other = Tensor(TensorType(DTYPES["bf16"], (4,)), buffer, 100)
    access.copy(halves, other)
    out = bytearray(8)
    access.read(other, 0, memoryview(out))
    assert out == b"abcdefgh"
    buffer.free()


@pytest.mark.parametrize("shape", [(2, 64), (0, 32)])
def test_blocks_are_copied_as_bytes(shape: tuple[int, ...], device: CpuDevice) -> None:
    type = TensorType(DTYPES["q8_0"], shape)
    a, b = (Tensor(type, device.buffer_type.allocate(type.nbytes)) for _ in range(2))
    data = bytes(range(type.nbytes))
    access.write(a, 0, memoryview(data))
    access.copy(a, b)
    out = bytearray(type.nbytes)
    access.read(b, 0, memoryview(out))
    assert out == data
    a.buffer.free()
    b.buffer.free()


# Buffers


def test_freeing_a_buffer_twice_gives_its_memory_back_once(device: CpuDevice) -> None:
    kept = device.buffer_type.allocate(1000)
    buffer = device.buffer_type.allocate(5000)
    for _ in range(3):
        buffer.free()
    assert used_bytes(device) == 1000
    kept.free()


def test_a_buffer_that_many_threads_free_gives_its_memory_back_once(device: CpuDevice) -> None:
    kept = device.buffer_type.allocate(1000)
    buffer = device.buffer_type.allocate(5000)
    threads = [threading.Thread(target=buffer.free) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert used_bytes(device) == 1000
    kept.free()


def test_what_does_not_fit_is_refused_with_both_numbers(device: CpuDevice) -> None:
    with pytest.raises(OutOfMemoryError, match="has 1,048,576 bytes free; 1,048,577 are needed"):
        device.buffer_type.allocate(2**20 + 1)
    device.buffer_type.allocate(2**20).free()


@pytest.mark.parametrize("size", [0, 1, 63, 4096])
def test_a_buffer_starts_on_a_cache_line_whatever_its_size(size: int, device: CpuDevice) -> None:
    buffer = device.buffer_type.allocate(size, Usage.WEIGHTS)
    assert buffer.address % device.buffer_type.alignment == 0
    assert (buffer.size_bytes, buffer.usage) == (size, Usage.WEIGHTS)
    buffer.free()


def test_what_the_host_refuses_is_out_of_memory_and_not_counted() -> None:
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**63)) as device:
        with pytest.raises(OutOfMemoryError, match="the host refused"):
            device.buffer_type.allocate(2**62)
        assert used_bytes(device) == 0


def test_clearing_fills_the_whole_buffer(device: CpuDevice) -> None:
    buffer = device.buffer_type.allocate(10)
    buffer.clear(7)
    out = bytearray(10)
    buffer.get(0, memoryview(out))
    assert out == bytes([7] * 10)
    buffer.free()


def test_a_buffer_over_host_memory_is_that_memory_and_is_not_counted() -> None:
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**20)) as device:
        memory = bytearray(np.arange(4, dtype=np.float32).tobytes())
        buffer = device.buffer_from_host(memoryview(memory))
        assert used_bytes(device) == 0
        Tensor(TensorType(F32, (4,)), buffer).array[0] = 9
        assert np.frombuffer(memory, np.float32).tolist() == [9, 1, 2, 3]
        buffer.free()


def test_a_buffer_over_no_host_memory_is_empty() -> None:
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**20)) as device:
        assert device.buffer_from_host(memoryview(b"")).size_bytes == 0


@pytest.mark.parametrize("array", [np.zeros(()), np.zeros((0, 3)), np.arange(6.0).reshape(2, 3)])
def test_the_bytes_of_an_array_are_its_memory(array: Array) -> None:
    found = host_bytes(array)
    assert (found.nbytes, found.tobytes()) == (array.nbytes, array.tobytes())


# Devices


@pytest.mark.parametrize("stored", [name for name, one in DTYPES.items() if one.kind == "quantized"])
def test_a_device_converts_every_stored_type_both_ways(device: CpuDevice, stored: str) -> None:
    blocks, plain = TensorType(DTYPES[stored], (256,)), TensorType(F32, (256,))
    assert device.supports_op("cast", {}, [plain], blocks) == ""
    assert device.supports_op("cast", {}, [blocks], plain) == ""


def test_a_device_reads_its_own_memory(device: CpuDevice) -> None:
    assert device.supports_buffer_type(device.buffer_type)
    assert device.buffer_type.alloc_size(TensorType(F32, (3,))) == 12


def test_a_devices_capabilities_are_what_it_does(device: CpuDevice) -> None:
    assert device.capabilities.host_buffer == (device.host_buffer_type is not None)
    if not device.capabilities.buffer_from_host:
        with pytest.raises(UnsupportedError):
            device.buffer_from_host(memoryview(b"1234"))


HOLDS = """
import threadpoolctl
from heliograph_backends.cpu import CpuDevice

def threads():
    return {one["num_threads"] for one in threadpoolctl.threadpool_info() if one["user_api"] == "blas"}

with threadpoolctl.threadpool_limits(limits=2, user_api="blas"):
    first, second = CpuDevice(threads=1, native=False), CpuDevice(threads=1, native=False)
    assert threads() == {1}
    first.close()
    first.close()
    assert threads() == {1}
    second.close()
    assert threads() == {2}
"""


def test_blas_is_held_to_one_thread_until_the_last_device_closes() -> None:
    """In a process without the devices of other tests."""
    pytest.importorskip("threadpoolctl")
    subprocess.run([sys.executable, "-c", HOLDS], check=True, timeout=SECONDS)
