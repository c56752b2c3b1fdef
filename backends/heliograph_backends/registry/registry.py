"""The registry: the backends of this process, and their devices by priority."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from heliograph_backends.contract import Device
from heliograph_backends.registry.entry import BackendEntry
from heliograph_backends.registry.plugins import BackendSource, built_in, installed, sources_of
from heliograph_backends.registry.specification import (
    backend_name,
    parse_specification,
    suggest,
    unknown_backend,
)
from heliograph_proto.devices import BackendInfo, DeviceType
from heliograph_proto.errors import ConfigurationError, UnknownDeviceError

#: What there is when nobody says otherwise.
DEFAULT_SPECIFICATIONS = ("cpu",)

#: The kinds of device that compute best by themselves, after ggml_backend_init_best.
BEST = (DeviceType.GPU, DeviceType.INTEGRATED_GPU, DeviceType.CPU)


class Registry:
    """The backends of this process, and the devices of those that were started. Thread-safe.

    A backend is known without its code being run, unless it was loaded by `load`; it is started, and so
    has devices, when a specification names it.
    """

    def __init__(self, plugins: Sequence[str] = ()) -> None:
        """What is built in, these plugins, and what is installed; of one name, the first. See `load`."""
        #: Held while backends come and go, which may take long.
        self._changing = threading.RLock()
        #: Guards what follows, briefly.
        self._lock = threading.Lock()
        self._entries: list[BackendEntry] = []
        #: By priority.
        self._started: tuple[BackendEntry, ...] = ()
        for source in built_in():
            self._add(source)
        for plugin in plugins:
            self.load(plugin)
        for source in installed():
            self._add(source)

    @classmethod
    def of(cls, *devices: Device) -> Registry:
        """A registry of devices that the program made, by priority; it closes them."""
        made = cls()
        for name in dict.fromkeys(device.backend for device in devices):
            entry = BackendEntry.of(name, [device for device in devices if device.backend == name])
            made._entries = [one for one in made._entries if one.name != name] + [entry]
            made._started += (entry,)
        return made

    def __repr__(self) -> str:
        return f"<Registry of {', '.join(device.name for device in self.devices) or 'nothing'}>"

    # Backends

    @property
    def backends(self) -> tuple[BackendInfo, ...]:
        """All that are known, also those that cannot start, and why.

        Loads those that nobody asked for yet: the first time may take a while.
        """
        with self._changing:
            for entry in self._entries:
                entry.probe()
            return tuple(entry.info for entry in self._entries)

    @property
    def unavailable(self) -> tuple[BackendInfo, ...]:
        """Those that cannot start."""
        return tuple(one for one in self.backends if one.why)

    def load(self, source: str) -> tuple[BackendInfo, ...]:
        """Makes the plugins known that a module, a file or a directory holds. Runs their code.

        One that is of no use is known with its reason. Raises ConfigurationError where there is nothing, or
        where others could have written it.
        """
        with self._changing:
            return tuple(self._load(one).info for one in sources_of(source))

    def _load(self, source: BackendSource) -> BackendEntry:
        known = next((one for one in self._entries if one.origin == source.origin), None)
        if known is not None and not known.why:
            return known
        if known is not None:
            self._entries.remove(known)
        return self._add(source)

    def _add(self, source: BackendSource) -> BackendEntry:
        entry = BackendEntry(source)
        if not source.is_named:
            entry.load()
        taken = self._entry(entry.name)
        if taken is not None and not taken.why and not entry.why:
            entry.refuse(f"the name {entry.name!r} is taken: {taken.origin}")
            entry.rival = taken
        self._entries.append(entry)
        return entry

    def start(self, specifications: Sequence[str]) -> tuple[Device, ...]:
        """Makes devices, of less priority than those that are there: the new ones.

        All devices of a backend are made at once. Raises ConfigurationError, and has made none then.
        """
        with self._changing:
            wanted = self._parse(specifications)
            taken = [device.name for device in self.devices]
            try:
                for entry, parameters in wanted.items():
                    entry.start(parameters, taken)
                    taken += [device.name for device in entry.devices]
            except BaseException:
                for entry in wanted:
                    entry.close()
                raise
            with self._lock:
                self._started += tuple(wanted)
            return tuple(device for entry in wanted for device in entry.devices)

    def _parse(self, specifications: Sequence[str]) -> dict[BackendEntry, list[Mapping[str, Any]]]:
        found: dict[BackendEntry, list[Mapping[str, Any]]] = {}
        for text in specifications:
            entry = self._known(backend_name(text))
            if entry in self._started:
                raise ConfigurationError(
                    f"backend {entry.name!r} was started before",
                    advice="unload it, or name all its devices at once",
                )
            if not entry.load():
                entry.require()
            _, parameters = parse_specification(text, {entry.name: entry.parameters})
            found.setdefault(entry, []).append(parameters)
        return found

    def unload(self, name: str) -> None:
        """Closes a backend's devices and forgets it and its code. Raises ConfigurationError while in use."""
        with self._changing:
            entry = self._known(name)
            with self._lock:
                if entry.users:
                    users = f"{entry.users} session{'s' if entry.users > 1 else ''}"
                    raise ConfigurationError(
                        f"backend {entry.name!r} is in use by {users}", advice="close what uses it first"
                    )
                self._started = tuple(one for one in self._started if one is not entry)
            self._entries.remove(entry)
            entry.unload()
            for rival in [one for one in self._entries if one.rival is entry]:
                self._entries.remove(rival)
                self._add(rival.source)

    def _known(self, name: str) -> BackendEntry:
        entry = self._entry(name)
        if entry is None:
            raise unknown_backend(name, [one.name for one in self._entries])
        return entry

    def _entry(self, name: str) -> BackendEntry | None:
        """Of this name, in upper or lower case; one that can be used rather than one that cannot."""
        found = [one for one in self._entries if one.name.casefold() == name.casefold()]
        return min(found, key=lambda one: bool(one.why), default=None)

    # Devices

    @property
    def devices(self) -> tuple[Device, ...]:
        """By priority."""
        return tuple(device for entry in self._started for device in entry.devices)

    def device(self, name: str = "") -> Device:
        """The device of a name, in upper or lower case, or the first one. Raises UnknownDeviceError."""
        for device in (devices := self.devices):
            if name.casefold() in ("", device.name.casefold()):
                return device
        advice = suggest(name, [device.name for device in devices])
        raise UnknownDeviceError(f"no device is named {name[:64]!r}", advice=advice)

    def by_type(self, type: DeviceType) -> tuple[Device, ...]:
        """The devices of a kind, by priority."""
        return tuple(device for device in self.devices if device.type is type)

    def best(self) -> Device:
        """The first GPU, else integrated GPU, else CPU. Raises UnknownDeviceError."""
        found = [device for type in BEST for device in self.by_type(type)]
        if not found:
            raise UnknownDeviceError("there is no GPU and no CPU", advice="name one: --device cpu")
        return found[0]

    def acquire(self) -> tuple[Device, ...]:
        """All devices, for somebody's use: until they are released, no backend of theirs can be unloaded."""
        with self._lock:
            for entry in self._started:
                entry.users += 1
            return self.devices

    def release(self, devices: Sequence[Device]) -> None:
        """Gives back what `acquire` gave, once."""
        with self._lock:
            for entry in self._started:
                entry.users -= any(device in devices for device in entry.devices)

    def close(self) -> None:
        """Closes all devices. Idempotent."""
        with self._changing:
            for entry in self._started:
                entry.close()


def open_registry(
    specifications: Sequence[str] = DEFAULT_SPECIFICATIONS,
    backends: Sequence[str] = (),
    *,
    probe: bool = False,
) -> Registry:
    """Loads plugins and starts the devices that the specifications name.

    With `probe`, finds out at once what there is to say of all other backends, which otherwise happens when
    somebody asks. Raises ConfigurationError, also for a plugin of which a device was asked for and that is
    of no use; others of those are known with their reason.
    """
    registry = Registry(backends)
    registry.start(specifications)
    if probe:
        _ = registry.backends
    return registry
