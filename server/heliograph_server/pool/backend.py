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
    """All devices of the members that are named, or the one that a URL names: `remote:url=host:7070#cpu0`."""

    name = "remote"
    contract_version = CONTRACT_VERSION
    parameters = (
        Parameter(
            "url", ParameterKind.TEXT, "a member: grpc://host:port or unix:///path, with #device for one"
        ),
        Parameter("token", ParameterKind.TEXT, "a file with the token to show there ($HELIOGRAPH_TOKEN)"),
        Parameter("ca", ParameterKind.TEXT, "a PEM file of authorities that vouch for it ($HELIOGRAPH_CA)"),
        Parameter("certificate", ParameterKind.TEXT, "a PEM file to show there ($HELIOGRAPH_CERTIFICATE)"),
        Parameter("key", ParameterKind.TEXT, "its key ($HELIOGRAPH_KEY)"),
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
    """The daemons that are named, one session each, however many of their devices are named. Raises what
    connecting does."""
    wanted: dict[str, list[str]] = {}
    shown: dict[str, Credentials | None] = {}
    for one in parameters:
        if not (url := one.get("url", "")):
            raise ConfigurationError("no member is named", advice="name one: remote:url=grpc://host:7070")
        address = parse_address(url)
        daemon = str(replace(address, device=""))
        wanted.setdefault(daemon, []).append(address.device)
        # Of several devices of one daemon, the first that says so says it for all.
        shown[daemon] = shown.get(daemon) or _shown(one)
    made: list[Member] = []
    try:
        for url, names in wanted.items():
            credentials = shown[url] or NO_CREDENTIALS
            made.append(join(url, names if all(names) else (), credentials=credentials))
    except HeliographError:
        for member in made:
            member.close()
        raise
    return made


def _shown(parameters: Mapping[str, Any]) -> Credentials | None:
    """What a member is to be shown, if that is said. Raises InvalidArgumentError."""
    ca, certificate, key = (str(parameters.get(one) or "") for one in ("ca", "certificate", "key"))
    file = str(parameters.get("token") or "")
    found = Credentials(token_in(file, "token") if file else "", ca, certificate, key)
    return found if found != NO_CREDENTIALS else None


@contextmanager
def open_device(url: str) -> Iterator[RemoteDevice]:
    """The device that a URL names, or a daemon's first, as one of the backend contract.

    Raises what `hg.connect` does, and UnknownDeviceError.
    """
    address = parse_address(url)
    shown = replace(NO_CREDENTIALS, token=address.token)
    names = (address.device,) if address.device else ()
    member = join(str(replace(address, device="")), names, credentials=shown)
    try:
        yield member.devices[0]
    finally:
        member.close()
