"""Commands that use a place in shared memory, on devices whose delays are scripted: what can be broken off,
and what the client may then do with the place."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from core_client import CoreClient

from heliograph_backends.fake import FakeDevice
from heliograph_backends.host_memory.sealed import why_no_sealed
from heliograph_proto import commands as c
from heliograph_proto.errors import (
    CancelledError,
    DeadlineExceededError,
    LimitExceededError,
    OutOfRangeError,
    UnknownHandleError,
)
from heliograph_proto.sessions import PLACE_BYTES
from heliograph_proto.types import tensor_type
from heliograph_server.session.operations import private_copy
from heliograph_server.session.protocol.instructions import SharedPlace

pytestmark = pytest.mark.skipif(bool(why_no_sealed()), reason=why_no_sealed() or "-")

SIZE = 1000
TENSOR, OTHER, STREAM = 1, 2, 3
BYTES = tensor_type("u8", (SIZE,))


class Mapped(CoreClient):
    """A client that has its session's memory mapped, and a tensor on the device."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(device)
        found = self.session.share_memory()
        self.memory = mmap.mmap(found.descriptor, found.size_bytes)
        os.close(found.descriptor)
        self.do(c.Allocate(TENSOR, BYTES, device.name))

    def put(self, data: bytes, offset_bytes: int = 0) -> None:
        self.memory[offset_bytes : offset_bytes + len(data)] = data

    def write(self, size_bytes: int = SIZE) -> c.SetTensor:
        return c.SetTensor(TENSOR, 0, None, 0, size_bytes, shared=0)

    def read(self, size_bytes: int = SIZE) -> c.GetTensor:
        return c.GetTensor(TENSOR, 0, size_bytes, shared=0)

    def stop(self, sequence: int) -> c.Completion:
        """Cancels a command; its completion."""
        self.send(c.Cancel(sequence))
        return self.wait(sequence)


@pytest.fixture(params=[True, False], ids=["of the host", "of a device"])
def device(request: pytest.FixtureRequest) -> FakeDevice:
    return FakeDevice(is_host=request.param)


@pytest.fixture
def far() -> FakeDevice:
    """Its memory is not the host's: it may take any time."""
    return FakeDevice(is_host=False)


@pytest.fixture
def mapped(device: FakeDevice) -> Iterator[Mapped]:
    with Mapped(device) as made:
        yield made


def test_bytes_come_and_go_by_a_place(mapped: Mapped) -> None:
    mapped.put(b"\x07" * SIZE)
    mapped.do(mapped.write())
    mapped.put(bytes(SIZE))
    mapped.do(mapped.read())
    assert mapped.memory[:SIZE] == b"\x07" * SIZE
    assert mapped.get(TENSOR, BYTES).tolist() == [7] * SIZE


def test_nothing_comes_and_goes_as_well(mapped: Mapped) -> None:
    mapped.do(mapped.write(0))
    mapped.do(mapped.read(0))


def test_a_place_has_a_largest_size(mapped: Mapped) -> None:
    for kind in (mapped.write(PLACE_BYTES + 1), mapped.read(PLACE_BYTES + 1)):
        assert isinstance(mapped.refused(kind), LimitExceededError | OutOfRangeError)
    mapped.do(
        c.Allocate(OTHER, tensor_type("u8", (2 * PLACE_BYTES,)), mapped.session._devices.device("").name)
    )
    refused = mapped.refused(c.SetTensor(OTHER, 0, None, 0, PLACE_BYTES + 1, shared=0))
    assert isinstance(refused, LimitExceededError) and "in pieces" in refused.advice
    refused = mapped.refused(c.GetTensor(OTHER, 0, PLACE_BYTES + 1, shared=0))
    assert isinstance(refused, LimitExceededError)
    mapped.do(c.SetTensor(OTHER, 0, None, 0, PLACE_BYTES, shared=0))
    with pytest.raises(LimitExceededError):
        mapped.session.shared_bytes(0, PLACE_BYTES + 1)


def test_a_write_to_a_slow_device_is_broken_off_and_its_place_is_free(far: FakeDevice) -> None:
    with Mapped(far) as mapped:
        mapped.put(b"\x07" * SIZE)
        gate = far.script.hold("set")
        writing = mapped.send(mapped.write())
        assert gate.entered.wait(10)
        assert isinstance(mapped.stop(writing).error, CancelledError)
        # The client uses the place for something else; what is written is what was there.
        mapped.put(b"\x09" * SIZE)
        gate.open()
        mapped.do(c.Synchronize())
        assert isinstance(mapped.refused(c.GetTensor(TENSOR, 0, SIZE)), CancelledError)
        assert mapped.memory[:SIZE] == b"\x09" * SIZE


def test_a_read_from_a_slow_device_is_broken_off_and_leaves_its_place_alone(far: FakeDevice) -> None:
    with Mapped(far) as mapped:
        gate = far.script.hold("get")
        reading = mapped.send(mapped.read())
        assert gate.entered.wait(10)
        assert isinstance(mapped.stop(reading).error, CancelledError)
        mapped.put(b"\x09" * SIZE)
        gate.open()
        mapped.do(c.Synchronize())
        assert mapped.memory[:SIZE] == b"\x09" * SIZE
        mapped.do(mapped.read())
        assert mapped.memory[:SIZE] == bytes(SIZE)


@pytest.mark.parametrize("work", ["set", "get"])
def test_a_deadline_ends_one_too(far: FakeDevice, work: str) -> None:
    with Mapped(far) as mapped:
        gate = far.script.hold("set" if work == "set" else "get")
        kind = mapped.write() if work == "set" else mapped.read()
        mapped._sequence += 1
        mapped.session.submit([c.Command(mapped._sequence, kind, notify=True, timeout_ms=50)])
        assert isinstance(mapped.wait(mapped._sequence).error, DeadlineExceededError)
        gate.open()
        mapped.do(c.Synchronize())


def test_a_copy_in_the_hosts_memory_is_done_before_it_is_reported() -> None:
    device = FakeDevice(is_host=True)
    with Mapped(device) as mapped:
        mapped.put(b"\x07" * SIZE)
        gate = device.script.hold("set")
        writing = mapped.send(mapped.write())
        assert gate.entered.wait(10)
        cancelling = mapped.send(c.Cancel(writing))
        assert mapped.wait(cancelling).error is None
        assert writing not in mapped._done
        gate.open()
        assert mapped.wait(writing).error is None
        assert mapped.get(TENSOR, BYTES).tolist() == [7] * SIZE


def test_a_session_that_ended_has_no_memory_any_more(far: FakeDevice) -> None:
    before = descriptors(), mappings()
    # What is left must not depend on when somebody looks for cycles.
    gc.disable()
    try:
        with Mapped(far) as mapped:
            mapped.memory.close()
        assert (descriptors(), mappings()) == before
        with pytest.raises(UnknownHandleError):
            mapped.session._executor.shared_part(SharedPlace(0, 1))
    finally:
        gc.enable()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    """Of memory that is shared."""
    return Path("/proc/self/maps").read_text().count("memfd:heliograph")


def test_a_copy_is_nobody_elses() -> None:
    given = np.arange(10, dtype=np.uint8)
    copied = private_copy(given.data)
    given[:] = 0
    assert copied.tolist() == list(range(10))
    assert private_copy(memoryview(b"")).nbytes == 0
