"""The annotation that makes a dataclass field a setting of the configuration. Pure.

    drain_seconds: Annotated[float, Setting("The time for running work.", least=0)] = 30.0

The type and the default are the field's. `heliograph_server.config` derives keys of the file,
environment variables and flags from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["plain", "size", "path", "path or URL", "plugin", "device"]


@dataclass(frozen=True, slots=True)
class Setting:
    """The description and the bounds of one field."""

    #: The description, in one sentence.
    says: str
    #: More of the description, shown in the example file but not in --help.
    more: str = ""
    #: The bounds, both inclusive; for a list, of its length.
    least: float | None = None
    most: float | None = None
    #: The accepted words; empty: any text.
    words: tuple[str, ...] = ()
    #: "size": a number of bytes that may be written as "20GiB"; "path", "path or URL" and
    #: "plugin": relative to the folder of the configuration file; "device": a list of
    #: specifications, which contain commas.
    kind: Kind = "plain"
    #: The heading in --help; empty: that of the previous field.
    section: str = ""
    #: The flag, if it differs from the field's name.
    flag: str = ""
    #: The placeholder of the value in --help.
    shown: str = "TEXT"
    #: True if it may change while the daemon runs.
    live: bool = False
