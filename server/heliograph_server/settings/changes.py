"""Two configurations side by side: what differs, and what of it may change while a daemon runs. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from heliograph_server.settings.table import Entry, entries, top_entries

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that two configurations have differently."""

    entry: Entry
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.entry.key} is {self.after!r:.200}, before {self.before!r:.200}"


def changes(before: object, after: object) -> tuple[Change, ...]:
    """What differs, in the order of the settings."""
    found = (Change(one, _value(before, one), _value(after, one)) for one in entries(type(before)))
    return tuple(one for one in found if one.before != one.after)


def with_live(before: T, after: T) -> T:
    """The first, with what the second says of settings that may change while a daemon runs."""
    live = {one.name: getattr(after, one.name) for one in top_entries(type(before)) if one.setting.live}
    changed: Any = replace(before, **live)  # type: ignore[type-var]
    return changed  # type: ignore[no-any-return]


def _value(config: object, entry: Entry) -> Any:
    holder = getattr(config, entry.table) if entry.table else config
    return getattr(holder, entry.name)
