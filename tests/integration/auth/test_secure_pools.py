"""Pools whose members ask who connects: by tokens, over TLS."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from certificates import Authority, Pair
from forked_daemons import running_daemon
from two_matrices import DEVICE, SECONDS, X, compiled, expected, weights

import heliograph as hg
import heliograph.aio
from heliograph.head.handoff import probe
from heliograph_proto.addresses import Credentials
from heliograph_proto.errors import ConfigurationError
from heliograph_server.auth.tokens import hash_of, new_token
from heliograph_server.links.links import PoolCredentials
from heliograph_server.pool.discovery import open_source

HERE = "grpc://127.0.0.1:7070"
RIGHTS = {"client": '["use"]', "head": '["use", "pool"]'}


@dataclass(frozen=True)
class SecurePool:
    """Two members and their head, which share a file of tokens and an authority."""

    head: str
    members: tuple[str, str]
    tokens: dict[str, str]
    files: dict[str, str]
    ca: str

    def __repr__(self) -> str:
        return f"<SecurePool at {self.head}>"


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecurePool]:
    folder = tmp_path_factory.mktemp("secrets")
    authority = Authority(folder / "authority")
    # By name alone: members that are found by their addresses are known by it all the same.
    named, addressed = authority.server("localhost", file="named"), authority.server(file="addressed")
    tokens = {name: new_token() for name in RIGHTS}
    files = {name: str(folder / name) for name in RIGHTS}
    entries = []
    for name, token in tokens.items():
        Path(files[name]).write_text(token + "\n")
        known = f'name = "{name}"\ntenant = "{name}"\nrights = {RIGHTS[name]}\n'
        entries.append(f'[[token]]\n{known}hash = "{hash_of(token)}"\n')
    table = folder / "tokens.toml"
    table.write_text("\n".join(entries))
    table.chmod(0o600)
    shown = ("--pool-token", files["head"], "--pool-ca", authority.ca)
    asked = ("--device", DEVICE, "--tokens", str(table), "--no-shared-memory", *shown)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("HELIOGRAPH_CA", authority.ca)

        def started(pair: Pair, *more: str, host: str = "127.0.0.1") -> str:
            tls = ("--tls-certificate", pair.certificate, "--tls-key", pair.key)
            listen = f"grpcs://{host}:0"
            return stack.enter_context(running_daemon(*asked, *tls, *more, listen=listen))

        found = started(named, host="localhost")
        members = f"{found.replace('localhost', '127.0.0.1')}?tls_name=localhost", started(addressed)
        source = f"static:one={members[0]},two={members[1]}"
        head = started(addressed, "--pool", source)
        patch.delenv("HELIOGRAPH_CA")
        yield SecurePool(head, members, tokens, files, authority.ca)


def wait_for_members(session: hg.Session) -> None:
    with session.watch() as watch:
        while len(session.devices) < 3:
            watch.next(timeout=SECONDS)


def test_a_graph_runs_over_members_that_ask_for_tokens_and_speak_tls(daemons: SecurePool) -> None:
    arrays = weights(31)
    with hg.connect(daemons.head, token=daemons.tokens["client"], ca=daemons.ca) as session:
        wait_for_members(session)
        plan = compiled(session, arrays)
        assert np.array_equal(plan.run(x=X)["y"], expected(arrays))
        traffic = session.server_traffic()
        # What is small goes by way of nobody else; the client brought its weights to the members itself.
        assert (traffic.content_bytes, traffic.peers.sent_bytes, traffic.peers.relayed_bytes) == (0, 0, 0)


def test_the_same_with_asyncio(daemons: SecurePool) -> None:
    arrays = weights(32)

    async def scenario() -> np.ndarray:  # type: ignore[type-arg]
        token = daemons.tokens["client"]
        async with heliograph.aio.connect(daemons.head, token=token, ca=daemons.ca) as session:
            found = {one.name: one for one in session.devices}
            pins = {"front/*": found["one/cpu0"], "behind/*": found["two/cpu0"]}
            plan = await session.compile(graph_of(arrays), list(pins.values()), pins=pins, timeout=SECONDS)
            return (await plan.run(x=X))["y"]

    assert np.array_equal(asyncio.run(scenario()), expected(arrays))


def graph_of(arrays: list[np.ndarray]) -> hg.Graph:  # type: ignore[type-arg]
    from two_matrices import graph

    return graph(arrays)


def test_a_client_makes_a_pool_of_them_with_one_token(daemons: SecurePool) -> None:
    arrays = weights(33)
    urls = list(daemons.members)
    with hg.connect(urls, token=daemons.tokens["head"], ca=daemons.ca) as session:
        first, second = session.devices
        pins = {"front/*": first, "behind/*": second}
        plan = session.compile(graph_of(arrays), [first, second], pins=pins, timeout=SECONDS)
        assert np.array_equal(plan.run(x=X)["y"], expected(arrays))


def test_who_may_only_use_a_daemon_cannot_have_it_connect_with_others(daemons: SecurePool) -> None:
    shown = {"token": daemons.tokens["client"], "ca": daemons.ca}
    with (
        hg.connect(daemons.members[1], **shown) as session,
        pytest.raises(hg.PermissionDeniedError, match="Probe|the way to another daemon"),
    ):
        probe(session, "grpc://127.0.0.1:1")
    arrays = weights(34)
    urls = list(daemons.members)
    with hg.connect(urls, **shown) as session:
        first, second = session.devices
        pins = {"front/*": first, "behind/*": second}
        with pytest.raises(hg.PermissionDeniedError, match="other daemons") as caught:
            session.compile(graph_of(arrays), [first, second], pins=pins, timeout=SECONDS)
        assert "'pool'" in caught.value.advice
        # On one of them alone it may.
        plan = session.compile(graph_of(arrays), first, timeout=SECONDS)
        assert np.array_equal(plan.run(x=X)["y"], expected(arrays))


def test_who_may_only_use_daemons_cannot_have_a_tensor_go_from_one_to_the_other(daemons: SecurePool) -> None:
    urls = list(daemons.members)
    with hg.connect(urls, token=daemons.tokens["client"], ca=daemons.ca) as session:
        first, second = session.devices
        source, target = session.put(X, first), session.empty(X.shape, "f32", second)
        # It goes by way of the client, whose own tokens open both.
        source.copy_to(target)
        assert np.array_equal(target.get(), X)


def test_a_head_that_shows_no_token_says_of_each_member_that_it_asks_for_one(daemons: SecurePool) -> None:
    source = f"static:two={daemons.members[1]}"
    more = ("--pool", source, "--pool-ca", daemons.ca)
    with running_daemon("--device", DEVICE, *more) as head, hg.connect(head) as session:
        member = one_that_failed(session)
        assert member.state is hg.MemberState.JOINING and "token" in member.why


def test_a_head_that_trusts_another_authority_says_so(daemons: SecurePool, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other")
    more = ("--pool", f"static:two={daemons.members[1]}", "--pool-token", daemons.files["head"])
    with (
        running_daemon("--device", DEVICE, *more, "--pool-ca", other.ca) as head,
        hg.connect(head) as session,
    ):
        assert "certificate" in one_that_failed(session).why


def one_that_failed(session: hg.Session) -> hg.MemberInfo:
    """The only member, once it is known why it is none."""
    (member,) = session.members()
    while member.why == "it has not answered yet":
        (member,) = session.members()
    return member


def test_a_name_finds_members_whose_certificates_are_for_it() -> None:
    found = []
    source = open_source("dns:grpcs://localhost:7171")
    source.start(found.append, found.append)
    try:
        while not found:
            source.refresh()
    finally:
        source.close()
    (listed, *_) = found[0]
    assert listed.url.startswith("grpcs://") and listed.url.endswith(":7171?tls_name=localhost")


@pytest.mark.parametrize("text", ["static:grpc://a:7070?token=hgt_x", "dns:grpcs://a:7070?token=hgt_x"])
def test_a_list_of_members_has_no_tokens_in_it(text: str) -> None:
    with pytest.raises(ConfigurationError, match="contains a token") as caught:
        open_source(text)
    assert "hgt_x" not in str(caught.value)


def test_a_token_for_the_pool_may_change_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "token"
    file.write_text("hgt_first")
    shown = PoolCredentials(str(file))
    assert shown(HERE) == Credentials("hgt_first")
    file.write_text("hgt_second\n")
    assert shown(HERE) == Credentials("hgt_second")
    with caplog.at_level(logging.ERROR):
        file.write_bytes(b"\xff two words")
        assert shown(HERE) == shown(HERE) == Credentials("hgt_second")
        file.unlink()
        assert shown(HERE) == Credentials("hgt_second")
    assert len(caplog.messages) == 1 and "stays in use" in caplog.messages[0]
    file.write_text("hgt_third")
    assert shown(HERE) == Credentials("hgt_third")


def test_a_pool_with_tls_shows_its_token_in_the_clear_to_nobody_elsewhere(
    tmp_path: Path, daemons: SecurePool
) -> None:
    file = tmp_path / "token"
    file.write_text("hgt_one")
    shown = PoolCredentials(str(file), daemons.ca)
    assert shown("grpcs://10.0.0.2:7070").token == shown(HERE).token == "hgt_one"
    assert shown("grpc://10.0.0.2:7070").token == ""
    with pytest.raises(hg.InvalidArgumentError, match="in the clear"):
        PoolCredentials(str(file))("grpc://10.0.0.2:7070")
    assert PoolCredentials(str(file), insecure=True)("grpc://10.0.0.2:7070").token == "hgt_one"


def test_a_daemon_does_not_start_with_secrets_that_it_cannot_read(tmp_path: Path) -> None:
    for wrong in ({"token_file": str(tmp_path / "none")}, {"ca": str(tmp_path / "none")}):
        with pytest.raises(ConfigurationError, match="for the pool"):
            PoolCredentials(**wrong)
    with pytest.raises(ConfigurationError, match="go together"):
        PoolCredentials(certificate=str(tmp_path / "certificate"))
