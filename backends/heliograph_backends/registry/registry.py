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

#: The default devices.
DEFAULT_SPECIFICATIONS = ("cpu",)

#: The kinds of devices, best first, after ggml_backend_init_best.
BEST = (DeviceType.GPU, DeviceType.INTEGRATED_GPU, DeviceType.CPU)


class Registry:
    """The backends of this process, and the devices of started ones. Thread-safe.

    A backend's code runs only when `load` or a specification names it, or `backends` probes it.
    Starting it, by a specification, creates its devices.
    """

    def __init__(self, plugins: Sequence[str] = ()) -> None:
        """Collect built-in backends, these plugins, and installed ones; the first of each name
        wins.

        See `load` for plugins.
        """
        #: Held while backends are added and removed, which may take long.
        self._changing = threading.RLock()
        #: Guards the fields below, briefly.
        self._lock = threading.Lock()
        self._entries: list[BackendEntry] = []
        #: By priority.
        self._started: tuple[BackendEntry, ...] = ()
        self._plugins = tuple(plugins)
        #: The plugins that were loaded, by the name of their backend, which only their code says.
        self._loaded: dict[str, BackendSource] = {}
        for source in built_in():
            self._add(source)
        for plugin in plugins:
            self.load(plugin)
        for source in installed():
            self._add(source)

    @classmethod
    def of(cls, *devices: Device) -> Registry:
        """Return a registry of existing devices, by priority; it closes them."""
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
        """All known backends, including those that cannot start, with the reasons.

        Loads all backends: the first time may take a while.
        """
        with self._changing:
            for entry in self._entries:
                entry.probe()
            return tuple(entry.info for entry in self._entries)

    @property
    def unavailable(self) -> tuple[BackendInfo, ...]:
        """The backends that cannot start."""
        return tuple(one for one in self.backends if one.why)

    def load(self, source: str) -> tuple[BackendInfo, ...]:
        """Add the plugins of a module, a file or a directory. Runs their code.

        An unusable plugin is added with the reason. Raises ConfigurationError if there is none, or
        if others can write to it.
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
        if not source.is_named and entry.load():
            self._loaded[entry.name.casefold()] = source
        taken = self._entry(entry.name)
        if taken is not None and not taken.why and not entry.why:
            entry.refuse(f"the name {entry.name!r} is taken: {taken.origin}")
            entry.rival = taken
        self._entries.append(entry)
        return entry

    def start(self, specifications: Sequence[str]) -> tuple[Device, ...]:
        """Create devices, of lower priority than existing ones, and return them.

        A backend's devices are created all at once. Raises ConfigurationError, and then creates
        none.
        """
        with self._changing:
            starting = self._parse(specifications)
            taken = [device.name for device in self.devices]
            try:
                for entry, parameters in starting.items():
                    entry.start(parameters, taken)
                    taken += [device.name for device in entry.devices]
            except BaseException:
                for entry in starting:
                    entry.close()
                raise
            with self._lock:
                self._started += tuple(starting)
            return tuple(device for entry in starting for device in entry.devices)

    def _parse(self, specifications: Sequence[str]) -> dict[BackendEntry, list[Mapping[str, Any]]]:
        found: dict[BackendEntry, list[Mapping[str, Any]]] = {}
        for text in specifications:
            entry = self._known(backend_name(text))
            if entry in self._started:
                raise ConfigurationError(
                    f"backend {entry.name!r} is already started",
                    advice="unload it, or specify all its devices at once",
                )
            if not entry.load():
                entry.require()
            _, parameters = parse_specification(text, {entry.name: entry.parameters})
            found.setdefault(entry, []).append(parameters)
        return found

    def load_again(self, text: str) -> BackendInfo:
        """Load a backend by its name: one of this package, of an installed one, or of the plugins
        that this registry was opened with, also by their source. No other code runs.

        Raises ConfigurationError.
        """
        with self._changing:
            entry = self._entry(text)
            if entry is None or entry.why:
                source = self._source(text)
                if entry is not None:
                    self._entries.remove(entry)
                entry = self._add(source)
            if not entry.load():
                entry.require()
            return entry.info

    def _source(self, text: str) -> BackendSource:
        plugins = {plugin: sources_of(plugin) for plugin in self._plugins}
        if text in plugins:
            return plugins[text][0]
        known = [*built_in(), *(one for several in plugins.values() for one in several), *installed()]
        wanted = text.casefold()
        found = next((one for one in known if wanted in (one.name.casefold(), one.origin.casefold())), None)
        found = found or self._loaded.get(wanted)
        if found is None:
            advice = suggest(text, list(dict.fromkeys([*(one.name for one in known), *self._loaded])))
            raise ConfigurationError(f"there is no backend {text[:64]!r} to load", advice=advice)
        return found

    def devices_of(self, name: str) -> tuple[Device, ...]:
        """Return the devices of a backend. Raises ConfigurationError for an unknown one."""
        with self._changing:
            return self._known(name).devices

    def unload(self, name: str, *, checked: bool = False) -> None:
        """Close a backend's devices and remove its code.

        Raises ConfigurationError while in use, unless the caller has `checked` that it is not.
        """
        with self._changing:
            entry = self._known(name)
            with self._lock:
                if entry.users and not checked:
                    users = f"{entry.users} session{'s' if entry.users > 1 else ''}"
                    raise ConfigurationError(
                        f"backend {entry.name!r} is in use by {users}", advice="close them first"
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
            unloaded = [one for one in self._entries if one.is_unloaded_plugin]
            known = [one.name for one in self._entries if one not in unloaded]
            error = unknown_backend(name, known)
            # Such a plugin has only the name of its file, so any of them may be the backend.
            why = [f"; plugin {one.origin} was not loaded: {one.why}" for one in unloaded]
            raise ConfigurationError(error.message + "".join(why), advice=error.advice)
        return entry

    def _entry(self, name: str) -> BackendEntry | None:
        """Return the entry of a name, ignoring case; a usable one is preferred."""
        found = [one for one in self._entries if one.name.casefold() == name.casefold()]
        return min(found, key=lambda one: bool(one.why), default=None)

    # Devices

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices, by priority."""
        return tuple(device for entry in self._started for device in entry.devices)

    def device(self, name: str = "") -> Device:
        """Return the device of a name, ignoring case; the first for "". Raises UnknownDeviceError."""
        for device in (devices := self.devices):
            if name.casefold() in ("", device.name.casefold()):
                return device
        advice = suggest(name, [device.name for device in devices])
        raise UnknownDeviceError(f"no device is named {name[:64]!r}", advice=advice)

    def by_type(self, type: DeviceType) -> tuple[Device, ...]:
        """Return the devices of a type, by priority."""
        return tuple(device for device in self.devices if device.type is type)

    def best(self) -> Device:
        """Return the first GPU, else integrated GPU, else CPU. Raises UnknownDeviceError."""
        found = [device for type in BEST for device in self.by_type(type)]
        if not found:
            raise UnknownDeviceError("there is no GPU and no CPU", advice="add one: --device cpu")
        return found[0]

    def acquire(self) -> tuple[Device, ...]:
        """Acquire all devices: until `release`, their backends cannot be unloaded."""
        with self._lock:
            for entry in self._started:
                entry.users += 1
            return self.devices

    def release(self, devices: Sequence[Device]) -> None:
        """Release the devices of one `acquire`."""
        with self._lock:
            for entry in self._started:
                entry.users -= any(device in devices for device in entry.devices)

    def close(self) -> None:
        """Close all devices. Idempotent."""
        with self._changing:
            for entry in self._started:
                entry.close()


def open_registry(
    specifications: Sequence[str] = DEFAULT_SPECIFICATIONS,
    backends: Sequence[str] = (),
    *,
    probe: bool = False,
) -> Registry:
    """Load plugins and start the devices of the specifications.

    With `probe`, also load all other backends now instead of on the first access to `backends`.
    Raises ConfigurationError, also for an unusable plugin that a specification names; other
    unusable plugins are listed with their reason.
    """
    registry = Registry(backends)
    registry.start(specifications)
    if probe:
        _ = registry.backends
    return registry
