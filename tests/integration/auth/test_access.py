"""A daemon that asks for tokens: who may call what, and whose sessions are whose."""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from access_daemons import Tokens, daemon_with_tokens, works
from daemon_threads import ThreadDaemon, thread_daemon
from google.protobuf.descriptor import ServiceDescriptor

import heliograph as hg
from heliograph_proto.codec.status import error_from_metadata
from heliograph_proto.errors import SessionClosedError, UnauthenticatedError
from heliograph_proto.v1 import (
    admin_pb2,
    bulk_pb2,
    command_pb2,
    device_pb2,
    keeper_pb2,
    model_pb2,
    peer_pb2,
    plan_pb2,
    session_pb2,
)
from heliograph_server.auth import interceptor
from heliograph_server.auth.interceptor import NEEDED
from heliograph_server.auth.tokens import remove_token
from heliograph_server.daemon.daemon import SERVICES
from heliograph_server.resources.principals import Principal, Right

MODULES = (
    session_pb2, device_pb2, plan_pb2, bulk_pb2, command_pb2, model_pb2, peer_pb2, keeper_pb2, admin_pb2,
)  # fmt: skip
#: How long a refusal may take; none takes a hundredth.
SECONDS = 10.0


def services() -> list[ServiceDescriptor]:
    found = [one for module in MODULES for one in module.DESCRIPTOR.services_by_name.values()]
    assert {one.full_name for one in found} == set(SERVICES), "name the module of each service here"
    return found


METHODS = {
    f"/{service.full_name}/{method.name}": method for service in services() for method in service.methods
}
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens(tmp_path / "tokens")


@pytest.fixture
def daemon(tokens: Tokens) -> Iterator[ThreadDaemon]:
    with daemon_with_tokens(tokens) as made:
        yield made


def called(daemon: ThreadDaemon, method: str, *headers: tuple[str, str | bytes]) -> grpc.StatusCode:
    """What becomes of a call that never sends anything."""
    silence = threading.Event()

    def nothing() -> Iterator[bytes]:
        silence.wait(SECONDS)
        yield from ()

    with grpc.insecure_channel(daemon.url.removeprefix("grpc://")) as channel:
        call: Any = channel.stream_stream(method)(nothing(), timeout=SECONDS, metadata=headers)
        try:
            for _ in call:
                pass
        except grpc.RpcError:
            pass
        code: grpc.StatusCode = call.code()
        trailing = tuple(call.trailing_metadata() or ())
        silence.set()
    refusals = {
        grpc.StatusCode.UNAUTHENTICATED: hg.UnauthenticatedError,
        grpc.StatusCode.PERMISSION_DENIED: hg.PermissionDeniedError,
    }
    if code in refusals:
        error = error_from_metadata(trailing)
        assert isinstance(error, refusals[code]) and error.advice
    return code


def bearer(token: str) -> tuple[str, str]:
    return "authorization", f"Bearer {token}"


@pytest.mark.parametrize("method", [*METHODS, REFLECTION])
def test_no_method_answers_without_a_token(daemon: ThreadDaemon, method: str) -> None:
    assert called(daemon, method) is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("method", METHODS)
def test_every_method_names_the_right_that_it_takes(method: str) -> None:
    assert method in NEEDED, "say in heliograph_server/access/rights.py what it takes to call it"


def test_no_right_is_named_for_a_method_that_is_not_there() -> None:
    assert {one for one in NEEDED if one.startswith("/heliograph.")} == set(METHODS)


@pytest.mark.parametrize("method", [one for one in METHODS if NEEDED.get(one) is Right.POOL])
def test_a_token_to_use_is_not_one_to_be_of_a_pool(daemon: ThreadDaemon, tokens: Tokens, method: str) -> None:
    assert called(daemon, method, bearer(tokens.of["alice"])) is grpc.StatusCode.PERMISSION_DENIED


def test_a_method_that_is_in_no_table_is_refused(
    daemon: ThreadDaemon, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = "/heliograph.v1.DeviceService/ListDevices"
    monkeypatch.delitem(interceptor.NEEDED, method)
    assert called(daemon, method, bearer(tokens.of["alice"])) is grpc.StatusCode.PERMISSION_DENIED


def test_a_method_that_nobody_has_is_refused_alike(daemon: ThreadDaemon, tokens: Tokens) -> None:
    method = "/heliograph.v1.NoService/Nothing"
    assert called(daemon, method) is grpc.StatusCode.UNAUTHENTICATED
    assert called(daemon, method, bearer(tokens.of["alice"])) is grpc.StatusCode.PERMISSION_DENIED


def test_health_answers_anybody(daemon: ThreadDaemon) -> None:
    with grpc.insecure_channel(daemon.url.removeprefix("grpc://")) as channel:
        check: Any = channel.unary_unary("/grpc.health.v1.Health/Check", None, None)
        assert check(b"", timeout=SECONDS) == b"\x08\x01"


# Tokens


def test_a_session_with_a_token_works(daemon: ThreadDaemon, tokens: Tokens) -> None:
    with hg.connect(daemon.url, token=tokens.of["alice"]) as session:
        assert works(session)
        array = np.arange(500_000, dtype=np.float32)
        assert (session.put(array).get() == array).all()
        assert tokens.of["alice"] not in f"{session!r} {session.address}"


def test_a_url_with_a_token_works(daemon: ThreadDaemon, tokens: Tokens) -> None:
    with hg.connect(f"{daemon.url}?token={tokens.of['alice']}") as session:
        assert works(session)


def test_without_a_token_the_error_says_what_to_do(daemon: ThreadDaemon) -> None:
    with pytest.raises(UnauthenticatedError, match="none was given") as caught:
        hg.connect(daemon.url)
    assert "HELIOGRAPH_TOKEN" in caught.value.advice


def test_a_wrong_token_is_not_repeated(daemon: ThreadDaemon) -> None:
    with pytest.raises(UnauthenticatedError, match="does not know") as caught:
        hg.connect(daemon.url, token="hgt_wrong-one")
    assert "wrong-one" not in str(caught.value)


def test_an_expired_token_says_so(daemon: ThreadDaemon, tokens: Tokens) -> None:
    token = tokens.add("late", expires=time.time() - 1)
    with pytest.raises(UnauthenticatedError, match="'late' has expired"):
        hg.connect(daemon.url, token=token)


def test_two_hundred_wrong_tokens_harm_nobody(daemon: ThreadDaemon, tokens: Tokens) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    open_ = "/heliograph.v1.SessionService/Open"
    with (
        grpc.insecure_channel(daemon.url.removeprefix("grpc://")) as channel,
        hg.connect(daemon.url, token=tokens.of["alice"]) as session,
    ):
        call: Any = channel.unary_unary(open_)
        for _ in range(200):
            wrong = "hgt_" + "".join(chance.choices("abcdefghijklmnop-_0123", k=chance.randint(0, 60)))
            with pytest.raises(grpc.RpcError) as caught:
                call(b"", timeout=SECONDS, metadata=(bearer(wrong),))
            error: Any = caught.value
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        assert works(session)


@pytest.mark.parametrize("length", [0, 1, 46, 48, 512, 513, 4000], ids=lambda length: f"{length} characters")
def test_tokens_of_another_length_are_refused(daemon: ThreadDaemon, length: int) -> None:
    found = called(daemon, "/heliograph.v1.SessionService/Open", bearer("x" * length))
    assert found is grpc.StatusCode.UNAUTHENTICATED


def test_half_a_token_and_one_with_more_behind_it_are_refused(daemon: ThreadDaemon, tokens: Tokens) -> None:
    method, good = "/heliograph.v1.SessionService/Open", tokens.of["alice"]
    for wrong in (good[:-1], good[: len(good) // 2], good + "a", good.upper(), good + " " + good):
        assert called(daemon, method, bearer(wrong)) is grpc.StatusCode.UNAUTHENTICATED


def test_two_headers_are_refused_even_if_both_are_right(daemon: ThreadDaemon, tokens: Tokens) -> None:
    one = bearer(tokens.of["alice"])
    other = bearer(tokens.of["bob"])
    method = "/heliograph.v1.SessionService/Open"
    for headers in ((one, one), (one, other), (bearer("wrong"), one), (one, bearer(""))):
        assert called(daemon, method, *headers) is grpc.StatusCode.UNAUTHENTICATED


def test_other_kinds_of_headers_are_refused(daemon: ThreadDaemon, tokens: Tokens) -> None:
    good, method = tokens.of["alice"], "/heliograph.v1.SessionService/Open"
    for value in (good, f"Basic {good}", f"Token {good}", "Bearer", "Bearer ", f"Bearer{good}"):
        assert called(daemon, method, ("authorization", value)) is grpc.StatusCode.UNAUTHENTICATED
    garbage = random.Random(7).randbytes(300)
    assert (
        called(daemon, method, ("authorization-bin", garbage), ("x-token", good))
        is grpc.StatusCode.UNAUTHENTICATED
    )


def test_garbage_on_the_port_harms_nobody(daemon: ThreadDaemon, tokens: Tokens) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    with hg.connect(daemon.url, token=tokens.of["alice"]) as session:
        for begin in (
            b"",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x16\x03\x01\x02\x00",
            b"GET / HTTP/1.1\r\n",
        ):
            with socket.create_connection(("127.0.0.1", daemon.port), timeout=SECONDS) as plain:
                plain.sendall(begin + chance.randbytes(5000))
        assert works(session)


# Tenants


def test_a_session_of_another_tenant_is_as_one_that_never_was(daemon: ThreadDaemon, tokens: Tokens) -> None:
    with (
        hg.connect(daemon.url, token=tokens.of["alice"]) as alice,
        grpc.insecure_channel(daemon.url.removeprefix("grpc://")) as channel,
    ):
        for method, request in requests_of(alice.info.session).items():
            told = [
                refusal(channel, method, request_, tokens.of[who])
                for who, request_ in (("bob", request), ("bob", requests_of(bytes(16))[method]))
            ]
            assert told[0] == told[1], method
            if not method.endswith(("/Close", "/TakeUp")):
                # The end of a session that is not there is no error, and only heads may call TakeUp.
                assert told[0][0] is grpc.StatusCode.NOT_FOUND, method
        assert works(alice)
        same = refusal(
            channel,
            "/heliograph.v1.SessionService/GetStatistics",
            session_pb2.GetStatisticsRequest(session=alice.info.session).SerializeToString(),
            tokens.of["alice"],
        )
        assert same[0] is grpc.StatusCode.OK


def requests_of(session: bytes) -> dict[str, bytes]:
    """A request of each method that names a session."""
    found = {
        "SessionService/Close": session_pb2.CloseRequest(session=session),
        "SessionService/GetStatistics": session_pb2.GetStatisticsRequest(session=session),
        "SessionService/Snapshot": session_pb2.SnapshotRequest(session=session),
        "SessionService/TakeUp": session_pb2.TakeUpRequest(session=session, earlier=bytes(16)),
        "SessionService/GetOffers": session_pb2.GetOffersRequest(session=session),
        "SessionService/TellHandover": session_pb2.TellHandoverRequest(session=session),
        "SessionService/PrepareMove": session_pb2.PrepareMoveRequest(
            session=session, address="grpc://127.0.0.1:1"
        ),
        "SessionService/Move": session_pb2.MoveRequest(session=session, address="grpc://127.0.0.1:1"),
        "SessionService/FollowLog": session_pb2.FollowLogRequest(session=session),
        "BulkService/Download": bulk_pb2.DownloadRequest(session=session, transfer=1),
        "BulkService/FindMissingContents": bulk_pb2.FindMissingContentsRequest(session=session),
        "BulkService/Admit": bulk_pb2.AdmitRequest(session=session),
        "BulkService/Upload": bulk_pb2.UploadRequest(
            target=bulk_pb2.UploadTarget(session=session, transfer=1, size_bytes=4)
        ),
        "BulkService/UploadShared": bulk_pb2.UploadSharedRequest(
            target=bulk_pb2.UploadTarget(session=session, digest=bytes(32), size_bytes=4)
        ),
        "CommandService/Execute": command_pb2.CommandBatch(session=session),
        "ModelService/ListModels": model_pb2.ListModelsRequest(session=session),
        "ModelService/DescribeModel": model_pb2.DescribeModelRequest(session=session, name="x"),
        "PlanService/Compile": plan_pb2.CompileRequest(session=session, plan=1),
        "PlanService/Estimate": plan_pb2.EstimateRequest(session=session),
        "PlanService/Explain": plan_pb2.ExplainRequest(session=session, plan=1),
        "PlanService/Reserve": plan_pb2.ReserveRequest(session=session, reservation=1),
        "PlanService/PlaceContents": plan_pb2.PlaceContentsRequest(
            compile=plan_pb2.CompileRequest(session=session, plan=1)
        ),
    }
    return {f"/heliograph.v1.{name}": one.SerializeToString() for name, one in found.items()}


def test_each_method_that_names_a_session_is_asked_for_anothers() -> None:
    named = {one for one, found in METHODS.items() if "session" in found.input_type.fields_by_name}
    elsewhere = {"/heliograph.v1.PeerService/Probe", "/heliograph.v1.SessionService/Open"}
    assert named - elsewhere <= set(requests_of(bytes(16)))


def test_a_client_with_a_token_follows_the_log_of_its_session(daemon: ThreadDaemon, tokens: Tokens) -> None:
    with hg.connect(daemon.url, token=tokens.of["alice"]) as alice:
        lines = alice.log()
        owner = daemon.host.session(alice.info.session).log_fields
        logging.getLogger("heliograph_server.tests").warning("of alice", extra=owner)
        assert next(iter(lines)).message == "of alice"


def refusal(channel: grpc.Channel, method: str, request: bytes, token: str) -> tuple[grpc.StatusCode, str]:
    """How a call ends that sends one message, and what is said."""
    call: Any = channel.stream_stream(method)
    made = call(iter((request,)), timeout=SECONDS, metadata=(bearer(token),))
    try:
        for _ in made:
            pass
    except grpc.RpcError:
        pass
    return made.code(), made.details()


def test_a_session_may_be_closed_by_its_tenant_alone(daemon: ThreadDaemon, tokens: Tokens) -> None:
    request = "/heliograph.v1.SessionService/Close"
    with (
        hg.connect(daemon.url, token=tokens.of["alice"]) as alice,
        grpc.insecure_channel(daemon.url.removeprefix("grpc://")) as channel,
    ):
        close = session_pb2.CloseRequest(session=alice.info.session).SerializeToString()
        assert refusal(channel, request, close, tokens.of["bob"])[0] is grpc.StatusCode.OK
        assert works(alice)


def test_a_log_is_followed_by_the_tenant_of_the_session_alone(daemon: ThreadDaemon, tokens: Tokens) -> None:
    with (
        hg.connect(daemon.url, token=tokens.of["alice"]) as alice,
        grpc.insecure_channel(daemon.url.removeprefix("grpc://")) as channel,
    ):
        with alice.log(level="info"):
            pass  # the first answer has come, so that she may follow it
        asked = session_pb2.FollowLogRequest(session=alice.info.session).SerializeToString()
        header = ("authorization", f"Bearer {tokens.of['bob']}")
        call: Any = channel.unary_stream("/heliograph.v1.SessionService/FollowLog")
        with pytest.raises(grpc.RpcError) as refused:
            list(call(asked, timeout=SECONDS, metadata=(header,)))
        assert isinstance(error_from_metadata(refused.value.trailing_metadata()), SessionClosedError)


def test_the_host_knows_a_session_for_its_tenant_alone(daemon: ThreadDaemon, tokens: Tokens) -> None:
    with hg.connect(daemon.url, token=tokens.of["alice"]) as alice:
        token = alice.info.session
        session = daemon.host.session(token)
        assert session.principal.tenant == "alice" and session.principal.shown == "alice"
        assert daemon.host.session(token, Principal("alice")) is session
        with pytest.raises(SessionClosedError) as others:
            daemon.host.session(token, Principal("bob", frozenset(Right)))
        with pytest.raises(SessionClosedError) as nobodys:
            daemon.host.session(bytes(16), Principal("bob"))
        assert str(others.value) == str(nobodys.value)


def test_contents_of_tenants_with_one_secret_do_not_mix(daemon: ThreadDaemon, tokens: Tokens) -> None:
    secret, weights = bytes(range(32)), np.random.default_rng(1).random(50_000)
    digest = hg_digest(weights)
    host = daemon.host
    opened = {
        name: host.session(host.open_session("test", secret=secret, principal=Principal(name)).session)
        for name in ("alice", "bob", "")
    }
    try:
        upload = opened["alice"].begin_upload(digest, weights.nbytes)
        upload.write(0, memoryview(weights).cast("B"))
        upload.finish()
        assert not opened["alice"].missing_contents([digest])
        again = host.session(host.open_session("test", secret=secret, principal=Principal("alice")).session)
        opened["again"] = again
        assert not again.missing_contents([digest])
        for name in ("bob", ""):
            assert opened[name].missing_contents([digest]) == (digest,)
    finally:
        for one in opened.values():
            one.close()


def hg_digest(array: np.ndarray[Any, Any]) -> bytes:
    from heliograph_proto.digests import digest_of

    return digest_of(array.tobytes())


# Tokens that are taken back


def ended(session: hg.Session) -> hg.HeliographError:
    """Why a session ends, within a bound."""
    over = threading.Event()
    session._shell.when_lost(lambda _: over.set())
    assert over.wait(SECONDS)
    error = session._shell.core.lost
    assert error is not None
    return error


def test_a_token_that_is_taken_back_opens_nothing_and_its_sessions_end(
    daemon: ThreadDaemon, tokens: Tokens
) -> None:
    token = tokens.add("carol")
    with (
        hg.connect(daemon.url, token=token) as carol,
        hg.connect(daemon.url, token=tokens.of["alice"]) as alice,
    ):
        assert works(carol)
        remove_token(tokens.path, "carol")
        with pytest.raises(UnauthenticatedError, match="does not know"):
            hg.connect(daemon.url, token=token)
        error = ended(carol)
        assert isinstance(error, UnauthenticatedError) and "revoked" in error.message
        assert works(alice)


def test_sessions_end_when_their_token_expires(daemon: ThreadDaemon, tokens: Tokens) -> None:
    token = tokens.add("short", expires=time.time() + 2)
    with hg.connect(daemon.url, token=token) as session:
        error = ended(session)
    assert isinstance(error, UnauthenticatedError) and "expired" in error.message


def test_a_file_that_is_broken_changes_nothing(
    daemon: ThreadDaemon, tokens: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    before = tokens.path.read_bytes()
    with hg.connect(daemon.url, token=tokens.of["alice"]) as alice:
        try:
            for broken in (b"", b"[[token", b"\xff\xff", b'[[token]]\nname = "x"\n'):
                tokens.path.write_bytes(broken)
                with hg.connect(daemon.url, token=tokens.of["bob"]) as bob:
                    assert works(bob)
            tokens.path.unlink()
            with hg.connect(daemon.url, token=tokens.of["bob"]) as bob:
                assert works(bob)
        finally:
            tokens.path.write_bytes(before)
            tokens.path.chmod(0o600)
        assert works(alice)
    assert "stay valid" in caplog.text and "; advice: " in caplog.text


def test_a_unix_socket_needs_a_token_as_well(tokens: Tokens, tmp_path: Path) -> None:
    with thread_daemon(listen=(f"unix://{tmp_path}/socket",), tokens=str(tokens.path)) as made:
        with pytest.raises(UnauthenticatedError):
            hg.connect(made.url)
        with hg.connect(f"{made.url}?token={tokens.of['alice']}") as session:
            assert works(session)


def test_a_daemon_without_tokens_asks_nobody() -> None:
    with thread_daemon() as made, hg.connect(made.url, token="whatever-it-is") as session:
        assert works(session)
        assert made.host.session(session.info.session).principal == Principal()
