"""TLS: what is shown, what is trusted, and what is said when it is not."""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from access_daemons import Tokens, daemon_with_tls, works
from certificates import Authority, Pair, serial_of
from daemon_threads import ThreadDaemon, thread_daemon

import heliograph as hg
from heliograph_proto.errors import ConfigurationError, UnauthenticatedError, UnavailableError
from heliograph_proto.sessions import Quota
from heliograph_server.config.config import ServerConfig
from heliograph_server.config.exposure import check_together
from heliograph_server.resources.principals import Right


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def daemon(authority: Authority) -> Iterator[ThreadDaemon]:
    with daemon_with_tls(authority) as made:
        yield made


def shown_by(daemon: ThreadDaemon, port: int = 0) -> int:
    """The number of the certificate that a new connection sees, at gRPC's port or another one."""
    asking = ssl.create_default_context()
    asking.check_hostname, asking.verify_mode = False, ssl.CERT_NONE
    asking.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port or daemon.port), timeout=10) as plain,
        asking.wrap_socket(plain) as made,
    ):
        return serial_of(ssl.DER_cert_to_PEM_cert(made.getpeercert(binary_form=True) or b""))


# Trust


def test_sessions_over_tls_compute_and_carry_tensors(daemon: ThreadDaemon, authority: Authority) -> None:
    with hg.connect(daemon.url, ca=authority.ca) as session:
        assert daemon.url.startswith("grpcs://") and session.address == daemon.url
        assert works(session)
        array = np.arange(1_000_000, dtype=np.float32)
        assert (session.put(array).get() == array).all()


def test_asyncio_sessions_over_tls_carry_tensors(daemon: ThreadDaemon, authority: Authority) -> None:
    async def carried() -> bool:
        array = np.arange(1_000_000, dtype=np.float32)
        async with hg.aio.connect(daemon.url, ca=authority.ca) as session:
            tensor = await session.put(array)
            return bool((await tensor.get() == array).all())

    assert asyncio.run(carried())


def test_the_environment_names_the_authority(
    daemon: ThreadDaemon, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HELIOGRAPH_CA", authority.ca)
    with hg.connect(daemon.url) as session:
        assert works(session)


def test_an_unknown_authority_is_said_and_what_to_do(daemon: ThreadDaemon, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="authority is not among the system's") as caught:
        hg.connect(daemon.url)
    assert "ca=FILE" in caught.value.advice
    other = Authority(tmp_path, "Another authority")
    with pytest.raises(UnavailableError, match="authority is not among"):
        hg.connect(daemon.url, ca=other.ca)


def test_asyncio_says_the_same(daemon: ThreadDaemon) -> None:
    async def connected() -> None:
        await hg.aio.connect(daemon.url)

    with pytest.raises(UnavailableError, match="authority is not among the system's"):
        asyncio.run(connected())


def test_a_certificate_of_another_host_is_said(daemon: ThreadDaemon, authority: Authority) -> None:
    with pytest.raises(UnavailableError, match=r"not for 'other\.example'") as caught:
        hg.connect(f"{daemon.url}?tls_name=other.example", ca=authority.ca)
    assert "tls_name=NAME" in caught.value.advice


def test_a_name_that_is_the_common_name_alone_is_another_host_too(authority: Authority) -> None:
    pair = authority.server("127.0.0.1", file="common", common_name="localhost")
    with daemon_with_tls(authority, pair=pair) as made:
        with pytest.raises(UnavailableError, match="its certificate is not for 'localhost'") as caught:
            hg.connect(made.url.replace("127.0.0.1", "localhost"), ca=authority.ca)
        assert "tls_name=NAME" in caught.value.advice


def test_a_name_is_expected_where_the_address_is_a_tunnels(authority: Authority) -> None:
    pair = authority.server("gpu.example", file="tunnel")
    with daemon_with_tls(authority, pair=pair) as made:
        with pytest.raises(UnavailableError, match=r"not for '127\.0\.0\.1'"):
            hg.connect(made.url, ca=authority.ca)
        with hg.connect(f"{made.url}?tls_name=gpu.example", ca=authority.ca) as session:
            assert works(session)


@contextmanager
def tls_server(pair: Pair) -> Iterator[str]:
    """Something that speaks TLS with a certificate that no daemon would start with."""
    shown = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shown.load_cert_chain(pair.certificate, pair.key)
    shown.set_alpn_protocols(["h2"])
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            while True:
                try:
                    plain, _ = listening.accept()
                except OSError:
                    return
                plain.settimeout(5)
                try:
                    shown.wrap_socket(plain, server_side=True).close()
                except OSError:
                    plain.close()

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"grpcs://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(10)


@pytest.mark.parametrize(
    ("dates", "said"),
    [
        ({"ends_days": -0.5}, "its certificate has expired"),
        ({"begins_days": 0.5}, "its certificate is not valid yet"),
    ],
)
def test_dates_are_said(authority: Authority, dates: dict[str, float], said: str) -> None:
    pair = authority.server(file="dated", **dates)  # type: ignore[arg-type]
    with tls_server(pair) as url, pytest.raises(UnavailableError, match=said):
        hg.connect(url, ca=authority.ca)


def test_a_self_signed_certificate_is_said(tmp_path: Path, authority: Authority) -> None:
    own = Authority(tmp_path)
    key = tmp_path / "authority-key.pem"
    own.write_key(key)
    with tls_server(Pair(own.ca, str(key))) as url, pytest.raises(UnavailableError, match="self-signed"):
        hg.connect(url, ca=authority.ca)


def test_tls_is_not_spoken_at_a_port_in_the_clear(authority: Authority) -> None:
    with thread_daemon() as made:
        url = made.url.replace("grpc://", "grpcs://")
        with pytest.raises(UnavailableError, match="does not speak TLS") as caught:
            hg.connect(url, ca=authority.ca)
        assert made.url in caught.value.advice


def test_nothing_is_said_in_the_clear_at_a_port_of_tls(daemon: ThreadDaemon) -> None:
    with pytest.raises(UnavailableError, match="speaks TLS, but the URL does not use it") as caught:
        hg.connect(daemon.url.replace("grpcs://", "grpc://"))
    assert daemon.url in caught.value.advice


def test_nobody_at_a_port_is_said_as_without_tls() -> None:
    with pytest.raises(UnavailableError, match="connection refused"):
        hg.connect("grpcs://127.0.0.1:1")


# Certificates of clients


def test_a_client_that_shows_a_certificate_is_a_tenant(authority: Authority) -> None:
    with daemon_with_tls(authority, tls_client_ca=authority.ca) as made:
        bob = authority.client("bob")
        with hg.connect(made.url, ca=authority.ca, certificate=bob.certificate, key=bob.key) as session:
            assert works(session)
            array = np.arange(500_000, dtype=np.float32)
            assert (session.put(array).get() == array).all()
            principal = made.host.session(session.info.session).principal
        assert principal.tenant == principal.shown == "bob"
        assert principal.rights == {Right.USE}


def test_a_quota_that_changes_is_in_force_for_whoever_shows_a_certificate(authority: Authority) -> None:
    with daemon_with_tls(authority, tls_client_ca=authority.ca) as made:
        bob = authority.client("bob")
        shown = {"ca": authority.ca, "certificate": bob.certificate, "key": bob.key}
        with hg.connect(made.url, **shown) as session:
            made.change(quota=Quota(device_memory_bytes=1024))
            with pytest.raises(hg.OutOfMemoryError, match="the quota of tenant 'bob' is 1,024 bytes"):
                session.put(np.zeros(1000, np.float32)).get()


def test_clients_with_other_certificates_do_not_see_each_others_sessions(authority: Authority) -> None:
    from heliograph.transport.channels import open_channel
    from heliograph_proto.addresses import Credentials, parse_address
    from heliograph_proto.v1 import session_pb2

    with daemon_with_tls(authority, tls_client_ca=authority.ca) as made:
        bob, eve = authority.client("bob"), authority.client("eve")
        shown = Credentials("", authority.ca, eve.certificate, eve.key)
        with (
            hg.connect(made.url, ca=authority.ca, certificate=bob.certificate, key=bob.key) as session,
            open_channel(parse_address(made.url), (), shown) as channel,
        ):
            ask: Any = channel.unary_unary("/heliograph.v1.SessionService/GetStatistics")
            request = session_pb2.GetStatisticsRequest(session=session.info.session)
            with pytest.raises(Exception, match="the session is unknown or was closed"):
                ask(request.SerializeToString(), timeout=10)
            assert works(session)


def test_certificates_that_a_daemon_does_not_take_are_said(authority: Authority, tmp_path: Path) -> None:
    strange = Authority(tmp_path, "A strange authority").client("mallory")
    late, early = authority.client("late", ends_days=-0.5), authority.client("early", begins_days=0.5)
    with daemon_with_tls(authority, tls_client_ca=authority.ca) as made:
        with pytest.raises(UnauthenticatedError, match="requires? a certificate") as caught:
            hg.connect(made.url, ca=authority.ca)
        assert "HELIOGRAPH_CERTIFICATE" in caught.value.advice
        for pair, said in ((late, "has expired"), (early, "not valid yet"), (strange, "not accepted")):
            with pytest.raises(UnauthenticatedError, match=said):
                hg.connect(made.url, ca=authority.ca, certificate=pair.certificate, key=pair.key)


def test_with_both_a_certificate_opens_the_door_and_a_token_says_who_it_is(
    authority: Authority, tmp_path: Path
) -> None:
    tokens = Tokens(tmp_path / "tokens")
    own = authority.client("carrier")
    shown = {"ca": authority.ca, "certificate": own.certificate, "key": own.key}
    with daemon_with_tls(authority, tls_client_ca=authority.ca, tokens=str(tokens.path)) as made:
        with pytest.raises(UnauthenticatedError, match="none was given"):
            hg.connect(made.url, **shown)
        with pytest.raises(UnauthenticatedError, match="requires? a certificate"):
            hg.connect(made.url, ca=authority.ca, token=tokens.of["alice"])
        with hg.connect(made.url, token=tokens.of["alice"], **shown) as session:
            assert works(session)
            assert made.host.session(session.info.session).principal.tenant == "alice"


def test_a_clients_key_of_another_certificate_is_named(authority: Authority) -> None:
    one, other = authority.client("one"), authority.client("other")
    with pytest.raises(hg.InvalidArgumentError, match="not the key of this certificate"):
        hg.connect("grpcs://127.0.0.1:1", ca=authority.ca, certificate=one.certificate, key=other.key)


# Certificates that change


def renew(pair: Pair, by: Pair) -> None:
    """As a tool does that renews certificates: one file, then the other."""
    for old, new in ((pair.certificate, by.certificate), (pair.key, by.key)):
        shutil.copy(new, f"{old}.new")
        os.replace(f"{old}.new", old)


def test_a_new_certificate_is_shown_to_new_connections_and_old_ones_live(authority: Authority) -> None:
    pair = authority.server(file="renewed")
    with (
        daemon_with_tls(authority, pair=pair) as made,
        hg.connect(made.url, ca=authority.ca) as before,
    ):
        first = shown_by(made)
        renew(pair, authority.server(file="renewal"))
        second = shown_by(made)
        assert first != second == serial_of(Path(pair.certificate).read_bytes())
        assert works(before)
        with hg.connect(made.url, ca=authority.ca) as after:
            assert works(after)


def test_the_dashboard_uses_a_renewed_certificate_for_new_connections_and_keeps_open_ones(
    authority: Authority,
) -> None:
    pair = authority.server(file="of-dashboard")
    trusting = ssl.create_default_context(cafile=authority.ca)
    with daemon_with_tls(authority, pair=pair, web="https://127.0.0.1:0") as made:
        port = int(made.web.rpartition(":")[2])
        before = http.client.HTTPSConnection("127.0.0.1", port, context=trusting, timeout=10)
        before.request("GET", "/api/me")
        assert before.getresponse().read()
        first = shown_by(made, port)
        assert first == serial_of(Path(pair.certificate).read_bytes())
        renew(pair, authority.server(file="of-dashboard-later"))
        second = shown_by(made, port)
        assert first != second == serial_of(Path(pair.certificate).read_bytes())
        before.request("GET", "/api/me")
        assert before.getresponse().status == 200
        before.close()
        # A broken one is not used, as with gRPC.
        Path(pair.certificate).write_bytes(b"garbage")
        assert shown_by(made, port) == second == shown_by(made)


@pytest.mark.parametrize("what", ["garbage", "another key", "expired", "gone"])
def test_a_certificate_that_is_no_good_leaves_the_old_one_in_force(
    authority: Authority, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    pair = authority.server(file="broken")
    with daemon_with_tls(authority, pair=pair) as made:
        first = shown_by(made)
        if what == "garbage":
            Path(pair.certificate).write_bytes(b"garbage")
        elif what == "another key":
            shutil.copy(authority.server(file="foreign").key, pair.key)
        elif what == "expired":
            renew(pair, authority.server(file="expired", ends_days=-0.5))
        else:
            Path(pair.key).unlink()
        with caplog.at_level(logging.ERROR):
            assert shown_by(made) == first
            with hg.connect(made.url, ca=authority.ca) as session:
                assert works(session)
        assert "stays in use" in caplog.text
        renew(pair, authority.server(file="good"))
        assert shown_by(made) != first


# Settings


def refused(authority: Authority, **options: Any) -> ConfigurationError:
    pair = authority.server()
    files = {"tls_certificate": pair.certificate, "tls_key": pair.key} | options
    with pytest.raises(ConfigurationError) as caught, thread_daemon(**files):
        pass
    return caught.value


TLS = ("grpcs://127.0.0.1:0",)


def test_files_that_cannot_be_used_are_named_at_the_start(authority: Authority, tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.pem"
    garbage.write_bytes(b"-----BEGIN CERTIFICATE-----\nnothing\n")
    late, early = (
        authority.server(file="late", ends_days=-0.5),
        authority.server(file="early", begins_days=0.5),
    )
    client = authority.client("a-client")
    other = authority.server(file="other")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tls_certificate": "/no/such.pem"}, r"tls_certificate /no/such\.pem: No such file"),
        ({"tls_key": "/no/such.pem"}, r"tls_key /no/such\.pem: No such file"),
        ({"tls_client_ca": "/no/such.pem"}, r"tls_client_ca /no/such\.pem: No such file"),
        ({"tls_certificate": str(garbage)}, r"tls_certificate .*garbage\.pem has no readable certificate"),
        ({"tls_key": str(garbage)}, r"tls_key .*garbage\.pem has no readable private key"),
        ({"tls_client_ca": str(garbage)}, r"tls_client_ca .*garbage\.pem has no readable certificate"),
        ({"tls_key": other.key}, r"other-key\.pem is not the key of tls_certificate .*server\.pem"),
        ({"tls_certificate": late.certificate, "tls_key": late.key}, r"late\.pem has expired"),
        ({"tls_certificate": early.certificate, "tls_key": early.key}, r"early\.pem is not valid yet"),
        (
            {"tls_certificate": client.certificate, "tls_key": client.key},
            r"a-client\.pem is not a server certificate",
        ),
    ]
    for options, said in cases:
        error = refused(authority, listen=TLS, **options)
        assert error.advice
        with pytest.raises(ConfigurationError, match=said):
            raise error


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"listen": TLS}, "needs a certificate and its key"),
        ({"tls_certificate": "a.pem"}, "go together"),
        ({"tls_client_ca": "a.pem", "tokens": "t"}, "which need TLS"),
        ({"listen": ("grpc://0.0.0.0:0",)}, "in plain text and without authentication"),
        (
            {"listen": ("grpcs://0.0.0.0:0",), "tls_certificate": "a.pem", "tls_key": "b.pem"},
            "without authentication",
        ),
        (
            {
                "listen": (*TLS, "grpc://127.0.0.1:0"),
                "tls_certificate": "a.pem",
                "tls_key": "b.pem",
                "tls_client_ca": "c.pem",
            },
            "cannot present a certificate",
        ),
        ({"listen": ("grpc://127.0.0.1:0?token=hidden",), "tokens": "t"}, "which are for clients"),
        ({"listen": ("grpc://0.0.0.0:0",), "tokens": "t"}, "would be sent in plain text"),
    ],
)
def test_settings_that_let_in_more_than_they_say_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        check_together(ServerConfig(**settings))
    assert caught.value.advice and "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"listen": ("grpc://0.0.0.0:0",), "insecure": True},
        {"listen": ("grpc://0.0.0.0:0",), "tokens": "t", "insecure": True},
        {
            "listen": ("grpcs://0.0.0.0:0",),
            "tls_certificate": "a.pem",
            "tls_key": "b.pem",
            "tls_client_ca": "c.pem",
        },
    ],
)
def test_other_hosts_may_come_where_somebody_asks_who_they_are(settings: dict[str, Any]) -> None:
    assert not ServerConfig(**settings).addresses[0].is_loopback
