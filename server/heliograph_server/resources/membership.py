"""Devices of a pool that appear and disappear during sessions, as seen by host and sessions.

Everything here may be called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from heliograph_backends.contract import Buffer, Device
from heliograph_proto.devices import MemberInfo
from heliograph_proto.errors import DeviceLostError, HeliographError
from heliograph_proto.sessions import StayingSession, WantedBytes
from heliograph_server.resources.checks import unknown_device
from heliograph_server.resources.device_names import DeviceNames
from heliograph_server.resources.measurements import HostMeasurements


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """Devices of one member that appeared or were lost, or that leave, since it drains."""

    member: str
    appeared: tuple[Device, ...] = ()
    lost: tuple[Device, ...] = ()
    why: str = ""
    #: Called when all sessions have the devices, before their clients hear of them.
    applied: Callable[[], None] = lambda: None
    #: Devices whose values are to go elsewhere while their `is_draining` is true.
    leaving: tuple[Device, ...] = ()
    #: Tells the member which sessions keep values there; none: it may end. It may block. False if
    #: the member was not told.
    tell_staying: Callable[[Sequence[StayingSession]], bool] = lambda staying: True


@dataclass(frozen=True, slots=True)
class Reachability:
    """The reachability of member `b` from member `a`, or from this host (""). None: not known
    yet."""

    a: str
    b: str
    reachable: bool | None
    #: If it is not reachable: the reason, and the time for which that has been so.
    why: str = ""
    seconds: float = 0.0


#: Called for each change, one at a time and in order, after `Membership.devices` was updated.
Changed: TypeAlias = Callable[[MembershipChange], None]


class Membership(Protocol):
    """The members of a pool, as a host uses them. Thread-safe. Implemented by
    `heliograph_server.pool.Pool`."""

    @property
    def devices(self) -> Sequence[Device]:
        """The devices of all ready members, by priority."""

    @property
    def members(self) -> Sequence[MemberInfo]:
        """All members, including those that are not ready."""

    @property
    def reaches(self) -> Sequence[Reachability]:
        """The reachability among ready members: from this host first, then from each member."""

    @property
    def relayed(self) -> Sequence[Reachability]:
        """The pairs of ready members whose first cannot reach the second, so that this host relays
        values."""

    @property
    def daemons(self) -> Sequence[bytes]:
        """The incarnations of all daemons behind these devices, also through other heads."""

    def start(self, incarnation: Callable[[], bytes], changed: Changed, links: HostMeasurements) -> None:
        """Begin to look for members, for a head with this incarnation at any time, and to measure
        the links between them."""

    def why_missing(self, device: str) -> HeliographError | None:
        """The reason why a member does not offer a device of this name. None if no member has
        one."""

    def await_devices(self, names: Collection[str]) -> None:
        """Wait for devices of members to be ready, for as long as a member that is away."""

    def take_up(self, wanted: Sequence[WantedBytes]) -> Sequence[tuple[int, Buffer]]:
        """Take the memory with wanted bytes that members kept for an earlier life of this head, and
        have them free the rest. Return the buffers with their places in `wanted`. Blocks."""

    def let_go(self) -> None:
        """Leave all members, which keep for a while what they hold for this head."""

    def close(self) -> None:
        """Release all members. Idempotent."""


class SessionDevices(Mapping[str, Device]):
    """The devices that one session may use, by name and in order, and those that it lost.

    Thread-safe: a reader sees the devices of one moment.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        why_missing: Callable[[str], HeliographError | None] = lambda name: None,
    ) -> None:
        self._lock = threading.Lock()
        self._why_missing = why_missing
        self._first = devices[0].name
        #: Replaced by each change.
        self._devices = {device.name: device for device in devices}
        self._lost: dict[str, DeviceLostError] = {}
        #: Devices that took the place of others.
        self.names = DeviceNames()

    def __repr__(self) -> str:
        return f"<SessionDevices {', '.join(self._devices)}>"

    def __getitem__(self, name: str) -> Device:
        return self._devices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._devices)

    def __len__(self) -> int:
        return len(self._devices)

    def device(self, name: str) -> Device:
        """Return a device by name; "" is the first.

        Raises DeviceLostError for a lost device, UnknownDeviceError, and the reason why a member
        does not offer the device.
        """
        name = self.names.current(name or self._first)
        if (found := self._devices.get(name)) is not None:
            return found
        if (error := self._lost.get(name) or self._why_missing(name)) is not None:
            raise error.at(error.origin)
        raise unknown_device(name, self._devices)

    def present(self) -> tuple[Device, ...]:
        """The devices that are not lost."""
        return tuple(self._devices.values())

    def change(self, change: MembershipChange) -> bool:
        """Apply a change. Return True if it had an effect."""
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
            self.names.appeared([one.name for one in change.appeared])
            has_effect = devices != self._devices
            self._devices = devices
        return has_effect
