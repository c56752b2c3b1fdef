"""One backend of a registry: found, then loaded, then started. What goes wrong is kept in words."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from heliograph_backends.contract import CONTRACT_VERSION, Backend, Device, Parameter
from heliograph_backends.registry.plugins import BackendSource, drop_modules
from heliograph_proto.devices import BackendInfo
from heliograph_proto.errors import ConfigurationError, HeliographError

logger = logging.getLogger(__name__)

#: The longest reason that is kept, in characters: it may quote what a plugin raised.
LONGEST_WHY = 1000


class BackendEntry:
    """A backend, from where it was found to its devices. The registry's lock is around it."""

    def __init__(self, source: BackendSource) -> None:
        self.name = source.name
        self.origin = source.origin
        #: Why it has no devices, in words.
        self.why = ""
        self.devices: tuple[Device, ...] = ()
        #: How many have acquired its devices.
        self.users = 0
        self.source = source
        #: The one that has its name.
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
        """Devices that were made elsewhere."""
        made = cls(BackendSource(name, "the program's own", lambda: (None, ())))
        made.devices, made._probed = tuple(devices), True
        return made

    @property
    def info(self) -> BackendInfo:
        """What it says of itself."""
        version = CONTRACT_VERSION if self._kind is not None or self.devices else 0
        names = tuple(device.name for device in self.devices)
        return BackendInfo(self.name, self.origin, version, names, self.why, self._features)

    @property
    def parameters(self) -> Sequence[Parameter]:
        """Those of its class, once it was loaded."""
        return self._kind.parameters if self._kind is not None else ()

    def load(self) -> bool:
        """Runs its code, once. Whether there is a class to start."""
        if self._kind is not None or self.why or self.devices:
            return self._kind is not None
        try:
            found, self._modules = self.source.load()
            why = why_unfit(found, self.name if self.source.is_named else "")
        except (Exception, SystemExit) as error:
            drop_modules(self._modules)
            self._fail("it cannot be loaded", error)
            return False
        if why:
            self.refuse(why)
            return False
        assert isinstance(found, type) and issubclass(found, Backend)
        self._kind, self.name = found, found.name
        return True

    def start(self, parameters: Sequence[Mapping[str, Any]], taken: Collection[str]) -> None:
        """Makes its devices, each with its parameters and none with a name that is taken.

        Raises ConfigurationError saying why there are none; it may be tried again.
        """
        self._probed = True
        if self.load():
            self._start(parameters, taken)
        self.require()

    def require(self) -> None:
        """Raises ConfigurationError if it cannot start."""
        if self.why:
            raise ConfigurationError(f"backend {self.name!r} ({self.origin}) cannot start: {self.why}")

    def probe(self) -> None:
        """Finds out, once, what it has to say when it is asked for no device."""
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
                self.why = self.why or "it has no devices, and does not say why"
            self._features = {str(key): str(value) for key, value in backend.features().items()}
        except (Exception, SystemExit) as error:
            self._fail("starting it failed", error)
        if self.why:
            self.close()

    def close(self) -> None:
        """Closes its devices. Idempotent."""
        devices, self.devices = self.devices, ()
        for device in devices:
            try:
                device.close()
            except Exception:
                logger.exception("%r of backend %s could not be closed", device, self.name)

    def unload(self) -> None:
        """Closes its devices and forgets its code."""
        self.close()
        drop_modules(self._modules)

    def refuse(self, why: str) -> None:
        """It is not to be used."""
        self.close()
        drop_modules(self._modules)
        self._kind, self.why = None, why

    def _fail(self, doing: str, error: BaseException) -> None:
        logger.debug("backend %s: %s", self.name, doing, exc_info=error)
        self.why = one_line(f"{doing}: {in_words(error)}")


def why_unusable(devices: Sequence[object], taken: Collection[str]) -> str:
    """Why devices cannot go to a registry that has others of the names taken; empty if they can."""
    names = set(taken)
    for one in devices:
        if not isinstance(one, Device):
            return f"{one!r:.80} among its devices is no heliograph_backends.contract.Device"
        if not isinstance(one.name, str) or not one.name:
            return f"a device is named {one.name!r:.80}"
        if one.name in names:
            return f"a device is named {one.name!r} already"
        names.add(one.name)
    return ""


def in_words(error: BaseException) -> str:
    """An error: ours as it is, others with their class."""
    if isinstance(error, HeliographError):
        return f"{error.message}; {error.advice}" if error.advice else error.message
    return f"{type(error).__name__}: {error}"


def one_line(text: str) -> str:
    """What a plugin said, as a table can show it."""
    return " ".join(text.split())[:LONGEST_WHY]


def why_unfit(found: object, name: str = "") -> str:
    """Why something is no backend class for this version, called `name` if that is given; empty if it is."""
    if not isinstance(found, type) or not issubclass(found, Backend):
        return f"{found!r:.80} is no subclass of heliograph_backends.contract.Backend"
    own, version = (getattr(found, one, None) for one in ("name", "contract_version"))
    if not isinstance(own, str) or re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,63}", own) is None:
        return f"{found.__name__}.name is {own!r:.80}: letters, digits, - and _ are needed"
    if name and own.casefold() != name.casefold():
        return f"its class calls itself {own!r}"
    if version != CONTRACT_VERSION:
        return f"it is made for version {version!r:.20} of the contract; this is version {CONTRACT_VERSION}"
    if not all(isinstance(one, Parameter) for one in found.parameters):
        return f"{found.__name__}.parameters are no sequence of Parameter"
    return ""
