"""The devices that took the place of others, whose values a session has there now."""

from __future__ import annotations

from collections.abc import Collection, Mapping


class DeviceNames:
    """The devices that a client's names stand for. Thread-safe: each change replaces the whole.

    A client knows its tensors and plans under the names of their first devices. Such a name stands
    for the device with the values, until a device of that name appears.
    """

    def __init__(self) -> None:
        self.now: Mapping[str, str] = {}

    def __repr__(self) -> str:
        return f"<DeviceNames {dict(self.now)}>"

    def current(self, name: str) -> str:
        """Return the name of the device that has the place of one."""
        return self.now.get(name, name)

    def replace(self, names: Mapping[str, str]) -> None:
        """Other devices take the place of some."""
        self.now = {**{old: names.get(new, new) for old, new in self.now.items()}, **names}

    def appeared(self, names: Collection[str]) -> None:
        """Devices of these names are there, and mean themselves."""
        self.now = {old: new for old, new in self.now.items() if old not in names}
