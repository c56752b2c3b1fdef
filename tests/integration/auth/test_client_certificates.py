"""The rights that client certificates have: `use` by default, and more by the file of clients."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from access_daemons import daemon_with_tls, works
from certificates import Authority, Pair
from daemon_threads import ThreadDaemon

import heliograph as hg
from heliograph import admin
from heliograph.head.handoff import probe
from heliograph_proto.errors import ConfigurationError
from heliograph_server.auth.clients import names_of, parse_clients
from heliograph_server.config.config import ServerConfig
from heliograph_server.config.exposure import check_together
from heliograph_server.resources.principals import Right

ENTRIES = """
[[client]]
match = "CN:ops-*"
tenant = "operators"
rights = ["use", "admin"]

[[client]]
match = "DNS:*.pool.example"
tenant = "pool"
rights = ["use", "pool"]

[client.quota]
sessions = 1

[[client]]
match = "CN:ops-night"
tenant = "night"
"""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def clients(tmp_path: Path) -> Path:
    path = tmp_path / "clients.toml"
    path.write_text(ENTRIES)
    path.chmod(0o600)
    return path


@pytest.fixture
def daemon(authority: Authority, clients: Path) -> Iterator[ThreadDaemon]:
    with daemon_with_tls(authority, tls_client_ca=authority.ca, tls_clients=str(clients)) as made:
        yield made


def shown(authority: Authority, pair: Pair) -> dict[str, str]:
    return {"ca": authority.ca, "certificate": pair.certificate, "key": pair.key}


def principal_of(daemon: ThreadDaemon, session: hg.Session) -> tuple[str, set[Right]]:
    found = daemon.host.session(session.info.session).principal
    return found.tenant, set(found.rights)


def test_a_certificate_alone_has_the_right_to_use_and_no_other(authority: Authority) -> None:
    with daemon_with_tls(authority, tls_client_ca=authority.ca) as made:
        alice = shown(authority, authority.client("alice"))
        with hg.connect(made.url, **alice) as session:
            assert works(session) and principal_of(made, session) == ("alice", {Right.USE})
            with pytest.raises(hg.PermissionDeniedError, match="Probe"):
                probe(session, "grpc://127.0.0.1:1")
        with admin.connect(made.url, **alice) as operator, pytest.raises(hg.PermissionDeniedError):
            operator.set_log_level("info")


def test_an_entry_makes_a_certificate_an_operators(daemon: ThreadDaemon, authority: Authority) -> None:
    operator = shown(authority, authority.client("ops-day"))
    with admin.connect(daemon.url, **operator) as operations:
        assert operations.sessions() == ()
    with hg.connect(daemon.url, **operator) as session:
        assert principal_of(daemon, session) == ("operators", {Right.USE, Right.ADMIN})


def test_an_entry_by_an_alternative_name_makes_a_peer_of_a_pool_with_a_quota(
    daemon: ThreadDaemon, authority: Authority
) -> None:
    member = authority.client("", "DNS:other.example", "DNS:one.pool.example", "IP:10.0.0.1", file="member")
    with hg.connect(daemon.url, **shown(authority, member)) as session:
        assert principal_of(daemon, session) == ("pool", {Right.USE, Right.POOL})
        with pytest.raises(hg.LimitExceededError, match="1 sessions"):
            hg.connect(daemon.url, **shown(authority, member))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("ops-night",), ("operators", {Right.USE, Right.ADMIN})),  # the first entry that matches
        (("x", "DNS:a.pool.example", "DNS:z.example"), ("pool", {Right.USE, Right.POOL})),
        (("x", "DNS:A.POOL.EXAMPLE"), ("pool", {Right.USE, Right.POOL})),
        (("x", "DNS:a.b.pool.example"), ("x", {Right.USE})),  # an asterisk is one label
        (("x", "URI:https://a.pool.example"), ("x", {Right.USE})),  # of another kind
        (("ops-",), ("ops-", {Right.USE})),  # an asterisk is not empty
        (("OPS-a",), ("OPS-a", {Right.USE})),
        (("xops-a",), ("xops-a", {Right.USE})),
        (("a*[b]{c}.:é",), ("a*[b]{c}.:é", {Right.USE})),
    ],
)
def test_names_decide_as_the_page_says(
    daemon: ThreadDaemon, authority: Authority, names: tuple[str, ...], expected: tuple[str, set[Right]]
) -> None:
    pair = authority.client(*names, file="named")
    with hg.connect(daemon.url, **shown(authority, pair)) as session:
        assert principal_of(daemon, session) == expected


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("operators",), "is the tenant of other certificates"),
        (("",), "common name"),
        (("ops-\x01a",), "common name"),
        (("", "DNS:other.example"), "common name"),
    ],
)
def test_names_that_could_be_taken_for_another_tenants_are_refused(
    daemon: ThreadDaemon, authority: Authority, names: tuple[str, ...], said: str
) -> None:
    pair = authority.client(*names, file="refused")
    with pytest.raises(hg.UnauthenticatedError, match=said):
        hg.connect(daemon.url, **shown(authority, pair))


@pytest.mark.parametrize("kind", ["DNS", "URI", "email"])
def test_a_name_with_a_nul_is_no_other_name(authority: Authority, kind: str) -> None:
    """gRPC reports such a name up to the NUL."""
    pair = authority.client("x", f"{kind}:a@pool.example\0.evil.example", file="nul")
    pem = Path(pair.certificate).read_bytes()
    key = {"DNS": "peer_dns", "URI": "peer_uri", "email": "peer_email"}[kind]
    found = {"x509_pem_cert": [pem], "x509_common_name": [b"x"], key: [b"a@pool.example"]}
    assert names_of(found) == [("CN", "x")]


def test_a_nul_in_a_common_name_is_refused(daemon: ThreadDaemon, authority: Authority) -> None:
    pair = authority.client("ops-a\0.evil", file="nul-name")
    with pytest.raises(hg.UnauthenticatedError, match="common name"):
        hg.connect(daemon.url, **shown(authority, pair))


def test_a_changed_file_is_in_force_and_sessions_that_lost_a_right_end(
    daemon: ThreadDaemon, authority: Authority, clients: Path
) -> None:
    operator = shown(authority, authority.client("ops-day"))
    with hg.connect(daemon.url, **operator) as session:
        ended = threading.Event()
        daemon.host.session(session.info.session).when_closing[ended] = lambda _error: ended.set()
        clients.write_text(ENTRIES.replace('"use", "admin"', '"use"'))
        assert ended.wait(20)
    with admin.connect(daemon.url, **operator) as operations, pytest.raises(hg.PermissionDeniedError):
        operations.sessions()


def test_a_broken_file_leaves_the_entries_before_it_in_force(
    daemon: ThreadDaemon, authority: Authority, clients: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clients.write_text("[[client]]\nmatch = 3\n")
    with admin.connect(daemon.url, **shown(authority, authority.client("ops-day"))) as operations:
        assert operations.sessions() == ()
    assert "the previous clients stay valid" in caplog.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[client]]\nmatch = 'ops'\ntenant = 'a'", "its match is 'ops'"),
        ("[[client]]\nmatch = 'cn:ops'\ntenant = 'a'", "its match is 'cn:ops'"),
        ("[[client]]\nmatch = 'CN:'\ntenant = 'a'", "its match is 'CN:'"),
        ("[[client]]\nmatch = 'CN:ops'", "its tenant is not valid"),
        ("[[client]]\nmatch = 'CN:ops'\ntenant = 'a'\nrights = ['root']", "its rights are"),
        ("[[client]]\nmatch = 'CN:ops'\ntenant = 'a'\nright = ['use']", "unknown key 'right'"),
        ("[[client]]\nmatch = 'CN:ops'\ntenant = 'a'\n[client.quota]\nsesions = 1", "unknown quota"),
        ("[[token]]\nname = 'x'", "are not clients"),
        ("[[client", "not TOML"),
        (f"a = {'[' * 5000}", "not a file of clients|not TOML"),
    ],
)
def test_what_is_wrong_in_a_file_of_clients_is_said(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        parse_clients(text, "clients.toml")
    assert caught.value.advice or "TOML" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tls_client_ca": "a", "tokens": "t"}, "tokens identify all callers"),
        ({}, "no certificates of clients are required"),
    ],
)
def test_a_file_of_clients_without_effect_is_refused(settings: dict[str, Any], said: str) -> None:
    tls = {"listen": ("grpcs://127.0.0.1:0",), "tls_certificate": "a", "tls_key": "b"}
    with pytest.raises(ConfigurationError, match=said):
        check_together(ServerConfig(tls_clients="c", **tls, **settings))
