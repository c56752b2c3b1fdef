"""The hand-written bulk codec against protobuf's own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import heliograph as hg
from heliograph._bulk import Receiver, decode_download, upload_messages, upload_target
from heliograph_proto.v1 import bulk_pb2

FIXED = settings(max_examples=200, deadline=None, derandomize=True, database=None)


@FIXED
@given(
    session=st.binary(max_size=40),
    target=st.integers(0, 2**64 - 1) | st.binary(max_size=40),
    data=st.binary(max_size=1000),
    chunk=st.integers(1, 1200),
)
def test_uploads_are_the_bytes_that_protobuf_writes(
    session: bytes, target: int | bytes, data: bytes, chunk: int
) -> None:
    header = upload_target(session, target, len(data))
    expected = [
        bulk_pb2.UploadRequest(
            target=None if offset else header, offset_bytes=offset, data=data[offset : offset + chunk]
        ).SerializeToString()
        for offset in range(0, max(len(data), 1), chunk)
    ]
    assert list(upload_messages(header, memoryview(data), chunk)) == expected


@FIXED
@given(offset=st.integers(0, 2**64 - 1), size=st.integers(0, 2**64 - 1), data=st.binary(max_size=300))
def test_downloads_are_read_as_protobuf_reads_them(offset: int, size: int, data: bytes) -> None:
    message = bulk_pb2.DownloadResponse(offset_bytes=offset, size_bytes=size, data=data)
    assert decode_download(message.SerializeToString()) == (offset, size, data)


@FIXED
@given(garbage=st.binary(max_size=60))
def test_garbage_is_a_typed_error_or_what_protobuf_makes_of_it(garbage: bytes) -> None:
    try:
        found = decode_download(garbage)
    except hg.ProtocolError:
        with pytest.raises(Exception):  # noqa: B017 - protobuf's class is not public
            bulk_pb2.DownloadResponse.FromString(garbage)
        return
    expected = bulk_pb2.DownloadResponse.FromString(garbage)
    assert found == (expected.offset_bytes, expected.size_bytes, expected.data)


def test_fields_in_another_order_and_unknown_ones_are_understood() -> None:
    message = b"\x7a\x02hi" + b"\x08\x03" + b"\x10\x05" + b"\xa0\x06\x07"
    assert decode_download(message) == (3, 5, b"hi")


@pytest.mark.parametrize(
    "pieces", [[(1, b"ab")], [(0, b"ab"), (3, b"c")], [(0, b"abcd")], [(0, b"a"), (0, b"a")]]
)
def test_pieces_that_do_not_fit_together_are_refused(pieces: list[tuple[int, bytes]]) -> None:
    receiver = Receiver(memoryview(bytearray(3)))
    with pytest.raises(hg.ProtocolError):
        for offset, data in pieces:
            message = bulk_pb2.DownloadResponse(offset_bytes=offset, size_bytes=3, data=data)
            receiver.piece(message.SerializeToString())


def test_bytes_that_are_missing_are_noticed() -> None:
    with pytest.raises(hg.ProtocolError, match="0 of 3"):
        Receiver(memoryview(bytearray(3))).finish()
