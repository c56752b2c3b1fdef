"""A daemon behind ways that can be cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from cutting import CutProxy, cut_proxy
from daemon_threads import thread_daemon
from surviving import TRANSPORTS, Site

from heliograph.transport import handshake


@pytest.fixture(params=list(TRANSPORTS), ids=list(TRANSPORTS))
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def site(transport: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with thread_daemon(**TRANSPORTS[transport]) as daemon:
        assert daemon._daemon is not None
        port = daemon._daemon._direct.port
        with cut_proxy(daemon.url) as grpc, cut_proxy(f"grpc://127.0.0.1:{port or 1}") as direct:
            _lead_through(monkeypatch, grpc, direct)
            yield Site(daemon, grpc, direct)


def _lead_through(monkeypatch: pytest.MonkeyPatch, grpc: CutProxy, direct: CutProxy) -> None:
    """Have clients find the direct port behind its proxy."""
    decode = handshake.decode_open

    def decoded(answer: bytes, address: Any) -> Any:
        info = decode(answer, address)
        if info.direct is None:
            return info
        return replace(info, direct=replace(info.direct, port=direct.port, own_ports=(grpc.port,)))

    monkeypatch.setattr(handshake, "decode_open", decoded)
