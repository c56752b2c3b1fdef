"""Calls that do not end. A session, a tenant and the daemon have so many at once; a further one
gets a typed error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from access_daemons import Tokens, daemon_with_tokens
from daemon_threads import thread_daemon
from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2
from raw_client import SECONDS, RawSession, methods_of, raw_channel, still_serves

from heliograph import admin
from heliograph_proto.codec.status import error_from_metadata
from heliograph_proto.errors import DeadlineExceededError, HeliographError, LimitExceededError
from heliograph_proto.sessions import DrainState, Limits, Quota
from heliograph_proto.v1 import bulk_pb2, session_pb2
from heliograph_server.daemon.daemon import SERVICES
from heliograph_server.resources.principals import Right
from heliograph_server.rpc import receiving

REFLECTION = "grpc.reflection.v1alpha.ServerReflection"
UPLOAD = "/heliograph.v1.BulkService/Upload"
METHODS = [
    f"/{service}/{method.name}"
    for service in (*SERVICES, "grpc.health.v1.Health", REFLECTION)
    for method in descriptor_pool.Default().FindServiceByName(service).methods
]


class Pending:
    """Calls that send their first messages, and then nothing."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._over = threading.Event()

    def call(self, method: str, *first: bytes, metadata: tuple[tuple[str, str], ...] = ()) -> Any:
        left = list(first)
        messages = iter(lambda: left.pop(0) if left else self._over.wait(SECONDS) and None, None)
        call: Any = self._channel.stream_stream(method)
        return call(messages, timeout=SECONDS, metadata=metadata)

    def end(self) -> None:
        self._over.set()


@contextmanager
def pending(url: str) -> Iterator[Pending]:
    with raw_channel(url) as channel:
        calls = Pending(channel)
        try:
            yield calls
        finally:
            calls.end()


def error_of(call: Any) -> HeliographError:
    """The typed error with which a call ends."""
    with pytest.raises(grpc.RpcError) as raised:
        for _ in call:
            pass
    refused: Any = raised.value
    error = error_from_metadata(tuple(refused.trailing_metadata() or ()))
    assert error is not None, refused
    return error


def begun(session: bytes, digest: int) -> bytes:
    """The first message of an upload of 100 bytes."""
    target = bulk_pb2.UploadTarget(session=session, digest=bytes((digest,)) * 32, size_bytes=100)
    return bulk_pb2.UploadRequest(target=target).SerializeToString()


def errors_of(calls: list[Any], count: int) -> list[HeliographError]:
    """The errors of those calls that the server ends: so many; which ones, the network decides."""
    for _ in range(5000):
        ended = [one for one in calls if not one.is_active()]
        if len(ended) >= count:
            assert len(ended) == count
            return [error_of(one) for one in ended]
        threading.Event().wait(0.002)
    raise AssertionError(f"{count} calls did not end")


def test_a_session_has_so_many_calls_at_once() -> None:
    with (
        thread_daemon(Limits(calls=4)) as daemon,
        raw_channel(daemon.url) as channel,
        pending(daemon.url) as calls,
    ):
        raw = RawSession(channel).attach()
        raw.answer(raw.allocate(1, 4))
        opened = [calls.call(UPLOAD, begun(raw.token, number)) for number in range(8)]
        # Three of them, beside the command stream, go on.
        ended = errors_of(opened, 5)
        assert all(isinstance(one, LimitExceededError) for one in ended)
        assert "4 calls" in ended[0].message
        raw.answer(raw.allocate(2, 4))
        still_serves(daemon.url)
        closed = methods_of(channel, "SessionService").Close(session_pb2.CloseRequest(session=raw.token))
        assert closed == session_pb2.CloseResponse()
        raw.close()


def test_a_tenant_has_so_many_calls_at_once_and_gets_its_slots_back() -> None:
    with thread_daemon(quota=Quota(calls=3)) as daemon:
        with pending(daemon.url) as calls, raw_channel(daemon.url) as channel:
            raw = RawSession(channel).attach()
            raw.answer(raw.allocate(1, 4))
            waiting = [calls.call(UPLOAD, begun(raw.token, number)) for number in range(3)]
            (error,) = errors_of(waiting, 1)
            assert isinstance(error, LimitExceededError) and "quota" in error.message
            assert "calls at once" in error.message and error.retry_after_seconds
            assert daemon.host.tenants()[0].calls == 3
            for one in waiting:
                one.cancel()
            raw.close()
        assert_no_call_is_left(daemon)


def assert_no_call_is_left(daemon: Any) -> None:
    for _ in range(5000):
        if daemon.host.tenants()[0].calls == 0:
            return
        threading.Event().wait(0.002)
    raise AssertionError(f"{daemon.host.tenants()}")


def test_the_daemon_has_so_many_calls_at_once() -> None:
    with thread_daemon(max_calls=5) as daemon, pending(daemon.url) as calls:
        opened = [calls.call(UPLOAD) for _ in range(9)]
        ended = errors_of(opened, 4)
        assert all("5 calls" in one.message for one in ended)
        assert all(isinstance(one, LimitExceededError) for one in ended)
        calls.end()
        for one in opened:
            one.cancel()


def test_an_operator_reaches_a_daemon_that_has_the_most_calls(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path / "tokens", {"alice": (Right.USE,), "ops": (Right.USE, Right.ADMIN)})
    with daemon_with_tokens(tokens, max_calls=1) as daemon, pending(daemon.url) as calls:
        bearer = ("authorization", f"Bearer {tokens.of['alice']}")
        opened = [calls.call(UPLOAD, metadata=(bearer,)) for _ in range(2)]
        errors_of(opened, 1)
        with admin.connect(daemon.url, token=tokens.of["ops"]) as operator:
            assert operator.sessions() == ()
            assert operator.drain(5.0, stay=True).state is not DrainState.SERVING
        for one in opened:
            one.cancel()


def test_a_call_of_any_method_whose_first_message_never_comes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "FIRST_SECONDS", 0.3)
    with thread_daemon(Limits(attach_timeout_ms=300)) as daemon, pending(daemon.url) as calls:
        opened = {method: calls.call(method) for method in METHODS}
        for method, call in opened.items():
            error = error_of(call)
            assert isinstance(error, DeadlineExceededError) and "first message" in error.message, method
        assert_no_call_is_left(daemon)
        still_serves(daemon.url)


def test_questions_about_services_have_slots_and_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "NEXT_SECONDS", 0.3)
    method = f"/{REFLECTION}/ServerReflectionInfo"
    asked = reflection_pb2.ServerReflectionRequest(list_services="*").SerializeToString()
    with thread_daemon(quota=Quota(calls=2)) as daemon, pending(daemon.url) as calls:
        opened = [calls.call(method) for _ in range(5)]
        assert all("calls at once" in one.message for one in errors_of(opened, 3))
        for one in opened:
            one.cancel()
        assert_no_call_is_left(daemon)
        call = calls.call(method, asked)
        listed = reflection_pb2.ServerReflectionResponse.FromString(next(call)).list_services_response
        assert {*SERVICES, REFLECTION} <= {one.name for one in listed.service}
        error = error_of(call)
        assert isinstance(error, DeadlineExceededError) and "next message" in error.message
        assert isinstance(error_of(calls.call(method, bytes(70_000))), LimitExceededError)
        assert_no_call_is_left(daemon)


def test_an_upload_that_stops_in_the_middle_ends_and_gives_its_slot_back() -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(thread_daemon(Limits(upload_idle_ms=300)))
        channel = stack.enter_context(raw_channel(daemon.url))
        calls = stack.enter_context(pending(daemon.url))
        raw = RawSession(channel).attach()
        raw.answer(raw.allocate(1, 4))
        error = error_of(calls.call(UPLOAD, begun(raw.token, 1)))
        assert isinstance(error, DeadlineExceededError) and "no bytes of the upload" in error.message
        assert daemon.host.tenants()[0].staging_bytes == 0
        raw.close()
