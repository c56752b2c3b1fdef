"""TCP connections beside gRPC's: the clients and servers that have them."""

from __future__ import annotations

import socket
import threading
from typing import Any

import numpy as np
import pytest
from certificates import Authority
from daemon_threads import ThreadDaemon, thread_daemon
from direct_clients import (
    offers,
)
from middlemen import middleman

import heliograph as hg
from heliograph.connection import address_of
from heliograph.transport.direct import opening
from heliograph_proto.codec.frames import framed
from heliograph_proto.sessions import DirectOffer
from heliograph_proto.v1 import direct_pb2

SECONDS = 60
MIB = 2**20


def test_a_client_that_asks_for_none_uses_grpc(lone: ThreadDaemon) -> None:
    with hg.connect(lone.url, direct=False) as session:
        assert "direct=False" in session.why_no_command_socket
        assert session.put(np.arange(MIB)).get()[-1] == MIB - 1


def test_a_server_that_takes_none_is_used_by_grpc() -> None:
    with thread_daemon() as daemon, hg.connect(daemon.url) as session:
        assert "takes no direct connections" in session.why_no_command_socket
        assert session.put(np.arange(MIB)).get()[-1] == MIB - 1


def test_a_server_with_tls_takes_none(tmp_path: Any) -> None:
    authority = Authority(tmp_path)
    made = authority.server()
    options = {"tls_certificate": str(made.certificate), "tls_key": str(made.key)}
    listen = ("grpcs://127.0.0.1:0", "grpc://127.0.0.1:0")
    with (
        thread_daemon(listen=listen, direct_connections=0, **options) as daemon,
        hg.connect(daemon.url, ca=authority.ca) as session,
    ):
        assert not session.command_socket


def test_a_client_behind_a_proxy_uses_grpc(lone: ThreadDaemon) -> None:
    with middleman(lone.url) as between, hg.connect(between.url) as session:
        assert "proxy" in session.why_no_command_socket
        assert session.put(np.arange(MIB)).get()[-1] == MIB - 1


def test_a_port_that_nobody_listens_at_is_no_error(
    lone: ThreadDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    offers(lone, monkeypatch, port)
    with hg.connect(lone.url) as session:
        assert "refused" in session.why_no_command_socket
        assert session.put(np.arange(MIB)).get()[-1] == MIB - 1


def test_a_server_has_nobody_send_more_than_a_ticket_to_a_port_of_its_choice() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.setblocking(False)
        offer = DirectOffer(other.getsockname()[1], bytes(65), b"proof", own_ports=(1,))
        with pytest.raises(hg.UnsupportedError, match="a ticket of 65 bytes"):
            opening.open_offered(address_of("grpc://127.0.0.1:1"), offer, direct_pb2.DirectRequest(), 1.0)
        with pytest.raises(BlockingIOError):
            other.accept()


def test_another_program_at_the_port_is_not_trusted(
    lone: ThreadDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        offers(lone, monkeypatch, other.getsockname()[1])

        def answer() -> None:
            client, _ = other.accept()
            with client:
                client.recv(4096)
                wrong = direct_pb2.DirectResponse(proof=b"another")
                client.sendall(framed(wrong.SerializeToString()))
                assert client.recv(1) == b""

        answering = threading.Thread(target=answer)
        answering.start()
        with hg.connect(lone.url) as session:
            assert "another program" in session.why_no_command_socket
        answering.join(SECONDS)
        assert not answering.is_alive()


def test_a_silent_port_is_not_tried_again_at_once(
    lone: ThreadDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "DIRECT_SECONDS", 0.05)
    monkeypatch.setattr(opening, "_avoided", {})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        offers(lone, monkeypatch, silent.getsockname()[1])
        with hg.connect(lone.url) as session:
            assert "timed out" in session.why_no_command_socket
        with hg.connect(lone.url) as session:
            assert "a short time ago" in session.why_no_command_socket


def test_the_tickets_are_no_text_of_a_session(lone: ThreadDaemon) -> None:
    with hg.connect(lone.url) as session:
        offer = session.info.direct
        assert offer is not None
        assert repr(offer.ticket) not in repr(session.info) and repr(offer.proof) not in repr(session.info)


def test_an_address_of_a_family_that_is_off_keeps_no_other_from_being_tried(
    lone: ThreadDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = socket.getaddrinfo

    def both(*given: Any, **named: Any) -> Any:
        unknown = (255, socket.SOCK_STREAM, 0, "", ("::1", 1))
        return [unknown, *find(*given, **named)]

    monkeypatch.setattr(opening.socket, "getaddrinfo", both)
    with hg.connect(lone.url) as session:
        assert session.command_socket, session.why_no_command_socket
