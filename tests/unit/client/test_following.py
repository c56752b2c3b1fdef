"""The daemons that a client follows its session to, and the credentials that it shows there."""

from __future__ import annotations

import pickle

import pytest

import heliograph as hg
from heliograph.transport.following import followed, info_there, named_destination, trusted
from heliograph_proto.addresses import Credentials, parse_address
from heliograph_proto.codec import decode_error, encode_error
from heliograph_proto.digests import moved_secret
from heliograph_proto.sessions import DirectOffer, Limits, SessionInfo

TOKEN = Credentials(token="secret")
NOTHING = Credentials()
PIN = "ab" * 32


@pytest.mark.parametrize(
    ("own", "other", "shown"),
    [
        ("grpc://one:1", "grpc://other:2", NOTHING),
        ("grpc://one:1", "grpcs://other:2", TOKEN),
        ("grpcs://one:1", "grpcs://other:2", TOKEN),
        ("grpcs://one:1", "grpcs://other:2?tls_name=pool", TOKEN),
        ("grpc://127.0.0.1:1", "grpc://127.0.0.1:2", TOKEN),
        ("unix:///a", "unix:///b", TOKEN),
        ("grpc://127.0.0.1:1", "unix:///b", TOKEN),
    ],
)
def test_a_client_follows_where_it_loses_nothing(own: str, other: str, shown: Credentials) -> None:
    found = trusted(other, parse_address(own), shown)
    assert (found.url, found.credentials) == (other, shown)


@pytest.mark.parametrize(
    ("own", "other", "why"),
    [
        ("grpcs://one:1", "grpc://other:2", "not be encrypted"),
        ("grpcs://one:1", "unix:///b", "not be encrypted"),
        ("grpc://one:1", "grpc://127.0.0.1:2", "of this host"),
        ("grpc://one:1", "unix:///b", "of this host"),
        ("grpc://127.0.0.1:1", "grpc://other:2", "token would go there unencrypted"),
        (f"grpcs://one:1?pin={PIN}", "grpcs://other:2", "fingerprint"),
        ("grpcs://one:1", f"grpcs://other:2?pin={PIN}", "no plain address"),
        ("grpc://127.0.0.1:1", "grpc://other:2?insecure=yes", "no plain address"),
        ("grpc://one:1", "grpc://other:2?token=theirs", "no plain address"),
        ("grpc://one:1", "local:", "no plain address"),
        ("grpc://one:1", "gopher://other", "unknown scheme"),
    ],
)
def test_a_client_follows_no_daemon_that_could_take_something(own: str, other: str, why: str) -> None:
    with pytest.raises(hg.PermissionDeniedError, match="does not follow") as refused:
        trusted(other, parse_address(own), TOKEN)
    assert why in refused.value.message and "secret" not in str(refused.value)


def test_a_token_that_may_go_in_the_clear_goes_on_so() -> None:
    own, shown = parse_address("grpc://one:1?insecure=yes"), Credentials(token="secret", in_clear=True)
    found = trusted("grpc://other:2", own, shown)
    assert found.credentials.token == "secret" and found.address.insecure


def test_a_user_may_name_what_a_daemon_may_not() -> None:
    own = parse_address("grpc://127.0.0.1:1#cpu1")
    named = named_destination("grpc://other:2?insecure=yes&token=theirs", own, TOKEN)
    assert named.credentials.token == "theirs" and named.address.device == "cpu1"
    assert named.url == "grpc://other:2", "the daemon hears of no token"
    there = hg.MovedError("it is elsewhere").to("grpc://other:2", b"")
    assert followed(there, own, TOKEN, named) is named
    with pytest.raises(hg.PermissionDeniedError):
        followed(there, own, TOKEN, None)
    with pytest.raises(hg.InvalidArgumentError, match="unencrypted"):
        named_destination("grpc://other:2", own, TOKEN)


def test_the_secret_there_comes_from_the_secret_here_and_the_proof() -> None:
    here = SessionInfo(
        b"s" * 16,
        1,
        ("lease", "direct", "shared-memory", "command-socket"),
        Limits(),
        b"",
        "",
        (),
        direct=DirectOffer(1, b"", b""),
    )
    there = info_there(here, hg.MovedError("it is elsewhere").to("grpc://other:2", b"p" * 16))
    assert there.session == moved_secret(b"s" * 16, b"p" * 16) != here.session
    assert len(there.session) == 16 and there.features == here.features and there.direct is None
    assert moved_secret(b"s" * 16, b"q" * 16) != there.session


def test_the_place_of_a_session_survives_the_wire_and_copies() -> None:
    made = hg.MovedError("it is elsewhere", advice="follow").to("grpc://other:2", b"p" * 16)
    for found in (decode_error(encode_error(made)), pickle.loads(pickle.dumps(made)), made.anew()):
        assert isinstance(found, hg.MovedError)
        assert (found.url, found.proof, found.advice) == (made.url, made.proof, made.advice)
        assert found is not made
