"""Uploads whose bytes do not come, and commands and uploads that come without each other."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest
from daemon_threads import ThreadDaemon, thread_daemon
from raw_client import RawSession, raw_channel

from heliograph_proto.codec import decode_error
from heliograph_proto.codec.status import error_from_metadata
from heliograph_proto.digests import digest_of
from heliograph_proto.errors import DeadlineExceededError
from heliograph_proto.sessions import Limits
from heliograph_proto.v1 import bulk_pb2, command_pb2

SECONDS = 10.0
SIZE = 64


@pytest.fixture
def daemon() -> Iterator[ThreadDaemon]:
    with thread_daemon(Limits(upload_idle_ms=200)) as made:
        yield made


@pytest.fixture
def raw(daemon: ThreadDaemon) -> Iterator[RawSession]:
    with raw_channel(daemon.url) as channel:
        session = RawSession(channel).attach()
        session.allocate(1, SIZE // 4)
        yield session
        session.close()


def write_of(transfer: int) -> command_pb2.SetTensor:
    return command_pb2.SetTensor(tensor=1, size_bytes=SIZE, transfer=transfer)


@pytest.mark.parametrize("target", [{"transfer": 7}, {"digest": digest_of(bytes(SIZE))}])
def test_an_upload_without_further_bytes_ends(raw: RawSession, target: dict[str, object]) -> None:
    over = threading.Event()

    def pieces() -> Iterator[bulk_pb2.UploadRequest]:
        named = bulk_pb2.UploadTarget(session=raw.token, size_bytes=SIZE, **target)
        yield bulk_pb2.UploadRequest(target=named, data=bytes(SIZE // 2))
        over.wait(SECONDS)

    with pytest.raises(grpc.RpcError) as refused:
        raw.bulk.Upload(pieces(), timeout=SECONDS)
    over.set()
    error = error_from_metadata(tuple(refused.value.trailing_metadata()))
    assert isinstance(error, DeadlineExceededError) and "no bytes" in error.message


def test_a_command_does_not_wait_for_ever_for_an_upload(raw: RawSession) -> None:
    error = raw.failure(set_tensor=write_of(7))
    assert isinstance(error, DeadlineExceededError) and "did not both come" in error.message
    # Its stream goes on.
    assert not raw.answer(raw.send(memset=command_pb2.Memset(tensor=1, size_bytes=SIZE))).HasField("error")


def test_an_upload_that_no_command_names_is_dropped(raw: RawSession, daemon: ThreadDaemon) -> None:
    named = bulk_pb2.UploadTarget(session=raw.token, size_bytes=SIZE, transfer=8)
    raw.bulk.Upload(iter([bulk_pb2.UploadRequest(target=named, data=bytes(SIZE))]), timeout=SECONDS)
    assert daemon.host.statistics().staged_bytes == SIZE
    # The second command's upload never comes: once it has failed, the bytes of the first are gone.
    for transfer in (9, 10):
        raw.failure(set_tensor=write_of(transfer))
    assert daemon.host.statistics().staged_bytes == 0
    completion = raw.answer(raw.send(set_tensor=write_of(8)))
    assert isinstance(decode_error(completion.error), DeadlineExceededError)
