"""One backend of a registry: found, then loaded, then started. Failures are kept as text."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from heliograph_backends.contract import CONTRACT_VERSION, Backend, Device, Parameter
from heliograph_backends.registry.plugins import BackendSource, drop_modules
from heliograph_proto.devices import BackendInfo
from heliograph_proto.errors import ConfigurationError, HeliographError

logger = logging.getLogger(__name__)

#: The maximum length of a reason, which may quote a plugin's exception.
LONGEST_WHY = 1000


class BackendEntry:
    """A backend, from its source to its devices. The registry's lock guards it."""

    def __init__(self, source: BackendSource) -> None:
        self.name = source.name
        self.origin = source.origin
        #: The reason why it has no devices.
        self.why = ""
        self.devices: tuple[Device, ...] = ()
        #: The number of holders of its devices.
        self.users = 0
        self.source = source
        #: The entry that already has its name.
        self.rival: BackendEntry | None = None
        self._kind: type[Backend] | None = None
        self._modules: tuple[str, ...] = ()
        self._features: Mapping[str, str] = {}
        self._probed = False

    def __repr__(self) -> str:
        state = self.why or ", ".join(device.name for device in self.devices) or "not started"
        return f"<Entry {self.name}, {self.origin}: {state}>"

    @classmethod
    def of(cls, name: str, devices: Sequence[Device]) -> BackendEntry:
        """Return an entry of devices created elsewhere."""
        made = cls(BackendSource(name, "the program's own", lambda: (None, ())))
        made.devices, made._probed = tuple(devices), True
        return made

    @property
    def is_unloaded_plugin(self) -> bool:
        """True for a plugin whose code failed, or whose class is not usable."""
        return bool(self.why) and self._kind is None and not self.source.is_named

    @property
    def info(self) -> BackendInfo:
        """A description of the backend."""
        version = CONTRACT_VERSION if self._kind is not None or self.devices else 0
        names = tuple(device.name for device in self.devices)
        own = self.source.version or self._module_version
        return BackendInfo(self.name, self.origin, version, names, self.why, self._features, own)

    @property
    def _module_version(self) -> str:
        module = sys.modules.get(self._kind.__module__) if self._kind is not None else None
        return one_line(str(getattr(module, "__version__", "")))

    @property
    def parameters(self) -> Sequence[Parameter]:
        """The parameters of its class, once loaded."""
        return self._kind.parameters if self._kind is not None else ()

    def load(self) -> bool:
        """Run its code, once; return True if it has a class to start."""
        if self._kind is not None or self.why or self.devices:
            return self._kind is not None
        try:
            found, self._modules = self.source.load()
            why = why_unfit(found, self.name if self.source.is_named else "")
        except (Exception, SystemExit) as error:
            drop_modules(self._modules)
            self._fail("", error)
            return False
        if why:
            self.refuse(why)
            return False
        assert isinstance(found, type) and issubclass(found, Backend)
        self._kind, self.name = found, found.name
        return True

    def start(self, parameters: Sequence[Mapping[str, Any]], taken: Collection[str]) -> None:
        """Create a device for each set of parameters, with names that are not in `taken`.

        Raises ConfigurationError with the reason if there are none; the call may be repeated.
        """
        self._probed = True
        if self.load():
            self._start(parameters, taken)
        self.require()

    def require(self) -> None:
        """Raise ConfigurationError if it cannot start."""
        if self.why:
            raise ConfigurationError(f"backend {self.name!r} ({self.origin}) cannot start: {self.why}")

    def probe(self) -> None:
        """Start it once without devices, to learn its features or why it is unavailable."""
        if not self._probed and self.load():
            self._start((), ())
            self.close()
        self._probed = True

    def _start(self, parameters: Sequence[Mapping[str, Any]], taken: Collection[str]) -> None:
        assert self._kind is not None
        try:
            backend = self._kind(parameters)
            self.devices = tuple(backend.devices())
            why = why_unusable(self.devices, taken) if self.devices else backend.why_unavailable()
            self.why = one_line(why)
            if parameters and not self.devices:
                self.why = self.why or "it has no devices and gives no reason"
            self._features = {str(key): str(value) for key, value in backend.features().items()}
        except (Exception, SystemExit) as error:
            self._fail("starting it failed", error)
        if self.why:
            self.close()

    def close(self) -> None:
        """Close its devices. Idempotent."""
        devices, self.devices = self.devices, ()
        for device in devices:
            try:
                device.close()
            except Exception:
                logger.exception("failed to close %r of backend %s", device, self.name)

    def unload(self) -> None:
        """Close its devices and drop its modules."""
        self.close()
        drop_modules(self._modules)

    def refuse(self, why: str) -> None:
        """Make it unusable for a reason."""
        self.close()
        drop_modules(self._modules)
        self._kind, self.why = None, why

    def _fail(self, doing: str, error: BaseException) -> None:
        logger.debug("backend %s failed", self.name, exc_info=error)
        self.why = one_line(f"{doing}: {in_words(error)}" if doing else in_words(error))


def why_unusable(devices: Sequence[object], taken: Collection[str]) -> str:
    """Return why devices cannot join a registry with the names in `taken`; empty if they can."""
    names = set(taken)
    for one in devices:
        if not isinstance(one, Device):
            return f"{one!r:.80} among its devices is not a heliograph_backends.contract.Device"
        if not isinstance(one.name, str) or not one.name:
            return f"a device has the invalid name {one.name!r:.80}"
        if one.name in names:
            return f"another device is named {one.name!r}"
        names.add(one.name)
    return ""


def in_words(error: BaseException) -> str:
    """Return an error's text: message and advice of a HeliographError, class and text of others."""
    if isinstance(error, HeliographError):
        return f"{error.message}; {error.advice}" if error.advice else error.message
    return f"{type(error).__name__}: {error}"


def one_line(text: str) -> str:
    """Return a plugin's text as one bounded line, for tables."""
    return " ".join(text.split())[:LONGEST_WHY]


def why_unfit(found: object, name: str = "") -> str:
    """Return the reason why an object is not a usable backend class; empty if it is.

    `name`, if given, is the required name.
    """
    if not isinstance(found, type) or not issubclass(found, Backend):
        return f"{found!r:.80} is not a subclass of heliograph_backends.contract.Backend"
    own, version = (getattr(found, one, None) for one in ("name", "contract_version"))
    if not isinstance(own, str) or re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,63}", own) is None:
        return f"{found.__name__}.name is {own!r:.80}; only letters, digits, - and _ are allowed"
    if name and own.casefold() != name.casefold():
        return f"its class is named {own!r}"
    if version != CONTRACT_VERSION:
        return f"it is made for version {version!r:.20} of the contract; this is version {CONTRACT_VERSION}"
    if not all(isinstance(one, Parameter) for one in found.parameters):
        return f"{found.__name__}.parameters is not a sequence of Parameter"
    return ""
