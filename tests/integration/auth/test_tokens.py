"""The file of tokens, `heliograph token`, and the first token that `heliograph serve` makes."""

from __future__ import annotations

import asyncio
import os
import re
import stat
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest
from access_daemons import works
from forked_daemons import running_daemon

import heliograph as hg
from heliograph.cli import main
from heliograph_proto.addresses import parse_address
from heliograph_proto.errors import ConfigurationError, PermissionDeniedError, UnauthenticatedError
from heliograph_proto.sessions import Quota
from heliograph_server.auth.access import Access
from heliograph_server.auth.tokens import TokenFile, hash_of, new_token, parse_tokens, read_tokens
from heliograph_server.config.config import ServerConfig
from heliograph_server.resources.principals import Principal, Right

HASH = "sha256:" + "0" * 64
HEAD = Principal("head", frozenset((Right.USE, Right.POOL)))
ONE = f'[[token]]\nname = "a"\nhash = "{HASH}"\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.toml"


def token(path: Path, action: str, *arguments: str) -> int:
    return main(["token", action, *arguments, "--file", str(path)])


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.strip()


def test_an_entry_says_who_and_what_and_until_when() -> None:
    text = f"""
        [[token]]
        name = "alice-laptop"
        hash = "{HASH}"
        tenant = "alice"
        rights = ["use", "admin"]
        expires = 2027-01-01T00:00:00Z
        [token.quota]
        device_memory_bytes = "2GiB"
        sessions = 3
    """
    (found,) = parse_tokens(text, "file")
    assert (found.name, found.tenant, found.rights) == ("alice-laptop", "alice", {Right.USE, Right.ADMIN})
    assert found.expires == datetime(2027, 1, 1, tzinfo=UTC).timestamp()
    principal = found.principal(Quota(plans=5, sessions=1))
    assert principal.quota == Quota(sessions=3, plans=5, device_memory_bytes=2 * 2**30)
    assert HASH not in repr(principal) + repr(found)


def test_what_is_not_said_is_the_least() -> None:
    (found,) = parse_tokens(ONE, "file")
    assert (found.tenant, found.rights, found.expires, found.quota) == ("default", {Right.USE}, None, {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[token", "is not TOML"),
        ("token = 3", "entries that are not tokens"),
        ("tokens = []", "entries that are not tokens: tokens"),
        ("token = [3]", "is not a table"),
        ('[[token]]\nhash = "x"', "its name is not valid"),
        (ONE + 'secret = "x"', "has the unknown key 'secret'"),
        ('[[token]]\nname = "a"\nhash = "plain-text"', "its hash is malformed"),
        ('[[token]]\nname = "a\\n"\nhash = "plain-text"', "its name is not valid"),
        (ONE + 'rights = ["root"]', "its rights are"),
        (ONE + "rights = []", "its rights are"),
        (ONE + 'tenant = ""', "its tenant is not valid"),
        (ONE + 'expires = "soon"', "it expires 'soon'"),
        (ONE + "[token.quota]\nplanes = 1", "unknown quota 'planes'"),
        (ONE + "[token.quota]\nplans = -1", "quota plans is -1"),
        (ONE + "[token.quota]\nweight = 0.0", "quota weight is 0.0"),
        (ONE + "[token.quota]\nweight = 1e9", "quota weight is 1000000000.0"),
        (ONE + '[token.quota]\ndevice_memory_bytes = "much"', "quota device_memory_bytes"),
        (ONE + ONE, "two tokens have the same name"),
        (ONE + ONE.replace('"a"', '"b"'), "two tokens have the same hash"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)) as caught:
        parse_tokens(text, "file")
    assert caught.value.advice and HASH not in str(caught.value)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_refused(path: Path, mode: int) -> None:
    path.write_text(ONE)
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match="written by users other") as caught:
        TokenFile(str(path))
    assert "chmod 600" in caught.value.advice


def test_a_token_is_printed_once_and_kept_nowhere(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = os.umask(0)
    try:
        assert token(path, "new", "--name", "alice", "--tenant", "a", "--right", "pool") == 0
    finally:
        os.umask(before)
    made = printed(capsys)
    assert re.fullmatch(r"hgt_[\w-]{43}", made)
    text = path.read_text()
    assert made not in text and hash_of(made) in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = TokenFile(str(path)).identify(made, Quota())
    assert (found.tenant, found.shown, found.rights) == ("a", "alice", {Right.POOL})


def test_tokens_are_listed_and_taken_back(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token(path, "new", "--name", "alice", "--expires", "30d")
    token(path, "new", "--name", 'b"ob\\', "--right", "use", "--right", "admin")
    made = printed(capsys).splitlines()
    assert token(path, "ls") == 0
    listed = printed(capsys)
    assert "alice" in listed and 'b"ob\\' in listed and "admin use" in listed and "never" in listed
    assert not any(one in listed for one in made)
    alice = next(one for one in read_tokens(str(path)) if one.name == "alice")
    assert alice.expires is not None and abs(alice.expires - time.time() - 30 * 86400) < 60
    assert token(path, "rm", "alice") == 0
    assert [one.name for one in read_tokens(str(path))] == ['b"ob\\']
    assert token(path, "rm", "alice") == 1
    assert token(path, "rm", 'b"ob\\') == 0
    assert read_tokens(str(path)) == ()
    TokenFile(str(path))


def test_what_an_operator_wrote_stays_when_a_token_is_added(path: Path) -> None:
    path.write_text("# mine\n" + ONE)
    path.chmod(0o640)
    assert token(path, "new", "--name", "other") == 0
    assert path.read_text().startswith("# mine\n" + ONE.rstrip())
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize(
    "arguments",
    [
        ("--name", "a"),
        ("--name", ""),
        ("--name", "b\n"),
        ("--name", "b", "--tenant", ""),
        ("--name", "b", "--expires", "soon"),
        ("--name", "b", "--expires", "0d"),
        ("--name", "b", "--expires", "999999999y"),
    ],
)
def test_a_token_that_cannot_be_is_refused_and_the_file_left(path: Path, arguments: tuple[str, ...]) -> None:
    path.write_text(ONE)
    path.chmod(0o600)
    assert token(path, "new", *arguments) == 1
    assert path.read_text() == ONE


def test_a_file_must_be_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("HELIOGRAPH_TOKENS", raising=False)
    assert main(["token", "ls"]) == 1
    assert "--file FILE" in capsys.readouterr().err


def test_every_token_is_another() -> None:
    assert len({new_token() for _ in range(1000)}) == 1000


@pytest.mark.parametrize("shown", [False, True])
def test_a_first_token_that_nobody_was_shown_is_taken_away_again(tmp_path: Path, shown: bool) -> None:
    file = tmp_path / "tokens"
    access = Access(ServerConfig(tokens=str(file)), Counter())
    assert file.exists()
    if shown:
        assert access.first_token in access.shown(parse_address("grpc://127.0.0.1:7070"))
    asyncio.run(access.close())
    assert file.exists() is shown


def test_serve_makes_a_first_token_and_prints_a_url_that_works(
    path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with running_daemon("--tokens", str(path), "--device", "fake") as url:
        assert re.fullmatch(r"grpc://127\.0\.0\.1:\d+\?token=hgt_[\w-]{43}", url)
        with hg.connect(url) as session:
            assert works(session)
        with pytest.raises(UnauthenticatedError):
            hg.connect(url.partition("?")[0])
    made = url.partition("=")[2]
    assert made not in capfd.readouterr().err
    (kept,) = read_tokens(str(path))
    assert (kept.name, kept.tenant, kept.rights) == ("first", "default", {Right.USE, Right.ADMIN})
    with running_daemon("--tokens", str(path), "--device", "fake") as url:
        assert "token" not in url
        with hg.connect(url, token=made) as session:
            assert works(session)


def test_the_command_line_shows_the_environments_token(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    token(path, "new", "--name", "alice")
    made = printed(capsys)
    with running_daemon("--tokens", str(path), "--device", "fake") as url:
        assert main(["devices", "--server", url]) == 1
        assert "none was given" in capsys.readouterr().err
        assert main(["devices", "--server", f"{url}?token={made}"]) == 0
        monkeypatch.setenv("HELIOGRAPH_TOKEN", made)
        assert main(["devices", "--server", url]) == 0
        assert made not in "".join(capsys.readouterr())


def test_serve_says_which_tokens_it_cannot_read(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path.write_text("[[token")
    with pytest.raises(hg.UnavailableError), running_daemon("--tokens", str(path), "--device", "fake"):
        pass
    assert f"{path} is not TOML" in capfd.readouterr().err


def test_tickets_are_good_for_their_tenant_alone_unless_a_head_gave_them() -> None:
    from heliograph_backends.cpu.backend import CpuDevice
    from heliograph_backends.registry import Registry
    from heliograph_proto import commands as c
    from heliograph_proto.types import tensor_type
    from heliograph_server.runtime.host import Host
    from heliograph_server.runtime.upload_tickets import Announced

    host = Host(Registry.of(CpuDevice(threads=1, native=False)))
    try:
        for owner, is_anyones in ((Principal("alice", frozenset((Right.USE,))), False), (HEAD, True)):
            session = host.session(host.open_session("test", principal=owner).session)
            session.attach(lambda _: None, lambda _: None)
            session.submit([c.Command(1, c.Allocate(1, tensor_type("u8", (16,))))])
            session.when_written([1]).result(10)
            (one,) = host.admissions.admit(session, [Announced(1, 16, bytes(32))], lambda *_: None)
            assert host.admissions.find(one.ticket, owner) is one
            if is_anyones:
                assert host.admissions.find(one.ticket, Principal("bob")) is one
            else:
                with pytest.raises(PermissionDeniedError, match="not valid"):
                    host.admissions.find(one.ticket, Principal("bob"))
            session.close()
    finally:
        host.close()


@pytest.mark.parametrize(
    "broken",
    [
        "a = " + "[" * 100_000,
        f"{ONE}[token.quota]\nsessions = {'9' * 5000}\n",
        f"{ONE}[token.quota]\nsessions = 0x{'f' * 6000}\n",
        f"{ONE}[token.quota]\nweight = 0x{'f' * 400}\n",
        f"{ONE}rights = [0x{'f' * 6000}]\n",
        f"{ONE}#{' ' * 2**23}\n",
    ],
    ids=["deep", "long number", "long in hexadecimal", "heavy", "a number of rights", "long"],
)
def test_the_tokens_that_were_in_force_stay_so_whatever_the_file_becomes(path: Path, broken: str) -> None:
    path.write_text(ONE)
    path.chmod(0o600)
    tokens = TokenFile(str(path))
    path.write_text(broken)
    assert tokens.find("x") is None and [one.name for one in tokens.all] == ["a"]
    with pytest.raises(ConfigurationError):
        read_tokens(str(path))


def test_a_pipe_is_no_file_of_tokens_and_nobody_waits_for_it(path: Path) -> None:
    path.write_text(ONE)
    path.chmod(0o600)
    tokens = TokenFile(str(path))
    path.unlink()
    os.mkfifo(path, 0o600)
    assert tokens.find("x") is None and [one.name for one in tokens.all] == ["a"]
    with pytest.raises(ConfigurationError, match="it is not a regular file"):
        read_tokens(str(path))
