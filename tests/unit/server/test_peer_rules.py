"""The addresses that a daemon connects to when a session names them."""

from __future__ import annotations

import pytest

from heliograph_proto.errors import ConfigurationError, InvalidArgumentError, PermissionDeniedError
from heliograph_server.resources.peer_rules import PeerRules, rules_of


def allows(rules: PeerRules, url: str) -> bool:
    try:
        rules.check(url)
    except PermissionDeniedError as error:
        assert error.advice
        return False
    return True


@pytest.mark.parametrize(
    ("entry", "allowed", "refused"),
    [
        ("gpu-1", "grpc://GPU-1:9", "grpc://gpu-2:9"),
        ("gpu-1:7070", "grpcs://gpu-1:7070", "grpc://gpu-1:7071"),
        ("10.0.0.0/24", "grpc://10.0.0.9:1", "grpc://10.0.1.9:1"),
        ("10.0.0.0/24", "grpc://[::ffff:10.0.0.9]:1", "grpc://gpu-1:1"),
        ("fd00::/8", "grpc://[fd00::1]:1", "grpc://[fe00::1]:1"),
        ("[::1]", "grpc://[::1]:1", "grpc://[::2]:1"),
        ("[::1]:5", "grpc://[::1]:5", "grpc://[::1]:6"),
        ("unix:///a", "unix:///a", "unix:///b"),
        ("loopback", "unix:///a", "grpc://10.0.0.1:1"),
        ("loopback", "grpc://localhost:1", "grpc://localhost.example:1"),
    ],
)
def test_an_entry_allows_what_it_names_and_no_more(entry: str, allowed: str, refused: str) -> None:
    rules = rules_of((entry,), asks=True, is_local=False)
    assert allows(rules, allowed) and not allows(rules, refused)


def test_without_entries_the_right_to_name_daemons_decides() -> None:
    assert allows(rules_of((), asks=True, is_local=False), "grpc://127.0.0.1:1")


def test_an_open_daemon_on_loopback_stays_on_its_host() -> None:
    rules = rules_of((), asks=False, is_local=True)
    assert allows(rules, "grpc://127.0.0.1:1") and not allows(rules, "grpc://10.0.0.1:1")


@pytest.mark.parametrize(
    "url",
    [
        "grpc://127.0.0.1:1",
        "grpc://127.9.9.9:1",
        "grpc://localhost:1",
        "grpc://x.localhost.:1",
        "grpc://0.0.0.0:1",
        "grpc://[::]:1",
        "grpc://[::1]:1",
        "grpc://[::ffff:127.0.0.1]:1",
        "grpc://169.254.169.254:80",
        "unix:///run/docker.sock",
    ],
)
def test_an_open_daemon_on_a_network_does_not_connect_to_its_own_host(url: str) -> None:
    rules = rules_of((), asks=False, is_local=False)
    assert not allows(rules, url) and allows(rules, "grpc://10.0.0.1:1")


@pytest.mark.parametrize("entry", ["10.0.0.0/99", "ftp://x", "a b", ""])
def test_a_wrong_entry_is_said(entry: str) -> None:
    with pytest.raises(ConfigurationError, match="pool_peers"):
        rules_of((entry,), asks=True, is_local=False)


def test_a_malformed_address_is_said() -> None:
    with pytest.raises(InvalidArgumentError):
        rules_of(("*",), asks=True, is_local=False).check("ftp://x")
