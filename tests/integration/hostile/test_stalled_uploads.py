"""Uploads whose bytes do not come, and commands and uploads that come without each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import grpc
import pytest
from daemon_threads import ThreadDaemon, thread_daemon
from raw_client import RawSession, f32, node, raw_channel

from heliograph_proto.codec import decode_error
from heliograph_proto.codec.status import error_from_metadata
from heliograph_proto.digests import digest_of
from heliograph_proto.errors import DeadlineExceededError
from heliograph_proto.sessions import Limits
from heliograph_proto.v1 import bulk_pb2, command_pb2, graph_pb2, plan_pb2

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


def test_a_compile_does_not_wait_for_ever_for_the_bytes_of_a_tensor() -> None:
    leaf = graph_pb2.Leaf(kind=graph_pb2.LEAF_KIND_VARIABLE, name="v", type=f32(SIZE // 4))
    graph = graph_pb2.Graph(
        leaves=[leaf],
        nodes=[node("neg", 0, shape=(SIZE // 4,))],
        outputs=[graph_pb2.Output(name="y", value=1)],
    )
    with thread_daemon(compile_seconds=1.0) as daemon, raw_channel(daemon.url) as channel:
        session = RawSession(channel).attach()
        session.answer(session.allocate(1, SIZE // 4))
        session.send(set_tensor=write_of(7))
        end = time.monotonic() + SECONDS
        while not daemon.host.statistics().commands_in_flight:
            assert time.monotonic() < end, "the command did not arrive"
        bindings = [plan_pb2.LeafBinding(leaf=0, tensor=1)]
        with pytest.raises(DeadlineExceededError, match="not compiled within 1 s"):
            session.compile(graph, bindings=bindings)
        session.close()
