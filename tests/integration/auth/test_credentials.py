"""What a client shows: addresses with tokens, arguments and the environment."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

import heliograph as hg
from heliograph.transport.channels import credentials_elsewhere, credentials_of, open_channel
from heliograph_proto.addresses import Credentials, parse_address, without_token
from heliograph_proto.errors import InvalidArgumentError

TOKEN = "hgt_secret-of-mine"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOKEN", "TOKEN_FILE", "CA", "CERTIFICATE", "KEY"):
        monkeypatch.delenv(f"HELIOGRAPH_{name}", raising=False)


@pytest.mark.parametrize(
    "url",
    [
        f"grpc://127.0.0.1:7070?token={TOKEN}",
        f"grpcs://host.example:7070?token={TOKEN}",
        f"grpcs://host.example:7070/?tls_name=other.example&token={TOKEN}#cpu0",
        f"unix:///run/socket?token={TOKEN}",
        f"127.0.0.1:7070?token={TOKEN}",
    ],
)
def test_a_token_is_taken_out_of_a_url_and_never_shown(url: str) -> None:
    address = parse_address(url)
    assert address.token == TOKEN
    assert TOKEN not in str(address) and TOKEN not in repr(address)
    assert TOKEN not in repr(credentials_of(address))
    assert parse_address(str(address)) == address


def test_a_name_for_the_certificate_stays_in_the_address() -> None:
    address = parse_address("grpcs://127.0.0.1:7070?tls_name=host.example#cpu1")
    assert (address.scheme, address.tls_name, address.device) == ("grpcs", "host.example", "cpu1")
    assert str(address) == "grpcs://127.0.0.1:7070?tls_name=host.example#cpu1"
    assert address.grpc_target == "ipv4:127.0.0.1:7070" and address.is_loopback and address.is_tls


def test_grpcs_has_the_same_port_by_default() -> None:
    assert str(parse_address("grpcs://[::1]")) == "grpcs://[::1]:7070"
    assert not parse_address("grpcs://10.0.0.1").is_loopback


@pytest.mark.parametrize(
    "url",
    [
        f"nonsense://host?token={TOKEN}",
        f"grpc://host/path?token={TOKEN}",
        f"grpc://ho st?token={TOKEN}",
        f"grpc://host:99999?token={TOKEN}",
        f"grpc://host?token={TOKEN}&token={TOKEN}",
        f"grpc://host?token={TOKEN}\n",
        f"grpc://host?token={TOKEN}\x07",
        f"grpc://host?token={TOKEN}%20{TOKEN}",
        f"grpc://host?nothing={1}&token={TOKEN}",
        f"grpc://host?tls_name=other&token={TOKEN}",
        f"grpc://[::1?token={TOKEN}",
        f"grpc://host#cpu:threads=2?token={TOKEN}",
        f"unix://relative?token={TOKEN}",
        f"grpc://user@host?token={TOKEN}",
        f"grpc://host#cpu0?token={TOKEN}",
    ],
)
def test_no_error_repeats_a_token(url: str) -> None:
    try:
        shown = repr(parse_address(url))
    except InvalidArgumentError as error:
        shown = f"{error!r} {error}"
    assert TOKEN not in shown


@pytest.mark.parametrize("query", ["token=", "tls_name=", "key=1", "token=%00", f"token={'x' * 513}"])
def test_a_query_that_makes_no_sense_is_refused(query: str) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_address(f"grpcs://host?{query}")


def test_text_that_has_a_url_in_it_is_shown_without_the_token() -> None:
    assert TOKEN not in without_token(f"see grpc://host?tls_name=x&TOKEN={TOKEN}")


def test_an_argument_wins_over_the_url_and_the_url_over_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain, with_token = parse_address("grpc://127.0.0.1"), parse_address("grpc://127.0.0.1?token=url")
    assert credentials_of(plain) == Credentials()
    file = tmp_path / "token"
    file.write_text("of-the-file\n")
    monkeypatch.setenv("HELIOGRAPH_TOKEN_FILE", str(file))
    assert credentials_of(plain).token == "of-the-file"
    monkeypatch.setenv("HELIOGRAPH_TOKEN", "environment")
    assert credentials_of(plain).token == "environment"
    assert credentials_of(with_token).token == "url"
    assert credentials_of(with_token, token="argument").token == "argument"
    assert credentials_of(with_token, token="").token == ""


def test_files_come_from_arguments_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    address = parse_address("grpcs://127.0.0.1")
    for name in ("CA", "CERTIFICATE", "KEY"):
        monkeypatch.setenv(f"HELIOGRAPH_{name}", f"{name}.pem")
    assert credentials_of(address) == Credentials("", "CA.pem", "CERTIFICATE.pem", "KEY.pem")
    assert credentials_of(address, ca="mine.pem").ca == "mine.pem"


def test_a_certificate_without_its_key_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="go together"):
        credentials_of(parse_address("grpcs://127.0.0.1"), certificate="some.pem")


def test_a_file_of_a_token_that_is_missing_or_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HELIOGRAPH_TOKEN_FILE", str(tmp_path / "missing"))
    with pytest.raises(InvalidArgumentError, match="missing"):
        hg.connect("grpc://127.0.0.1:1")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    monkeypatch.setenv("HELIOGRAPH_TOKEN_FILE", str(tmp_path / "binary"))
    with pytest.raises(InvalidArgumentError, match="not text"):
        hg.connect("grpc://127.0.0.1:1")


@pytest.mark.parametrize("token", ["two words", "line\nend", "für", "x" * 513, "\x00"])
def test_what_cannot_be_a_token_is_refused_and_not_repeated(token: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        hg.connect("grpc://127.0.0.1:1", token=token)
    assert token not in str(caught.value)


def test_this_process_is_shown_nothing() -> None:
    with pytest.raises(InvalidArgumentError, match="another process"):
        hg.connect("local:", token=TOKEN)


@pytest.mark.parametrize(("name", "content"), [("ca", b"no PEM"), ("ca", b""), ("ca", None)])
def test_a_file_of_authorities_that_cannot_be_used_is_named(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=r"ca\.pem"):
        hg.connect("grpcs://127.0.0.1:1", **{name: str(path)})


def test_a_token_that_came_encrypted_does_not_go_on_in_the_clear() -> None:
    own, shown = parse_address("grpcs://head.example"), Credentials(TOKEN, "ca.pem")
    assert credentials_elsewhere(shown, own, parse_address("grpcs://other.example")) == shown
    assert credentials_elsewhere(shown, own, parse_address("grpc://127.0.0.1")) == shown
    assert credentials_elsewhere(shown, own, parse_address("grpc://other.example")) == replace(
        shown, token=""
    )
    clear, other = parse_address("grpc://head.example?insecure=yes"), parse_address("grpc://other.example")
    assert credentials_elsewhere(shown, clear, other) == replace(shown, token="")
    allowed = replace(shown, in_clear=True)
    assert credentials_elsewhere(allowed, clear, other) == allowed


def test_a_token_is_not_sent_in_the_clear_unless_the_url_says_so() -> None:
    with pytest.raises(InvalidArgumentError, match="unencrypted") as caught:
        hg.connect("grpc://192.0.2.1:7070", token=TOKEN)
    assert "insecure=yes" in caught.value.advice and TOKEN not in str(caught.value)

    async def connected() -> None:
        await hg.aio.connect(f"grpc://192.0.2.1:7070?token={TOKEN}")

    with pytest.raises(InvalidArgumentError, match="unencrypted"):
        asyncio.run(connected())
    for url in (
        "grpc://192.0.2.1:7070?insecure=yes",
        "grpc://127.0.0.1:1",
        "unix:///a",
        "grpc://localhost:1",
    ):
        address = parse_address(url)
        assert str(parse_address(str(address))) == url
        open_channel(address, (), credentials_of(address, TOKEN)).close()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("grpc://h:1?insecure=no", "insecure is not yes"),
        ("grpcs://h:1?insecure=yes", "insecure is for grpc://"),
        ("grpc://h:1?pin=" + "a" * 64, "pin needs grpcs://"),
        ("grpcs://h:1?pin=abc", "no fingerprint"),
    ],
)
def test_parameters_that_mean_nothing_are_said(url: str, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        parse_address(url)


def test_members_of_a_pool_have_no_tokens_of_their_own() -> None:
    with pytest.raises(InvalidArgumentError, match="the same token") as caught:
        hg.connect([f"grpc://127.0.0.1:1?token={TOKEN}", "grpc://127.0.0.1:2"])
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["grpc://user:hgt_abc@host:1", "grpc://hgt_abc@host:1", "grpc://host:1/hgt_abc", "http://hgt_abc@host"],
)
def test_a_token_where_none_belongs_is_not_repeated_either(url: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_address(url)
    assert "abc" not in str(caught.value)
