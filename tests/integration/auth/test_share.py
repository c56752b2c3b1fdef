"""`heliograph serve --share`, and URLs that name a certificate by its fingerprint."""

from __future__ import annotations

import asyncio
import builtins
import hashlib
import signal
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from access_daemons import daemon_with_tls, works
from certificates import Authority, Pair
from daemon_threads import ThreadDaemon, thread_daemon
from forked_daemons import serve

import heliograph as hg
from heliograph import admin
from heliograph._probe import pins
from heliograph.cli import main
from heliograph_proto.errors import ConfigurationError, PermissionDeniedError, UnavailableError
from heliograph_server.auth.sharing import open_share, sharing
from heliograph_server.auth.tokens import remove_token
from heliograph_server.config.config import ServerConfig, Sources

SECONDS = 60.0
HERE = ("grpcs://127.0.0.1:0",)


@pytest.fixture(autouse=True)
def no_certificate_is_known() -> None:
    pins._known.clear()


@contextmanager
def shared(folder: Path) -> Iterator[tuple[ThreadDaemon, str]]:
    """A daemon of this process with a share, and the URL."""
    share = open_share(folder / "share", is_kept=True)
    with thread_daemon(**dict(share.settings(ServerConfig(HERE, share=True)))) as made:
        assert made._daemon is not None
        yield made, share.url(made._daemon.addresses[0])


def fingerprint_of(pair: Pair) -> str:
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(Path(pair.certificate).read_text())).hexdigest()


def test_a_process_that_shares_prints_one_url_that_opens_it(tmp_path: Path) -> None:
    daemon = serve(
        "--share", "--listen", "grpcs://127.0.0.1:0", "--device", "cpu:threads=1", stdout=subprocess.PIPE
    )
    try:
        assert daemon.stdout is not None
        url = daemon.stdout.readline().removeprefix("listening on ").strip()
        notice = "".join(daemon.stdout.readline() for _ in range(5))
        assert "Clients with this URL" in notice and "Ctrl-C" in notice
        with hg.connect(url) as session:
            assert works(session)
            assert "token" not in session.address and "token" not in repr(session)
    finally:
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(SECONDS) == 0
        daemon.stdout.close()


def test_the_url_of_a_share_opens_sessions_of_both_apis_and_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def computed(url: str) -> str:
        async with hg.aio.connect(url) as session:
            return session.address

    with shared(tmp_path) as (_, url):
        for _ in range(2):
            with hg.connect(url) as session:
                assert works(session)
        assert "pin=" in asyncio.run(computed(url)) and "pin=" in session.address
        with hg.connect(session.address, token=url.partition("token=")[2].partition("&")[0]) as again:
            assert works(again)
        pins._known.clear()
        asyncio.run(computed(url))
        monkeypatch.setenv("HELIOGRAPH_SERVER", url)
        assert main(["devices"]) == 0 and main(["health"]) == 0
        assert "hgt_" not in capsys.readouterr().out
        with admin.connect(url) as operator, pytest.raises(PermissionDeniedError):
            operator.sessions()


def test_another_certificate_than_the_pinned_one_gets_no_token(tmp_path: Path) -> None:
    async def connected(url: str) -> None:
        await hg.aio.connect(url)

    with shared(tmp_path / "one") as (_, url), shared(tmp_path / "two") as (other, _):
        port = url.partition("?")[0].rpartition(":")[2]
        wrong = url.replace(f":{port}?", f":{other.port}?")
        for _ in range(2):
            for connect in (hg.connect, lambda url: asyncio.run(connected(url))):
                with pytest.raises(UnavailableError, match="has the fingerprint") as caught:
                    connect(wrong)
                assert "hgt_" not in str(caught.value) and "no server" not in str(caught.value)
                assert "ask for a new URL" in caught.value.advice and "advice" not in caught.value.message
            # The second time with a remembered certificate, where gRPC's handshake finds out.
            with hg.connect(url):
                pass
        assert other._daemon is not None
        assert sum(other._daemon._slot.refused.values()) == 0


def test_a_restarted_share_with_the_same_folder_has_the_same_url(tmp_path: Path) -> None:
    with shared(tmp_path) as (_, first):
        pass
    with shared(tmp_path) as (_, second):
        assert first.partition("?")[2] == second.partition("?")[2]
        with hg.connect(second) as session:
            assert works(session)
    folder = tmp_path / "share"
    assert folder.stat().st_mode & 0o777 == 0o700
    for name in ("key.pem", "token", "tokens"):
        assert (folder / name).stat().st_mode & 0o077 == 0


def test_a_folder_that_others_may_read_or_whose_token_was_revoked_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "share"
    open_share(folder, is_kept=True)
    remove_token(folder / "tokens", "heliograph-share")
    with pytest.raises(ConfigurationError, match="was revoked"):
        open_share(folder, is_kept=True)
    folder.chmod(0o755)
    with pytest.raises(ConfigurationError, match="open to other users"):
        open_share(folder, is_kept=True)


def test_a_share_of_its_own_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    config = ServerConfig(share=True)
    with sharing(config, Sources(above={"share": True})) as (share, sources):
        assert sources.load().listen == ("grpcs://0.0.0.0:7070",) and sources.load().tokens
        assert "any host" in share.notice(sources.load().addresses) and share.token not in repr(share)
        url = share.url(sources.load().addresses[0])
        assert "0.0.0.0" not in url and share.token in url
    assert not share.folder.exists()


@pytest.mark.parametrize("own", ["tokens", "tls_certificate", "tls_client_ca"])
def test_a_share_beside_other_access_is_refused(own: str) -> None:
    config: Any = ServerConfig(share=True, **{own: "/a/file"})
    with pytest.raises(ConfigurationError, match=own), sharing(config, Sources()):
        pass


def test_a_share_in_plain_text_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="plain text"):
        ServerConfig(("grpc://0.0.0.0:7070",), share=True)


def test_without_the_library_for_certificates_its_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def importing(name: str, *given: Any, **named: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *given, **named)

    monkeypatch.setattr(builtins, "__import__", importing)
    with pytest.raises(ConfigurationError, match="cryptography") as caught:
        open_share(tmp_path / "share", is_kept=True)
    assert "heliograph[share]" in caught.value.advice


@pytest.mark.parametrize("names", [("127.0.0.1",), ("gpu.example",), ("*.example",)])
def test_a_certificate_of_an_authority_can_be_pinned_whatever_its_names(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    authority = Authority(tmp_path)
    pair = authority.server(*names)
    with daemon_with_tls(authority, pair=pair) as made:
        with hg.connect(f"{made.url}?pin=sha256:{fingerprint_of(pair).upper()}") as session:
            assert works(session)
        with pytest.raises(UnavailableError, match="has the fingerprint"):
            hg.connect(f"{made.url}?pin={'0' * 64}")


def test_a_sibling_of_the_pinned_certificate_is_not_accepted(tmp_path: Path) -> None:
    """The same authority vouches for it, and it has the same names."""
    authority = Authority(tmp_path)
    one, other = authority.server(file="one"), authority.server(file="other")
    pin = fingerprint_of(one)
    with daemon_with_tls(authority, pair=one) as first, hg.connect(f"{first.url}?pin={pin}"):
        pass
    with (
        daemon_with_tls(authority, pair=other) as second,
        pytest.raises(UnavailableError, match="has the fingerprint"),
    ):
        hg.connect(f"{second.url}?pin={pin}", ca=authority.ca)


def test_a_pin_of_a_daemon_that_is_not_there_is_said() -> None:
    with pytest.raises(UnavailableError, match="connection refused"):
        hg.connect(f"grpcs://127.0.0.1:1?pin={'0' * 64}")


def test_members_of_a_pool_have_no_pins() -> None:
    with pytest.raises(hg.InvalidArgumentError, match="by its fingerprint"):
        hg.connect([f"grpcs://127.0.0.1:1?pin={'0' * 64}"])
