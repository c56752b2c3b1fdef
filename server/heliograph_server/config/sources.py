"""The settings of a file, the environment and a command line, each as a flat mapping of keys to
values."""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from heliograph_backends.registry.plugins import is_folder
from heliograph_proto.errors import ConfigurationError
from heliograph_server.config.addresses import is_like_url
from heliograph_server.config.schema import PREFIX, SettingEntry, entries, inner_entries, suggest, top_entries
from heliograph_server.config.values import checked, from_text, size_as_written

T = TypeVar("T")

#: Variables that Kubernetes sets in every container for a service with this name prefix; the daemon
#: ignores them.
OF_A_SERVICE = re.compile(
    rf"{PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
HELP = "`heliograph serve --help` lists the options"


def read_file(path: Path) -> bytes:
    """Read the content of a file. Raises ConfigurationError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"cannot read {path}: {error.strerror}", advice="check --config, or $HELIOGRAPH_CONFIG"
        ) from None


def of_file(kind: type, content: bytes, path: Path) -> dict[str, Any]:
    """The values of a TOML file; its paths are relative to its folder. Raises
    ConfigurationError."""
    try:
        table = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # from huge numbers and deeply nested tables, too
        raise ConfigurationError(f"{path} is not TOML: {error}") from None
    values = of_table(kind, table, f"{path}: ")
    for one in entries(kind):
        if one.key in values:
            values[one.key] = _resolved(one, values[one.key], path.parent)
    return values


def of_table(kind: type, table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values of a parsed table. `where` precedes keys in errors."""
    values: dict[str, Any] = {}
    known = {one.name: one for one in top_entries(kind)}
    for name, value in table.items():
        entry = _known(name, known, f"{where}unknown key {name!r}")
        values |= _of_inner(entry, value, where) if entry.is_table else _one(entry, value, where)
    return values


def of_environment(kind: type, environment: Mapping[str, str], others: Collection[str]) -> dict[str, Any]:
    """The values of variables. Raises ConfigurationError for one with the prefix that is neither a
    setting nor one of the `others`."""
    values: dict[str, Any] = {}
    known = {one.variable: one for one in entries(kind)}
    for name, text in environment.items():
        if not name.startswith(PREFIX) or name in others or OF_A_SERVICE.fullmatch(name):
            continue
        if name not in known:
            raise ConfigurationError(
                f"unknown variable {name}", advice=suggest(name, (*known, *others), HELP)
            )
        entry = known[name]
        values[entry.key] = checked(entry, from_text(entry, text), name)
    return values


def of_flags(kind: type, parsed: argparse.Namespace) -> dict[str, Any]:
    """The values of flags that `add_flags` added. Raises ConfigurationError."""
    values: dict[str, Any] = {}
    for entry in top_entries(kind):
        given = getattr(parsed, entry.name)
        if given is None:
            continue
        if entry.is_table:
            values |= _of_pairs(entry, given)
        else:
            value = from_text(entry, given) if isinstance(given, str) else given
            values[entry.key] = checked(entry, value, entry.flag)
    return values


def add_flags(kind: type, parser: argparse.ArgumentParser) -> None:
    """Add a flag for every setting, under headings. `of_flags` checks their values."""
    sections: dict[str, Any] = {}
    for entry in top_entries(kind):
        title = entry.setting.section
        if title not in sections:
            sections[title] = parser.add_argument_group(title)
        sections[title].add_argument(entry.flag, dest=entry.name, help=_help(entry), **_argument(entry))


def flags(kind: type) -> tuple[str, ...]:
    """The names of the flags."""
    return tuple(one.flag for one in top_entries(kind))


def built(kind: type[T], values: Mapping[str, Any]) -> T:
    """Build the dataclass from these values, and defaults for missing ones."""
    arguments: dict[str, Any] = {}
    for entry in top_entries(kind):
        if entry.is_table:
            inner = {one.name: values[one.key] for one in inner_entries(entry) if one.key in values}
            arguments[entry.name] = replace(entry.default, **inner)
        elif entry.key in values:
            arguments[entry.name] = values[entry.key]
    return kind(**arguments)


def _one(entry: SettingEntry, value: Any, where: str) -> dict[str, Any]:
    return {entry.key: checked(entry, value, f"{where}{entry.key}")}


def _of_inner(entry: SettingEntry, table: Any, where: str) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise ConfigurationError(
            f"{where}{entry.name} is {table!r:.200}", advice=f"write a table: [{entry.name}]"
        )
    values: dict[str, Any] = {}
    known = {one.name: one for one in inner_entries(entry)}
    for name, value in table.items():
        values |= _one(_known(name, known, f"{where}unknown key '{entry.name}.{name}'"), value, where)
    return values


def _of_pairs(entry: SettingEntry, pairs: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    known = {one.name: one for one in inner_entries(entry)}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        one = _known(name, known, f"{entry.flag} {pair!r:.200} names no setting")
        if not equals:
            raise ConfigurationError(
                f"{entry.flag} {name} has no value", advice=f"write {entry.flag} {name}=VALUE"
            )
        values[one.key] = checked(one, from_text(one, text), f"{entry.flag} {name}")
    return values


def _known(name: str, known: Mapping[str, SettingEntry], message: str) -> SettingEntry:
    if name not in known:
        raise ConfigurationError(message, advice=suggest(name, known))
    return known[name]


def _resolved(entry: SettingEntry, value: Any, folder: Path) -> Any:
    """A value of a file in this folder, with absolute paths."""
    here = folder.absolute()
    is_url = entry.setting.kind == "path or URL" and is_like_url(value)
    if entry.setting.kind in ("path", "path or URL") and value and not is_url:
        return str(here / value)
    if entry.setting.kind == "plugin":
        return tuple(str(here / one) if _is_path(one, here) else one for one in value)
    return value


def _is_path(plugin: str, folder: Path) -> bool:
    """Return whether a plugin is a file or folder; others are modules."""
    return "/" in plugin or plugin.endswith(".py") or is_folder(plugin, folder)


def _argument(entry: SettingEntry) -> dict[str, Any]:
    """The options of argparse for a flag."""
    if entry.type is bool:
        return {"action": argparse.BooleanOptionalAction}
    shown = "|".join(entry.setting.words) or ("NAME=VALUE" if entry.is_table else entry.setting.shown)
    several = entry.is_table or entry.type not in (int, float, str)
    return {"metavar": shown, **({"action": "append"} if several else {})}


def _help(entry: SettingEntry) -> str:
    text = entry.setting.says.rstrip(".")
    if text[1:2].islower():
        text = text[0].lower() + text[1:]
    if entry.is_table:
        text += f". NAME: {', '.join(one.name for one in inner_entries(entry))}; repeatable"
    elif entry.type not in (bool, int, float, str):
        text += "; repeatable"
    default = _default(entry)
    return (text + (f" (default: {default})" if default else "")).replace("%", "%%")


def _default(entry: SettingEntry) -> str:
    match entry.default:
        case bool() as value:
            return "on" if value else "off"
        case int() as value if entry.setting.kind == "size":
            return size_as_written(value)
        case float() as value:
            return f"{value:g}"
        case tuple() as value:
            return ",".join(value)
        case int() | str() as value:
            return str(value)
    return ""
