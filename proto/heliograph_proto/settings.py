"""What an operator may say of a field of a configuration: an annotation that the field carries. Pure.

    drain_seconds: Annotated[float, Setting("How long work may go on.", least=0, most=86_400)] = 30.0

The type and the default are the field's. `heliograph_server.config` makes keys of a file, variables and
flags of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["plain", "size", "path", "plugin", "device"]


@dataclass(frozen=True, slots=True)
class Setting:
    """What is said and asked of one field."""

    #: What it is, in one sentence.
    says: str
    #: What else there is to know, which the example of a file tells and --help does not.
    more: str = ""
    #: The least and the most that it may be, both included; of a list: how many it has.
    least: float | None = None
    most: float | None = None
    #: The words that it may be; empty: any text.
    words: tuple[str, ...] = ()
    #: "size": a number of bytes that may be written as "20GiB"; "path" and "plugin" begin at the folder of
    #: the file that names them; "device": a list of specifications, which have commas of their own.
    kind: Kind = "plain"
    #: The heading in --help; empty: that of the field before.
    section: str = ""
    #: The flag, where it is not the field's name.
    flag: str = ""
    #: What --help calls the value.
    shown: str = "TEXT"
    #: Whether it may change while the daemon runs.
    live: bool = False
