"""A configuration as a commented TOML file with every setting. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from textwrap import fill
from typing import Any

from heliograph_server.config.schema import SettingEntry, inner_entries, top_entries
from heliograph_server.config.values import bounds, size_as_written

WIDTH = 110
DEL = "\x7f"


def as_file(config: object, heading: str) -> str:
    """The text of the file; reading it gives the same configuration."""
    top = top_entries(type(config))
    parts = [_comment(heading)]
    parts += [_explained(one, getattr(config, one.name)) for one in top if not one.is_table]
    parts += ["\n".join(_table(one, getattr(config, one.name))) for one in top if one.is_table]
    return "\n\n".join(parts) + "\n"


def _table(entry: SettingEntry, holder: object) -> Iterator[str]:
    yield f"{_comment(_about(entry))}\n[{entry.name}]"
    for one in inner_entries(entry):
        yield f"{_comment(one.setting.says)}\n{one.name} = {_written(one, getattr(holder, one.name))}"


def _explained(entry: SettingEntry, value: Any) -> str:
    return f"{_comment(_about(entry))}\n{entry.name} = {_written(entry, value)}"


def _about(entry: SettingEntry) -> str:
    """The comment of one setting."""
    setting = entry.setting
    sentences = [setting.says, setting.more]
    if setting.words:
        sentences.append(f"One of {', '.join(map(json.dumps, setting.words))}.")
    if entry.type is float:
        sentences.append(f"Allowed: {bounds(entry)}.")
    if setting.live:
        sentences.append("May change while the daemon runs.")
    return " ".join(filter(None, sentences))


def _comment(text: str) -> str:
    paragraphs = (
        fill(one, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False) or "#"
        for one in text.split("\n")
    )
    return "\n".join(paragraphs)


def _written(entry: SettingEntry, value: Any) -> str:
    """A value in TOML; texts are written as in JSON."""
    if entry.setting.kind == "size":
        text = size_as_written(value)
        return text if text.isdecimal() else f'"{text}"'
    if isinstance(value, float):
        return repr(value)
    # JSON does not escape this control character, and TOML requires it.
    return json.dumps(value, ensure_ascii=False).replace(DEL, "\\u007f")
