"""How often the bytes of a transfer are copied, by the memory that each side takes while it carries them.

What is copied somewhere else than to its destination lies in memory that was not there before, and
`tracemalloc` sees all that Python and NumPy take.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from core_client import CoreClient

from heliograph.transport.bulk.messages import Receiver, upload_messages, upload_target
from heliograph_backends.fake import FakeDevice
from heliograph_proto import commands as c
from heliograph_proto.codec.bulk import decode_upload, encode_download
from heliograph_proto.errors import CancelledError, ProtocolError
from heliograph_proto.types import tensor_type

MIB = 2**20
SIZE, CHUNK = 16 * MIB, MIB
#: For everything that is not the bytes themselves.
LITTLE = MIB // 4
DATA = np.random.default_rng(5).integers(0, 256, SIZE, np.uint8)


class Peak:
    """The most memory that was taken at once, in bytes, beyond what there was before."""

    size_bytes = 0


@contextmanager
def measured() -> Iterator[Peak]:
    found = Peak()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        yield found
        found.size_bytes = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def messages() -> list[bytes]:
    target = upload_target(b"session", 7, SIZE)
    return list(upload_messages(target, memoryview(DATA), CHUNK))


@pytest.fixture
def client() -> Iterator[CoreClient]:
    device = FakeDevice(memory_bytes=4 * SIZE)
    with CoreClient(device) as made:
        made.do(c.Allocate(1, tensor_type("u8", (SIZE,))))
        yield made
        made.do(c.Free((1,)))
    device.close()


def test_a_client_makes_one_message_at_a_time_of_an_array() -> None:
    with measured() as peak:
        for message in upload_messages(upload_target(b"session", 7, SIZE), memoryview(DATA), CHUNK):
            assert len(message) > CHUNK
    assert peak.size_bytes < 2 * CHUNK + LITTLE


def test_a_client_puts_what_comes_where_it_belongs() -> None:
    out = np.zeros(SIZE, np.uint8)
    coming = [
        encode_download(start, SIZE, memoryview(DATA)[start : start + CHUNK])
        for start in range(0, SIZE, CHUNK)
    ]
    receiver = Receiver(memoryview(out))
    with measured() as peak:
        for message in coming:
            receiver.piece(message)
        receiver.finish()
    assert np.array_equal(out, DATA)
    assert peak.size_bytes < LITTLE


@pytest.mark.parametrize("command_first", [True, False])
def test_a_server_writes_messages_into_the_tensor_and_nowhere_else(
    client: CoreClient, command_first: bool
) -> None:
    coming, command = messages(), c.SetTensor(1, 0, None, transfer=7, size_bytes=SIZE)
    with measured() as peak:
        number = client.send(command) if command_first else 0
        upload = client.session.begin_upload(7, SIZE)
        for message in coming:
            piece = decode_upload(message)
            upload.write(piece.offset_bytes, piece.data)
        upload.finish()
        done = client.wait(number or client.send(command))
    assert done.error is None
    assert peak.size_bytes < LITTLE
    assert client.do(c.GetTensor(1, SIZE - 9, 9)).data == DATA[-9:].tobytes()


def test_small_parts_that_wait_for_their_command_take_little_more_memory_than_their_bytes(
    client: CoreClient,
) -> None:
    """Each piece of a packed transfer may be a single byte."""
    size = 64 * 1024

    def fill(place: memoryview) -> int:
        place[:] = bytes([7]) * place.nbytes
        return place.nbytes

    with measured() as peak:
        upload = client.session.begin_upload(7, size)
        while upload.received_bytes < size:
            upload.receive(fill, 1)
        upload.finish()
    assert peak.size_bytes < 2 * size
    assert client.do(c.SetTensor(1, 0, None, transfer=7, size_bytes=size)).error is None
    assert client.do(c.GetTensor(1, size - 9, 9)).data == bytes([7]) * 9


@pytest.mark.parametrize("end", ["cancelled", "broken off"])
def test_a_write_that_ends_before_its_bytes_have_come_frees_its_stream(client: CoreClient, end: str) -> None:
    number = client.send(c.SetTensor(1, 0, None, transfer=7, size_bytes=SIZE))
    upload = client.session.begin_upload(7, SIZE)
    first = decode_upload(messages()[0])
    upload.write(0, first.data)
    behind = client.send(c.GetTensor(1, 0, 9))
    if end == "cancelled":
        client.send(c.Cancel(number))
    else:
        upload.abort(CancelledError("the upload broke off"))
    for sequence in (number, behind):
        assert isinstance(client.wait(sequence).error, CancelledError), "its tensor is poisoned"
    with pytest.raises((CancelledError, ProtocolError)):
        upload.write(first.data.nbytes, first.data)
    upload.abort(CancelledError("the test is over"))
    client.do(c.Memset(1, 0, SIZE, 7))
    assert client.do(c.GetTensor(1, 0, 9)).data == bytes([7]) * 9


def test_a_server_copies_a_tensor_into_messages_and_nowhere_else(client: CoreClient) -> None:
    with measured() as peak:
        client.send(c.GetTensor(1, 0, SIZE, transfer=8))
        download = client.session.open_download(8)
        found = download.wait(30)
        assert sum(map(len, found.encoded)) >= SIZE
    # These are the messages themselves.
    assert SIZE <= peak.size_bytes < SIZE + LITTLE
    download.close()
