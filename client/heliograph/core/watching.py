"""Changes of a server's devices, for both APIs: the session's list and its watchers."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from heliograph_proto.devices import DeviceChange, DeviceInfo, ReplacedDevice
from heliograph_proto.errors import LimitExceededError
from heliograph_proto.sessions import SessionInfo

if TYPE_CHECKING:
    from collections.abc import Callable

#: The most unread events of a watcher; it misses further ones, and gets an error.
MOST_EVENTS = 10_000


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """A device of the server appeared or was lost, or the session has ended."""

    #: Its name, NAME/DEVICE; empty at the end of the session.
    device: str
    #: The member of the pool that it belongs to.
    member: str
    #: The reason for its loss; empty if it appeared.
    lost: str = ""
    #: The reason for the end of the session, in the last event; empty in all others.
    ended: str = ""


def updated(info: SessionInfo, change: DeviceChange) -> SessionInfo:
    """Return the session's information after a change.

    Lost devices stay in the list, with the reason.
    """
    devices = [replace(one, lost=change.why) if one.name in change.lost else one for one in info.devices]
    places = {one.name: place for place, one in enumerate(devices)}
    for one in change.appeared:
        if one.name in places:
            devices[places[one.name]] = one
        else:
            devices.append(one)
    return replace(info, devices=tuple(devices), daemons=change.daemons)


def why_lost(devices: Sequence[DeviceInfo], name: str) -> str:
    """Return the reason why a device is lost; empty while it is there."""
    return next((one.lost for one in devices if one.name == name), "")


def events_of(change: DeviceChange) -> list[DeviceEvent]:
    """Return one event for each device."""
    lost = [DeviceEvent(name, change.member, change.why or "it is gone") for name in change.lost]
    return lost + [DeviceEvent(one.name, change.member) for one in change.appeared]


class WatchBase:
    """The events since its creation."""

    def __init__(self) -> None:
        self._events: deque[DeviceEvent] = deque()
        self._missed = 0
        self._ended = False
        #: The event of the session's end, after all others.
        self._last: DeviceEvent | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'ended' if self._ended else 'open'}: {len(self._events)} events>"

    def put(self, events: Sequence[DeviceEvent]) -> None:
        """Add events."""
        for event in events:
            if len(self._events) < MOST_EVENTS:
                self._events.append(event)
            else:
                self._missed += 1

    def end(self, why: str = "") -> None:
        """End it, with a last event if a session ended, and why."""
        if why and not self._ended:
            self._last = DeviceEvent("", "", ended=why)
        self._ended = True

    def _take(self) -> DeviceEvent | None:
        """Return the next event, or None if there is none, now or ever.

        Raises LimitExceededError, once, if events were missed.
        """
        if self._events:
            return self._events.popleft()
        if self._missed:
            missed, self._missed = self._missed, 0
            raise LimitExceededError(
                f"{missed} device events were missed, because earlier ones were not read",
                advice="look at session.devices, and go on",
            )
        last, self._last = self._last, None
        return last


class Watchers:
    """The watchers of one session's devices. Only their users keep them alive."""

    def __init__(self) -> None:
        self._all: weakref.WeakSet[WatchBase] = weakref.WeakSet()
        # Reentrant: a destructor may run, and end a session, while this thread holds it.
        self._lock = threading.RLock()
        #: The reason for the end of the session, once it has ended.
        self._ended = ""
        #: Devices that others took the place of, in order.
        self._replaced: list[ReplacedDevice] = []
        #: For servers that use other servers.
        self.tell: Callable[[DeviceChange], None] | None = None

    def add(self, watch: WatchBase) -> None:
        """Add a watcher, and end it at once if the session has ended."""
        with self._lock:
            self._all.add(watch)
            ended = self._ended
        if ended:
            watch.end(ended)

    def _watchers(self) -> list[WatchBase]:
        with self._lock:
            return list(self._all)

    def apply(self, info: SessionInfo, changes: Sequence[DeviceChange]) -> SessionInfo:
        """Return the session's information after changes, to store before `announce`."""
        for change in changes:
            info = updated(info, change)
            self._replaced += change.replaced
        return info

    @property
    def replacements(self) -> int:
        """The number of devices so far that others took the place of."""
        return len(self._replaced)

    def place_of(self, device: str, since: int) -> str:
        """Return the device that has the place of one, for an object made after so many
        `replacements`."""
        for one in self._replaced[since:]:
            if one.name == device:
                device = one.device
        return device

    def announce(self, changes: Sequence[DeviceChange]) -> None:
        """Tell the watchers about changes."""
        for change in changes:
            for watch in self._watchers():
                watch.put(events_of(change))
            if self.tell is not None:
                self.tell(change)

    def end(self, why: str) -> None:
        """End the session's watchers, and tell them why it ended."""
        with self._lock:
            self._ended = why
        for watch in self._watchers():
            watch.end(why)
