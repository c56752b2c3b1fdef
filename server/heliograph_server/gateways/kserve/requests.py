"""The parameters of requests, and errors in the words of the protocol. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any

from heliograph_proto.errors import HeliographError, InvalidInputError, UnsupportedError

MOST_PRIORITY = 2**32
#: The most characters of a correlation id.
MOST_ID = 128
#: The most characters of an error's text.
MOST_TEXT = 1000


@dataclass(frozen=True, slots=True)
class InferOptions:
    """The wishes of a request."""

    #: From 1, the most urgent; 0 is the model's default.
    priority: int = 0
    #: The most time until its run begins.
    seconds: float = math.inf
    #: The correlation id of its sequence; 0 or "" is none.
    sequence: int | str = 0
    #: True if it is the first of its sequence, and if it is the last.
    starts: bool = False
    ends: bool = False
    #: All parameters of the request.
    parameters: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class RegionPart:
    """A part of a shared-memory region, by the region's name."""

    region: str
    offset: int
    size: int


#: Those of a request without parameters.
NO_WISHES = InferOptions()


def options_of(parameters: Mapping[str, Any]) -> InferOptions:
    """Return the options of a request's parameters. Unknown ones are the client's own. Raises
    InvalidInputError."""
    if not parameters:
        return NO_WISHES
    sequence = parameters.get("sequence_id", 0)
    if type(sequence) not in (int, str) or len(str(sequence)) > MOST_ID:
        raise InvalidInputError(f"the parameter 'sequence_id' is {short(sequence)}, and no number or text")
    starts, ends = (parameters.get(name, False) for name in ("sequence_start", "sequence_end"))
    if type(starts) is not bool or type(ends) is not bool:
        raise InvalidInputError("sequence_start and sequence_end are true or false")
    priority = _whole(parameters, "priority", MOST_PRIORITY)
    microseconds = _whole(parameters, "timeout", 2**63)
    seconds = microseconds / 1e6 if microseconds else math.inf
    return InferOptions(priority, seconds, sequence, starts, ends, parameters)


def region_of(parameters: Mapping[str, Any]) -> RegionPart | None:
    """Return the part of a region that has the elements of a tensor; None if the request has them.
    Raises UnsupportedError, InvalidInputError."""
    if not parameters:
        return None
    if parameters.get("classification"):
        raise UnsupportedError("the parameter 'classification' is not taken", advice="sort the scores there")
    region = parameters.get("shared_memory_region")
    if region is None:
        return None
    if not isinstance(region, str):
        raise InvalidInputError(f"the parameter 'shared_memory_region' is {short(region)}, and no text")
    offset = _whole(parameters, "shared_memory_offset", 2**62)
    return RegionPart(region, offset, _whole(parameters, "shared_memory_byte_size", 2**62))


def _whole(parameters: Mapping[str, Any], name: str, most: int) -> int:
    value = parameters.get(name, 0)
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20:
        value = int(value)
    if type(value) is not int or not 0 <= value <= most:
        raise InvalidInputError(f"the parameter {name!r} is {short(value)}; it must be a number from 0 on")
    return value


def text_of(error: HeliographError) -> str:
    """Return the text of an error for a client without our types: what happened, and what to do."""
    text = f"{error.message}; {error.advice}" if error.advice else error.message
    return " ".join(text.split())[:MOST_TEXT]
