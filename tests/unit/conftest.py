"""Unit tests are of one process: one that opens a connection or starts a daemon fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc._cython import cygrpc

#: gRPC's core, which opens its sockets by itself.
ENDS = ("Channel", "Server", "AioChannel", "AioServer")
#: Not what an event loop wakes itself with, which is a pair of sockets.
EVENTS = ("socket.bind", "socket.connect")

FOLDER = Path(__file__).parent
_is_unit = False


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Hooks of this kind stay for good, so that others run with it too."""
    if _is_unit and (event in EVENTS or (event == "subprocess.Popen" and "serve" in arguments[1])):
        raise AssertionError(f"a unit test has no {event} {arguments[1:2]}: it belongs to tests/integration")


sys.addaudithook(_watch)


class _Refused:
    def __init__(self, *_: Any, **__: Any) -> None:
        raise AssertionError("a unit test opens no connection of gRPC: it belongs to tests/integration")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """From the first of its fixtures on; pytest calls this for the items of other folders, too."""
    global _is_unit
    if FOLDER not in item.path.parents:
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        for name in ENDS:
            patch.setattr(cygrpc, name, _Refused)
        _is_unit = True
        try:
            return (yield)
        finally:
            _is_unit = False
