"""Every setting of a dataclass, with its key in a file, its variable and its flag. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from typing import Any, TypeVar, get_type_hints

from heliograph_proto.settings import Setting

PREFIX = "HELIOGRAPH_"


@dataclass(frozen=True, slots=True)
class SettingEntry:
    """One setting."""

    #: The name of the field.
    name: str
    #: The type of its values: bool, int, float, str, tuple[str, ...], or a dataclass of such
    #: fields.
    type: Any
    default: Any
    setting: Setting
    #: The field whose value is the dataclass of this one; empty for the top level.
    table: str = ""

    @property
    def key(self) -> str:
        """The key in a file, with its table."""
        return f"{self.table}.{self.name}" if self.table else self.name

    @property
    def variable(self) -> str:
        """The name of the environment variable."""
        return PREFIX + self.key.upper().replace(".", "_")

    @property
    def flag(self) -> str:
        """The option on the command line; of a table, the option that takes NAME=VALUE."""
        return self.setting.flag or "--" + self.name.replace("_", "-")

    @property
    def is_table(self) -> bool:
        """True if the setting is a dataclass of settings."""
        return is_dataclass(self.type)


def top_entries(kind: type[Any]) -> tuple[SettingEntry, ...]:
    """The settings of a dataclass, in order; a table of settings counts as one."""
    types = get_type_hints(kind, include_extras=True)
    made: list[SettingEntry] = []
    for one in fields(kind):
        hint = types[one.name]
        (setting,) = (found for found in hint.__metadata__ if isinstance(found, Setting))
        if not setting.section and made:
            setting = replace(setting, section=made[-1].setting.section)
        default = one.default if one.default_factory is MISSING else one.default_factory()
        made.append(SettingEntry(one.name, hint.__origin__, default, setting))
    return tuple(made)


def inner_entries(table: SettingEntry) -> tuple[SettingEntry, ...]:
    """The settings of a table; they are live if the table is."""
    return tuple(
        replace(one, table=table.name, setting=replace(one.setting, live=table.setting.live))
        for one in top_entries(table.type)
    )


def entries(kind: type[Any]) -> tuple[SettingEntry, ...]:
    """Every setting of a dataclass and of its tables, without the tables themselves."""
    found: list[SettingEntry] = []
    for one in top_entries(kind):
        found += inner_entries(one) if one.is_table else (one,)
    return tuple(found)


def suggest(word: str, known: Collection[str], otherwise: str = "") -> str:
    """Advice for an unknown word: a similar known one, else `otherwise`, else all known words."""
    # The common prefix of variables would make all of them similar.
    names = {one.removeprefix(PREFIX): one for one in known}
    near = get_close_matches(word.removeprefix(PREFIX), names, 1)
    return f"did you mean {names[near[0]]!r}?" if near else otherwise or f"known: {', '.join(known)}"


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A setting that differs between two configurations."""

    entry: SettingEntry
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.entry.key} is {self.after!r:.200}, before {self.before!r:.200}"


def changes(before: object, after: object) -> tuple[SettingChange, ...]:
    """The settings that differ, in order."""
    found = (SettingChange(one, _value(before, one), _value(after, one)) for one in entries(type(before)))
    return tuple(one for one in found if one.before != one.after)


def with_live(before: T, after: T) -> T:
    """The first configuration with the live settings of the second."""
    live = {one.name: getattr(after, one.name) for one in top_entries(type(before)) if one.setting.live}
    changed: Any = replace(before, **live)  # type: ignore[type-var]
    return changed  # type: ignore[no-any-return]


def _value(config: object, entry: SettingEntry) -> Any:
    holder = getattr(config, entry.table) if entry.table else config
    return getattr(holder, entry.name)
