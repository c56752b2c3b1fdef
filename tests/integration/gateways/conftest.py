"""A daemon that listens for ggml's RPC protocol."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from daemon_threads import ThreadDaemon, thread_daemon
from ggml_rpc_client import RpcClient, rpc_client, warm_up


@pytest.fixture(scope="module")
def gateway() -> Iterator[ThreadDaemon]:
    with thread_daemon(ggml_rpc="127.0.0.1:0") as daemon:
        warm_up(daemon)
        yield daemon


@pytest.fixture
def port(gateway: ThreadDaemon) -> int:
    return gateway.ggml_rpc_port


@pytest.fixture
def client(port: int) -> Iterator[RpcClient]:
    with rpc_client(port) as made:
        yield made
