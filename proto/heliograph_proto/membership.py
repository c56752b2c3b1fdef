"""Daemons of a pool, and what happens to their devices."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heliograph_proto.description import DeviceInfo


class MemberState(Enum):
    """Where a daemon of a pool is in its life."""

    #: It has not answered yet, or not as a member must; it is tried again.
    JOINING = 1
    #: Its devices are there.
    READY = 2
    #: It was ready, and does not answer any more; it is tried again.
    LOST = 3


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """A daemon whose devices are, or were to be, among a head's."""

    #: Its devices are named NAME/DEVICE.
    name: str
    #: Where the head reaches it.
    address: str
    state: MemberState
    #: Unless it is ready: why not, in words.
    why: str = ""
    #: Names of its devices; none unless it is ready.
    devices: tuple[str, ...] = ()
    #: Its program and version; empty unless it is ready, and where the head does not tell.
    server: str = ""
    #: Unless it is ready: what to do about that, in words; may be empty.
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Way:
    """From one daemon of a pool to another one, which it fetches values from; what placement goes by."""

    #: The member that fetches; empty: the head itself.
    a: str
    #: The member from which it does.
    b: str
    #: Of an empty message, there and back.
    round_trip_seconds: float
    #: Of payload.
    bytes_per_second: float
    #: Whether these two were measured; else they are assumed.
    round_trip_measured: bool = False
    bandwidth_measured: bool = False
    #: Whether `a` can fetch values from `b`; if not, they go through the head. None: nobody knows yet.
    reachable: bool | None = None
    #: If it cannot: why, in words.
    why: str = ""

    @property
    def measured(self) -> bool:
        """Whether nothing of it is assumed."""
        return self.round_trip_measured and self.bandwidth_measured


@dataclass(frozen=True, slots=True)
class DeviceChange:
    """Devices of a member came to a head, or are gone from it."""

    member: str
    appeared: tuple[DeviceInfo, ...] = ()
    #: Names of those that are gone, and why, in words.
    lost: tuple[str, ...] = ()
    why: str = ""
    #: The incarnations of all daemons behind the head, from now on.
    daemons: tuple[bytes, ...] = ()
