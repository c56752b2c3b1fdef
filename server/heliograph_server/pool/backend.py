"""The backend "remote": devices of member daemons, by URL."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import heliograph as hg
from heliograph_backends.contract import CONTRACT_VERSION, Backend, Parameter, ParameterKind
from heliograph_proto.addresses import parse_address
from heliograph_proto.errors import ConfigurationError, HeliographError
from heliograph_server.pool.device import RemoteDevice

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0


class RemoteBackend(Backend):
    """All devices of the members that are named, or the one that a URL names: `remote:url=host:7070#cpu0`."""

    name = "remote"
    contract_version = CONTRACT_VERSION
    parameters = (
        Parameter(
            "url", ParameterKind.TEXT, "a member: grpc://host:port or unix:///path, with #device for one"
        ),
    )

    def __init__(self, parameters: Sequence[Mapping[str, Any]] = ({},)) -> None:
        self._devices: tuple[RemoteDevice, ...] = ()
        self._why = ""
        made: list[RemoteDevice] = []
        try:
            for one in parameters:
                made += _devices_of(one.get("url", ""))
        except HeliographError as error:
            for device in made:
                device.close()
            self._why = str(error)
        else:
            self._devices = tuple(made)

    def devices(self) -> tuple[RemoteDevice, ...]:
        return self._devices

    def why_unavailable(self) -> str:
        return self._why


def _devices_of(url: str) -> list[RemoteDevice]:
    """The devices of a member, each with a session of its own. Raises what connecting does."""
    if not url:
        raise ConfigurationError("no member is named", advice="name one: remote:url=grpc://host:7070")
    address = parse_address(url)
    with hg.connect(url, timeout=CONNECT_SECONDS) as session:
        names = [address.device] if address.device else [device.name for device in session.devices]
    base = url.partition("#")[0]
    made: list[RemoteDevice] = []
    try:
        for name in names:
            made.append(_connect(f"{base}#{name}"))
    except HeliographError:
        for device in made:
            device.close()
        raise
    return made


def _connect(url: str) -> RemoteDevice:
    address = parse_address(url)
    session = hg.connect(url, timeout=CONNECT_SECONDS)
    try:
        member = session.device(address.device) if address.device else session.devices[0]
        host = Path(address.path).stem if address.scheme == "unix" else f"{address.host}:{address.port}"
        return RemoteDevice(f"{host or 'local'}/{member.name}", session, member)
    except BaseException:
        session.close()
        raise


@contextmanager
def open_device(url: str) -> Iterator[RemoteDevice]:
    """The device that a URL names, or a daemon's first, as one of the backend contract.

    Raises what `hg.connect` does, and UnknownDeviceError.
    """
    device = _connect(url)
    try:
        yield device
    finally:
        device.close()
