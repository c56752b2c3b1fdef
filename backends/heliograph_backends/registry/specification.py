"""Specifications of devices, `NAME[:key=value,...]`: text in, typed parameters out. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import TypeAlias

from heliograph_backends.contract import Parameter, ParameterKind
from heliograph_backends.cpu import CpuBackend
from heliograph_backends.fake import FakeBackend
from heliograph_proto.errors import ConfigurationError
from heliograph_proto.types import NO_UNITS, UNITS, parse_size

#: The parameters of one device: whole numbers for counts and sizes.
Values: TypeAlias = dict[str, int | str]

#: The built-in backends.
BUILT_IN = (CpuBackend, FakeBackend)


def backend_name(specification: str) -> str:
    """Return the backend's name in a specification."""
    return specification.partition(":")[0].strip()


def parse_specification(
    text: str, backends: Mapping[str, Sequence[Parameter]] | None = None
) -> tuple[str, Values]:
    """Return the registered name of a backend and the parameters of one device, ignoring case.

    `backends` maps each known name to its parameters; by default the built-in ones. A text may
    contain anything except a comma. Raises ConfigurationError with a suggestion.
    """
    known = {one.name: one.parameters for one in BUILT_IN} if backends is None else backends
    given = backend_name(text)
    name = next((one for one in known if one.casefold() == given.casefold()), None)
    if name is None:
        raise unknown_backend(given, known)
    values: Values = {}
    for item in filter(None, map(str.strip, text.partition(":")[2].split(","))):
        key, value = _item(item, name, known[name])
        if key in values:
            raise ConfigurationError(f"backend {name!r} has the parameter {key!r} twice")
        values[key] = value
    return name, values


def unknown_backend(name: str, known: Collection[str]) -> ConfigurationError:
    """Return the error for an unknown backend."""
    # By spelling, "gpu" is closer to "cpu" than to any GPU backend.
    is_gpu = name.casefold().rstrip("0123456789") in ("gpu", "nvidia")
    advice = "did you mean 'cuda'?" if is_gpu and "cuda" in known else suggest(name, known)
    return ConfigurationError(f"unknown backend {name[:64]!r}", advice=advice)


def suggest(word: str, known: Collection[str]) -> str:
    """Return advice for an unknown word."""
    near = get_close_matches(word.casefold(), known, 1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"


def _item(item: str, backend: str, parameters: Sequence[Parameter]) -> tuple[str, int | str]:
    key, equals, value = (part.strip() for part in item.partition("="))
    found = next((one for one in parameters if one.name == key), None)
    if found is None:
        message = f"backend {backend!r} has no parameter {key[:64]!r}"
        advice = suggest(key, [one.name for one in parameters])
        if key.isdecimal():
            advice = f"{advice}, each with =VALUE; a device's name has no colon: {backend}{key[:20]}"
        raise ConfigurationError(message, advice=advice)
    if found.kind is not ParameterKind.TEXT:
        return key, _number(found, value)
    if not equals:
        raise ConfigurationError(f"{key} has no value", advice=f"write {key}=TEXT: {found.doc}")
    return key, value


def _number(parameter: Parameter, value: str) -> int:
    number = parse_size(value, UNITS if parameter.kind is ParameterKind.SIZE else NO_UNITS)
    if number is None:
        advice = "give a whole number; sizes may have a unit such as 512MiB or 2GiB"
        raise ConfigurationError(f"{parameter.name}={value!r} is not a number", advice=advice)
    return number
