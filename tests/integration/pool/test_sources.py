"""Where a pool learns of its members: texts that name sources, and what these tell."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

import pytest

from heliograph_proto.errors import ConfigurationError, HeliographError
from heliograph_server.pool.discovery import DnsSource, ListedMember, MembershipSource, open_source


class Told:
    """What a source has told."""

    def __init__(self) -> None:
        self.lists: list[Sequence[ListedMember]] = []
        self.errors: list[HeliographError] = []
        self._changed = threading.Condition()

    def changed(self, members: Sequence[ListedMember]) -> None:
        with self._changed:
            self.lists.append(members)
            self._changed.notify_all()

    def failed(self, error: HeliographError) -> None:
        with self._changed:
            self.errors.append(error)
            self._changed.notify_all()

    def wait(self, *names: str) -> None:
        """Until these are the members."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: bool(self.lists) and [one.name for one in self.lists[-1]] == list(names), 10
            ), self.lists

    def wait_for_list(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self.lists), 10)

    def wait_for_errors(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.errors) >= count, 10)


def listed(source: MembershipSource) -> dict[str, str]:
    told = Told()
    source.start(told.changed, told.failed)
    (members,) = told.lists
    source.close()
    return {one.name: one.url for one in members}


def test_static_members_are_named_by_host_and_by_port_where_it_is_another_than_usual() -> None:
    found = listed(open_source("static:a:7070, b:7071 ,c,[::1]:7070,[::2]:9"))
    assert found == {
        "a": "grpc://a:7070",
        "b:7071": "grpc://b:7071",
        "c": "grpc://c:7070",
        "[::1]": "grpc://[::1]:7070",
        "[::2]:9": "grpc://[::2]:9",
    }


def test_static_members_can_be_given_names() -> None:
    found = listed(open_source("static:left=a:7070,right=a:7071,near=unix:///run/x.sock"))
    assert found == {"left": "grpc://a:7070", "right": "grpc://a:7071", "near": "unix:///run/x.sock"}


@pytest.mark.parametrize(
    ("text", "message", "advice"),
    [
        ("a:7070", "not a source of members", "static:"),
        ("statik:a", "not a source of members", "did you mean static:"),
        ("", "not a source of members", "dns:NAME"),
        ("static:", "needs at least one member", "static:a:7070"),
        ("static:,,", "needs at least one member", ""),
        ("static:a,A:7070", "two members are named 'a'", "left="),
        ("static:x=a,x=b", "two members are named 'x'", "left="),
        ("static:a/b", "a member at 'a/b'", ""),
        ("static:a:b:c", "a member at", ""),
        ("static:local:", "not a daemon", "HOST:PORT"),
        ("static:a:7070#cpu0", "not a daemon", "whole daemon"),
        ("static:a/b=a:7070", "cannot be named", "letters"),
        ("static:=a:7070", "cannot be named", "letters"),
        ("dns:", "a member at ''", ""),
        ("dns:unix:///x", "not a name and port", "dns:NAME"),
        ("dns:a:99999", "a member at 'a:99999'", ""),
    ],
)
def test_a_text_that_names_no_source_is_refused_with_advice(text: str, message: str, advice: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        open_source(text)
    assert advice in caught.value.advice


def test_a_source_whose_package_is_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "heliograph_server.pool.ray_discovery", None)
    with pytest.raises(ConfigurationError) as caught:
        open_source("ray:heliograph")
    assert "heliograph[ray]" in caught.value.advice


def test_every_address_of_a_name_is_a_member_and_the_list_follows_the_name() -> None:
    addresses = ["10.0.0.10", "10.0.0.9", "10.0.0.9", "fd00::1"]
    told = Told()
    source = DnsSource("pool", 7071, lambda _: list(addresses), seconds=0.01)
    source.start(told.changed, told.failed)
    told.wait("10.0.0.9:7071", "10.0.0.10:7071", "[fd00::1]:7071")
    addresses.remove("10.0.0.10")
    told.wait("10.0.0.9:7071", "[fd00::1]:7071")
    source.close()
    assert len(told.lists) == 2 and not told.errors


def test_a_name_that_does_not_resolve_yet_is_an_empty_pool_that_waits() -> None:
    answers: list[list[str]] = []

    def resolve(_: str) -> list[str]:
        if not answers:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return answers[0]

    told = Told()
    source = DnsSource("pool", resolve=resolve, seconds=0.01)
    source.start(told.changed, told.failed)
    told.wait_for_errors(2)
    told.wait()
    answers.append(["10.0.0.1"])
    told.wait("10.0.0.1")
    source.close()
    assert "pool does not resolve" in told.errors[0].message


def test_a_name_server_that_is_gone_takes_no_member_away_and_a_loss_is_looked_after_at_once() -> None:
    broken = threading.Event()

    def resolve(_: str) -> list[str]:
        if broken.is_set():
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return ["10.0.0.1"]

    told = Told()
    source = DnsSource("pool", resolve=resolve, seconds=3600)
    source.start(told.changed, told.failed)
    told.wait("10.0.0.1")
    broken.set()
    source.refresh()
    told.wait_for_errors(1)
    source.close()
    assert len(told.lists) == 1


def test_names_of_this_host_resolve() -> None:
    told = Told()
    source = open_source("dns:localhost:7070")
    source.start(told.changed, told.failed)
    told.wait_for_list()
    source.close()
    assert {one.name for one in told.lists[0]} & {"127.0.0.1", "[::1]"}
