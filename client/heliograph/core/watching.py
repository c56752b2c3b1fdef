"""What happens to a server's devices, for both APIs: the list that a session has, and who watches it."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from heliograph_proto.devices import DeviceChange, DeviceInfo
from heliograph_proto.errors import LimitExceededError
from heliograph_proto.sessions import SessionInfo

if TYPE_CHECKING:
    from collections.abc import Callable

#: Events that wait for who watches; further ones are missed, and it is told.
MOST_EVENTS = 10_000


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """A device of the server came, or is gone."""

    #: Its name, NAME/DEVICE.
    device: str
    #: The member of the pool that it belongs to.
    member: str
    #: Why it is gone, in words; empty when it came.
    lost: str = ""


def updated(info: SessionInfo, change: DeviceChange) -> SessionInfo:
    """What a session knows of its server after a change: what is gone stays in the list, with the reason."""
    devices = [replace(one, lost=change.why) if one.name in change.lost else one for one in info.devices]
    places = {one.name: place for place, one in enumerate(devices)}
    for one in change.appeared:
        if one.name in places:
            devices[places[one.name]] = one
        else:
            devices.append(one)
    return replace(info, devices=tuple(devices), daemons=change.daemons)


def why_lost(devices: Sequence[DeviceInfo], name: str) -> str:
    """Why a device is gone; empty while it is there."""
    return next((one.lost for one in devices if one.name == name), "")


def events_of(change: DeviceChange) -> list[DeviceEvent]:
    """One for each device."""
    lost = [DeviceEvent(name, change.member, change.why or "it is gone") for name in change.lost]
    return lost + [DeviceEvent(one.name, change.member) for one in change.appeared]


class WatchBase:
    """Events that came since it was made. `wake` is called when there is one more, or the session ended."""

    def __init__(self) -> None:
        self._events: deque[DeviceEvent] = deque()
        self._missed = 0
        self._ended = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'ended' if self._ended else 'open'}: {len(self._events)} events>"

    def put(self, events: Sequence[DeviceEvent]) -> None:
        """They happened."""
        for event in events:
            if len(self._events) < MOST_EVENTS:
                self._events.append(event)
            else:
                self._missed += 1

    def end(self) -> None:
        """There will be no more."""
        self._ended = True

    def _take(self) -> DeviceEvent | None:
        """The next one; None: there is none, now or ever. Raises LimitExceededError, once, where some were
        missed."""
        if self._events:
            return self._events.popleft()
        if self._missed:
            missed, self._missed = self._missed, 0
            raise LimitExceededError(
                f"{missed} events of devices were missed, since nobody took those before",
                advice="look at session.devices, and go on",
            )
        return None


class Watchers:
    """Those who watch the devices of one session; they are kept by who uses them alone."""

    def __init__(self) -> None:
        self._all: weakref.WeakSet[WatchBase] = weakref.WeakSet()
        # Reentrant, since a destructor may run, and end a session, while this thread holds it.
        self._lock = threading.RLock()
        self._ended = False
        #: For servers that use other servers.
        self.tell: Callable[[DeviceChange], None] | None = None

    def add(self, watch: WatchBase) -> None:
        """It is told from now on; of a session that is over, that."""
        with self._lock:
            self._all.add(watch)
            ended = self._ended
        if ended:
            watch.end()

    def _everybody(self) -> list[WatchBase]:
        with self._lock:
            return list(self._all)

    def apply(self, info: SessionInfo, changes: Sequence[DeviceChange]) -> SessionInfo:
        """What happened; the session's new knowledge. Tell it to `announce` once the session has it."""
        for change in changes:
            info = updated(info, change)
        return info

    def announce(self, changes: Sequence[DeviceChange]) -> None:
        """Tells who watches."""
        for change in changes:
            for watch in self._everybody():
                watch.put(events_of(change))
            if self.tell is not None:
                self.tell(change)

    def end(self) -> None:
        """The session is over."""
        with self._lock:
            self._ended = True
        for watch in self._everybody():
            watch.end()
