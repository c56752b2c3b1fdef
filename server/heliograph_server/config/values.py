"""Values of settings: checks, and conversion from texts. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from heliograph_proto.errors import ConfigurationError
from heliograph_proto.types import parse_size
from heliograph_server.config.schema import SettingEntry, entries, suggest

WORDS: Mapping[str, bool] = {
    "true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False,
}  # fmt: skip


def checked(entry: SettingEntry, value: Any, place: str) -> Any:
    """Return a value in the field's type. Raises ConfigurationError with the place and the expected
    values."""
    typed = _typed(entry, value)
    if typed is None or not _within(entry, typed):
        raise ConfigurationError(f"{place} is {value!r:.200}", advice=f"it must be {expected(entry)}")
    if entry.setting.words and typed not in entry.setting.words:
        raise ConfigurationError(f"{place} is {value!r:.200}", advice=suggest(typed, entry.setting.words))
    return float(typed) if entry.type is float else typed


def from_text(entry: SettingEntry, text: str) -> Any:
    """The value of a text, as in a file; the text itself if it is not one."""
    if entry.type is bool:
        return WORDS.get(text.strip().lower(), text)
    if entry.type is int:
        return int(text) if re.fullmatch(r"\s*[+-]?[0-9]{1,20}\s*", text) else text.strip()
    if entry.type is float:
        try:
            return float(text)
        except ValueError:
            return text
    return text if entry.type is str else _listed(text, entry.setting.kind == "device")


def check_all(config: object) -> None:
    """Raise ConfigurationError for the first invalid field; the place is its name."""
    for one in entries(type(config)):
        holder = getattr(config, one.table) if one.table else config
        checked(one, getattr(holder, one.name), one.key)


def expected(entry: SettingEntry) -> str:
    """A description of the allowed values."""
    if entry.type is bool:
        return "true or false"
    if entry.type is str:
        return "a text"
    if entry.type not in (int, float):
        return "a list of texts" + (", at least one" if entry.setting.least else "")
    kind = "a whole number" if entry.type is int else "a number"
    return ", ".join(
        filter(None, ('a size, such as "20GiB"' if entry.setting.kind == "size" else kind, bounds(entry)))
    )


def bounds(entry: SettingEntry) -> str:
    """The bounds of a number, or of a list's length, such as "0 to 60"; empty if there are none."""
    least, most = entry.setting.least, entry.setting.most
    if most is not None:
        return f"{least or 0:g} to {most:.0f}"
    return "" if least is None else f"{least:g} or more"


def size_as_written(size_bytes: int) -> str:
    """A size in the largest unit that divides it, such as "20GiB"."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes and size_bytes % 2**power == 0:
            return f"{size_bytes >> power}{unit}"
    return str(size_bytes)


def _typed(entry: SettingEntry, value: Any) -> Any:
    """The value in the field's type, or None if it has another type."""
    if entry.type is bool or isinstance(value, bool):
        return value if entry.type is type(value) else None
    if entry.type is int:
        if entry.setting.kind == "size" and isinstance(value, str):
            return parse_size(value)
        return value if isinstance(value, int) else None
    if entry.type is float:
        return value if isinstance(value, int | float) else None
    if entry.type is str:
        return value if isinstance(value, str) else None
    listed = isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)
    return tuple(value) if listed else None


def _within(entry: SettingEntry, value: Any) -> bool:
    least, most = entry.setting.least, entry.setting.most
    size = len(value) if isinstance(value, tuple) else value
    # In this form, NaN is out of bounds.
    return (least is None or size >= least) and (most is None or size <= most)


def _listed(text: str, of_devices: bool) -> list[str]:
    """Split a text at commas, but not inside a device's specification, NAME:KEY=VALUE,KEY=VALUE."""
    parts: list[str] = []
    for part in filter(None, map(str.strip, text.split(","))):
        if of_devices and parts and "=" in part.partition(":")[0]:
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return parts
