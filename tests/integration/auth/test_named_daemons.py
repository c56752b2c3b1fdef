"""The daemons that a session may make another one connect to."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from access_daemons import Tokens, daemon_with_tokens
from daemon_threads import thread_daemon

import heliograph as hg
from heliograph.head.handoff import hand_over, new_edge, probe
from heliograph.head.members import compile_frozen
from heliograph_proto.errors import MemberLostError, PermissionDeniedError
from heliograph_proto.plans import Arrival, Partition, PeerSource, PlanOptions


@contextmanager
def listener(answer: bytes | None) -> Iterator[tuple[str, threading.Event]]:
    """A program that is no daemon: the URL, and whether anything has connected. Without an answer
    it is silent."""
    reached = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            kept = []
            while True:
                try:
                    made, _ = listening.accept()
                except OSError:
                    break
                reached.set()
                kept.append(made)
                if answer is not None:
                    made.sendall(answer)
                    made.close()
            for one in kept:
                one.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"grpc://127.0.0.1:{listening.getsockname()[1]}", reached
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(10)


def test_a_tenant_cannot_make_a_daemon_connect(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path / "tokens")
    with daemon_with_tokens(tokens) as made, listener(b"") as (url, reached):
        with (
            thread_daemon() as other,
            hg.connect(made.url, token=tokens.of["alice"]) as session,
            hg.connect(other.url) as elsewhere,
        ):
            with pytest.raises(PermissionDeniedError):
                probe(session, url)
            target = session.put(np.zeros(4, np.float32))
            with pytest.raises(PermissionDeniedError, match="fetch a tensor"):
                hand_over(elsewhere.put(np.ones(4, np.float32)), target, url, timeout=10)
        assert not reached.is_set()


def test_entries_restrict_the_daemons_that_the_right_pool_may_name(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path / "tokens")
    with (
        daemon_with_tokens(tokens, pool_peers=("10.0.0.0/8",)) as made,
        listener(b"") as (url, reached),
        hg.connect(made.url, token=tokens.of["head"]) as session,
    ):
        with pytest.raises(PermissionDeniedError, match="does not connect to"):
            probe(session, url)
        assert not reached.is_set()
        made.change(pool_peers=("loopback",))
        probe(session, url, seconds=1)
        assert reached.is_set()


def test_an_open_daemon_connects_within_its_own_host_only() -> None:
    with (
        thread_daemon() as made,
        hg.connect(made.url) as session,
        pytest.raises(PermissionDeniedError, match=r"does not connect to grpc://192\.0\.2\.1:1"),
    ):
        probe(session, "grpc://192.0.2.1:1")


def test_a_probe_does_not_tell_what_else_is_at_an_address() -> None:
    with (
        thread_daemon() as made,
        hg.connect(made.url) as session,
        listener(b"HTTP/1.0 404 Not Found\r\n\r\n") as (web, _),
        listener(None) as (silent, _),
    ):
        said = set()
        for url in ("grpc://127.0.0.1:1", web, silent):
            found = probe(session, url, seconds=1)
            assert isinstance(found.error, MemberLostError)
            said.add(str(found.error).replace(url, "URL"))
        assert len(said) == 1


def test_entries_restrict_the_sources_of_a_partition_and_of_a_tensor(tmp_path: Path) -> None:
    """Also for callers with the right `pool`."""
    tokens = Tokens(tmp_path / "tokens")
    with (
        daemon_with_tokens(tokens, pool_peers=("10.0.0.0/8",)) as made,
        listener(b"") as (url, reached),
        hg.connect(made.url, token=tokens.of["head"]) as session,
    ):
        g = hg.Graph()
        x = g.input("x", (4,), "f32")
        g.output("y", x + 1.0)
        arrival = Arrival(0, new_edge(), PeerSource(url, bytes(16)))
        options = PlanOptions(partition=Partition((arrival,)))
        with pytest.raises(PermissionDeniedError, match="does not connect to"):
            compile_frozen(session, g._outline(), options, bindings={}, timeout=10)
        target = session.put(np.zeros(4, np.float32))
        with (
            thread_daemon() as other,
            hg.connect(other.url) as elsewhere,
            pytest.raises(PermissionDeniedError, match="does not connect to"),
        ):
            hand_over(elsewhere.put(np.ones(4, np.float32)), target, url, timeout=10)
        assert not reached.is_set()
