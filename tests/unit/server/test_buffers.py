"""Buffers of a session: making them, placing tensors in them, chunks, copies, memory of the process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from core_client import CoreClient

from heliograph_backends.contract import Tensor
from heliograph_backends.cpu.backend import CpuDevice
from heliograph_backends.fake import FakeDevice
from heliograph_proto import commands as c
from heliograph_proto.commands import Chunks
from heliograph_proto.devices import CopyPath, Memory, Usage
from heliograph_proto.errors import (
    CancelledError,
    HandleExistsError,
    InvalidArgumentError,
    OutOfMemoryError,
    OutOfRangeError,
    UnavailableError,
    UnknownHandleError,
)
from heliograph_proto.types import tensor_type

F4, BYTES = tensor_type("f32", (4,)), tensor_type("u8", (256,))
BUFFER, ONE, TWO, THREE = 1, 11, 12, 13


@pytest.fixture
def client() -> Iterator[CoreClient]:
    with CoreClient(CpuDevice(threads=1, native=False, memory_bytes=2**20)) as made:
        yield made


class Recorded(FakeDevice):
    """A device that notes which tensors it was told of, and whose buffers are small."""

    def __init__(self, max_size: int = 2**62) -> None:
        super().__init__(memory_bytes=2**20)
        self.told: list[tuple[str, Tensor]] = []
        self.buffer_type.max_size = max_size
        allocate = self.buffer_type.allocate

        def recorded(size_bytes: int, usage: Usage = Usage.ANY) -> Any:
            buffer = allocate(size_bytes, usage)
            buffer.init_tensor = lambda tensor: self.told.append(("init", tensor))
            buffer.free_tensor = lambda tensor: self.told.append(("free", tensor))
            return buffer

        self.buffer_type.allocate = recorded  # type: ignore[method-assign]


def test_a_buffer_begins_as_zeros_and_tensors_share_its_bytes_where_they_overlap(client: CoreClient) -> None:
    client.do(c.AllocateBuffer(BUFFER, 128))
    client.do(c.PlaceTensor(ONE, BUFFER, 0, F4))
    client.do(c.PlaceTensor(TWO, BUFFER, 0, F4))
    client.do(c.PlaceTensor(THREE, BUFFER, 64, F4))
    client.do(c.SetTensor(ONE, 0, np.arange(4, dtype="f4").tobytes()))
    assert client.get(TWO, F4).tolist() == [0, 1, 2, 3]
    assert client.get(THREE, F4).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("offset", "expected"),
    [
        (4, InvalidArgumentError),
        (128, OutOfRangeError),
        (2**63, OutOfRangeError),
        (2**64 - 64, OutOfRangeError),
    ],
)
def test_a_tensor_is_placed_inside_of_its_buffer_and_aligned(
    client: CoreClient, offset: int, expected: type[Exception]
) -> None:
    client.do(c.AllocateBuffer(BUFFER, 128))
    assert isinstance(client.refused(c.PlaceTensor(ONE, BUFFER, offset, F4)), expected)
    assert isinstance(client.refused(c.GetTensor(ONE, 0, 16)), expected), "the handle holds the error"


def test_a_buffer_lives_as_long_as_its_tensors(client: CoreClient) -> None:
    client.do(c.AllocateBuffer(BUFFER, 64))
    client.do(c.PlaceTensor(ONE, BUFFER, 0, F4))
    client.do(c.Free((BUFFER,)))
    client.do(c.Memset(ONE, 0, 16, 1))
    assert client.get(ONE, F4).view("u1").tolist() == [1] * 16
    assert isinstance(client.refused(c.PlaceTensor(TWO, BUFFER, 0, F4)), UnknownHandleError)
    before = client.host.memory().free_bytes
    client.do(c.Free((ONE,)))
    assert client.host.memory().free_bytes == before + 64


def test_a_list_of_tensors_lies_in_one_buffer_each_aligned(client: CoreClient) -> None:
    client.do(c.AllocateTensors(BUFFER, ((ONE, F4), (TWO, F4)), usage=Usage.WEIGHTS))
    client.do(c.SetTensor(TWO, 0, bytes([7]) * 16))
    assert not client.get(ONE, F4).any()
    assert client.host.memory().total_bytes - client.host.memory().free_bytes == 64 + 16
    client.do(c.ClearBuffer(BUFFER, 5))
    assert client.get(ONE, F4).view("u1").tolist() == [5] * 16
    assert client.get(TWO, F4).view("u1").tolist() == [5] * 16


def test_a_list_past_the_largest_size_lies_in_several_buffers_that_behave_as_one() -> None:
    with CoreClient(Recorded(max_size=96)) as client:
        client.do(c.AllocateTensors(BUFFER, tuple((number, F4) for number in (ONE, TWO, THREE))))
        assert client.session.statistics().storages == 2
        client.do(c.ClearBuffer(BUFFER, 9))
        for number in (ONE, TWO, THREE):
            assert client.get(number, F4).view("u1").tolist() == [9] * 16
        assert isinstance(client.refused(c.PlaceTensor(99, BUFFER, 0, F4)), InvalidArgumentError)
        client.do(c.SetUsage(BUFFER, Usage.COMPUTE))
        client.do(c.ResetBuffer(BUFFER))
        client.do(c.Free((BUFFER, ONE, TWO, THREE)))
        assert client.session.statistics().storages == 0


def test_a_tensor_larger_than_any_buffer_is_out_of_memory_and_says_the_size() -> None:
    with CoreClient(Recorded(max_size=96)) as client:
        for kind in (
            c.Allocate(ONE, BYTES),
            c.AllocateBuffer(BUFFER, 256),
            c.AllocateTensors(BUFFER + 1, ((TWO, BYTES),)),
        ):
            error = client.refused(kind)
            assert isinstance(error, OutOfMemoryError) and "96" in error.message


def test_a_list_that_does_not_fit_poisons_all_of_its_tensors_and_takes_no_memory(client: CoreClient) -> None:
    huge = tensor_type("u8", (2**19,))
    error = client.refused(c.AllocateTensors(BUFFER, ((ONE, huge), (TWO, huge), (THREE, F4))))
    assert isinstance(error, OutOfMemoryError)
    for number in (ONE, THREE):
        assert isinstance(client.refused(c.GetTensor(number, 0, 4)), OutOfMemoryError)
    assert client.host.memory().free_bytes == 2**20


def test_handles_of_a_list_are_new_and_differ(client: CoreClient) -> None:
    assert isinstance(client.refused(c.AllocateTensors(BUFFER, ((ONE, F4), (ONE, F4)))), HandleExistsError)
    client.do(c.Allocate(TWO, F4))
    assert isinstance(client.refused(c.AllocateTensors(5, ((TWO, F4),))), HandleExistsError)


def test_the_device_is_told_of_tensors_that_are_placed_and_that_go_but_not_of_views() -> None:
    device = Recorded()
    with CoreClient(device) as client:
        client.do(c.AllocateBuffer(BUFFER, 128))
        client.do(c.PlaceTensor(ONE, BUFFER, 64, F4))
        client.do(c.View(TWO, ONE, 0, F4))
        client.do(c.Free((TWO, ONE)))
        assert [(what, tensor.offset_bytes) for what, tensor in device.told] == [("init", 64), ("free", 64)]


def test_a_buffer_type_is_chosen_by_name(client: CoreClient) -> None:
    client.do(c.AllocateBuffer(BUFFER, 64, buffer_type="cpu0"))
    error = client.refused(c.AllocateBuffer(BUFFER + 1, 64, buffer_type="gold"))
    assert isinstance(error, InvalidArgumentError) and "cpu0" in error.advice


def test_chunks_are_written_and_read_at_their_distances(client: CoreClient) -> None:
    client.do(c.Allocate(ONE, BYTES))
    client.do(c.SetTensor(ONE, 3, bytes(range(1, 7)), chunks=Chunks(2, 3, 100)))
    found = client.get(ONE, BYTES)
    assert {place: int(found[place]) for place in np.flatnonzero(found)} == {
        3: 1, 4: 2, 103: 3, 104: 4, 203: 5, 204: 6,
    }  # fmt: skip
    done = client.do(c.GetTensor(ONE, 4, 2, chunks=Chunks(1, 2, 100)))
    assert bytes(done.data) == bytes([2, 4])


@pytest.mark.parametrize(
    ("chunks", "size", "expected"),
    [
        (Chunks(2, 3, 1), 6, OutOfRangeError),
        (Chunks(2, 3, 128), 6, OutOfRangeError),
        (Chunks(2, 2, 2**63), 4, OutOfRangeError),
        (Chunks(2, 3, 100), 5, InvalidArgumentError),
        (Chunks(0, 2**60, 2**60), 0, None),
    ],
)
def test_chunks_that_overlap_reach_outside_or_do_not_add_up_are_refused(
    client: CoreClient, chunks: Chunks, size: int, expected: type[Exception] | None
) -> None:
    client.do(c.Allocate(ONE, BYTES))
    for kind in (c.SetTensor(ONE, 0, bytes(size), chunks=chunks), c.GetTensor(ONE, 0, size, chunks=chunks)):
        if expected is None:
            client.do(kind)
        else:
            assert isinstance(client.refused(kind), expected)


def test_a_copy_says_which_path_it_took() -> None:
    cpu = CpuDevice(threads=1, native=False, memory_bytes=2**20)
    far, further = (FakeDevice(f"fake{number}", memory_bytes=2**20) for number in range(2))
    for device in (far, further):
        device.buffer_type.is_host = False
    with CoreClient(cpu, far, further) as client:
        for number, name in ((ONE, "cpu0"), (TWO, "cpu0"), (THREE, "fake0"), (4, "fake1")):
            client.do(c.Allocate(number, F4, name))
        client.do(c.Memset(ONE, 0, 16, 3))
        assert client.do(c.CopyTensor(ONE, THREE)).copy_path is CopyPath.DESTINATION
        assert client.do(c.CopyTensor(THREE, 4)).copy_path is CopyPath.HOST
        client.do(c.Memset(THREE, 0, 16, 0))
        assert client.do(c.CopyTensor(THREE, TWO)).copy_path is CopyPath.SOURCE
        assert client.do(c.CopyTensor(ONE, ONE)).copy_path is None
        assert client.get(4, F4).view("u1").tolist() == [3] * 16
        assert not client.get(TWO, F4).any()


def test_memory_of_the_process_is_used_in_place(client: CoreClient) -> None:
    room = np.zeros(64 + 16, np.uint8)
    start = -room.ctypes.data % 64
    mine = room[start : start + 16].view("f4")
    client.do(c.AllocateBuffer(BUFFER, 16, memory=memoryview(mine).cast("B")))
    client.do(c.PlaceTensor(ONE, BUFFER, 0, F4))
    mine[:] = 2
    assert client.get(ONE, F4).tolist() == [2, 2, 2, 2]
    client.do(c.SetTensor(ONE, 0, np.full(4, 5, "f4").tobytes()))
    assert mine.tolist() == [5, 5, 5, 5]


def test_commands_on_tensors_that_overlap_run_in_order_whatever_their_streams() -> None:
    device = FakeDevice(memory_bytes=2**20)
    with CoreClient(device) as client:
        client.do(c.AllocateBuffer(BUFFER, 64))
        client.do(c.PlaceTensor(ONE, BUFFER, 0, F4))
        client.do(c.PlaceTensor(TWO, BUFFER, 0, F4))
        client.do(c.CreateStream(50))
        gate = device.script.hold("set")
        writing = client.send(c.SetTensor(ONE, 0, bytes([1]) * 16))
        assert gate.entered.wait(10)
        reading = client.send(c.GetTensor(TWO, 0, 16), stream=50)
        assert reading not in client._done
        threading.Thread(target=gate.open).start()
        assert bytes(client.wait(reading).data) == bytes([1]) * 16
        assert client.wait(writing).error is None


def test_a_hint_that_fails_spoils_no_bytes() -> None:
    device = FakeDevice(memory_bytes=2**20)
    with CoreClient(device) as client:
        client.do(c.AllocateBuffer(BUFFER, 128))
        client.do(c.PlaceTensor(ONE, BUFFER, 0, F4))
        client.do(c.Memset(ONE, 0, 16, 7))
        for kind in (
            c.SetUsage(BUFFER, Usage.WEIGHTS),
            c.ResetBuffer(BUFFER),
            c.PlaceTensor(TWO, BUFFER, 0, F4),
        ):
            gate = device.script.hold("set")
            client.send(c.SetTensor(ONE, 0, bytes([7]) * 16))
            assert gate.entered.wait(10)
            hint = client.send(kind)
            client.send(c.Cancel(hint))
            assert isinstance(client.wait(hint).error, CancelledError)
            gate.open()
            assert client.get(ONE, F4).view("u1").tolist() == [7] * 16
        assert isinstance(client.refused(c.Memset(TWO, 0, 16, 1)), CancelledError), "it was never placed"
        assert client.get(ONE, F4).view("u1").tolist() == [7] * 16


def test_a_list_and_its_buffer_have_handles_of_their_own(client: CoreClient) -> None:
    error = client.refused(c.AllocateTensors(BUFFER, ((BUFFER, F4), (ONE, F4))))
    assert isinstance(error, HandleExistsError)


def test_a_view_with_gaps_of_memory_that_is_no_array_is_read_and_written() -> None:
    device = FakeDevice(memory_bytes=2**20)
    device.buffer_type.is_host = False
    with CoreClient(device) as client:
        client.do(c.Allocate(ONE, tensor_type("f32", (8,))))
        client.do(c.View(TWO, ONE, 4, F4, (8,)))
        client.do(c.SetTensor(TWO, 0, np.arange(4, dtype="f4").tobytes()))
        client.do(c.Memset(TWO, 0, 4, 255))
        assert client.get(ONE, tensor_type("f32", (8,))).view("u4").tolist()[::2] == [0, 0, 0, 0]
        assert client.get(TWO, F4)[1:].tolist() == [1, 2, 3]


def test_a_device_that_does_not_answer_is_listed_and_the_others_work() -> None:
    class Lost(FakeDevice):
        is_silent = False

        def memory(self) -> Memory:
            if self.is_silent:
                raise UnavailableError("the member is gone")
            return super().memory()

    lost = Lost(memory_bytes=2**20)
    with CoreClient(CpuDevice(threads=1, native=False, memory_bytes=2**20), lost) as client:
        lost.is_silent = True
        try:
            own, other = client.host.device_list().devices
            assert own.memory.total_bytes == 2**20
            assert "the member is gone" in other.missing["memory"]
            another = client.host.open_session("somebody else")
            client.host.session(another.session).close()
        finally:
            lost.is_silent = False
