"""`local:` as a transport that the server's package brings, and what is said where it is not installed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata

import pytest

import heliograph as hg
from heliograph.core import methods
from heliograph.transport import calls, plugins
from heliograph_server.inprocess import blocking


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What was looked up before is looked up again."""
    plugins.transport.cache_clear()
    yield
    plugins.transport.cache_clear()


def connect_blocking() -> object:
    return hg.connect("local:")


def connect_aio() -> object:
    async def connect() -> object:
        return await hg.aio.connect("local:")

    return asyncio.run(connect())


CONNECTS = pytest.mark.parametrize("connect", [connect_blocking, connect_aio])


@CONNECTS
def test_without_the_server_it_is_said_what_to_install(
    connect: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "GROUP", "no.such.group")
    with pytest.raises(hg.ConfigurationError, match="'heliograph_server' is not installed") as refusal:
        connect()
    assert refusal.value.advice == "pip install 'heliograph[server]'"


@CONNECTS
def test_without_a_package_of_the_server_it_is_said_which(
    connect: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = metadata.EntryPoint("local", "a_package_that_nobody_has", plugins.GROUP)
    monkeypatch.setattr(plugins, "_installed", lambda name: [broken])
    with pytest.raises(hg.ConfigurationError, match="'a_package_that_nobody_has' is not installed"):
        connect()


def test_the_transports_of_this_distribution_are_found_without_reading_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(metadata, "entry_points")
    assert plugins.transport("local") is blocking.LocalShell
    assert plugins.transport("local.aio").__qualname__ == "AioLocalShell.open"


def test_a_client_loads_nothing_of_the_server() -> None:
    code = "import sys, heliograph, heliograph.aio; print('heliograph_server' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


def test_every_method_is_known_over_the_wire_and_in_this_process() -> None:
    known = {one for one in vars(methods).values() if isinstance(one, methods.Method)}
    # Within one process no connection breaks, no daemon is restarted, and no session leaves.
    over_a_wire_alone = {
        methods.FIND_TRANSFER,
        methods.SNAPSHOT,
        methods.TAKE_UP,
        methods.TELL_HANDOVER,
        methods.MOVE,
        methods.PREPARE_MOVE,
    }
    assert set(calls._CODECS) == set(blocking._ANSWERS) | over_a_wire_alone == known
