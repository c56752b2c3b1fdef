"""The backend "remote": devices of member daemons, by URL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from heliograph.transport.channels import NO_CREDENTIALS, token_in
from heliograph_backends.contract import CONTRACT_VERSION, Backend, Parameter, ParameterKind
from heliograph_proto.addresses import Credentials, parse_address
from heliograph_proto.errors import ConfigurationError, HeliographError
from heliograph_server.pool.member import Member, join
from heliograph_server.pool.remote.device import RemoteDevice


class RemoteBackend(Backend):
    """All devices of the named members, or the one that a URL names:
    `remote:url=host:7070#cpu0`."""

    name = "remote"
    contract_version = CONTRACT_VERSION
    parameters = (
        Parameter(
            "url", ParameterKind.TEXT, "a member: grpc://host:port or unix:///path, with #device for one"
        ),
        Parameter("token", ParameterKind.TEXT, "a file with the token to present ($HELIOGRAPH_TOKEN)"),
        Parameter(
            "ca",
            ParameterKind.TEXT,
            "a PEM file of the CAs to trust ($HELIOGRAPH_CA)",
        ),
        Parameter(
            "certificate",
            ParameterKind.TEXT,
            "a PEM file to present ($HELIOGRAPH_CERTIFICATE)",
        ),
        Parameter("key", ParameterKind.TEXT, "the certificate's key ($HELIOGRAPH_KEY)"),
    )

    def __init__(self, parameters: Sequence[Mapping[str, Any]] = ({},)) -> None:
        self._devices: tuple[RemoteDevice, ...] = ()
        self._why = ""
        try:
            members = _members_of(parameters)
        except HeliographError as error:
            self._why = error.in_a_line()
        else:
            self._devices = tuple(device for member in members for device in member.devices)

    def devices(self) -> tuple[RemoteDevice, ...]:
        return self._devices

    def why_unavailable(self) -> str:
        return self._why


def _members_of(parameters: Sequence[Mapping[str, Any]]) -> list[Member]:
    """Join the named daemons, with one session each for all of their devices. Raises the errors of
    `join`."""
    devices: dict[str, list[str]] = {}
    credentials: dict[str, Credentials | None] = {}
    for one in parameters:
        if not (url := one.get("url", "")):
            raise ConfigurationError("no member is named", advice="name one: remote:url=grpc://host:7070")
        address = parse_address(url)
        daemon = str(replace(address, device=""))
        devices.setdefault(daemon, []).append(address.device)
        # The first device of a daemon with credentials gives them for all.
        credentials[daemon] = credentials.get(daemon) or _credentials(one)
    made: list[Member] = []
    try:
        for url, names in devices.items():
            names = names if all(names) else []
            made.append(join(url, names, credentials=credentials[url] or NO_CREDENTIALS))
    except HeliographError:
        for member in made:
            member.close()
        raise
    return made


def _credentials(parameters: Mapping[str, Any]) -> Credentials | None:
    """The credentials in a member's parameters, if any. Raises InvalidArgumentError."""
    ca, certificate, key = (str(parameters.get(one) or "") for one in ("ca", "certificate", "key"))
    file = str(parameters.get("token") or "")
    found = Credentials(token_in(file, "token") if file else "", ca, certificate, key)
    return found if found != NO_CREDENTIALS else None


@contextmanager
def open_device(url: str) -> Iterator[RemoteDevice]:
    """Open the device that a URL names, or a daemon's first, as a device of the backend contract.

    Raises the errors of `hg.connect`, and UnknownDeviceError.
    """
    address = parse_address(url)
    credentials = replace(NO_CREDENTIALS, token=address.token)
    names = (address.device,) if address.device else ()
    member = join(str(replace(address, device="")), names, credentials=credentials)
    try:
        yield member.devices[0]
    finally:
        member.close()
