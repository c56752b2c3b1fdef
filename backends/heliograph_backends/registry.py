"""Which devices there are: backends by name, made from specifications such as "cpu:threads=2"."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from heliograph_backends.contract import Backend, Device
from heliograph_backends.cpu import CpuBackend
from heliograph_backends.fake import FakeBackend
from heliograph_proto.description import UnavailableBackend
from heliograph_proto.errors import ConfigurationError, HeliographError, UnknownDeviceError

#: Parameters of each backend; all are numbers, sizes may have a unit.
PARAMETERS: Mapping[str, tuple[str, ...]] = {"cpu": ("threads", "memory"), "fake": ("memory",)}

SIZES = ("memory",)
_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_specification(text: str) -> tuple[str, dict[str, int]]:
    """ "NAME[:key=value,...]" as a name and numbers. Raises ConfigurationError with a suggestion."""
    name, _, rest = text.strip().partition(":")
    if name not in PARAMETERS:
        raise ConfigurationError(f"unknown backend {name!r}", advice=_suggest(name, PARAMETERS))
    parameters = {}
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        if key not in PARAMETERS[name]:
            message = f"backend {name!r} has no parameter {key!r}"
            raise ConfigurationError(message, advice=_suggest(key, PARAMETERS[name]))
        if key in parameters:
            raise ConfigurationError(f"backend {name!r} has the parameter {key!r} twice")
        parameters[key] = _number(key, value)
    return name, parameters


def _suggest(word: str, known: Mapping[str, object] | Sequence[str]) -> str:
    near = get_close_matches(word, list(known), 1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def _number(key: str, value: str) -> int:
    match = re.fullmatch(r"([0-9]{1,18})([A-Za-z]*)", value)
    if match is None or match[2] not in _UNITS or (match[2] and key not in SIZES):
        advice = "a whole number, for sizes with a unit such as 512MiB or 2GiB"
        raise ConfigurationError(f"{key}={value!r} is no number", advice=advice)
    return int(match[1]) * _UNITS[match[2]]


class Registry:
    """The devices of this process, by priority, and the backends that could not start."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self.backends = tuple(backends)
        self.devices: tuple[Device, ...] = tuple(d for one in backends for d in one.devices())
        self.unavailable = tuple(
            UnavailableBackend(one.name, one.why_unavailable()) for one in backends if not one.devices()
        )

    def __repr__(self) -> str:
        return f"<Registry of {', '.join(device.name for device in self.devices) or 'nothing'}>"

    def device(self, name: str = "") -> Device:
        """The device of a name, or the first one. Raises UnknownDeviceError."""
        for device in self.devices:
            if name in ("", device.name):
                return device
        advice = _suggest(name, [device.name for device in self.devices])
        raise UnknownDeviceError(f"no device is named {name[:64]!r}", advice=advice)

    def close(self) -> None:
        """Closes all devices."""
        for device in self.devices:
            device.close()


def open_registry(specifications: Sequence[str] = ("cpu",)) -> Registry:
    """Starts the backends that the specifications name. Raises ConfigurationError."""
    parsed: dict[str, list[dict[str, int]]] = {}
    for text in specifications:
        name, parameters = parse_specification(text)
        parsed.setdefault(name, []).append(parameters)
    backends: list[Backend] = []
    try:
        for name, parameter_list in parsed.items():
            backends.append(CpuBackend(parameter_list) if name == "cpu" else FakeBackend(parameter_list))
    except HeliographError:
        for backend in backends:
            for device in backend.devices():
                device.close()
        raise
    return Registry(backends)
