"""The hand-written bulk codec against protobuf's own, and against files written once."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import GOLDEN

import heliograph as hg
from heliograph.transport.bulk.messages import Receiver, upload_messages, upload_target
from heliograph_proto.codec.bulk import (
    DownloadPiece,
    UploadPiece,
    decode_download,
    decode_upload,
    encode_download,
    encode_upload,
)
from heliograph_proto.codec.packing import Encoding, pack
from heliograph_proto.v1 import bulk_pb2

FIXED = settings(max_examples=200, deadline=None, derandomize=True, database=None)
U64 = st.integers(0, 2**64 - 1)
#: Of those that exist, and one that does not.
ENCODINGS = st.sampled_from([0, 1, 2, 2**31 - 1])


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
@given(offset=U64, size=U64, data=st.binary(max_size=300), encoding=ENCODINGS, plain=U64)
def test_downloads_are_the_bytes_that_protobuf_writes(
    offset: int, size: int, data: bytes, encoding: Any, plain: int
) -> None:
    plain = plain if encoding else 0
    message = bulk_pb2.DownloadResponse(
        offset_bytes=offset, size_bytes=size, data=data, encoding=encoding, plain_bytes=plain
    )
    made = encode_download(offset, size, memoryview(data), encoding, plain)
    assert made == message.SerializeToString()
    assert decode_download(made) == DownloadPiece(offset, size, memoryview(data), encoding, plain)


@FIXED
@given(offset=U64, data=st.binary(max_size=300), encoding=ENCODINGS, plain=U64)
def test_packed_uploads_are_written_and_read_as_protobuf_does(
    offset: int, data: bytes, encoding: Any, plain: int
) -> None:
    plain = plain if encoding else 0
    message = bulk_pb2.UploadRequest(offset_bytes=offset, data=data, encoding=encoding, plain_bytes=plain)
    made = encode_upload(None, offset, memoryview(data), encoding, plain)
    assert made == message.SerializeToString()
    assert decode_upload(made) == UploadPiece(None, offset, memoryview(data), 0, encoding, plain)


@FIXED
@given(offset=U64, size=U64, data=st.binary(max_size=300))
def test_downloads_are_read_as_protobuf_reads_them(offset: int, size: int, data: bytes) -> None:
    message = bulk_pb2.DownloadResponse(offset_bytes=offset, size_bytes=size, data=data)
    assert decode_download(message.SerializeToString()) == DownloadPiece(offset, size, memoryview(data))


@FIXED
@given(target=st.none() | st.binary(max_size=40), offset=U64, data=st.binary(max_size=300))
def test_uploads_are_read_as_protobuf_reads_them(target: bytes | None, offset: int, data: bytes) -> None:
    given_target = None if target is None else bulk_pb2.UploadTarget(session=target, transfer=7)
    message = bulk_pb2.UploadRequest(target=given_target, offset_bytes=offset, data=data)
    encoded = None if given_target is None else given_target.SerializeToString()
    found = decode_upload(message.SerializeToString())
    assert found == UploadPiece(encoded, offset, memoryview(data))


@FIXED
@given(garbage=st.binary(max_size=60))
def test_garbage_is_a_typed_error_or_what_protobuf_makes_of_a_download(garbage: bytes) -> None:
    try:
        found = decode_download(garbage)
    except hg.ProtocolError:
        with pytest.raises(Exception):  # noqa: B017 - protobuf's class is not public
            bulk_pb2.DownloadResponse.FromString(garbage)
        return
    expected = bulk_pb2.DownloadResponse.FromString(garbage)
    assert found == DownloadPiece(
        expected.offset_bytes,
        expected.size_bytes,
        memoryview(expected.data),
        expected.encoding,
        expected.plain_bytes,
    )


@FIXED
@given(garbage=st.binary(max_size=60) | st.binary(max_size=20).map(lambda end: b"\x0a\x02\x10\x07\x7a" + end))
def test_garbage_is_a_typed_error_or_what_protobuf_makes_of_an_upload(garbage: bytes) -> None:
    try:
        found = decode_upload(garbage)
    except hg.ProtocolError:
        with pytest.raises(Exception):  # noqa: B017 - protobuf's class is not public
            bulk_pb2.UploadRequest.FromString(garbage)
        return
    try:
        expected = bulk_pb2.UploadRequest.FromString(garbage)
    except Exception:
        # What is wrong inside the target shows when that is read.
        assert found.target is not None
        with pytest.raises(Exception):  # noqa: B017
            bulk_pb2.UploadTarget.FromString(found.target)
        return
    assert (found.offset_bytes, found.data) == (expected.offset_bytes, memoryview(expected.data))
    assert (found.encoding, found.plain_bytes) == (expected.encoding, expected.plain_bytes)
    assert (found.target is not None) == expected.HasField("target")
    if found.target is not None:
        assert bulk_pb2.UploadTarget.FromString(found.target) == expected.target


def test_fields_in_another_order_and_unknown_ones_are_understood() -> None:
    message = b"\x7a\x02hi" + b"\x08\x03" + b"\x10\x05" + b"\xa0\x06\x07"
    assert decode_download(message) == DownloadPiece(3, 5, memoryview(b"hi"))
    upload = b"\x7a\x02hi" + b"\x10\x03" + b"\x0a\x02\x10\x07" + b"\xa0\x06\x07"
    assert decode_upload(upload) == UploadPiece(b"\x10\x07", 3, memoryview(b"hi"))


def test_a_field_that_comes_twice_counts_the_last_time_and_messages_are_merged() -> None:
    message = b"\x0a\x02\x10\x07" + b"\x0a\x02\x20\x05" + b"\x10\x01" + b"\x10\x03" + b"\x7a\x01a"
    assert decode_upload(message) == UploadPiece(b"\x10\x07\x20\x05", 3, memoryview(b"a"))


def test_what_is_written_today_is_what_was_written_when_the_files_were_made() -> None:
    target = upload_target(bytes(range(32)), 2**40 + 1, 5 * 2**30)
    data = memoryview(bytes(range(256)) * 2)
    first = encode_upload(target.SerializeToString(), 0, data)
    later = encode_upload(None, 5 * 2**30 - 512, data)
    down = encode_download(2**32 + 7, 5 * 2**30, data)
    for name, made in {"upload_first": first, "upload_later": later, "download": down}.items():
        assert made == (GOLDEN / f"{name}.bin").read_bytes(), name


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


@pytest.mark.parametrize(("agreed", "plain_bytes"), [((), 64 * 2**20), ((2,), 64 * 2**20), ((1,), 2**20)])
def test_a_packed_piece_that_a_client_did_not_ask_for_takes_no_memory(
    agreed: tuple[int, ...], plain_bytes: int
) -> None:
    """A server could otherwise have each message of a download unpack to all of it."""
    out = np.empty(plain_bytes, np.uint8)
    packed = pack(Encoding.PLANES_ZSTD, memoryview(bytes(plain_bytes)))
    assert packed is not None
    message = encode_download(0, plain_bytes, packed, Encoding.PLANES_ZSTD, plain_bytes)
    receiver = Receiver(memoryview(out), agreed)
    tracemalloc.start()
    try:
        with pytest.raises(hg.ProtocolError):
            receiver.piece(message)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
