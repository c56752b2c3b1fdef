"""Devices that come and go while sessions live: those of a host's pool, as host and sessions see them.

Any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from heliograph_backends.contract import Device
from heliograph_proto.devices import MemberInfo
from heliograph_proto.errors import DeviceLostError, HeliographError
from heliograph_server.resources.checks import unknown_device
from heliograph_server.resources.measurements import HostMeasurements


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """Devices of one member came, or are gone."""

    member: str
    appeared: tuple[Device, ...] = ()
    lost: tuple[Device, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Reachability:
    """Whether a member, or this host (""), can fetch values from another member; None: nobody knows yet."""

    a: str
    b: str
    reachable: bool | None
    #: If not, why.
    why: str = ""


#: Told of each change, one at a time and in order, when `Membership.devices` has it already.
Changed: TypeAlias = Callable[[MembershipChange], None]


class Membership(Protocol):
    """The members of a pool, as a host needs them. Thread-safe; `heliograph_server.pool.Pool` is one."""

    @property
    def devices(self) -> Sequence[Device]:
        """Those of all members that are ready, by priority."""

    @property
    def members(self) -> Sequence[MemberInfo]:
        """All that are, or are to be."""

    @property
    def reaches(self) -> Sequence[Reachability]:
        """Who of those that are ready can reach whom: first this host, then each member."""

    @property
    def daemons(self) -> Sequence[bytes]:
        """The incarnations of all daemons behind these devices, through other heads too."""

    def start(self, incarnation: bytes, changed: Changed, links: HostMeasurements) -> None:
        """Begins to look for members, of a head with this incarnation; and measures the ways between them."""

    def why_missing(self, device: str) -> HeliographError | None:
        """Why a member that would have a device of this name does not offer it; None if none would."""

    def close(self) -> None:
        """Lets go of all members. Idempotent."""


class SessionDevices(Mapping[str, Device]):
    """The devices that one session may use, by name and in their order, with those that it lost.

    Thread-safe: whoever reads sees the devices of one moment.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        why_missing: Callable[[str], HeliographError | None] = lambda name: None,
    ) -> None:
        self._lock = threading.Lock()
        self._why_missing = why_missing
        self._first = devices[0].name
        #: A new one with each change.
        self._devices = {device.name: device for device in devices}
        self._lost: dict[str, DeviceLostError] = {}

    def __repr__(self) -> str:
        return f"<SessionDevices {', '.join(self._devices)}>"

    def __getitem__(self, name: str) -> Device:
        return self._devices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._devices)

    def __len__(self) -> int:
        return len(self._devices)

    def device(self, name: str) -> Device:
        """By name; "" is the first. Raises DeviceLostError for one that is gone, UnknownDeviceError, and why
        a member that would have it does not."""
        name = name or self._first
        if (found := self._devices.get(name)) is not None:
            return found
        if (error := self._lost.get(name) or self._why_missing(name)) is not None:
            raise error.at(error.origin)
        raise unknown_device(name, self._devices)

    def present(self) -> tuple[Device, ...]:
        """Those that are there."""
        return tuple(self._devices.values())

    def change(self, change: MembershipChange) -> bool:
        """Whether it was news."""
        with self._lock:
            devices = dict(self._devices)
            for device in change.lost:
                if devices.get(device.name) is device:
                    del devices[device.name]
                    self._lost[device.name] = device.lost or DeviceLostError(change.why)
            for device in change.appeared:
                if device.lost is None:
                    devices[device.name] = device
                    self._lost.pop(device.name, None)
            is_news = devices != self._devices
            self._devices = devices
        return is_news
